"""One worker process: started, spoken to, killed."""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ensemble.common.protocol import Failed, Stop
from ensemble.scheduling.launchers.local import LocalLauncher, LocalWorker
from tests.members.huggingface.scoring.test_predict import start, worker_spec
from tests.waiting import PATIENCE_SECONDS, wait_until
from tests.worker.test_session import publish


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[LocalWorker]:
    folder = tmp_path / "logs of it"
    folder.mkdir()
    made = LocalWorker({"CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2"}, folder / "w.log")
    yield made
    made.close()


def wait_until_closed(worker: LocalWorker, seconds: float = PATIENCE_SECONDS) -> list[Any]:
    events: list[Any] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        select.select([worker.events_fd], [], [], 0.2)
        events += worker.receive()
        if not worker.is_open:
            return events
    raise AssertionError("the worker's line stayed open")


def test_the_environment_is_set_before_the_process_starts(worker: LocalWorker) -> None:
    environment = Path(f"/proc/{worker.pid}/environ")
    wait_until(environment.read_bytes, "the process has begun with what it was started with")
    assert b"CUDA_VISIBLE_DEVICES=GPU-1,GPU-2" in environment.read_bytes().split(b"\0")


def test_it_has_a_session_of_its_own(worker: LocalWorker) -> None:
    assert os.getsid(worker.pid) == worker.pid != os.getsid(0)
    assert os.getpgid(worker.pid) == worker.pid


@pytest.mark.usefixtures("warm")
def test_what_goes_wrong_comes_back_as_an_event(worker: LocalWorker, tmp_path: Path) -> None:
    worker.send(start(worker_spec(tmp_path / "nowhere", **publish(tmp_path, {"text": ["a"]}))))
    events = wait_until_closed(worker)
    failed = events[-1]
    assert isinstance(failed, Failed)
    assert "nowhere" in failed.message
    assert "Traceback" in failed.traceback
    assert "Traceback" in worker.log.read_text()
    assert worker.close().code == 1


def test_stop_before_anything_else_is_no_start(worker: LocalWorker) -> None:
    worker.send(Stop())
    assert isinstance(wait_until_closed(worker)[-1], Failed)
    assert worker.close().code == 1


def test_it_ends_when_its_standard_input_does(worker: LocalWorker) -> None:
    assert worker._process.stdin is not None
    worker._process.stdin.close()
    wait_until_closed(worker)
    assert worker.close().code == 1


def test_the_end_of_a_process_that_has_closed_its_channel_is_not_waited_for_in_vain(
    worker: LocalWorker,
) -> None:
    """A GPU is free when its process has ended, which on a GPU is some time after the last event."""
    launcher = LocalLauncher({})
    assert worker._process.stdin is not None
    worker._process.stdin.close()
    wait_until_closed(worker)
    assert launcher.wait([worker], 30) == [worker]
    assert worker.has_exited()
    worker.close()
    assert launcher.wait([worker], 0) == []


def test_a_killed_process_tells_its_signal_and_is_reaped(worker: LocalWorker) -> None:
    os.kill(worker.pid, signal.SIGKILL)
    while not worker.has_exited():
        time.sleep(0.01)
    assert worker.close().code == -signal.SIGKILL
    assert not Path(f"/proc/{worker.pid}").exists()
    worker.send(Stop())  # a process that is gone is no reason to fail
    assert worker.close().code == -signal.SIGKILL


def test_a_stopped_process_is_ended_too(worker: LocalWorker) -> None:
    os.kill(worker.pid, signal.SIGSTOP)
    assert worker.close().code in (-signal.SIGKILL, -signal.SIGTERM)
    assert not Path(f"/proc/{worker.pid}").exists()
