"""What ``status`` tells from another terminal while a real run goes on, and after it has ended."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.chunky import ids_of
from tests.faults.inject import Fault, Injected
from tests.faults.test_endings import start, wait_for
from tests.project import Project
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("warm")


@pytest.mark.long
def test_a_real_run_is_seen_from_another_terminal(chunky: Project, tmp_path: Path) -> None:
    """The worker sleeps over the third of four chunks, so that half of the rows are done."""
    injected = Injected(tmp_path, Fault("sleep", ids_of(chunky, 9), times=1))

    def status() -> str:
        done = chunky.ensemble("status", "runs/first")
        return " ".join((done.stdout + done.stderr).split())

    def is_half_done() -> bool:
        if not (chunky.folder / "runs/first/run.json").exists():
            return False
        members = chunky.run_json()["members"]
        return bool(members and members[0]["rows_done"] >= 8)

    with start(chunky, injected) as process:
        wait_for(lambda: bool(injected.pids()), process)
        wait_for(is_half_done, process)  # the report is written every few seconds
        seen = status()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=PATIENCE_SECONDS)
    assert "tokens/s time left -" in seen, seen
    assert "llama predicting 8 16 50%" in seen
    assert "runs/first: running for " in seen
    assert "left (process" in seen
    assert chunky.run_json()["members"][0]["tokens_done"] > 0
    ended = status()
    assert "llama unfinished 8 16 50%" in ended
    assert "runs/first: interrupted, after " in ended
    assert "the same command resumes" in ended
    assert chunky.ensemble("run", "config.yaml", "-q").returncode == 0
    assert "runs/first: complete, after " in status()
