"""Members whose rows are selected when others have ended: who starts when, and that nobody waits for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from ensemble.common.clock import Watch
from ensemble.common.gpus import Device
from ensemble.common.protocol import ChunkDone, Failed, Predict
from ensemble.planning.plan import ModelPlan, Plan, with_job
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import MAX_TURN_SECONDS, Scheduler
from ensemble.scheduling.state import ModelState
from tests.planning.test_plan import gpus
from tests.pretended import Answer, PretendedLauncher, PretendedRun, computed, plan_of, used


class Selecting(PretendedRun):
    """The last member gets its rows when all others have ended: the first ones of the table.

    Args:
        share: of the rows.
    """

    def __init__(self, plan: Plan, members: Sequence[ModelState], share: float = 1.0) -> None:
        super().__init__()
        self._plan, self._share = plan, share
        self._members = members
        self._ended: list[str] = []
        self.ended_then: list[str] = []

    def on_ended(self, state: ModelState) -> None:
        self._ended.append(state.plan.name)
        *others, last = self._members
        if last.plan.is_undecided and {other.plan.name for other in others} <= {*self._ended}:
            rows = len(self._plan.facts[last.plan.name].lengths)
            is_selected = np.arange(rows) < round(self._share * rows)
            self.ended_then = [*self._ended]
            nothing = np.zeros(rows, dtype=np.bool_)
            last.extend(with_job(self._plan, last.plan, 0, is_selected, np.zeros(rows), nothing))


def undecided(member: ModelPlan) -> ModelPlan:
    """The member as a run has it until its rows are selected."""
    return replace(member, undecided={0: 1.0}, chunks=(), order=member.order[:0])


def run(
    chunks: Sequence[int],
    devices: Sequence[Device],
    answer: Answer = computed,
    share: float = 1.0,
    deadline: Deadline | None = None,
) -> tuple[list[ModelState], Selecting]:
    """Run members with so many rows of a chunk each, of which the last one waits for the others."""
    plan = plan_of(chunks, [1] * len(chunks), devices)
    *others, last = plan.models
    plans = [*others, undecided(last)]
    members = [ModelState(member) for member in plans]
    hooks, clock = Selecting(plan, members, share), Watch(MAX_TURN_SECONDS)
    launcher = PretendedLauncher(answer)
    Scheduler(members, devices, launcher, hooks, Rules(2, "fail", 60.0), clock, deadline).run()
    return members, hooks


@pytest.mark.parametrize("count", [0, 1, 2])
def test_it_does_all_that_it_gets_and_ends(count: int) -> None:
    (first, last), hooks = run([6, 6], gpus(count), share=0.5)
    assert first.finished
    assert last.finished
    assert hooks.ended_then == ["m0"]
    assert (last.counters.rows, last.rows) == (3, 3)
    assert last.fraction == 1.0
    assert len(last.workers) <= max(1, count), "a slow machine may start a second one"
    assert last.workers[0].leased_after_seconds >= first.workers[0].leased_after_seconds


def test_nobody_waits_on_a_device_that_another_member_wants() -> None:
    (first, other, last), _ = run([12, 4, 12], gpus(2), share=0.3)
    assert first.finished
    assert other.finished
    assert last.finished
    assert used(first)[0] != used(other)[0], "side by side"
    assert other.workers[0].leased_after_seconds < last.workers[0].leased_after_seconds


def test_it_waits_for_nobody_who_has_failed_and_the_run_ends() -> None:
    calls: list[int] = []

    def answer(command: Predict) -> object:
        calls.append(command.chunk)
        if len(calls) == 1:
            return Failed("WriteError", "no space", "", command.chunk)
        return computed(command)

    (first, last), _ = run([6, 6], gpus(1), answer, share=0.5)
    assert first.failure is not None
    assert last.finished, "what its hooks gave it then"
    assert last.counters.rows == 3


def test_with_nothing_to_do_no_worker_is_started() -> None:
    (_, last), _ = run([6, 6], [], share=0.0)
    assert last.finished
    assert last.finished_at is not None
    assert last.workers == []


def test_a_member_whose_rows_are_never_selected_is_not_finished() -> None:
    def answer(command: Predict) -> object:
        return Failed("WriteError", "no space", "", command.chunk)

    plan = plan_of([6, 6], [1, 1], [])
    members = [ModelState(plan.models[0]), ModelState(undecided(plan.models[1]))]
    hooks, clock, launcher = PretendedRun(), Watch(MAX_TURN_SECONDS), PretendedLauncher(answer)
    Scheduler(members, [], launcher, hooks, Rules(2, "fail", 60.0), clock).run()
    assert not members[1].finished
    assert (members[1].phase, members[1].fraction, members[1].rows) == ("waiting", 0.0, 0)


def test_under_a_time_limit_it_gets_the_time_that_is_left() -> None:
    given: list[int] = []
    chunk = 3.0

    def answer(command: Predict) -> ChunkDone:
        given.append(command.chunk)
        return computed(command, chunk)

    plan = plan_of([60, 60], [1, 1], [])
    total = len(plan.models[0].chunks)
    keeper = Deadline(1.5 * total * chunk, 1, lambda: len(given) * chunk)
    (first, last), _ = run([60, 60], [], answer, deadline=keeper)
    assert first.finished
    assert total / 4 < last.counters.chunks < total
    assert last.failure is None
