"""Members that read others' predictions, in runs that are killed: the bytes in the end are those of a quiet run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.faults.chunky import chunky_config, kill_after_shards, results
from tests.faults.forked.runs import ForkedRuns
from tests.faults.steps import Judge, Step, Verdict
from tests.project import Project
from tests.sampling import one_in

NAMES = ("ensemble.csv", "predictions/first.csv", "predictions/second.csv", "predictions/third.csv")

CODE = """
import numpy as np

def scaled(values):
    return values / values.sum(axis=1, keepdims=True)

def first(frame, context):
    letters = [[ord(letter) for letter in text[:40]] for text in frame["text"]]
    return scaled(np.array([[sum(row) % 7 + 1, sum(row) % 11 + 1, row[-1] % 5 + 1] for row in letters]) / 3)

def second(frame, context):
    return scaled(frame.filter(like="/").to_numpy()[:, -3:] ** 1.5)
"""


@pytest.fixture
def stages(chunky: Project) -> Project:
    """Three members of four chunks each; the second reads the first, and the third reads the second."""
    (chunky.folder / "mine.py").write_text(CODE, encoding="utf-8")
    usual = {"task_type": "python", "columns": ["text"]}
    models: list[dict[str, Any]] = [
        {**usual, "name": "first", "predict": "mine.py:first", "weight": 0},
        {**usual, "name": "second", "predict": "mine.py:second", "inputs": ["first"]},
        {**usual, "name": "third", "predict": "mine.py:second", "inputs": ["second"]},
    ]
    chunky.write_config(chunky_config(chunky, models=models, defaults=None))
    return chunky


def kill_at(ending: str, is_sync: bool = False) -> Judge:
    """Kill the run at its first step with such a path."""

    def judge(step: Step) -> Verdict:
        is_it = any(path.endswith(ending) for path in step.paths) and step.is_sync == is_sync
        return Verdict.KILL if is_it else Verdict.GO

    return judge


MOMENTS = {
    "the first has half of its rows": lambda: kill_after_shards(2, "first"),
    "the first has all of its rows": lambda: kill_after_shards(4, "first"),
    "the first has predictions": lambda: kill_at("predictions/first.csv"),
    "what the second reads gets its name": lambda: kill_at("inputs.arrow"),
    "the second has some rows": lambda: kill_after_shards(1, "second"),
    "the second has all of its rows": lambda: kill_after_shards(4, "second"),
    "the third has some rows": lambda: kill_after_shards(3, "third"),
    "all is merged": lambda: kill_at("ensemble.csv"),
}


@pytest.mark.parametrize("moment", one_in(4, [*MOMENTS]))
def test_killed_and_resumed_it_ends_with_the_same_bytes(
    stages: Project, forked: ForkedRuns, moment: str
) -> None:
    assert forked.run(stages.folder) == 0, forked.printed
    undisturbed = results(stages, names=NAMES)
    for name, read in (("second", "first"), ("third", "second")):
        powers = stages.values(f"runs/first/predictions/{read}.csv") ** 1.5
        expected = powers / powers.sum(axis=1, keepdims=True)
        np.testing.assert_array_equal(stages.values(f"runs/first/predictions/{name}.csv"), expected)
    assert forked.run(stages.folder, "--fresh", judge=MOMENTS[moment]()) == -9
    assert forked.run(stages.folder) == 0, forked.printed
    assert results(stages, names=NAMES) == undisturbed
    kept = sum(member["reused_rows"] for member in stages.run_json()["members"])
    assert kept > 0, "what was done is not computed again"


def test_an_input_whose_predictions_are_gone_is_computed_again(stages: Project, forked: ForkedRuns) -> None:
    """The members that read it keep theirs, as its settings are the same."""
    assert forked.run(stages.folder) == 0, forked.printed
    undisturbed = results(stages, names=NAMES)
    (stages.folder / "runs/first/predictions/first.csv").unlink()
    assert forked.run(stages.folder) == 0, forked.printed
    assert results(stages, names=NAMES) == undisturbed
    rows = {member["name"]: member["counters"]["rows"] for member in stages.run_json()["members"]}
    assert rows == {"first": 16, "second": 0, "third": 0}
