"""Runs that are ended from outside: signals in mid-chunk, a parent that is killed."""

from __future__ import annotations

import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.faults.chunky import chunky_config, ids_of, results
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected
from tests.faults.test_workers import is_gone
from tests.project import Project
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("warm")


def start(project: Project, injected: Injected) -> subprocess.Popen[str]:
    return project.start("run", "config.yaml", environment=injected.environment)


def wait_for(what: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    wait_until(lambda: what() or process.poll() is not None, "what a test waits for in a run")
    assert what(), process.communicate()[0]


@pytest.mark.fault(13)
def test_a_signal_in_mid_chunk_keeps_what_is_done(
    chunky: Project, forked: ForkedRuns, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """The worker sleeps over the third chunk; a terminal that is closed sends SIGHUP."""
    injected = Injected(tmp_path, Fault("sleep", ids_of(chunky, 9), times=1))
    with start(chunky, injected) as process:
        wait_for(lambda: bool(injected.pids()), process)
        process.send_signal(signal.SIGHUP)
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + signal.SIGHUP
    assert "stopped by SIGHUP" in printed
    assert "Traceback" not in printed
    assert is_gone(injected.pids()[0])
    assert chunky.run_json()["status"] == "interrupted"
    assert forked.run(chunky.folder) == 0, forked.printed
    assert results(chunky) == undisturbed
    (member,) = chunky.run_json()["members"]
    assert (member["reused_rows"], member["counters"]["rows"]) == (8, 8)


@pytest.mark.fault(13)
def test_a_signal_keeps_the_batches_of_an_unfinished_chunk_as_status_says(
    chunky: Project, forked: ForkedRuns, tmp_path: Path
) -> None:
    """The worker waits in the second of four batches of the third chunk until it is asked to end with it."""
    config = chunky_config(chunky)
    config["models"][0]["batch_size"] = 1
    chunky.write_config(config)
    assert forked.run(chunky.folder) == 0, forked.printed
    undisturbed = results(chunky)
    shutil.rmtree(chunky.folder / "runs")
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 9), times=1))
    log = chunky.folder / "runs/first/logs/run.log"
    with start(chunky, injected) as process:
        wait_for(lambda: bool(injected.pids()), process)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "is asked to finish its batch" in log.read_text(), process)
        injected.let_go()
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 128 + signal.SIGINT
    assert "stopped by Ctrl-C" in " ".join(printed.split())
    status = " ".join(chunky.ensemble("status", "runs/first").stdout.split())
    assert "llama unfinished 10 16" in status
    assert forked.run(chunky.folder) == 0, forked.printed
    assert results(chunky) == undisturbed
    (member,) = chunky.run_json()["members"]
    assert (member["reused_rows"], member["counters"]["rows"]) == (10, 6)


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.fault(13)
def test_a_second_signal_ends_it_at_once(chunky: Project, tmp_path: Path) -> None:
    """The worker is frozen, so that the run waits for it; nothing is left to be written down."""
    injected = Injected(tmp_path, Fault("freeze", ids_of(chunky, 1)))
    with start(chunky, injected) as process:
        wait_for(lambda: bool(injected.pids()), process)
        process.send_signal(signal.SIGINT)
        wait_for(lambda: _has_pending(injected.pids()[0], signal.SIGTERM), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGTERM
        process.communicate()
    assert chunky.run_json()["status"] == "running", "the first signal alone would have had this changed"
    wait_until_gone(injected.pids()[0])


@pytest.mark.long
@pytest.mark.fresh
@pytest.mark.fault(12)
def test_a_worker_that_cannot_notice_dies_with_its_parent(chunky: Project, tmp_path: Path) -> None:
    """Native code holds the interpreter: no thread of the worker can see that its standard input has ended."""
    injected = Injected(tmp_path, Fault("sleep with the interpreter", ids_of(chunky, 1)))
    with start(chunky, injected) as process:
        wait_for(lambda: bool(injected.pids()), process)
        process.kill()
        process.communicate(timeout=PATIENCE_SECONDS)
    wait_until_gone(injected.pids()[0])


def wait_until_gone(pid: int) -> None:
    wait_until(lambda: is_gone(pid), "the worker's end")


def _has_pending(pid: int, number: int) -> bool:
    """Whether a signal waits for a process that is stopped (proc(5))."""
    status = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["ShdPnd"], 16) >> (number - 1) & 1)
