"""Workers that another launcher starts, known by an entry point: a run of them is like any other."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest

from ensemble.common.errors import ConfigError
from ensemble.scheduling.launchers.base import make_launcher
from ensemble.scheduling.launchers.local import LocalLauncher
from tests.faults.chunky import ids_of, results
from tests.faults.inject import Fault, Injected
from tests.project import Project, python_path
from tests.sampling import one_in

ENTRY_POINTS = """[ensemble.launchers]
agent = tests.scheduling.agent:AgentLauncher
broken = tests.scheduling.nowhere:Launcher
function = tests.scheduling.agent:main
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """What an installed package with launchers leaves in a folder."""
    about = tmp_path / "site" / "somebodys_launchers-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: somebodys-launchers\nVersion: 0.1\n")
    (about / "entry_points.txt").write_text(ENTRY_POINTS)
    return about.parent


def run(project: Project, site: Path, node_disk: Path, injected: Injected, *options: str) -> str:
    """Run the project's config on a "node"; returns all that was printed."""
    path = python_path(*map(Path, injected.environment["PYTHONPATH"].split(":")), site)
    environment = {**injected.environment, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    chosen = f"launcher={{agent: {{node: node-b, folder: {node_disk}}}}}"
    done = project.ensemble("run", "config.yaml", "--set", chosen, *options, environment=environment)
    printed = done.stdout + done.stderr
    assert done.returncode == 0, printed
    assert "Traceback" not in printed
    return printed


def workers_of(project: Project) -> list[dict[str, Any]]:
    (member,) = project.run_json()["members"]
    workers: list[dict[str, Any]] = member["workers"]
    return workers


def test_a_run_on_another_node_is_like_one_here(
    chunky: Project, tmp_path: Path, site: Path, undisturbed: dict[str, bytes]
) -> None:
    node_disk = tmp_path / "disk of node-b"
    printed = run(chunky, site, node_disk, Injected(tmp_path))
    assert results(chunky) == undisturbed
    assert "predicting 16 rows" in printed
    (worker,) = workers_of(chunky)
    assert worker["process"].endswith(" on node-b")
    assert (worker["exit_code"], worker["counters"]["rows"]) == (0, 16)
    assert list((node_disk / "worker 0" / "shards_dir").iterdir()) == []
    log = (chunky.folder / "runs/first/logs/llama-0.log").read_bytes()
    assert log == (node_disk / "worker 0" / "log").read_bytes(), "logs can be read here"


@pytest.mark.long
def test_faults_on_another_node_are_retried(
    chunky: Project, tmp_path: Path, site: Path, undisturbed: dict[str, bytes]
) -> None:
    """One that is killed, one that hangs, an error of a single row's, and one that ends without a word."""
    injected = Injected(
        tmp_path,
        Fault("kill", ids_of(chunky, 2), times=1),
        Fault("sleep", ids_of(chunky, 6), times=1),
        Fault("freeze", ids_of(chunky, 9), times=1),
        Fault("exit", ids_of(chunky, 14), times=1),
    )
    printed = run(chunky, site, tmp_path / "disk", injected, "--set", "hang_timeout=5s")
    assert results(chunky) == undisturbed
    workers = workers_of(chunky)
    codes = [-signal.SIGKILL, -signal.SIGABRT, -signal.SIGKILL, 0, 0]
    assert [worker["exit_code"] for worker in workers] == codes
    assert f"(process {workers[0]['process']}) was killed" in printed
    assert f"(process {workers[1]['process']}) finished no batch for 5 s (hang_timeout)" in printed
    assert f"(process {workers[2]['process']}) has not responded for 5 s" in printed
    assert f"(process {workers[3]['process']}) ended with exit code 0" in printed
    (member,) = chunky.run_json()["members"]
    result = [(fault["kind"], fault["rows"], fault["remedy"]) for fault in member["faults"]]
    kinds = ["death", "hang", "hang", "death"]
    assert result == [(kind, [4 * place, 4 * place + 4], "again") for place, kind in enumerate(kinds)]
    stacks = (chunky.folder / "runs/first/logs/llama-1.log").read_text()
    assert "Fatal Python error: Aborted" in stacks
    assert "in predict" in stacks


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
        "{agent: {node: a, folder: b, disk: c}}",
        "disk: c}}: agent.disk: unknown key; ",
    ),
    (
        "{local: {}, agent: {}}",
        "the name of a launcher",
    ),
    ("{ray: auto}", "ray: must be a mapping"),
    ("3", "the name of a launcher or a mapping of one such name to its settings, not 3"),
    (
        "broken",
        "launcher broken: the entry point broken = tests.scheduling.nowhere:Launcher of the package somebodys",
    ),
    ("function", "is no subclass of ensemble.scheduling.launchers.base.Launcher; fix that package"),
]


@pytest.mark.long
@pytest.mark.parametrize(("chosen", "sentence"), one_in(4, WRONG))
def test_what_is_wrong_with_a_launcher_is_said_at_validate(
    project: Project, site: Path, chosen: str, sentence: str
) -> None:
    project.write_config(project.config())
    environment = {"PYTHONPATH": python_path(Path(__file__).parents[2], site)}
    done = project.ensemble("validate", "config.yaml", "--set", f"launcher={chosen}", environment=environment)
    assert done.returncode == 2
    assert sentence in done.stderr


def test_a_launcher_that_nobody_knows_is_said_with_its_line(project: Project) -> None:
    project.write_config(project.config(launcher="locla"))
    done = project.ensemble("validate", "config.yaml")
    assert re.search(r"launcher \(line \d+\): unknown launcher 'locla'", done.stderr)
