"""Workers that only pretend to compute, and runs of the scheduler with them: real ones would take minutes.

Those of a ``SimulatedLauncher`` take exactly as long as a test says, by a clock that passes with them alone.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ensemble.common.clock import Watch
from ensemble.common.gpus import Device
from ensemble.common.protocol import (
    ChunkDone,
    Closed,
    Command,
    CommonSpec,
    Counters,
    Failed,
    Load,
    Predict,
    Progress,
    Ready,
    Start,
    Started,
    Stop,
    WorkerSpec,
)
from ensemble.planning.plan import ModelPlan, Plan
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.launchers.base import Exit, Handle, Launcher, WorkerStart
from ensemble.scheduling.retry import OnBadRow, Rules
from ensemble.scheduling.scheduler import MAX_TURN_SECONDS, Scheduler
from ensemble.scheduling.state import ModelState, RunHooks
from tests.planning.test_plan import config, facts, make_plan

CHUNK_SECONDS = 0.03
WRITE_SECONDS = 0.005
SILENCE = object()
# Nobody who pretends reads it.
SPEC = WorkerSpec(
    CommonSpec(
        labels=(),
        activation="softmax",
        gpus=0,
        memory_limit_bytes=None,
        seed=0,
        table_path="",
        order_path="",
        shards_dir="",
    ),
    kind="",
    settings={},
)


Answer = Callable[[Predict], Any]


def computed(command: Predict, seconds: float = CHUNK_SECONDS) -> ChunkDone:
    rows = command.stop - command.start
    return ChunkDone(
        command.chunk,
        "shard",
        Counters(chunks=1, rows=rows, tokens=rows, padded_tokens=rows, batches=1, predict_seconds=seconds),
    )


class PretendedWorker(Handle):
    """Says what a worker says, when it would say it.

    Args:
        answer: what it says to a chunk; None: it is killed, a number: it exits with that code.
        can_start: else it fails as where CUDA does not start.

    Attributes:
        chunk_seconds, write_seconds: what it takes for a chunk, and to write its shard.
        got: the commands it was sent.
        told: the same with its number, in a list that several may share.
    """

    def __init__(self, process: str, answer: Answer = computed, can_start: bool = True) -> None:
        self.process = process
        self._answer = answer
        self._can_start = can_start
        self.got: list[Command] = []
        self.told: list[tuple[str, Command]] = []
        self._due: list[tuple[float, Any]] = []
        self._is_over = False
        self._code = 0
        self.chunk_seconds, self.write_seconds = CHUNK_SECONDS, WRITE_SECONDS
        self.was_aborted = self.was_closed = self.is_out_of_memory = False
        self._say(0, Started({}, 0.02))

    def _say(self, seconds: float, *events: Any) -> None:
        self._due += [(time.monotonic() + seconds, event) for event in events]

    def send(self, command: Command) -> None:
        self.got.append(command)
        self.told.append((self.process, command))
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
                self._say(self.chunk_seconds + self.write_seconds, answer)
                self._is_over = isinstance(answer, Failed)
        elif isinstance(command, Stop):
            self._say(0, Closed(1))
            self._is_over = True
        assert not isinstance(command, Start)

    def receive(self) -> list[Any]:
        now = time.monotonic()
        events = [event for due, event in self._due if due <= now]
        self._due = [(due, event) for due, event in self._due if due > now]
        self.is_open = not self.has_exited()
        return events

    def may_speak(self) -> bool:
        return any(due <= time.monotonic() for due, _ in self._due) or (self.is_open and self.has_exited())

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

    def close(self) -> Exit:
        self.was_closed = True
        text = "was killed by signal 9 (SIGKILL)" if self._code < 0 else f"ended with exit code {self._code}"
        return Exit(self._code, text, self.is_out_of_memory)


@dataclass(frozen=True)
class Launched:
    """A worker that the scheduler asked for: its member, the UUIDs it was to see."""

    member: str
    devices: tuple[str, ...]
    worker: PretendedWorker


class PretendedLauncher(Launcher):
    """Starts pretended workers.

    Args:
        broken: UUIDs of devices on which none can load.
    """

    def __init__(
        self,
        answer: Answer = computed,
        broken: Sequence[str] = (),
        on_launch: Callable[[Launched], None] = lambda launched: None,
    ) -> None:
        super().__init__({})
        self._answer, self._broken, self._on_launch = answer, broken, on_launch
        self._count = 0

    def start(self, start: WorkerStart) -> Handle:
        uuids = tuple(device.uuid for device in start.devices)
        self._count += 1
        worker = PretendedWorker(str(self._count), self._answer, not set(uuids) & set(self._broken))
        self._on_launch(Launched(start.log.name, uuids, worker))
        return worker

    def wait(self, handles: Sequence[Handle], timeout_seconds: float) -> Collection[Handle]:
        until = time.monotonic() + timeout_seconds
        while True:
            results = [
                handle for handle in handles if isinstance(handle, PretendedWorker) and handle.may_speak()
            ]
            if results or time.monotonic() >= until:
                return results
            time.sleep(0.001)


class SimulatedWorker(Handle):
    """Takes exactly as long as its launcher says, by the launcher's clock."""

    def __init__(self, launcher: SimulatedLauncher, member: int, devices: tuple[str, ...]) -> None:
        self.process = "1"
        self._launcher, self._member, self._devices = launcher, member, devices
        self.due: list[tuple[float, Any]] = [(launcher.now, Started({}, 0.0))]
        self._is_over = False

    def send(self, command: Command) -> None:
        now, limit = self._launcher.now, self._launcher.limit
        if isinstance(command, Load):
            seconds = self._launcher.startup_seconds[self._member]
            self.due.append((now + seconds, Ready(seconds, "cpu", "float32", "sdpa", 1, 128, 2048)))
        elif isinstance(command, Predict):
            seconds = self._launcher.chunk_seconds(self._member, self._devices, command)
            self.due.append((now + seconds, computed(command, seconds)))
            if now + seconds > limit and (
                rows := int((command.stop - command.start) * (limit - now) / seconds)
            ):
                self.due.append((limit, Progress(command.chunk, rows, rows, rows)))
        elif isinstance(command, Stop):
            self.due.append((now, Closed(1)))
            self._is_over = True

    def receive(self) -> list[Any]:
        events = [event for due, event in self.due if due <= self._launcher.now]
        self.due = [(due, event) for due, event in self.due if due > self._launcher.now]
        self.is_open = not self.has_exited()
        return events

    def has_exited(self) -> bool:
        return self._is_over and not self.due

    def terminate(self) -> None:
        self._is_over, self.due = True, []

    def abort(self) -> None:
        self.terminate()

    def close(self) -> Exit:
        return Exit(0, "ended with exit code 0")


