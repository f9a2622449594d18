"""Heartbeats, from a real process that has not been told what to load yet."""

from __future__ import annotations

import os
from pathlib import Path

from ensemble.common.clock import Watch
from ensemble.common.files import MAX_LOG_BYTES, open_log
from ensemble.common.protocol import Event, Heartbeat
from ensemble.scheduling.launchers.local import LocalWorker
from ensemble.worker.channel import HeartbeatThread
from tests.waiting import wait_until


def wait_for_end(worker: LocalWorker) -> None:
    wait_until(worker.has_exited, "the worker's end")


def test_idle_is_the_time_since_the_last_step_unless_it_waits() -> None:
    now = 100.0
    heartbeat = HeartbeatThread(lambda event: None)
    heartbeat.clock = Watch(3.0, lambda: now)
    heartbeat.step()
    now = 102.5
    assert heartbeat.idle_seconds() == 2.5
    heartbeat.step()
    now = 103.0
    assert heartbeat.idle_seconds() == 0.5
    heartbeat.wait()
    now = 200.0
    assert heartbeat.idle_seconds() == 0


def test_a_worker_gives_signs_of_life_before_it_imports_anything(tmp_path: Path) -> None:
    worker = LocalWorker({}, tmp_path / "log")
    try:
        events: list[Event] = []

        def has_two() -> bool:
            events.extend(worker.receive())
            return len(events) > 1

        wait_until(has_two, "a second heartbeat")
        assert {type(event) for event in events} == {Heartbeat}
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
        assert worker.close().code == 1
    assert (tmp_path / "log").read_text() == ""


def test_the_log_of_a_worker_that_prints_without_end_keeps_its_last_part(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with log.open("wb") as file:  # takes no space
        file.seek(MAX_LOG_BYTES)
        file.write(b"\nlast line\n")
    worker = LocalWorker({}, log)
    try:
        wait_until(lambda: log.stat().st_size < MAX_LOG_BYTES, "a shorter log")
        wait_until(lambda: log.read_bytes().endswith(b"\nlast line\n"), "its end")
        with open_log(log) as other:
            other.write(b"by another\n")
        assert log.read_bytes().endswith(b"\nlast line\nby another\n")
    finally:
        worker.close()
