"""The scheduler's choices, with workers that only pretend to compute: real ones would take minutes to show them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import ensemble.scheduling.scheduler
from ensemble.common.errors import MergeError
from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    Command,
    Failed,
    Predict,
    Stop,
)
from ensemble.jobs.job import model_of_trainings
from ensemble.planning.chunks import Chunk
from ensemble.planning.plan import Plan, without_done
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.state import ModelState
from tests.planning.test_plan import config, facts, gpus, make_plan
from tests.pretended import (
    CHUNK_SECONDS,
    SILENCE,
    Launched,
    PretendedWorker,
    computed,
    plan_of,
    schedule,
    used,
)


def test_a_gpu_that_is_left_over_joins_the_member_with_most_to_do() -> None:
    two = gpus(2)
    long, short = schedule(plan_of([120, 6], [1, 1], two), two)
    assert long.finished
    assert short.finished
    assert used(short) == [("GPU-1",)]
    assert used(long) == [("GPU-0",), ("GPU-1",)]
    assert long.workers[1].counters.chunks > 0


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
    starts = [state.workers[-1].leased_after_seconds for state in states]
    assert starts[0] > starts[2] > starts[1]


def test_a_member_that_waits_keeps_only_the_devices_it_may_use() -> None:
    two = gpus(2)
    made = plan_of([30, 30, 6], [1, 1, 1], two)
    members = [
        replace(member, placement=replace(member.placement, devices=devices))
        for member, devices in zip(made.models, [("GPU-1",), ("GPU-1",), ("GPU-0", "GPU-1")], strict=True)
    ]
    first, second, third = schedule(replace(made, models=tuple(members)), two)
    assert used(first) == used(second) == [("GPU-1",)]
    assert used(third) == [("GPU-0",)]
    assert third.workers[0].leased_after_seconds < second.workers[0].leased_after_seconds


def test_nobody_overtakes_a_member_that_waits_for_two_gpus() -> None:
    two = gpus(2)
    models: list[dict[str, Any]] = [{"replicas": 1}, {"num_gpus": 2}, {"replicas": 1}]
    lengths = [np.full(rows, 200_000, dtype=np.int64) for rows in (30, 6, 6)]
    known = {f"m{index}": facts(lengths[index], **keys) for index, keys in enumerate(models)}
    first, wide, last = schedule(make_plan(config(*models), known, two), two)
    assert used(first) == [("GPU-0",)]
    assert used(wide) == [("GPU-0", "GPU-1")]
    assert wide.workers[0].leased_after_seconds < last.workers[0].leased_after_seconds


def test_unequal_devices_end_within_a_chunk_of_each_other() -> None:
    two = gpus(2)
    told: list[tuple[str, Command]] = []

    def on_launch(launched: Launched) -> None:
        launched.worker.told = told
        if launched.devices == ("GPU-1",):
            launched.worker.chunk_seconds = 10 * CHUNK_SECONDS

    (state,) = schedule(plan_of([60], [2], two), two, on_launch=on_launch)
    slow, fast = sorted(state.workers, key=lambda record: record.counters.chunks)
    assert slow.devices == ("GPU-1",)
    assert 0 < slow.counters.chunks < fast.counters.chunks
    first_stop = next(place for place, (_, command) in enumerate(told) if isinstance(command, Stop))
    rest = [command for _, command in told[first_stop:] if isinstance(command, Predict)]
    assert not rest, "when one has nothing left to do, the other has one chunk in its hands and gets no more"


def one_member(rows: int = 100) -> Plan:
    """A single chunk of so many rows."""
    return make_plan(config({}), {"m0": facts(np.full(rows, 10, dtype=np.int64))}, [])


def holds(command: Predict, *places: int) -> bool:
    return any(command.start <= place < command.stop for place in places)


def test_a_row_that_kills_its_worker_is_found_and_the_rest_is_done() -> None:
    tries: Counter[tuple[int, int]] = Counter()

    def answer(command: Predict) -> Any:
        tries[command.start, command.stop] += 1
        return None if holds(command, 37) else computed(command)

    (state,) = schedule(one_member(), [], answer, "uniform")
    assert state.finished
    row = int(state.plan.order[37])
    assert list(state.bad_rows) == [(0, row)]
    assert sum(record.counters.rows for record in state.workers) == 99
    assert tries[0, 100] == 3, "once, and two retries"
    assert tries[37, 38] == 2, "no row is blamed for one accident"
    assert sum(tries.values()) < 3 + 2 + 2 * 7


def of_trainings(count: int) -> Plan:
    """A member's trainings, each a job without rows."""
    plan = one_member(count)
    chunks = tuple(Chunk(job, job, job + 1, 1 / count, job) for job in range(count))
    titles = [f"fold {job}" for job in range(count)]
    loaded = model_of_trainings(plan.config.models, plan.config.models[0], titles)
    model = replace(plan.models[0], loaded=loaded, chunks=chunks, order=np.arange(count))
    return replace(plan, models=(model,))


