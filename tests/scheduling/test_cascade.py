"""Members whose chunks become known while others run: who starts when, and that nobody waits for ever."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from ensemble.common.clock import Watch
from ensemble.common.gpus import Device
from ensemble.common.protocol import ChunkDone, Failed, Predict
from ensemble.planning.plan import Plan
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import MAX_TURN_SECONDS, Scheduler
from ensemble.scheduling.state import MemberState
from tests.planning.test_plan import gpus
from tests.pretended import Answer, Launched, PretendedLauncher, PretendedRun, computed, plan_of, used


class Growing(PretendedRun):
    """The last member gets a chunk with each one that the first has done, or all of them at its end.

    Args:
        at_once: all at the end of the first.
        share: of the first one's chunks.
    """

    def __init__(self, members: Sequence[MemberState], at_once: bool = False, share: float = 1.0) -> None:
        super().__init__()
        self.first, self.last = members[0], members[-1]
        self._at_once = at_once
        self._wanted = round(share * len(self.first.plan.chunks))
        self._done = self._given = 0
        self.log: list[str] = []

    def on_chunk_done(self, state: MemberState, done: ChunkDone) -> None:
        self.log.append(state.plan.name)
        if state is self.first:
            self._done += 1
            self._tell(may_grow=True)

    def on_ended(self, state: MemberState) -> None:
        if state is self.first:
            self._done = len(self.first.plan.chunks)
            self._tell(may_grow=False)

    def _tell(self, may_grow: bool) -> None:
        total = len(self.first.plan.chunks)
        unknown = total - self._done
        known = self._wanted if not unknown else 0 if self._at_once else min(self._done, self._wanted)
        new, self._given = range(self._given, known), known
        groups = [(np.array([number]), 1 / total, 0) for number in new]
        self.last.grow(groups, unknown, known, 0, (self._done - known) / total, may_grow)


def cascade_of(chunks: Sequence[int], first: Sequence[int], devices: Sequence[Device]) -> Plan:
    """The last member waits for those before it."""
    made = plan_of(chunks, first, devices)
    names = tuple(member.name for member in made.members[:-1])
    members = (*made.members[:-1], replace(made.members[-1], waits_for=names))
    return replace(made, members=members)


def run(
    plan: Plan,
    devices: Sequence[Device],
    answer: Answer = computed,
    at_once: bool = False,
    share: float = 1.0,
    deadline: Deadline | None = None,
    on_launch: Callable[[Launched], None] = lambda launched: None,
) -> tuple[list[MemberState], Growing]:
    members = [MemberState(member) for member in plan.members]
    hooks, clock = Growing(members, at_once, share), Watch(MAX_TURN_SECONDS)
    launcher = PretendedLauncher(answer, (), on_launch)
    pool = DevicePool(devices, 1, 60.0, launcher, hooks.say, clock)
    Scheduler(members, pool, launcher, hooks, Rules(2, "fail", 60.0), clock, deadline).run()
    return members, hooks


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("count", [0, 1, 2])
def test_it_does_all_that_it_gets_and_ends(count: int, at_once: bool) -> None:
    devices = gpus(count)
    (first, last), _ = run(cascade_of([6, 6], [1, 1], devices), devices, at_once=at_once, share=0.5)
    assert first.finished
    assert last.finished
    wanted = round(0.5 * len(first.plan.chunks))
    assert (last.counters.chunks, last.rows) == (wanted, wanted)
    assert last.fraction == pytest.approx(1.0)
    assert len(last.workers) == 1


def test_on_a_device_of_its_own_it_computes_row_by_row() -> None:
    two = gpus(2)
    given: list[list[int]] = []

    def on_launch(launched: Launched) -> None:
        if launched.member == "m1":
            told = launched.worker.send

            def send(command: object) -> None:
                if isinstance(command, Predict):
                    assert command.rows is not None
                    given.append(np.frombuffer(base64.b64decode(command.rows), "<i4").tolist())
                told(command)  # type: ignore[arg-type]

            launched.worker.send = send  # type: ignore[method-assign]
            launched.worker.chunk_seconds /= 10

    (first, last), hooks = run(cascade_of([12, 12], [1, 1], two), two, on_launch=on_launch)
    assert len(last.workers) == 1, "it waits for more, and is not started anew"
    assert "m1" in hooks.log[: hooks.log.index("m0", 6)], "before the first has ended"
    assert given == [[number] for number in range(len(first.plan.chunks))], "rows travel with the commands"
    assert used(first) == [("GPU-0",)]


def test_nobody_waits_on_a_device_that_another_member_wants() -> None:
    two = gpus(2)
    made = cascade_of([12, 4, 12], [1, 1, 1], two)
    (first, other, last), _ = run(made, two, share=0.3)
    assert first.finished
    assert other.finished
    assert last.finished
    assert other.workers[0].leased_after_seconds < last.workers[0].leased_after_seconds


def test_it_waits_for_nobody_who_has_failed_and_the_run_ends() -> None:
    def answer(command: Predict) -> object:
        return (
            Failed("WriteError", "no space", "", command.chunk) if command.rows is None else computed(command)
        )

    (first, last), _ = run(cascade_of([6, 6], [1, 1], gpus(1)), gpus(1), answer, share=0.5)
    assert first.failure is not None
    assert last.finished, "what its hooks gave it then"


def test_with_nothing_to_do_no_worker_is_started() -> None:
    (_, last), _ = run(cascade_of([6, 6], [1, 1], []), [], share=0.0)
    assert last.finished
    assert last.workers == []


def test_under_a_time_limit_it_gets_the_time_that_is_left() -> None:
    given: list[int] = []
    chunk = 3.0

    def answer(command: Predict) -> ChunkDone:
        given.append(command.chunk)
        return computed(command, chunk)

    made = cascade_of([60, 60], [1, 1], [])
    total = len(made.members[0].chunks)
    keeper = Deadline(1.5 * total * chunk, 1, lambda: len(given) * chunk)
    (first, last), hooks = run(made, [], answer, at_once=True, deadline=keeper)
    assert first.finished
    assert hooks.log[:total] == ["m0"] * total
    assert total / 4 < last.counters.chunks < total
    assert last.failure is None
