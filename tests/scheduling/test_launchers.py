"""Launchers by their names, built in and by an entry point."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ensemble.common.errors import ConfigError
from ensemble.scheduling.launchers.base import make_launcher
from ensemble.scheduling.launchers.local import LocalLauncher
from tests.packages import lay_out
from tests.project import ROOT, Project, python_path
from tests.sampling import one_in

ENTRIES = {
    "agent": "elsewhere:Agent",
    "broken": "nowhere:Launcher",
    "function": "elsewhere:main",
}
MODULE = """
from ensemble.common.errors import ConfigError
from ensemble.scheduling.launchers.local import LocalLauncher

class Agent(LocalLauncher):
    def __init__(self, settings):
        if "node" not in settings:
            raise ConfigError(["node: required"])

def main():
    pass
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """What an installed package with launchers leaves in a folder."""
    lay_out(tmp_path / "site", "somebodys-launchers", "ensemble.launchers", ENTRIES, elsewhere=MODULE)
    return tmp_path / "site"


def test_the_default_is_this_machine() -> None:
    assert isinstance(make_launcher("local"), LocalLauncher)
    assert isinstance(make_launcher({"local": {}}), LocalLauncher)
    with pytest.raises(ConfigError, match=r"local\.nodes: unknown key; this launcher has no settings"):
        make_launcher({"local": {"nodes": 2}})


WRONG = [
    ("locla", "launcher=locla: unknown launcher 'locla'; did you mean local?"),
    ("agnet", "launcher=agnet: unknown launcher 'agnet'; did you mean agent?"),
    ("agent", "launcher=agent: agent.node: required"),
    (
        "{local: {}, agent: {}}",
        "the name of a launcher",
    ),
    ("{ray: auto}", "ray: must be a mapping"),
    ("3", "the name of a launcher or a mapping of one such name to its settings, not 3"),
    (
        "broken",
        "launcher broken: the entry point broken = nowhere:Launcher of the package somebodys",
    ),
    ("function", "is no subclass of ensemble.scheduling.launchers.base.Launcher; fix that package"),
]


@pytest.mark.long
@pytest.mark.parametrize(("chosen", "sentence"), one_in(4, WRONG))
def test_what_is_wrong_with_a_launcher_is_said_at_validate(
    project: Project, site: Path, chosen: str, sentence: str
) -> None:
    project.write_config(project.config())
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    done = project.ensemble("validate", "config.yaml", "--set", f"launcher={chosen}", environment=environment)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_a_launcher_that_nobody_knows_is_said_with_its_line(project: Project) -> None:
    project.write_config(project.config(launcher="locla"))
    done = project.ensemble("validate", "config.yaml")
    assert re.search(r"launcher \(line \d+\): unknown launcher 'locla'", done.stderr)