def test_jobs_without_rows_are_tried_again_and_then_fail_their_member_by_title() -> None:
    tries: Counter[int] = Counter()

    def answer(command: Predict) -> Any:
        tries[command.start] += 1
        return None if command.start == 1 and tries[1] < 3 else computed(command)

    (state,) = schedule(of_trainings(3), [], answer)
    assert state.finished
    assert tries == {0: 1, 1: 3, 2: 1}
    assert [fault.remedy for fault in state.faults] == ["again", "again"]
    assert all(fault.message.startswith("fold 1: its worker") for fault in state.faults)

    (state,) = schedule(of_trainings(3), [], lambda command: None)
    assert state.failure is not None
    assert state.failure.message.startswith("fold 0: its worker")
    assert not state.bad_rows, "others can do without a row, but not without a training"

    lasting = Failed("MemberError", "its command ended with exit code 1", "", 0)
    (state,) = schedule(of_trainings(3), [], lambda command: replace(lasting, chunk=command.chunk))
    assert state.failure is not None
    assert state.failure.message == "fold 0: its command ended with exit code 1"
    assert len(state.workers) == 1


def test_an_exception_is_not_tried_again_but_halved_in_the_same_process() -> None:
    seen: list[int] = []

    def answer(command: Predict) -> Any:
        seen.append(command.stop - command.start)
        if holds(command, 5):
            return ChunkFailed(command.chunk, "IndexError", "index 7 is out of bounds", "trace")
        return computed(command)

    (state,) = schedule(one_member(8), [], answer)
    assert seen == [8, 4, 4, 2, 1, 1, 2], "the good half before the bad one's splits, each once"
    assert len(state.workers) == 1
    assert state.failure is not None
    row = int(state.plan.order[5]) + 1
    assert (
        f"1 row of the table could not be computed: row {row}: IndexError: index 7" in state.failure.message
    )
    assert "on_bad_row: uniform" in state.failure.message


