"""Heartbeats, from a real process that has not been told what to load yet."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ensemble.launch.local import LocalWorker
from ensemble.protocol import Event, Heartbeat
from ensemble.worker.pulse import Pulse


def wait_for_end(worker: LocalWorker) -> None:
    until = time.monotonic() + 30
    while not worker.has_exited():
        assert time.monotonic() < until, "it does not end"
        time.sleep(0.01)


def test_idle_is_the_time_since_the_last_step_unless_it_rests() -> None:
    pulse = Pulse(lambda event: None)
    time.sleep(0.02)
    idle = pulse.idle_seconds()
    assert idle >= 0.02
    pulse.step()
    time.sleep(0.001)
    assert pulse.idle_seconds() > 0
    pulse.rest()
    time.sleep(0.02)
    assert pulse.idle_seconds() == 0


def test_a_worker_gives_signs_of_life_before_it_imports_anything(tmp_path: Path) -> None:
    worker = LocalWorker({}, tmp_path / "log")
    try:
        events: list[Event] = []
        until = time.monotonic() + 30
        while len(events) < 2 and time.monotonic() < until:
            events += worker.receive()[0]
            time.sleep(0.01)
        assert [type(event) for event in events] == [Heartbeat, Heartbeat]
        assert events[1] == Heartbeat(0.0), "it waits for its first command"
    finally:
        worker.close()


def test_a_worker_to_which_nobody_listens_ends(tmp_path: Path) -> None:
    worker = LocalWorker({}, tmp_path / "log")
    try:
        os.close(worker.events_fd)  # its standard input stays open
        worker.events_fd = -1
        wait_for_end(worker)
    finally:
        assert worker.close() == 1
    assert (tmp_path / "log").read_text() == ""
