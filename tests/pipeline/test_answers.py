"""Answers in the submission: files of four competitions' shapes, held against what pandas makes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from sklearn.metrics import cohen_kappa_score

from tests.project import ROOT, Project

pytestmark = pytest.mark.usefixtures("warm")

ROWS = 60


def write(
    project: Project, labels: list[str], column: str, submitted: dict[str, Any], **changes: Any
) -> pd.DataFrame:
    """Write a table with a truth, a member's CSV with ties, a sample in another order and the config.

    Returns:
        the CSV, by id.
    """
    random = np.random.default_rng(len(labels))
    values = random.dirichlet(np.ones(len(labels)), ROWS).round(1 if len(labels) < 9 else 2)
    values[:, 0] += 1 - values.sum(axis=1)
    frame = pd.DataFrame(np.abs(values.round(2)), columns=labels)
    frame = frame.div(frame.sum(axis=1), axis=0)
    frame.insert(0, "id", [f"{row:03d}" for row in range(ROWS)])
    frame.to_csv(project.folder / "member.csv", index=False)
    table = pd.DataFrame({"id": frame["id"], "label": random.choice(labels, ROWS)})
    table["is_right"] = np.where(np.arange(ROWS) % 3 == 0, "yes", "")
    table.to_csv(project.folder / "test.csv", index=False)
    sample = pd.DataFrame({"id": frame["id"][::-1], column: "?"})
    sample.to_csv(project.folder / "sample.csv", index=False)
    config = {
        "data": {"path": "test.csv", "label_column": "label"},
        "labels": labels,
        "models": [{"name": "member", "task_type": "csv", "path": "member.csv"}],
        "submission": {"sample": "sample.csv", "path": "submission.csv", "columns": {column: submitted}},
        "output_dir": "out",
        "report": False,
    }
    project.write_config({**config, **changes})
    return frame.set_index("id")[labels]


def submission(project: Project, column: str) -> pd.Series[str]:
    """Run the config, and return the column of its submission by id, as text."""
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    frame = pd.read_csv(project.folder / "submission.csv", dtype=str, keep_default_na=False)
    assert frame.columns.tolist() == ["id", column]
    assert frame["id"].tolist() == [f"{row:03d}" for row in reversed(range(ROWS))]
    score = project.run_json("out")["answers"][column]
    shown = ", ".join(f"{metric.replace('_', ' ')} {value:.4f}" for metric, value in score.items())
    assert f"answers in {column}: {shown}\n" in done.stdout
    return frame.set_index("id")[column].sort_index()


def truth(project: Project) -> pd.Series[str]:
    return pd.read_csv(project.folder / "test.csv", dtype=str).set_index("id")["label"]


def test_one_label_by_the_samples_name_as_in_wsdm(project: Project) -> None:
    submitted = {"answer": "label", "names": {"a": "model_a", "b": "model_b"}}
    values = write(project, ["a", "b"], "winner", submitted)
    assert (values["a"] == values["b"]).any(), "a tie goes to the first"
    answers = submission(project, "winner")
    expected = values.idxmax(axis=1)
    pd.testing.assert_series_equal(answers, "model_" + expected, check_names=False)
    accuracy = (expected == truth(project)).mean()
    score = project.run_json("out")["answers"]["winner"]
    assert score["accuracy"] == pytest.approx(accuracy, abs=1e-12)
    assert project.run_json("out")["scores"]["ensemble"]["accuracy"] == pytest.approx(accuracy, abs=1e-12)


def test_three_labels_with_a_part_of_the_row_as_in_map(project: Project) -> None:
    labels = ["Correct:NA", "Neither:NA", "Misconception:Incomplete", "Misconception:Adding_terms"]
    column = "Category:Misconception"
    prefix = "{{ 'True' if is_right == 'yes' else 'False' }}_"
    submitted = {"answer": {"top": 3}, "format": prefix + "{{ answer }}"}
    values = write(project, labels, column, submitted)
    answers = submission(project, column)
    table = pd.read_csv(project.folder / "test.csv", dtype=str, keep_default_na=False).set_index("id")
    ranked = values.apply(lambda row: row.sort_values(ascending=False, kind="stable").index[:3], axis=1)
    expected = {
        row_id: " ".join(
            f"{table['is_right'][row_id] == 'yes'}_{label}"
            for label in ranked[row_id]
            if values.loc[row_id, label] > 0
        )
        for row_id in values.index
    }
    assert answers.to_dict() == expected
    precisions = [
        1 / (1 + list(ranked[row_id]).index(label)) if label in ranked[row_id] else 0.0
        for row_id, label in truth(project).items()
    ]
    score = project.run_json("out")["answers"][column]
    assert score["map@3"] == pytest.approx(np.mean(precisions), abs=1e-12)


def test_25_of_many_labels_as_in_eedi(project: Project) -> None:
    labels = [str(number) for number in range(40)]
    values = write(project, labels, "MisconceptionId", {"answer": {"top": 25, "separator": " "}})
    answers = submission(project, "MisconceptionId")
    order = np.argsort(-values.to_numpy(), axis=1, kind="stable")[:, :25]
    expected = [
        " ".join(labels[number] for number in numbers if values.iloc[row, number] > 0)
        for row, numbers in enumerate(order)
    ]
    assert answers.tolist() == expected
    assert max(len(cell.split()) for cell in answers) == 25


def test_a_number_by_thresholds_as_in_aes_2(project: Project) -> None:
    labels = [str(number) for number in range(1, 7)]
    thresholds = [1.7, 2.5, 3.4, 4.3, 5.2]
    submitted = {"answer": {"expected": [1, 2, 3, 4, 5, 6], "thresholds": thresholds}}
    values = write(project, labels, "score", submitted)
    answers = submission(project, "score")
    means = values.mul([1, 2, 3, 4, 5, 6]).sum(axis=1)
    edges = [-np.inf, *thresholds, np.inf]
    expected = pd.cut(means, edges, labels=labels, right=False).astype(str)
    pd.testing.assert_series_equal(answers, expected, check_names=False)
    score = project.run_json("out")["answers"]["score"]
    assert score["accuracy"] == pytest.approx((expected == truth(project)).mean(), abs=1e-12)
    kappa = cohen_kappa_score(expected.astype(int), truth(project).astype(int), weights="quadratic")
    assert score["quadratic_kappa"] == pytest.approx(kappa, abs=1e-12)


def test_answers_as_parquet_are_typed(project: Project) -> None:
    columns: dict[str, Any] = {"score": {"answer": {"expected": [1, 2, 4]}}, "best": {"answer": {"top": 2}}}
    values = write(project, ["a", "b", "c"], "score", columns["score"])
    sample = pd.read_csv(project.folder / "sample.csv", dtype=str)
    sample.assign(best="").to_csv(project.folder / "sample.csv", index=False)
    config = yaml.safe_load((project.folder / "config.yaml").read_text(encoding="utf-8"))
    config["submission"] |= {"path": "submission.parquet", "columns": columns}
    project.write_config(config)
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    frame = pd.read_parquet(project.folder / "submission.parquet").set_index("id").sort_index()
    assert frame["score"].dtype == np.int64
    assert frame["score"].isin([1, 2, 4]).all()
    first = frame["best"].str.split(" ").str[0]
    pd.testing.assert_series_equal(first, values.idxmax(axis=1), check_names=False, check_dtype=False)


def test_the_example_of_the_docs(project: Project) -> None:
    page = (ROOT / "docs/how-to/answers.md").read_text(encoding="utf-8")
    example = yaml.safe_load(page.split("```yaml\n")[1].split("```")[0])
    columns = ["winner", "best", "score", "b_wins"]
    assert [*example["submission"]["columns"]] == columns
    project.write_csv("test.csv", ["id", "language"], [["x", "en"]])
    project.write_csv("member.csv", ["id", "a", "b", "tie"], [["x", "0.3", "0.5", "0.2"]])
    project.write_csv("sample_submission.csv", ["id", *columns], [["x", *"0000"]])
    member = {"name": "member", "task_type": "csv", "path": "member.csv"}
    project.write_config(example | {"data": {"path": "test.csv"}, "models": [member], "output_dir": "out"})
    done = project.ensemble("run", "config.yaml", "--set", "report=false")
    assert done.returncode == 0, done.stderr
    cells = project.read("out/submission.csv")[1][0][1:]
    assert cells == ["model_b", "en_b en_a", "2", "0.5"]
    for column, cell in zip(columns[:3], cells, strict=False):
        assert f"| `{column}` | `{cell}` |" in page


def test_rows_that_rules_mask_have_fewer_labels(project: Project) -> None:
    rules = [{"when": "{{ is_right == 'yes' }}", "mask": ["b", "c"]}]
    values = write(
        project, ["a", "b", "c", "d"], "best", {"answer": {"top": 3, "separator": ","}}, rules=rules
    )
    answers = submission(project, "best")
    for number, cell in enumerate(answers):
        labels = cell.split(",")
        if number % 3 == 0:
            assert set(labels) <= {"a", "d"}, values.iloc[number]
        else:
            assert len(labels) == min(3, (values.iloc[number] > 0).sum())


def test_a_format_is_tried_on_every_row_before_anything_runs(project: Project) -> None:
    submitted = {"answer": "label", "format": "{{ 1 // (is_right | length - 3) }} {{ answer }}"}
    write(project, ["a", "b"], "winner", submitted)
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    assert "submission.columns.winner (line 15): format: row 1: line 1: ZeroDivisionError" in done.stderr
    submitted["format"] = "{{ is_rigth }} {{ answer }}"
    write(project, ["a", "b"], "winner", submitted)
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    assert "winner (line 15): 'is_rigth' (did you mean 'is_right'?)" in done.stderr
    submitted["format"] = "{{ is_right }}"
    write(project, ["a", "b"], "winner", submitted)
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    assert "winner (line 15): format: lacks {{ answer }}, so that no answer would be written" in done.stderr


def test_expected_numbers_need_probabilities_that_sum_to_1(project: Project) -> None:
    submitted = {"answer": {"expected": [1, 2, 3]}}
    write(project, ["a", "b", "c"], "score", submitted, ensemble={"method": "rank_mean"})
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    assert "submission.columns.score (line 16): expected: needs probabilities that sum to 1" in done.stderr


def test_a_column_that_is_no_label_says_how_to_submit_answers(project: Project) -> None:
    write(project, ["a", "b"], "winner", {"answer": "label"})
    done = project.ensemble("validate", "config.yaml", "--set", "submission.columns=null")
    assert done.returncode == 2
    assert "column 'winner' is not a label; " in done.stderr
