"""Labels above thresholds in the submission, held against what pandas makes of the merged probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, f1_score

from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")

ROWS, LABELS = 80, ["anger", "fear", "joy"]


def write(project: Project, columns: dict[str, Any], cells: str = "?", **changes: Any) -> pd.DataFrame:
    """Write labelled rows, a member's CSV with ties, a sample whose cells are all the same, and the config.

    Returns:
        the CSV, by id.
    """
    random = np.random.default_rng(5)
    frame = pd.DataFrame(random.random((ROWS, len(LABELS))).round(1), columns=LABELS)
    frame.insert(0, "id", [f"{row:03d}" for row in range(ROWS)])
    frame.to_csv(project.folder / "member.csv", index=False)
    table = frame[["id"]].assign(language=np.where(np.arange(ROWS) % 2, "en", "de"))
    table[LABELS] = (random.random((ROWS, len(LABELS))) < frame[LABELS]).astype(int)
    table.to_csv(project.folder / "test.csv", index=False)
    pd.DataFrame({"id": frame["id"]} | dict.fromkeys(columns, cells)).to_csv(
        project.folder / "sample.csv", index=False
    )
    config = {
        "data": {"path": "test.csv", "label_columns": LABELS},
        "labels": LABELS,
        "models": [{"name": "member", "task_type": "csv", "path": "member.csv", "activation": "sigmoid"}],
        "submission": {"sample": "sample.csv", "columns": columns},
        "output_dir": "out",
        "report": False,
    }
    project.write_config({**config, **changes})
    return frame.set_index("id")


def submission(project: Project) -> pd.DataFrame:
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    for column, scores in project.run_json("out")["answers"].items():
        shown = ", ".join(f"{metric.replace('_', ' ')} {value:.4f}" for metric, value in scores.items())
        assert f"answers in {column}: {shown}\n" in done.stdout
    return pd.read_csv(project.folder / "out/submission.csv", dtype=str, keep_default_na=False).set_index(
        "id"
    )


def truth(project: Project) -> pd.DataFrame:
    return pd.read_csv(project.folder / "test.csv", dtype={"id": str}).set_index("id")[LABELS]


def joined(is_above: pd.DataFrame, separator: str = " ", none: str = "") -> pd.Series[str]:
    cells = is_above.apply(lambda row: separator.join(name for name in is_above.columns if row[name]), axis=1)
    return cells.where(is_above.any(axis=1), none)


def test_labels_joined(project: Project) -> None:
    values = write(project, {"labels": {"answer": {"above": 0.6}}, "anger": "anger"})
    answers = submission(project)
    is_above = values[LABELS] >= 0.6
    assert (values[LABELS] == 0.6).any(axis=None), "a label at the threshold is above"
    assert not is_above.any(axis=1).all()
    pd.testing.assert_series_equal(answers["labels"], joined(is_above), check_names=False)
    scores, true = project.run_json("out")["answers"]["labels"], truth(project)
    assert scores["accuracy"] == pytest.approx(accuracy_score(true, is_above), abs=1e-12)
    for average in ("macro", "micro"):
        assert scores[f"{average}_f1"] == pytest.approx(f1_score(true, is_above, average=average), abs=1e-12)


def test_labels_joined_by_a_threshold_each_in_other_words(project: Project) -> None:
    answer = {"above": {"joy": 0.7, "anger": 0.4}, "separator": ", ", "none": "neutral"}
    column = {"answer": answer, "names": {"joy": "happy"}, "format": "{{ language }}:{{ answer }}"}
    values = write(project, {"labels": column})
    answers = submission(project)
    language = pd.read_csv(project.folder / "test.csv", dtype=str).set_index("id")["language"]
    for name, row in values.iterrows():
        words = [
            word
            for word, label, edge in (("anger", "anger", 0.4), ("happy", "joy", 0.7))
            if row[label] >= edge
        ]
        expected = ", ".join(f"{language[name]}:{word}" for word in words or ["neutral"])
        assert answers["labels"][name] == expected
    is_above = pd.DataFrame({"anger": values["anger"] >= 0.4, "joy": values["joy"] >= 0.7})
    score = project.run_json("out")["answers"]["labels"]
    assert score["accuracy"] == accuracy_score(truth(project)[["anger", "joy"]], is_above)


def test_at_least_one_label_of_those_that_are_possible(project: Project) -> None:
    answer = {"above": 0.9, "at_least": 2, "none": "-"}
    rules = [{"when": "{{ language == 'de' }}", "mask": ["joy", "fear"]}]
    values = write(project, {"labels": {"answer": answer}}, rules=rules)[LABELS]
    answers = submission(project)["labels"]
    values.loc[answers.index[::2], ["joy", "fear"]] = 0.0
    for name, row in values.iterrows():
        likeliest = row[row > 0].sort_values(ascending=False, kind="stable").index[:2]
        chosen = {*likeliest, *row.index[row >= 0.9]}
        assert answers[name] == (" ".join(label for label in LABELS if label in chosen) or "-")


def test_a_column_of_0_and_1_for_each_label(project: Project) -> None:
    columns = {"joy": {"answer": {"above": 0.5}}, "angry": {"answer": {"above": {"anger": 0.31}}}}
    columns["fear"] = {"answer": {"above": {"fear": 0.8}, "none": "no"}, "names": {"fear": "yes"}}
    values = write(project, columns, cells="0")
    answers = submission(project)
    assert [*answers] == ["joy", "angry", "fear"]
    is_above = pd.DataFrame(
        {"anger": values["anger"] >= 0.31, "fear": values["fear"] >= 0.8, "joy": values["joy"] >= 0.5}
    )
    assert (answers["joy"] == is_above["joy"].map({True: "1", False: "0"})).all()
    assert (answers["angry"] == is_above["anger"].map({True: "1", False: "0"})).all()
    assert (answers["fear"] == is_above["fear"].map({True: "yes", False: "no"})).all()
    scores = project.run_json("out")["answers"]
    assert [*scores] == ["joy, angry, fear"], "they are scored together"
    macro = f1_score(truth(project), is_above, average="macro")
    assert scores["joy, angry, fear"]["macro_f1"] == pytest.approx(macro, abs=1e-12)


def test_numbers_in_parquet_and_a_format_around_both(project: Project) -> None:
    columns = {
        "joy": {"answer": {"above": 0.5}},
        "f": {"answer": {"above": {"fear": 0.5}}, "format": "f{{ answer }}"},
    }
    values = write(project, columns)
    done = project.ensemble("run", "config.yaml", "--set", "submission.path=submission.parquet")
    assert done.returncode == 0, done.stderr
    frame = pd.read_parquet(project.folder / "submission.parquet").set_index("id")
    assert frame["joy"].dtype == np.int64
    assert (frame["joy"] == (values["joy"] >= 0.5)).all()
    assert (frame["f"] == (values["fear"] >= 0.5).map({True: "f1", False: "f0"})).all()


def test_one_of_two_exclusive_labels(project: Project) -> None:
    values = write(project, {"label": {"answer": {"above": {"yes": 0.3}}}})
    member = pd.DataFrame({"id": values.index, "no": 1 - values["joy"], "yes": values["joy"]})
    member.to_csv(project.folder / "member.csv", index=False)
    overrides = ("labels=[no, yes]", "models.0.activation=softmax", "data.label_columns=null")
    done = project.ensemble("run", "config.yaml", *(part for text in overrides for part in ("--set", text)))
    assert done.returncode == 0, done.stderr
    answers = pd.read_csv(project.folder / "out/submission.csv")["label"]
    assert answers.tolist() == (values["joy"] >= 0.3).astype(int).tolist()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"activation": "none"},
            "submission.columns.labels (line 16): above: is for probabilities, and the models give raw values "
            "(regression); use expected, with thresholds between numbers",
        ),
        (
            {"cells": ["0", "1"] * (ROWS // 2)},
            "sample.csv: column 'labels' holds 0 and 1, and is none of the labels; name its label in "
            "submission.columns: {answer: {above: {'joy': 0.5}}}",
        ),
        (
            {"columns": {}},
            "column 'labels' is not a label; map it to one of 'anger', 'fear', 'joy', or for the label itself to "
            "{answer: label}, for 0 and 1 to {answer: {above: {'joy': 0.5}}}",
        ),
    ],
)
def test_mistakes_are_said_before_anything_runs(
    project: Project, changes: dict[str, Any], sentence: str
) -> None:
    columns = {"labels": {"answer": {"above": 0.5}}}
    write(project, columns)
    if "cells" in changes:
        sample = pd.read_csv(project.folder / "sample.csv", dtype=str)
        sample.assign(labels=changes["cells"]).to_csv(project.folder / "sample.csv", index=False)
    overrides = [f"models.0.activation={changes.get('activation', 'sigmoid')}"]
    overrides += ["submission.columns=null"] if "columns" in changes else []
    done = project.ensemble(
        "validate", "config.yaml", *(part for text in overrides for part in ("--set", text))
    )
    assert done.returncode == 2
    assert sentence in done.stderr
