"""The plan of a member's trainings."""

from __future__ import annotations

from typing import Any

from ensemble.common.gpus import Device
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


def test_a_training_from_a_base_needs_a_gpu_that_torch_has_code_for() -> None:
    """A command may have a torch of its own."""
    old = Device("GPU-0", "card", (6, 0), 16 << 30, 0, torch_problem="no code; choose another")
    by_command = trained_config(1)
    assert plan_trainings(by_command, by_command.models[0], ["fold 0"], [old]).placement.problems == ()
    table = {"path": "t.csv", "label_column": "y"}
    from_base = config({"train": {"base_model": "models/base"}}, data=table)
    refused = plan_trainings(from_base, from_base.models[0], ["fold 0"], [old])
    assert refused.placement.problems == ("card (GPU-0): no code; choose another",)
