"""A cluster within one process: its runs are whole, and no step of the scheduler grows faster than the chunks."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from bench import scale
from ensemble.common.protocol import Progress, Ready
from ensemble.planning.chunks import CHUNK_MAX_ROWS
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import Scheduler
from ensemble.scheduling.state import ModelState
from tests.planning.test_plan import config, facts, gpus, make_plan
from tests.pretended import PretendedLauncher, computed, make_scheduler
from tests.scheduling.test_first_views import VIEWS


def test_a_run_over_512_gpus_is_whole(tmp_path: Path) -> None:
    rows = 50_000
    outcome = scale.run(tmp_path, rows, nodes=64, gpus=8, members=2, labels=2, chunk_seconds=0.1)
    # Row by row it has compared what was merged with what members gave.
    assert outcome["chunks"] >= 2 * rows / CHUNK_MAX_ROWS
    assert outcome["chunks"] == outcome["calls"]["Predict"]
    assert outcome["phases"]["predictions of a member (beside scheduling)"]["calls"] == 2
    names = [line["what"] for line in scale.table_of(outcome)]
    assert {"read and check the table", "scheduling", "merge", "all"} <= {*names}


@contextmanager
def counting_calls() -> Iterator[Counter[str]]:
    """How many functions are called meanwhile."""
    calls = Counter[str]()

    def count_call(frame: FrameType, event: str, argument: object) -> None:
        calls["all"] += event == "call"

    sys.setprofile(count_call)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def scheduler_of(rows: int, workers: int, views: int, is_timed: bool) -> Scheduler:
    """Of a member that has five rows in a chunk, and a GPU for each worker; none runs yet."""
    devices, clock = gpus(workers), count()
    keys = {"prompt_template": "{{ text }}", "text_column": None, "views": VIEWS[:views]} if views > 1 else {}
    known = {"m0": facts(np.full(rows, 200_000, dtype=np.int64), **keys)}
    [member] = make_plan(config(keys), known, devices).models
    deadline = Deadline(1e9, workers, lambda: float(next(clock))) if is_timed else None
    state, rules = ModelState(replace(member, first_replicas=workers)), Rules(2, "fail", 60.0)
    return make_scheduler([state], devices, PretendedLauncher(), rules, deadline)


def calls_of_starts(workers: int, is_timed: bool) -> int:
    """How many functions are called until so many workers have started, and have ended."""
    scheduler = scheduler_of(10 * workers, workers, 1, is_timed)
    with counting_calls() as calls:
        scheduler._start_workers()
        assert len(scheduler._workers) == workers
        for worker in [*scheduler._workers]:
            worker.note(Ready(), 0.0)
            worker.is_stopping = True
            scheduler._end(worker)
        scheduler.pool.poll()
    assert not scheduler.pool.is_releasing()
    return calls["all"]


def calls_of_dispatch(rows: int, workers: int, views: int, is_timed: bool) -> int:
    """How many functions are called until so many workers have had all chunks of a member."""
    scheduler = scheduler_of(rows, workers, views, is_timed)
    scheduler._start_workers()
    dispatcher, running, [state] = scheduler._dispatcher, scheduler._workers, scheduler.models
    done = 0
    with counting_calls() as calls:
        while state.chunks.pending:
            for worker in running:
                if (chunk := dispatcher.next_chunk(worker)) is None:
                    break
                state.advance(Progress(chunk.index, 1, 1, 1))
                worker.drop(chunk)
                state.complete(chunk, computed(state.command_of(chunk)))
                done += 1
            dispatcher.next_lease()
    assert done == len(state.plan.chunks)
    return calls["all"]


@pytest.mark.long
@pytest.mark.parametrize(("views", "is_timed"), [(1, False), (1, True), (3, True)])
def test_the_work_of_dispatch_grows_with_the_chunks_and_not_with_the_workers(
    views: int, is_timed: bool
) -> None:
    few, many = (calls_of_dispatch(rows, 16, views, is_timed) for rows in (1000, 4000))
    assert many < 4.5 * few
    assert calls_of_dispatch(4000, 64, views, is_timed) < 1.2 * many


@pytest.mark.parametrize("is_timed", [False, True])
def test_the_work_of_starts_and_ends_grows_with_the_workers(is_timed: bool) -> None:
    assert calls_of_starts(256, is_timed) < 4.2 * calls_of_starts(64, is_timed)
