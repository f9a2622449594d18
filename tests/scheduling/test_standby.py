"""Who stands by while others compute, for which devices, and that nothing depends on it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from ensemble.common.protocol import Predict
from ensemble.planning.plan import STANDBY_HOST_BYTES
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.records import Gap, WorkerRecord, idle_gaps
from ensemble.scheduling.state import ModelState
from tests.planning.test_plan import config, facts, gpus, make_plan
from tests.pretended import Launched, PretendedLauncher, PretendedWorker, computed, plan_of, schedule, used


class Watch:
    """What was launched, and what the others had been told by then."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.still_running: list[list[str]] = []

    def __call__(self, launched: Launched) -> None:
        self.still_running.append([launch.member for launch in self.launched if not launch.worker.was_closed])
        self.launched.append(launched)

    def of(self, member: str) -> list[PretendedWorker]:
        return [launch.worker for launch in self.launched if launch.member == member]


def kinds(worker: PretendedWorker) -> list[str]:
    return [type(command).__name__ for command in worker.got]


def test_the_next_member_stands_by_and_loads_only_when_the_device_is_free() -> None:
    item, watch = gpus(1), Watch()
    states = schedule(plan_of([6, 6, 6], [1, 1, 1], item), item, on_launch=watch)
    assert [launched.member for launched in watch.launched] == ["m0", "m1", "m2"]
    assert watch.still_running == [[], ["m0"], ["m1"]], "each began while the one before it computed"
    assert [used(state) for state in states] == [[("GPU-0",)]] * 3
    for before, after in pairwise(states):
        (first,), (second,) = before.workers, after.workers
        assert first.life_seconds is not None
        assert second.started_after_seconds < first.leased_after_seconds + first.life_seconds
        assert second.leased_after_seconds >= first.leased_after_seconds + first.life_seconds - 0.01
        assert second.start_seconds == 0.02, "what it said while it stood by is not lost"
    (second_worker,) = watch.of("m1")
    assert kinds(second_worker)[:2] == ["Load", "Predict"]


def test_nobody_stands_by_on_the_cpu_or_where_the_config_says_no() -> None:
    for devices, may_stand_by in (([], True), (gpus(1), False)):
        watch = Watch()
        states = schedule(
            plan_of([4, 4], [1, 1], devices), devices, on_launch=watch, may_stand_by=may_stand_by
        )
        assert all(state.finished for state in states)
        assert watch.still_running == [[], []]


def test_nobody_stands_by_where_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PretendedLauncher, "available_memory", lambda launcher, devices: STANDBY_HOST_BYTES)
    item, watch = gpus(1), Watch()
    states = schedule(plan_of([4, 4], [1, 1], item), item, on_launch=watch)
    assert all(state.finished for state in states)
    assert watch.still_running == [[], []]


def test_each_replica_of_the_next_member_stands_by_for_a_device_of_its_own() -> None:
    two, watch = gpus(2), Watch()
    first, second = schedule(plan_of([20, 20], [2, 2], two), two, on_launch=watch)
    assert sorted(used(first)) == sorted(used(second)) == [("GPU-0",), ("GPU-1",)]
    standing_by = watch.launched[2:]
    assert [standby.member for standby in standing_by] == ["m1", "m1"]
    assert {standby.devices for standby in standing_by} == {("GPU-0",), ("GPU-1",)}
    assert {worker.process for worker in second.workers} == {
        standby.worker.process for standby in standing_by
    }
    assert len({record.replica for record in second.workers}) == 2


@pytest.mark.parametrize("fail", [PretendedWorker.terminate, PretendedWorker.fail])
def test_one_that_fails_before_its_turn_is_replaced_and_costs_the_member_nothing(
    fail: Callable[[PretendedWorker], None],
) -> None:
    """It has ended, or has said that it cannot go on."""
    item, watch = gpus(1), Watch()

    def launch(launched: Launched) -> None:
        watch(launched)
        if len(watch.of("m1")) == 1 and launched.member == "m1":
            fail(launched.worker)

    first, second = schedule(plan_of([8, 4], [1, 1], item), item, on_launch=launch)
    assert first.finished
    assert second.finished
    assert not second.faults
    assert len(watch.of("m1")) == 2
    if fail is PretendedWorker.terminate:
        assert watch.still_running[2] == [], "after its own turn came; nobody stands by a second time"
    assert [record.process for record in second.workers] == [watch.of("m1")[1].process]


def test_where_the_host_runs_out_of_memory_nobody_stands_by_any_longer() -> None:
    item, watch = gpus(1), Watch()

    def answer(command: Predict) -> Any:
        first = watch.launched[0].worker
        if first.is_out_of_memory or len(watch.launched) < 2:
            return computed(command)
        first.is_out_of_memory = True
        return None

    first, second = schedule(plan_of([20, 4], [1, 1], item), item, answer, on_launch=watch)
    assert first.finished
    assert second.finished
    assert [fault.kind for fault in first.faults] == ["memory"]
    assert [launched.member for launched in watch.launched] == ["m0", "m1", "m0", "m1"]
    assert watch.still_running[2:] == [[], []], "neither beside the retry nor beside anybody else"


