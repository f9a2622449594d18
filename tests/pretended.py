"""Workers that only pretend to compute, and runs of the scheduler with them: real ones would take minutes."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ensemble.common.gpus import Device
from ensemble.common.protocol import (
    ChunkDone,
    Closed,
    Command,
    Computed,
    Counters,
    Failed,
    Load,
    Predict,
    Ready,
    Start,
    Started,
    Stop,
)
from ensemble.planning.plan import MemberPlan, Plan, make_plan
from ensemble.scheduling.deadline import TimeKeeper
from ensemble.scheduling.device_pool import Leases
from ensemble.scheduling.retry import Judge, Policy
from ensemble.scheduling.running_worker import Worker
from ensemble.scheduling.scheduler import Scheduler
from ensemble.scheduling.state import MemberState
from tests.planning.test_plan import config, facts

CHUNK_SECONDS = 0.03
WRITE_SECONDS = 0.005
SILENCE = object()


Answer = Callable[[Predict], Any]


def computed(command: Predict, seconds: float = CHUNK_SECONDS) -> ChunkDone:
    rows = command.stop - command.start
    return ChunkDone(
        command.chunk,
        "part",
        Counters(chunks=1, rows=rows, tokens=rows, padded_tokens=rows, batches=1, predict_seconds=seconds),
    )


class PretendedWorker:
    """On the other side of the scheduler's line: says what a worker says, when it would say it.

    Args:
        answer: what it says to a chunk; None: it is killed, a number: it exits with that code.
        can_start: else it fails as where CUDA does not start.

    Attributes:
        chunk_seconds, write_seconds: what it takes for a chunk, and to write its part.
        got: the commands it was sent.
        told: the same with its number, in a list that several may share.
    """

    def __init__(self, pid: int, answer: Answer = computed, can_start: bool = True) -> None:
        self.pid = pid
        self.events_fd, self._write_end = os.pipe()
        self._answer = answer
        self._can_start = can_start
        self.got: list[Command] = []
        self.told: list[tuple[int, Command]] = []
        self._due: list[tuple[float, Any]] = []
        self._is_over = False
        self._code = 0
        self.chunk_seconds, self.write_seconds = CHUNK_SECONDS, WRITE_SECONDS
        self.was_aborted = self.was_closed = False
        self._say(0, Started({}, 0.02))

    def _say(self, seconds: float, *events: Any) -> None:
        self._due += [(time.monotonic() + seconds, event) for event in events]
        os.write(self._write_end, b"x")  # wakes the selector, which then asks until all is said

    def send(self, command: Command) -> None:
        self.got.append(command)
        self.told.append((self.pid, command))
        if isinstance(command, Load) and self._can_start:
            self._say(0, Ready(0.02, "cpu", "float32", "sdpa", 1, 128, 2048))
        elif isinstance(command, Load):
            self._say(0, Failed("RuntimeError", "CUDA driver initialization failed", ""))
            self._is_over, self._code = True, 1
        elif isinstance(command, Predict):
            answer = self._answer(command)
            if answer is None or isinstance(answer, int):
                self._is_over, self._code = True, -9 if answer is None else answer
            elif answer is not SILENCE:
                if isinstance(answer, ChunkDone):
                    self._say(self.chunk_seconds, Computed(answer.chunk))
                self._say(self.chunk_seconds + self.write_seconds, answer)
                self._is_over = isinstance(answer, Failed)
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

    def fail(self) -> None:
        """Say that it cannot go on, and take a while to end."""
        self._say(0, Failed("ImportError", "no module named torch", ""))
        self._say(60.0, Closed(1))

    def abort(self) -> None:
        self.was_aborted = self._is_over = True

    def close(self) -> int:
        self.was_closed = True
        os.close(self.events_fd)
        os.close(self._write_end)
        return self._code


@dataclass(frozen=True)
class Launched:
    """A worker that the scheduler asked for: its member, the UUIDs it was to see, bytes to read ahead."""

    member: str
    devices: tuple[str, ...]
    read_ahead: int
    worker: PretendedWorker


def schedule(
    plan: Plan,
    devices: Sequence[Device],
    answer: Answer = computed,
    policy: Policy = "fail",
    hang_timeout: float = 60.0,
    time_keeper: TimeKeeper | None = None,
    broken: Sequence[str] = (),
    on_finished: Callable[[MemberState], None] = lambda state: None,
    may_stand_by: bool = True,
    on_launch: Callable[[Launched], None] = lambda launched: None,
    on_begin: Callable[[Scheduler], None] = lambda scheduler: None,
) -> list[MemberState]:
    """Run a plan with pretended workers, of which those on ``broken`` devices cannot load."""
    pids = iter(range(1, 1000))

    def launch(
        member: MemberPlan, replica: int, lease: Sequence[Device], read_ahead: int
    ) -> tuple[Worker, str]:
        can_start = not any(device.uuid in broken for device in lease)
        worker = PretendedWorker(next(pids), answer, can_start)
        on_launch(Launched(member.name, tuple(device.uuid for device in lease), read_ahead, worker))
        return worker, "log"

    # Without a driver nobody tells the memory, so that every device is free again at once.
    leases = Leases(devices, 1, 60.0, say=lambda text: None)
    judge = Judge(2, policy, lambda text: None, lambda state: None)
    members = [MemberState.of(member) for member in plan.members]
    scheduler = Scheduler(
        *(members, leases, launch, judge, lambda members: None, on_finished, hang_timeout, time_keeper),
        may_stand_by,
    )
    on_begin(scheduler)
    scheduler.run()
    return members


def plan_of(chunks: Sequence[int], first: Sequence[int], devices: Sequence[Device]) -> Plan:
    known = {
        f"m{index}": facts(np.full(count, 200_000, dtype=np.int64)) for index, count in enumerate(chunks)
    }
    made = make_plan(config(*({} for _ in chunks)), known, devices)
    members = zip(made.members, first, strict=True)
    return replace(made, members=tuple(replace(member, first_replicas=count) for member, count in members))


def used(state: MemberState) -> list[tuple[str, ...]]:
    return [record.devices for record in state.workers]
