"""Commands of pages that would change the machine: judged by what there is, and not run.

``python -m tests.docs.tools pip install '.[ray]'`` fails where the project has no such extra, or a page names an
option of ray that its command line lacks.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Sequence

from tests.project import ROOT


def pip(arguments: Sequence[str]) -> None:
    """Take the installation of a checkout, with extras that there are."""
    command, *packages = arguments
    assert command == "install", f"pip {command}: a page runs no other command than install"
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    for package in packages:
        path, _, named = package.partition("[")
        assert path == ".", f"pip install {package}: the project is installed from its checkout"
        unknown = {name for name in named.removesuffix("]").split(",") if name} - {*extras}
        assert not unknown, f"pip install {package}: no such extra"


def ray(arguments: Sequence[str]) -> None:
    """Take a command of ray whose options there are."""
    from ray.scripts.scripts import cli

    command, *options = arguments
    cli.commands[command].make_context(f"ray {command}", options)


if __name__ == "__main__":
    {"pip": pip, "ray": ray}[sys.argv[1]](sys.argv[2:])
