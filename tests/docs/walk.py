"""Follow a page from top to bottom, as a reader does: write files, run commands, compare what they print.

| block | what happens |
| -- | -- |
| `sh` | bash runs it and stops at the first command that fails; folder and variables stay for the next block |
| with a title that names a file | the file is written, in the folder where the commands are |
| `python` without a title | a process of its own runs it there |
| `text` | the command before printed these words in this order, whatever the figures; `...` leaves words out |
| `json` | the command before printed an object with these keys, and in lists objects with these keys |
| `console` | is shown, and not run |
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.docs.pages import Block, blocks
from tests.project import ROOT, python_path
from tests.waiting import PATIENCE_SECONDS

_FILE = re.compile(r"[\w./-]+\.\w+")
# What differs from machine to machine, beside figures.
_UNITS = {"KiB", "MiB", "GiB", "s", "min", "h", "e"}
# `ray` is held against its own command line: it would start, and stop, clusters of this machine.
_TOOLS = {
    "ensemble": '-m ensemble "$@"',
    "pip": '-m tests.docs.tools pip "$@"',
    "ray": '-m tests.docs.tools ray "$@"',
    "python": '"$@"',
}


class Walk:
    """A reader in a folder.

    Args:
        home: where the reader starts; what the page takes for granted, such as tables and models, must lie there.
        tools: an empty folder, for commands that stand before those of the machine.
    """

    def __init__(self, home: Path, tools: Path, environment: Mapping[str, str] | None = None) -> None:
        self.folder, self._tools = home, tools
        self._printed = ""
        tools.mkdir(parents=True)
        for name, arguments in _TOOLS.items():
            tool = tools / name
            tool.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}\n", encoding="utf-8")
            tool.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": os.pathsep.join([str(tools), os.environ["PATH"]]),
            "PYTHONPATH": python_path(ROOT),
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        }

    def follow(self, page: Path) -> None:
        steps = [*blocks(page)]
        assert any(block.language == "sh" for block in steps), f"{page.name}: nothing to run"
        for block in steps:
            self._take(block)

    def _take(self, block: Block) -> None:
        if _FILE.fullmatch(block.title):
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.language == "sh":
            self._shell(block)
        elif block.language == "python":
            self._run(block, [sys.executable, "-c", block.text])
        elif block.language == "text":
            self._compare(block)
        else:
            assert block.language in ("console", "yaml", "json"), (
                f"{block.place}: a block of {block.language!r}"
            )

    def _shell(self, block: Block) -> None:
        state = self._tools.parent / "state"
        keep = f"trap 'code=$?; pwd > {shlex.quote(str(state))}; exit $code' EXIT"
        self._run(block, ["bash", "-euo", "pipefail", "-c", f"{keep}\n{block.text}"])
        self.folder = Path(state.read_text(encoding="utf-8").removesuffix("\n"))

    def _run(self, block: Block, command: list[str]) -> None:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        self._printed = done.stdout
        assert done.returncode == 0, (
            f"{block.place}: exit code {done.returncode}\n{block.text}\n{done.stdout}"
        )

    def _compare(self, block: Block) -> None:
        printed = _words(self._printed)
        start = 0
        for part in re.split(r"^\s*\.\.\.\s*$", block.text, flags=re.MULTILINE):
            wanted = _words(part)
            ends = range(start, len(printed) - len(wanted) + 1)
            place = next((at for at in ends if printed[at : at + len(wanted)] == wanted), None)
            assert place is not None, f"{block.place}: not printed:\n{part}\nbut:\n{self._printed}"
            start = place + len(wanted)


def _missing(shown: object, printed: object, path: str = "") -> Iterator[str]:
    """Yield the keys of an object in a page that the printed one lacks."""
    if isinstance(shown, dict):
        for key, value in shown.items():
            if isinstance(printed, dict) and key in printed:
                yield from _missing(value, printed[key], f"{path}.{key}")
            else:
                yield f"{path}.{key}"
    elif isinstance(shown, list) and shown:
        if isinstance(printed, list) and printed:
            yield from _missing(shown[0], printed[0], f"{path}[0]")
        else:
            yield f"{path}[0]"


def _words(text: str) -> list[str]:
    """Return the words of an output, without figures, their units and the lines of tables."""
    return [word for word in re.findall(r"[A-Za-z_@][\w@]*", text) if word not in _UNITS]
