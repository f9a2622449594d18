"""Members that read the predictions of members before them: real runs, against what the files of these say."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.project import LABELS, Project

pytestmark = pytest.mark.usefixtures("warm")

_Values = npt.NDArray[np.float64]
PREDICTIONS = "runs/first/predictions"

CODE = """
import json
import sys

import numpy as np

def scaled(values):
    return values / values.sum(axis=1, keepdims=True)

def base(frame, context):
    lengths = frame["text"].str.len().to_numpy(dtype=float)
    return scaled(np.stack([lengths, lengths % 7 + context.kwargs["add"], lengths * 0 + 30], axis=1))

def squares(frame, context):
    print("COLUMNS", json.dumps({name: str(dtype) for name, dtype in frame.dtypes.items()}))
    inputs = [name.partition("/")[0] for name in frame.columns if name.endswith("/tie")]
    values = sum(frame[[f"{name}/{label}" for label in context.labels]].to_numpy() for name in inputs)
    return scaled(np.where(np.isnan(values), 1.0, values) ** 2)

def fails(frame, context):
    raise ValueError("not today")

def first(frame, context):
    lengths = frame["a"].str.len().to_numpy(dtype=float)
    return scaled(np.stack([lengths, lengths * 0 + 9, lengths * 0 + 30], axis=1))
"""

PROGRAM = """
import sys

import pandas as pd

