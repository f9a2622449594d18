"""The scheduler's choices, with workers that only pretend to compute: real ones would take minutes to show them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ensemble.devices import Device
from ensemble.leases import Leases
from ensemble.planning.plan import MemberPlan, Plan, make_plan
from ensemble.protocol import ChunkDone, Closed, Command, Predict, Ready, Start, Started, Stop
from ensemble.scheduler import Scheduler
from ensemble.state import MemberState
from tests.planning.test_plan import config, facts, gpus

CHUNK_SECONDS = 0.03


class PretendedWorker:
    """On the other side of the scheduler's line: says what a worker says, when it would say it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.events_fd, self._write_end = os.pipe()
        self._due: list[tuple[float, Any]] = []
        self._is_over = False
        self._say(0, Started({}, 0.02), Ready(0.02, "cpu", "float32", "sdpa", 1, 128, 2048))

    def _say(self, seconds: float, *events: Any) -> None:
        self._due += [(time.monotonic() + seconds, event) for event in events]
        os.write(self._write_end, b"x")  # wakes the selector, which then asks until all is said

    def send(self, command: Command) -> None:
        if isinstance(command, Predict):
            rows = command.stop - command.start
            self._say(CHUNK_SECONDS, ChunkDone(command.chunk, rows, rows, rows, 1, 0, 0, 0, CHUNK_SECONDS))
        elif isinstance(command, Stop):
            self._say(0, Closed(1))
            self._is_over = True
        assert not isinstance(command, Start)

    def receive(self) -> tuple[list[Any], bool]:
        now = time.monotonic()
        events = [event for due, event in self._due if due <= now]
        self._due = [(due, event) for due, event in self._due if due > now]
        if not self._due:
            os.set_blocking(self.events_fd, False)
            with contextlib.suppress(BlockingIOError):
                os.read(self.events_fd, 1 << 16)
        return events, not self.has_exited()

    def has_exited(self) -> bool:
        return self._is_over and not self._due

    def terminate(self) -> None:
        self._is_over = True

    def close(self) -> int:
        os.close(self.events_fd)
        os.close(self._write_end)
        return 0


def schedule(plan: Plan, devices: Sequence[Device]) -> list[MemberState]:
    pids = iter(range(1, 100))

    def launch(member: MemberPlan, replica: int, lease: Sequence[Device]) -> tuple[PretendedWorker, str]:
        return PretendedWorker(next(pids)), "log"

    # Without a driver nobody tells the memory, so that every device is free again at once.
    leases = Leases(devices, 1, 60.0, say=lambda text: None)
    return Scheduler(plan, leases, launch, lambda members: None, lambda state: None).run()


def plan_of(chunks: Sequence[int], first: Sequence[int], devices: Sequence[Device]) -> Plan:
    known = {
        f"m{index}": facts(np.full(count, 200_000, dtype=np.int64)) for index, count in enumerate(chunks)
    }
    made = make_plan(config(*({} for _ in chunks)), known, devices)
    members = zip(made.members, first, strict=True)
    return replace(made, members=tuple(replace(member, first_replicas=count) for member, count in members))


def used(state: MemberState) -> list[tuple[str, ...]]:
    return [record.devices for record in state.workers]


def test_a_gpu_that_is_left_over_joins_the_member_with_most_to_do() -> None:
    two = gpus(2)
    long, short = schedule(plan_of([120, 6], [1, 1], two), two)
    assert long.finished
    assert short.finished
    assert used(short) == [("GPU-1",)]
    assert used(long) == [("GPU-0",), ("GPU-1",)]
    assert long.workers[1].chunks > 0


def test_nobody_joins_a_member_that_is_nearly_done() -> None:
    two = gpus(2)
    first, second = schedule(plan_of([2, 1], [1, 1], two), two)
    assert used(first) == [("GPU-0",)]
    assert used(second) == [("GPU-1",)]


def test_a_member_that_waits_for_its_first_gpu_comes_before_those_who_would_join() -> None:
    two = gpus(2)
    states = schedule(plan_of([60, 6, 6], [1, 1, 1], two), two)
    assert [used(state)[0] for state in states] == [("GPU-0",), ("GPU-1",), ("GPU-1",)]
    assert used(states[0])[1:] == [("GPU-1",)], "only then does the first member get more"
    starts = [state.workers[-1].started_after_seconds for state in states]
    assert starts[0] > starts[2] > starts[1]


def test_a_member_that_waits_keeps_only_the_devices_it_may_use() -> None:
    two = gpus(2)
    made = plan_of([30, 30, 6], [1, 1, 1], two)
    members = [
        replace(member, placement=replace(member.placement, devices=devices))
        for member, devices in zip(made.members, [("GPU-1",), ("GPU-1",), ("GPU-0", "GPU-1")], strict=True)
    ]
    first, second, third = schedule(replace(made, members=tuple(members)), two)
    assert used(first) == used(second) == [("GPU-1",)]
    assert used(third) == [("GPU-0",)]
    assert third.workers[0].started_after_seconds < second.workers[0].started_after_seconds