class SimulatedLauncher(Launcher):
    """Time passes only while all wait, and then to what comes next; it is its own clock.

    Args:
        startup_seconds: of a worker of each member; they are called m0, m1 and so on.
        chunk_seconds: what a chunk takes, by the member's number, the worker's devices, and the command.
        limit: when time stands still; rows of a chunk in hand that are done by then are told.
        now: when it begins.

    Attributes:
        loads: how many workers of each member were started.
    """

    def __init__(
        self,
        startup_seconds: Sequence[float],
        chunk_seconds: Callable[[int, tuple[str, ...], Predict], float],
        limit: float,
        now: float = 0.0,
    ) -> None:
        super().__init__({})
        self.startup_seconds, self.chunk_seconds = startup_seconds, chunk_seconds
        self.limit, self.now = limit, now
        self.loads = Counter[int]()

    def __call__(self) -> float:
        return self.now

    def start(self, start: WorkerStart) -> Handle:
        member = int(start.log.name.removeprefix("m"))
        self.loads[member] += 1
        return SimulatedWorker(self, member, tuple(device.uuid for device in start.devices))

    def wait(self, handles: Sequence[Handle], timeout_seconds: float) -> Collection[Handle]:
        due = [at for handle in handles if isinstance(handle, SimulatedWorker) for at, _ in handle.due]
        self.now = min([self.limit, *(max(at, self.now) for at in due)])
        return handles


class PretendedRun(RunHooks):
    """What a scheduler wants of its run; a worker's log is named after its member."""

    def __init__(self, on_finished: Callable[[ModelState], None] = lambda state: None) -> None:
        self._on_finished = on_finished

    def worker_start(self, model: ModelPlan, replica: int, devices: Sequence[Device]) -> WorkerStart:
        return WorkerStart(Start(SPEC), tuple(devices), {}, Path(model.name))

    def say(self, text: str) -> None: ...

    def on_change(self, models: Sequence[ModelState]) -> None: ...

    def on_finished(self, state: ModelState) -> None:
        self._on_finished(state)


def make_scheduler(
    members: list[ModelState],
    devices: Sequence[Device],
    launcher: Launcher,
    rules: Rules,
    deadline: Deadline | None = None,
    on_finished: Callable[[ModelState], None] = lambda state: None,
) -> Scheduler:
    run, clock = PretendedRun(on_finished), Watch(MAX_TURN_SECONDS)
    # Without a driver nobody tells the memory, so that every device is free again at once.
    return Scheduler(members, devices, launcher, run, rules, clock, deadline)


def schedule(
    plan: Plan,
    devices: Sequence[Device],
    answer: Answer = computed,
    policy: OnBadRow = "fail",
    hang_timeout: float = 60.0,
    deadline: Deadline | None = None,
    broken: Sequence[str] = (),
    on_finished: Callable[[ModelState], None] = lambda state: None,
    may_stand_by: bool = True,
    on_launch: Callable[[Launched], None] = lambda launched: None,
) -> list[ModelState]:
    """Run a plan with pretended workers, of which those on ``broken`` devices cannot load."""
    members = [ModelState(member) for member in plan.models]
    launcher = PretendedLauncher(answer, broken, on_launch)
    rules = Rules(2, policy, hang_timeout, may_stand_by)
    make_scheduler(members, devices, launcher, rules, deadline, on_finished).run()
    return members


def plan_of(chunks: Sequence[int], first: Sequence[int], devices: Sequence[Device]) -> Plan:
    known = {
        f"m{index}": facts(np.full(count, 200_000, dtype=np.int64)) for index, count in enumerate(chunks)
    }
    made = make_plan(config(*({} for _ in chunks)), known, devices)
    members = zip(made.models, first, strict=True)
    return replace(made, models=tuple(replace(member, first_replicas=count) for member, count in members))


def used(state: ModelState) -> list[tuple[str, ...]]:
    return [record.devices for record in state.workers]
