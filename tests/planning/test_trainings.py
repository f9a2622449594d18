"""The plan of a member's trainings."""

from __future__ import annotations

from typing import Any

from ensemble.config import RunConfig
from ensemble.planning.plan import plan_trainings
from tests.planning.test_plan import config


def trained_config(members: int, **keys: Any) -> RunConfig:
    """Of members m0, m1 and so on that a command trains."""
    train = {"command": ["python", "train.py", "{train}", "{out}"]}
    return config(
        *({"train": train} for _ in range(members)), data={"path": "t.csv", "label_column": "y"}, **keys
    )


def test_a_training_that_goes_on_has_the_threads_with_which_it_began() -> None:
    run = trained_config(1, cpu_workers=2)
    whole = plan_trainings(run, run.models[0], ["fold 0", "fold 1", "fold 2"], [])
    rest = plan_trainings(run, run.models[0], ["fold 2"], [])
    assert (whole.replicas, rest.replicas) == (2, 1)
    assert whole.cpu_share == rest.cpu_share == 0.5