_, rows, out = sys.argv
frame = pd.read_csv(rows, dtype=str)
print("COLUMNS", list(frame.columns))
labels = ["winner_a", "winner_b", "tie"]
values = frame[[f"second/{label}" for label in labels]].astype(float).to_numpy() ** 3
pd.DataFrame(values / values.sum(axis=1, keepdims=True), index=frame["id"], columns=labels).to_csv(out)
"""


@pytest.fixture
def stages(project: Project) -> Project:
    """A project with the functions and the program above."""
    (project.folder / "mine.py").write_text(CODE, encoding="utf-8")
    (project.folder / "stage3.py").write_text(PROGRAM, encoding="utf-8")
    return project


def base(**changes: Any) -> dict[str, Any]:
    usual = {"name": "base", "task_type": "python", "predict": "mine.py:base", "columns": ["text"]}
    return {**usual, "kwargs": {"add": 2.0}, **changes}


def second(*inputs: str, **changes: Any) -> dict[str, Any]:
    usual = {"name": "second", "task_type": "python", "predict": "mine.py:squares"}
    return {**usual, "inputs": [*inputs] or ["base"], **changes}


def third(**changes: Any) -> dict[str, Any]:
    command = [sys.executable, "stage3.py", "{rows}", "{out}"]
    usual = {"name": "third", "task_type": "command", "command": command, "inputs": ["second"]}
    return {**usual, "columns": ["text"], **changes}


def run(project: Project, models: list[dict[str, Any]], *options: str, code: int = 0, **changes: Any) -> str:
    project.write_config(project.config(models=models, defaults=None, **{"submission": None, **changes}))
    done = project.ensemble("run", "config.yaml", *options)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def values(project: Project, member: str, folder: str = PREDICTIONS) -> _Values:
    return project.values(f"{folder}/{member}.csv")


def squared(read: _Values) -> _Values:
    return np.asarray(read**2 / (read**2).sum(axis=1, keepdims=True))


def contents(project: Project, *members: str) -> list[bytes]:
    return [(project.folder / f"{PREDICTIONS}/{name}.csv").read_bytes() for name in members]


def member(project: Project, name: str) -> dict[str, Any]:
    return next(each for each in project.run_json()["members"] if each["name"] == name)


def logged(project: Project, name: str) -> str:
    return (project.folder / f"runs/first/logs/{name}-0.log").read_text(encoding="utf-8")


def test_three_stages_each_read_the_one_before(stages: Project) -> None:
    """The first has no weight, and is computed all the same; the third is a program."""
    models = [base(weight=0), second(columns=["text"]), third()]
    stages.write_config(stages.config(models=models, defaults=None))
    for command in ("validate", "plan"):
        words = " ".join(stages.ensemble(command, "config.yaml").stdout.split())
        assert "reads the predictions of base" in words
        assert "reads the predictions of second" in words
    run(stages, models)
    np.testing.assert_array_equal(values(stages, "second"), squared(values(stages, "base")))
    cubes = values(stages, "second") ** 3
    np.testing.assert_array_equal(values(stages, "third"), cubes / cubes.sum(axis=1, keepdims=True))
    columns = json.loads(logged(stages, "second").partition("COLUMNS ")[2].splitlines()[0])
    of_inputs = {f"base/{label}": "float64" for label in LABELS}
    assert columns == {"text": "object", **of_inputs}
    names = [f"second/{label}" for label in LABELS]
    assert f"COLUMNS {['id', 'text', *names]}" in logged(stages, "third"), "columns narrow the table's alone"
    merged = (values(stages, "second") + values(stages, "third")) / 2
    np.testing.assert_allclose(stages.values("runs/first/ensemble.csv"), merged, rtol=1e-12)
    assert [each["inputs"] for each in stages.run_json()["members"]] == [[], ["base"], ["second"]]
    assert stages.run_json()["comparisons"] == {}, "those are of members that have some of the rows"
    assert "third: reads the predictions of second" in stages.ensemble("status", "runs/first").stdout


def test_what_is_computed_again_when_an_input_changes(stages: Project) -> None:
    models = [base(), base(name="other", kwargs={"add": 5.0}), second(), third()]
    run(stages, models)
    before = contents(stages, "second", "third")
    printed = run(stages, models)
    assert printed.count("done by an earlier run, reused") == 4
    printed = run(stages, [base(), base(name="other", kwargs={"add": 6.0}), second(), third()])
    assert "second: done by an earlier run, reused" in printed, "it does not read the other"
    # Weights and calibration are of the merge.
    printed = run(stages, [base(weight=3, calibration={"temperature": 2}), *models[1:]])
    assert "second: done by an earlier run, reused" in printed
    changed = base(kwargs={"add": 4.0})
    printed = run(stages, [changed, *models[1:]])
    assert "second: predictions of base changed since its predictions were made; it runs again" in printed
    assert "third: predictions of second changed since its predictions were made; it runs again" in printed
    np.testing.assert_array_equal(values(stages, "second"), squared(values(stages, "base")))
    run(stages, [changed, models[1], second("base", "other"), third()])
    np.testing.assert_array_equal(
        values(stages, "second"), squared(values(stages, "base") + values(stages, "other"))
    )
    run(stages, models, "--fresh")
    assert contents(stages, "second", "third") == before
    # Equal inputs of another run give equal rows.
    printed = run(stages, models, "--reuse", "runs/first", output_dir="runs/again")
    assert "third: 300 of 300 rows taken over from runs/first/predictions/third.csv" in printed


def test_an_input_that_fails(stages: Project) -> None:
    models = [base(predict="mine.py:fails"), second(weight=0), third(), base(name="alone")]
    printed = run(stages, models, code=1, retries=0)
    assert "second: failed" not in printed, "it stays to be done"
    assert [each["status"] for each in stages.run_json()["members"]] == [
        *("failed", "unfinished", "unfinished", "complete")
    ]
    printed = run(stages, models, retries=0, on_member_failure="continue")
    assert "member second left out: it reads the predictions of base, which failed" in printed
    assert "member third left out: it reads the predictions of second, which is left out" in printed
    np.testing.assert_array_equal(stages.values("runs/first/ensemble.csv"), values(stages, "alone"))
    assert stages.run_json()["left_out"] == ["base", "second", "third"]
    options: dict[str, Any] = {"retries": 0, "on_bad_row": "drop_member"}
    run(stages, models, output_dir="runs/dropped", **options)
    assert stages.run_json("runs/dropped")["left_out"] == ["base", "second", "third"]
    # When the input is repaired, all are computed.
    run(stages, [base(), *models[1:]], on_member_failure="continue")
    assert stages.run_json()["left_out"] == []
    np.testing.assert_array_equal(values(stages, "second"), squared(values(stages, "base")))


def test_predictions_from_elsewhere_may_lack_rows(stages: Project) -> None:
    """The member sees NaN there; rows that could not be computed have equal probabilities."""
    run(stages, [base()])
    header, rows = stages.read(f"{PREDICTIONS}/base.csv")
    stages.write_csv("given.csv", header, rows[100:])
    given = {"name": "given", "task_type": "csv", "path": "given.csv", "partial": True, "weight": 0}
    run(stages, [given, second("given")])
    read = np.array([row[1:] for row in rows], dtype=np.float64)
    read[:100] = 1.0
    np.testing.assert_array_equal(values(stages, "second"), squared(read))
    failing = CODE.replace(
        "return scaled(np.stack([lengths, lengths % 7",
        "lengths[frame['text'].to_numpy() == context.kwargs['bad']] = np.nan\n    return scaled(np.stack([lengths, "
        "lengths % 7",
    )
    (stages.folder / "mine.py").write_text(failing, encoding="utf-8")
    bad = base(kwargs={"add": 2.0, "bad": stages.texts[0]})
    run(stages, [bad, second()], on_bad_row="uniform", retries=0)
    np.testing.assert_allclose(values(stages, "second")[0], 1 / 3)
    np.testing.assert_array_equal(values(stages, "second"), squared(values(stages, "base")))


def test_views_and_when(project: Project) -> None:
    """An input's values are the mean of its views; a view that swaps columns reads the inputs as they are."""
    (project.folder / "mine.py").write_text(CODE, encoding="utf-8")
    project.write_pairs(60)
    views = [{"name": "as_is"}, {"name": "swapped", "swap": {"columns": ["a", "b"]}, "weight": 2}]
    pair = {"name": "pair", "task_type": "python", "predict": "mine.py:first", "columns": ["a", "b"]}
    reader = second("pair", columns=["a", "b"], views=views)
    limited = second("pair", "second", name="limited", when={"share": 0.5}, weight=0.5)
    models = [pair | {"views": views}, reader, limited]
    run(project, models)
    read = values(project, "pair")
    one, two = values(project, "pair@as_is"), values(project, "pair@swapped")
    np.testing.assert_allclose(read, (one + 2 * two) / 3, rtol=1e-12)
    for view in ("second@as_is", "second@swapped"):
        np.testing.assert_array_equal(values(project, view), squared(read))
    mean = (read + values(project, "second")) / 2
    ordered = np.sort(mean, axis=1)
    rows = np.sort(np.argsort(ordered[:, -1] - ordered[:, -2], kind="stable")[:30])
    expected = squared(read + values(project, "second"))[rows]
    np.testing.assert_array_equal(values(project, "limited"), expected)
    before = contents(project, "pair", "second", "limited")
    printed = run(project, models)
    assert "second: done by an earlier run, reused" in printed
    assert [view["rows"] for view in member(project, "second")["views"].values()] == [60, 60]
    assert contents(project, "pair", "second", "limited") == before
    assert [each["counters"]["rows"] for each in project.run_json()["members"]] == [0, 0, 0]


