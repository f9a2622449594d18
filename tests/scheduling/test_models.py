"""Members whose views have models of their own: each worker loads one model, and computes its jobs, with pretended
workers."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ensemble.common.protocol import Failed, Load, Predict
from ensemble.planning.plan import Plan
from ensemble.scheduling.deadline import Deadline
from tests.planning.test_plan import config, facts, gpus, make_plan
from tests.pretended import Launched, computed, schedule

# The third view has the first one's model.
VIEWS = [{"name": "a"}, {"name": "b", "model_name_or_path": "other"}, {"name": "c", "swap": None}]
MODELS = {"m0@a": ["m0@a", "m0@c"], "m0@b": ["m0@b"]}


def plan_of_models(rows: int, devices: int, *others: dict[str, Any]) -> Plan:
    keys: list[dict[str, Any]] = [{"views": VIEWS}, *others]
    lengths = np.full(rows, 200_000, dtype=np.int64)
    names = [*MODELS, *(f"m{number}" for number in range(1, len(keys)))]
    return make_plan(config(*keys), {name: facts(lengths) for name in names}, gpus(devices))


def test_views_of_one_model_are_its_jobs() -> None:
    models = plan_of_models(8, 2).models
    assert {model.name: [job.name for job in model.jobs] for model in models} == MODELS
    assert [job.phase for model in models for job in model.jobs] == [0, 1, 1]
    assert [model.model.model_dump()["model_name_or_path"] for model in models] == ["m", "other"]


@pytest.mark.parametrize("is_timed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_worker_computes_the_jobs_of_its_model_alone(count: int, is_timed: bool) -> None:
    launched = list[Launched]()
    plan = plan_of_models(8, count)
    began = time.monotonic()
    deadline = Deadline(600.0, count, lambda: time.monotonic() - began) if is_timed else None
    states = schedule(plan, gpus(count), deadline=deadline, on_launch=launched.append)
    assert all(state.finished for state in states)
    computed_rows: dict[str, list[tuple[int, int]]] = {name: [] for name in MODELS}
    orders = {model.name: model.order for model in plan.models}
    for worker in launched:
        name = worker.member
        for command in worker.worker.got:
            if isinstance(command, Predict):
                rows = orders[name][command.start : command.stop].tolist()
                computed_rows[name] += [(command.job, row) for row in rows]
    for model in plan.models:
        every = [(job, row) for job in range(len(model.jobs)) for row in range(8)]
        assert sorted(computed_rows[model.name]) == every, "each row of each job by its model, and once"
    loads = [worker.member for worker in launched if Load() in worker.worker.got]
    assert loads[0] == "m0@a"
    if count == 1:
        assert loads == [*MODELS], "each model is loaded once"


def test_models_of_a_member_fail_together() -> None:
    def answer(command: Predict) -> object:
        return Failed("ValueError", "no such layer", "", command.chunk) if command.job else computed(command)

    states = schedule(plan_of_models(4, 1, {}), gpus(1), answer)
    first, second, other = states
    assert first.failure is not None
    assert second.failure == first.failure
    assert first.failure.member == "m0"
    assert other.finished


def test_a_member_is_dropped_for_bad_rows_of_another_model_than_the_one_that_fails() -> None:
    later_jobs: list[Predict] = []

    def answer(command: Predict) -> object:
        if command.job:
            later_jobs.append(command)
        elif later_jobs:  # the second model
            return Failed("ValueError", "no such layer", "", command.chunk)
        elif command.start == 0:
            return replace(computed(command), bad_rows=(0,), bad_row_reasons=("too long",))
        return computed(command)

    states = schedule(plan_of_models(4, 1), gpus(1), answer, "drop_member")
    failures = [state.failure for state in states]
    assert [failure is not None and failure.is_dropped for failure in failures] == [True, True]
    assert failures[0] is not None
    assert "no such layer" in failures[0].message


def test_nobody_stands_by_with_a_model_whose_chunks_others_have_taken() -> None:
    launched, began = list[Launched](), time.monotonic()
    plan = plan_of_models(10, 2, {"replicas": 1})
    models = tuple(replace(model, first_replicas=2 if model.member == "m0" else 1) for model in plan.models)
    deadline = Deadline(600.0, 2, lambda: time.monotonic() - began)
    states = schedule(replace(plan, models=models), gpus(2), deadline=deadline, on_launch=launched.append)
    assert all(state.finished for state in states)
    loaded = [worker.worker.got for worker in launched if Load() in worker.worker.got]
    assert all(any(isinstance(command, Predict) for command in got) for got in loaded)
