"""The plan of a member's trainings."""

from __future__ import annotations

from ensemble.config.training import TrainConfig
from ensemble.planning.trainings import plan_trainings
from tests.planning.test_plan import config


def test_a_training_that_goes_on_has_the_threads_with_which_it_began() -> None:
    run = config({}, cpu_workers=2)
    train = TrainConfig.model_validate({"command": ["python", "train.py", "{train}", "{out}"]})
    whole = plan_trainings(run, 0, train, ["fold 0", "fold 1", "fold 2"], [])
    rest = plan_trainings(run, 0, train, ["fold 2"], [])
    assert (whole.replicas, rest.replicas) == (2, 1)
    assert whole.cpu_share == rest.cpu_share == 0.5
