"""How threads of child processes wait for each other: what real processes have in their environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ensemble.scheduling.launchers.local import LocalWorker
from tests.project import ROOT, Project, python_path
from tests.waiting import wait_until

WAITING = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")
SHORT = {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
# Every Python that starts writes down what it runs, and which of these variables it has.
RECORDER = f"""
import json, os, sys
waiting = {{name: os.environ[name] for name in {WAITING!r} if name in os.environ}}
with open(os.environ["TEST_RECORD"], "a") as file:
    file.write(json.dumps([sys.orig_argv[1:4], waiting]) + "\\n")
"""


@pytest.fixture(autouse=True)
def nobody_has_said_how_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in WAITING:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def recorder(tmp_path: Path) -> dict[str, str]:
    """The environment of a command all of whose processes write down theirs."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(RECORDER)
    return {"PYTHONPATH": python_path(site, ROOT), "TEST_RECORD": str(tmp_path / "record")}


def recorded(recorder: dict[str, str]) -> dict[str, dict[str, str]]:
    """By what each process ran: ``run`` for the command, a module for a child."""
    waiting = {}
    for line in Path(recorder["TEST_RECORD"]).read_text().splitlines():
        arguments, variables = json.loads(line)
        waiting[" ".join(arguments)] = variables
    return waiting


def code_of(module: str) -> str:
    return f"-P -c from {module} import main; main()"


def waiting_of(pid: int) -> dict[str, str]:
    """What stands in the environment of a process, once it is the program that was started."""
    command = Path(f"/proc/{pid}/cmdline")
    wait_until(lambda: b"-P" in command.read_bytes().split(b"\0"), "the start of the process")
    pairs = dict(pair.partition("=")[::2] for pair in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    return {name: pairs[name] for name in WAITING if name in pairs}


def waiting_of_a_worker(folder: Path) -> dict[str, str]:
    worker = LocalWorker({}, folder / "log")
    try:
        return waiting_of(worker.pid)
    finally:
        worker.close()


@pytest.mark.long
def test_workers_and_the_report_wait_shortly(project: Project, recorder: dict[str, str]) -> None:
    project.write_config(project.config(models=project.config()["models"][1:], report=True))
    done = project.ensemble("run", "config.yaml", environment=recorder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (project.folder / "runs/first/report.html").exists()
    waiting = recorded(recorder)
    assert waiting["-m ensemble run"] == {}
    assert waiting[code_of("ensemble.worker.__main__")] == SHORT
    assert waiting[code_of("ensemble.analysis.report.__main__")] == SHORT


@pytest.mark.parametrize(
    "own", [{"GOMP_SPINCOUNT": "77"}, {"KMP_BLOCKTIME": "infinite"}, {"OMP_WAIT_POLICY": "active"}]
)
def test_what_the_user_has_set_stays_alone(
    own: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either library lets its own variable decide before OMP_WAIT_POLICY."""
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert waiting_of_a_worker(tmp_path) == own
