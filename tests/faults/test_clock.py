"""Clocks that jump, and time in which nobody runs: no worker is blamed for it."""

from __future__ import annotations

import ast
import os
import signal
import time
from pathlib import Path

import pytest

from ensemble.common.clock import Watch, boot_seconds
from tests.faults.chunky import ids_of, results
from tests.faults.inject import Fault, Injected
from tests.faults.test_workers import faults_of, workers_of
from tests.project import ROOT, Project
from tests.waiting import PATIENCE_SECONDS

WALL_CLOCKS = ("time.time", "time.time_ns", "time.localtime", "time.gmtime")


@pytest.mark.long
@pytest.mark.fault(40)
def test_parent_and_worker_are_stopped_for_longer_than_a_worker_may_hang(
    chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """As in a notebook's machine that is frozen, or a laptop that sleeps; here by SIGSTOP, in mid-chunk."""
    injected = Injected(tmp_path, Fault("sleep", ids_of(chunky, 9), times=1, seconds=2))
    options = ("--set", "hang_timeout=20s")
    with chunky.start("run", "config.yaml", *options, environment=injected.environment) as process:
        injected.wait_for()
        everybody = [process.pid, *injected.pids()]
        for pid in everybody:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(24)
        for pid in everybody:
            os.kill(pid, signal.SIGCONT)
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, printed
    assert faults_of(chunky) == []
    assert len(workers_of(chunky)) == 1
    assert results(chunky) == undisturbed


@pytest.mark.long
@pytest.mark.fault(40)
def test_the_wall_clock_jumps(chunky: Project, undisturbed: dict[str, bytes]) -> None:
    """By a year, back and forth, under a limit of a day."""
    path = os.pathsep.join([str(ROOT), str(Path(__file__).parent / "jumping")])
    options = ["--set", "time_limit=24h", "--set", "hang_timeout=60s", "--set", "release_timeout=60s"]
    done = chunky.ensemble("run", "config.yaml", *options, environment={"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr
    log = (chunky.folder / "runs/first/logs/run.log").read_text(encoding="utf-8")
    assert len({line[:4] for line in log.splitlines()}) > 1, "the clock did jump"
    assert faults_of(chunky) == []
    assert results(chunky) == undisturbed


@pytest.mark.fault(40)
def test_nothing_is_decided_by_the_wall_clock() -> None:
    """Nobody asks for it but logs, report, status, which shows how old it is, and what fit and tune write."""
    asked = [
        f"{path.name}: {ast.unparse(node)}"
        for path in (ROOT / "ensemble").rglob("*.py")
        if path.name not in ("reporting.py", "status.py", "weights_file.py", "how_it_ran.py")
        if path.relative_to(ROOT).as_posix() != "ensemble/analysis/tune.py"
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS)
        or (isinstance(node, ast.Import) and any(alias.name == "datetime" for alias in node.names))
        or (isinstance(node, ast.ImportFrom) and node.module in ("datetime", "time"))
    ]
    assert asked == []


@pytest.mark.fault(40)
def test_a_watch_leaves_out_what_its_process_did_not_see() -> None:
    # The fifth comes after an hour in which the process was stopped.
    readings = iter([100.0, 100.0, 101.0, 103.5, 3703.5, 3704.5])
    watch = Watch(3.0, lambda: next(readings))
    began = watch()
    assert [watch() - began for _ in range(4)] == [1.0, 3.5, 6.5, 7.5]


def test_a_time_limit_goes_on_while_nobody_runs() -> None:
    """As whoever ends the session counts; /proc/uptime, which a suspend is in, has hundredths."""
    before, seconds, after = _uptime(), boot_seconds(), _uptime()
    assert before <= seconds <= after + 0.01


def _uptime() -> float:
    return float(Path("/proc/uptime").read_text(encoding="ascii").split()[0])
