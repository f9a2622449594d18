"""Which trainings a time limit leaves time for, by the speed of those that have ended."""

from __future__ import annotations

import pytest

from ensemble.common.protocol import Predict
from ensemble.planning.plan import plan_trainings
from ensemble.scheduling.deadline import TrainingDeadline
from ensemble.scheduling.state import ModelState
from tests.planning.test_trainings import trained_config
from tests.pretended import computed

FOLDS = ["fold 0", "fold 1", "fold 2"]


def members(count: int) -> list[ModelState]:
    """Members m0, m1 and so on with three trainings each, of which none has begun."""
    run = trained_config(count)
    return [ModelState(plan_trainings(run, model, FOLDS, [])) for model in run.models]


def train_one(state: ModelState, seconds: float) -> None:
    chunk = state.take(state.chunks.pending[0])
    state.complete(chunk, computed(Predict(chunk.index, chunk.start, chunk.stop), seconds))
    state.chunks.drop(chunk)


def deadline(seconds_left: float, workers: int = 1) -> TrainingDeadline:
    return TrainingDeadline(seconds_left, workers, lambda: 0.0)


@pytest.mark.fault(47)
def test_what_cannot_end_in_time_by_its_own_speed_is_not_begun() -> None:
    (state,) = members(1)
    # Nothing is known before the first has ended: it is tried while there is any time.
    assert deadline(0.1).first_fitting(state, [state]) is not None
    assert deadline(0.0).first_fitting(state, [state]) is None
    train_one(state, 40.0)
    train_one(state, 40.0)
    assert deadline(45.0).first_fitting(state, [state]) is None, "50 s, with some time to spare"
    assert not deadline(45.0).may_start(state, [state])
    assert deadline(55.0).first_fitting(state, [state]) == (state.chunks.pending[0], 2)
    assert deadline(55.0).may_start(state, [state])


def test_a_member_whose_trainings_cannot_all_end_leaves_the_time_to_the_next() -> None:
    first, second = states = members(2)
    assert list(deadline(100.0).ranks(states)) == ["m0", "m1"]
    train_one(first, 40.0)
    assert list(deadline(70.0).ranks(states)) == ["m1"], "two more would take 80 s"
    assert list(deadline(70.0, workers=2).ranks(states)) == ["m0", "m1"]
    train_one(second, 10.0)
    assert list(deadline(90.0).ranks(states)) == ["m0"], (
        "80 s of 90, so that 20 s for the second are left out"
    )
    assert list(deadline(110.0).ranks(states)) == ["m0", "m1"]