def test_a_member_that_can_compute_nothing_fails_soon() -> None:
    calls: list[Predict] = []

    def answer(command: Predict) -> Any:
        calls.append(command)
        return ChunkFailed(command.chunk, "TypeError", "forward() got an unexpected keyword", "trace")

    (state,) = schedule(one_member(4000), [], answer, "uniform")
    assert state.failure is not None
    assert (
        "3 rows could not be computed, and no other row was: too many to continue; TypeError"
        in state.failure.message
    )
    assert [call.stop - call.start for call in calls[1:]] == [calls[0].stop // 2, 1, 1, 1]
    assert [fault.remedy for fault in state.faults][:2] == ["in halves", "some alone"]


def test_rows_are_halved_again_once_one_of_those_tried_alone_is_good() -> None:
    bad = {0, 40}

    def answer(command: Predict) -> Any:
        if any(holds(command, place) for place in bad):
            return ChunkFailed(command.chunk, "KeyError", "'score'", "trace")
        return computed(command)

    (state,) = schedule(one_member(), [], answer, "uniform")
    assert state.finished
    assert set(state.bad_rows_of(0)) == {int(state.plan.order[place]) for place in bad}
    assert [fault.remedy for fault in state.faults].count("some alone") == 1


def test_rows_that_a_worker_names_are_set_aside() -> None:
    def answer(command: Predict) -> Any:
        return replace(computed(command), bad_rows=(3, 8), bad_row_reasons=("too long", "broken JSON"))

    (state,) = schedule(one_member(50), [], answer, "uniform")
    assert state.finished
    assert state.bad_rows_of(0) == {3: "too long", 8: "broken JSON"}
    (dropped,) = schedule(one_member(50), [], answer, "drop_member")
    assert dropped.failure is not None
    assert dropped.failure.is_dropped


def test_what_no_retry_fixes_is_not_retried() -> None:
    full = Failed("WriteError", "cannot write shard (No space left on device)", "", 0)
    (state,) = schedule(one_member(), [], lambda command: replace(full, chunk=command.chunk))
    assert state.failure is not None
    assert "No space left" in state.failure.message
    assert len(state.workers) == 1
    poisoned = iter(
        [Failed("AcceleratorError", "CUDA error: an illegal memory access", "", 0, can_retry=True)]
    )
    (state,) = schedule(one_member(), [], lambda command: next(poisoned, computed(command)))
    assert state.finished
    assert len(state.workers) == 2, "CUDA is poisoned in that process only"


def test_a_worker_that_gives_no_sign_of_life_is_ended_and_replaced() -> None:
    silent = iter([SILENCE])
    (state,) = schedule(one_member(), [], lambda command: next(silent, computed(command)), hang_timeout=0.3)
    assert state.finished
    assert "has not responded for 0.3 s" in state.faults[0].message
    assert len(state.workers) == 2


def test_another_replica_takes_the_chunk_of_one_that_died() -> None:
    two = gpus(2)
    deaths = iter([None])
    (state,) = schedule(plan_of([40], [2], two), two, lambda command: next(deaths, computed(command)))
    assert state.finished
    assert sum(record.counters.chunks for record in state.workers) == len(state.plan.chunks)


def timed_members(limit_chunks: int, chunks: Sequence[int]) -> tuple[list[ModelState], Deadline]:
    """A run that has time for so many chunks in all, by a clock that goes on with the chunks alone."""
    given: list[int] = []

    def clock() -> float:
        return len(given) * CHUNK_SECONDS * 100

    def answer(command: Predict) -> ChunkDone:
        given.append(command.chunk)
        return computed(command, CHUNK_SECONDS * 100)

    known = {
        f"m{index}": facts(np.full(count, 200_000, dtype=np.int64)) for index, count in enumerate(chunks)
    }
    made = make_plan(config(*({} for _ in chunks), time_limit=1.0), known, [])
    nothing = np.zeros((1, len(made.models[0].order)), dtype=np.bool_)
    timed = replace(made, models=tuple(without_done(member, nothing, True) for member in made.models))
    keeper = Deadline(limit_chunks * CHUNK_SECONDS * 100, 1, clock)
    return schedule(timed, [], answer, deadline=keeper), keeper


@pytest.mark.fault(26)
def test_under_a_time_limit_members_cover_the_same_rows_first() -> None:
    (first, second), keeper = timed_members(60, [240, 240])
    assert not first.finished
    assert not second.finished
    assert first.failure is None
    assert min(first.fraction, second.fraction) > 0.1
    assert abs(first.fraction - second.fraction) < 0.35
    done = [
        {chunk.start for chunk in state.plan.chunks} - {chunk.start for chunk in state.chunks.pending}
        for state in (first, second)
    ]
    assert 0 in done[0] & done[1], "the longest rows come first, because they show whether memory suffices"
    fewer, more = sorted(done, key=len)
    assert len(fewer - more) <= 1, "but for a chunk of which only some rows fitted in"
    assert keeper.seconds_left < 60 * CHUNK_SECONDS * 100


def test_time_enough_changes_nothing() -> None:
    states, keeper = timed_members(10_000, [60, 60])
    assert all(state.finished for state in states)
    assert [len(state.workers) for state in states] == [1, 1]
    assert not keeper.is_over


def test_a_gpu_on_which_nothing_starts_does_not_fail_those_that_have_another() -> None:
    two = gpus(2)
    states = schedule(plan_of([40, 40], [2, 1], two), two, broken=["GPU-1"])
    assert all(state.finished for state in states)
    assert all(state.failure is None for state in states)
    assert [record.exit_code for record in states[0].workers].count(1) == 1, "it is not tried again and again"

    assert {fault.remedy for fault in states[0].faults} == {"without it"}


def test_a_worker_that_is_told_to_stop_and_does_not_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ensemble.scheduling.scheduler, "EXIT_SECONDS", 0.3)
    monkeypatch.setattr(PretendedWorker, "send", deaf_to_stop(PretendedWorker.send))
    (state,) = schedule(one_member(), [])
    assert state.finished
    assert state.failure is None


def test_a_last_shard_may_take_longer_to_write_than_a_process_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a file server that stalls: hang_timeout is what counts."""
    monkeypatch.setattr(ensemble.scheduling.scheduler, "EXIT_SECONDS", 0.2)

    def on_launch(launched: Launched) -> None:
        launched.worker.write_seconds = 1.0

    (state,) = schedule(one_member(), [], on_launch=on_launch)
    assert state.finished
    assert not state.faults
    assert len(state.workers) == 1


def deaf_to_stop(
    send: Callable[[PretendedWorker, Command], None],
) -> Callable[[PretendedWorker, Command], None]:
    def send_but_stop(worker: PretendedWorker, command: Command) -> None:
        if not isinstance(command, Stop):
            send(worker, command)

    return send_but_stop


def test_what_workers_said_while_the_parent_was_busy_counts() -> None:
    states = schedule(
        plan_of([40, 40], [1, 1], gpus(2)),
        gpus(2),
        hang_timeout=0.3,
        on_finished=lambda state: time.sleep(0.8),
    )
    assert all(state.finished for state in states)
    assert not any(state.faults for state in states)


def test_predictions_that_cannot_be_gathered_fail_their_member_only() -> None:
    def on_finished(state: ModelState) -> None:
        if state.plan.name == "m0":
            raise MergeError("m0: 3 rows missing in its shards")

    first, second = schedule(plan_of([6, 6], [1, 1], []), [], on_finished=on_finished)
    assert first.failure is not None
    assert "3 rows missing" in first.failure.message
    assert second.finished


def test_an_error_of_the_parents_own_is_not_blamed_on_a_worker() -> None:
    def on_finished(state: ModelState) -> None:
        raise UnicodeEncodeError("ascii", "\u2028", 0, 1, "not of this parent's making")

    with pytest.raises(UnicodeEncodeError):
        schedule(one_member(), [], on_finished=on_finished)