def test_its_devices_are_in_the_order_of_a_lease() -> None:
    """Which GPU comes free first does not decide which is the member's first: max_memory goes by that."""
    two, watch = gpus(2), Watch()
    models: list[dict[str, Any]] = [{"replicas": 1}, {"replicas": 1}, {"num_gpus": 2}]
    known = {
        f"m{index}": facts(np.full(count, 200_000, dtype=np.int64), **models[index])
        for index, count in enumerate((30, 10, 6))
    }
    made = make_plan(config(*models), known, two)
    members = tuple(replace(member, first_replicas=1) for member in made.models)
    *_, wide = schedule(replace(made, models=members), two, on_launch=watch)
    assert used(wide) == [("GPU-0", "GPU-1")]
    assert [launch.devices for launch in watch.launched if launch.member == "m2"] == [("GPU-0", "GPU-1")]
    assert watch.still_running[2], "it began while others computed"


@pytest.mark.long
def test_none_outlives_a_run_that_ends_early() -> None:
    item, watch = gpus(1), Watch()

    def answer(command: Predict) -> Any:
        if len(watch.launched) == 2:
            raise KeyboardInterrupt
        return computed(command)

    with pytest.raises(KeyboardInterrupt):
        schedule(plan_of([50, 4], [1, 1], item), item, answer, on_launch=watch)
    assert [launch.member for launch in watch.launched] == ["m0", "m1"]
    assert all(launch.worker.was_closed for launch in watch.launched)
    assert "Load" not in kinds(watch.launched[1].worker)


def test_a_member_that_another_run_has_done_or_that_failed_has_nobody_standing_by() -> None:
    item, watch = gpus(1), Watch()
    plan = plan_of([8, 4, 4], [1, 1, 1], item)
    done = replace(plan.models[1], chunks=())
    schedule(replace(plan, models=(plan.models[0], done, plan.models[2])), item, on_launch=watch)
    assert [launch.member for launch in watch.launched] == ["m0", "m2"]


def test_what_a_run_has_no_time_for_is_left_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[str] = []

    def finish(state: ModelState) -> None:
        begun.set()
        go_on.wait()
        done.append(state.plan.name)

    plan = plan_of([1, 1], [1, 1], [])
    plan = replace(plan, models=tuple(replace(member, chunks=()) for member in plan.models))
    shut_down = ThreadPoolExecutor.shutdown

    def let_go(thread: ThreadPoolExecutor, wait: bool, cancel_futures: bool) -> None:
        shut_down(thread, wait=False, cancel_futures=cancel_futures)
        go_on.set()
        shut_down(thread, wait=wait)

    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", let_go)
    deadline = Deadline(0.5, 1, lambda: float(begun.is_set()))
    states = schedule(plan, [], deadline=deadline, on_finished=finish)
    assert done == ["m0"], "the one that had begun, to its end"
    assert not any(state.failure for state in states)


def computing(
    member: str, devices: str, begin: float | None, end: float | None, leased: float | None = None
) -> WorkerRecord:
    record = WorkerRecord(
        member, 0, tuple(devices), "7", "log", 0.0, (begin or 0.0) if leased is None else leased
    )
    return replace(record, computed_from=begin, computed_to=end)


def test_gaps_are_between_members_on_the_same_device() -> None:
    workers = [
        computing("a", "0", 1.0, 10.0),
        computing("a", "1", 2.0, 11.0),
        computing("a", "0", 12.0, 13.0),  # a retry of the same member: no change of members
        computing("a", "1", None, None),  # one that never computed
        computing("b", "01", 16.5, None),
    ]
    assert idle_gaps(workers) == (Gap("0", "a", "b", 3.5), Gap("1", "a", "b", 5.5))


def test_a_device_on_which_another_computes_has_no_gap() -> None:
    assert not idle_gaps(
        [computing("a", "0", 1.0, 3.0), computing("b", "0", 2.0, None), computing("c", "0", 4.0, 5.0)]
    )


def test_members_that_are_side_by_side_on_a_cpu_do_not_wait_for_each_other() -> None:
    beside = [computing("a", "c", 1.0, 1.5, leased=0.0), computing("b", "c", 2.0, 2.5, leased=0.1)]
    assert not idle_gaps(beside), "b was loading while a computed"
    after = computing("c", "c", 4.0, 5.0, leased=2.6)
    assert idle_gaps([*beside, after]) == (Gap("c", "b", "c", 1.5),)


def test_the_gaps_of_a_run_are_measured() -> None:
    item = gpus(1)
    states = schedule(plan_of([4, 4], [1, 1], item), item)
    (gap,) = idle_gaps(worker for state in states for worker in state.workers)
    assert (gap.device, gap.after, gap.before) == ("GPU-0", "m0", "m1")
    assert gap.seconds >= 0