@pytest.mark.long
def test_a_trial_a_rehearsal_and_a_time_limit(stages: Project) -> None:
    models = [base(), second(), third()]
    run(stages, models, "--limit", "20", "--set", "output_dir=runs/trial")
    np.testing.assert_array_equal(
        values(stages, "second", "runs/trial/predictions"),
        squared(values(stages, "base", "runs/trial/predictions")),
    )
    run(stages, models, time_limit="1h", submission={"sample": "sample.csv"})
    np.testing.assert_array_equal(values(stages, "second"), squared(values(stages, "base")))
    # Members that need no worker are read in a rehearsal, too.
    given = {"name": "base", "task_type": "csv", "path": f"{PREDICTIONS}/base.csv"}
    stages.write_config(stages.config(models=[given, *models[1:]], defaults=None, output_dir="runs/again"))
    done = stages.ensemble("rehearse", "config.yaml", "--sample-rows", "30")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "by a run of 30 of 300 rows" in done.stdout


def test_a_column_of_the_table_has_the_name_of_an_input(stages: Project) -> None:
    _, rows = stages.read("test.csv")
    stages.write_csv("test.csv", ["id", "text", "base/tie"], rows)
    models = [base(), second()]
    printed = run(stages, models, code=2, data={"path": "test.csv"})
    words = "column 'base/tie' has the name of predictions that models[1].inputs (second) reads; rename it"
    assert f"test.csv: {words}" in printed


def test_a_folder_of_an_awkward_name(stages: Project) -> None:
    run(stages, [base(), second()], output_dir="runs/a b/ü")
    folder = "runs/a b/ü/predictions"
    np.testing.assert_array_equal(values(stages, "second", folder), squared(values(stages, "base", folder)))
    assert not (Path(stages.folder) / "runs/a b/ü/work").exists()


def test_predictions_of_a_changed_input_forecast_nothing(stages: Project) -> None:
    """Whoever asks for the rows that ``when`` will select is told that an input's settings have changed."""
    run(stages, [base(weight=0), second()])
    limited = second("second", name="limited", when={"margin_below": 0.1})
    for add, code in ((2.0, 0), (3.0, 2)):
        models = [base(weight=0, kwargs={"add": add}), second(), limited]
        stages.write_config(stages.config(models=models, defaults=None))
        done = stages.ensemble("plan", "config.yaml", "--predictions-from", "runs/first")
        assert done.returncode == code, done.stdout + done.stderr
    assert "the settings of base (kwargs) have changed" in " ".join(done.stderr.split())
