"""Thresholds between ordered labels: held against a search of a whole grid, and through the commands."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd
import pytest
import yaml
from scipy.stats import norm
from sklearn.metrics import cohen_kappa_score

import ensemble
from ensemble.analysis.fit import folds
from ensemble.analysis.weights import answered, fit_thresholds
from ensemble.data.answers import numbers_of
from tests.labelled import labelled
from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")

LABELS = [str(number) for number in range(1, 7)]
NUMBERS = tuple(map(float, LABELS))
ROWS = 400


def essays(rows: int, labels: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities of scores, [rows, labels], that are drawn to the middle, and the true scores' places."""
    random = np.random.default_rng(seed)
    quality = random.normal(size=rows)
    truth = np.clip(np.round(quality * labels / 4 + (labels - 1) / 2), 0, labels - 1).astype(np.int64)
    centres = (quality + random.normal(size=rows) * 0.4) * labels / 8 + (labels - 1) / 2
    values = norm.pdf(np.arange(labels), centres[:, None], 0.9)
    return values / values.sum(axis=1, keepdims=True), truth


def kappa(truth: np.ndarray, means: np.ndarray, thresholds: tuple[float, ...]) -> float:
    return float(cohen_kappa_score(truth, np.digitize(means, thresholds), weights="quadratic"))


@pytest.mark.long
def test_no_thresholds_of_a_grid_are_better() -> None:
    values, truth = essays(300, 3)
    answer = fit_thresholds(values, labelled(truth), (0.0, 1.0, 2.0), seed=0)
    means = values @ np.arange(3)
    best = max(kappa(truth, means, pair) for pair in combinations(np.linspace(0.1, 1.9, 46).tolist(), 2))
    fitted = kappa(truth, means, answer.thresholds)
    assert fitted >= best - 0.002
    assert fitted > kappa(truth, means, (0.5, 1.5)) + 0.01
    assert answer.thresholds[0] < answer.thresholds[1]


def test_numbers_of_labels() -> None:
    assert numbers_of(["1", "2.5", "4"]) == (1.0, 2.5, 4.0)
    assert numbers_of(["1", "10", "2"]) == (1.0, 10.0, 2.0)
    for labels in (["low", "mid", "high"], ["1", "2", "inf"], ["1", "2", "1.0"]):
        assert numbers_of(labels) == (0.0, 1.0, 2.0)


def test_thresholds_are_those_of_rising_labels_whatever_their_order_is() -> None:
    values, truth = essays(300, 11)
    labels = [str(number) for number in range(11)]
    in_text_order = sorted(labels)
    columns = [labels.index(label) for label in in_text_order]
    places = np.argsort(columns)
    rising = fit_thresholds(values, labelled(truth), numbers_of(labels), seed=0)
    other = fit_thresholds(values[:, columns], labelled(places[truth]), numbers_of(in_text_order), seed=0)
    np.testing.assert_allclose(other.thresholds, rising.thresholds, atol=1e-6)
    answers = answered(rising, values)[:, columns]
    np.testing.assert_array_equal(answered(other, values[:, columns]), answers)


@pytest.fixture
def scored(project: Project) -> Project:
    """Write two graders' CSVs, the true scores, and a config for the table to submit."""
    for name, seed in (("one", 0), ("two", 0)):
        values, truth = essays(ROWS, 6, seed)
        values = values ** (1 + (name == "two"))
        frame = pd.DataFrame(values / values.sum(axis=1, keepdims=True), columns=LABELS)
        frame.insert(0, "id", [f"r{row}" for row in range(ROWS)])
        frame.to_csv(project.folder / f"{name}.csv", index=False)
    truth_table = pd.DataFrame({"id": frame["id"], "label": np.array(LABELS)[truth]})
    truth_table.to_csv(project.folder / "train.csv", index=False)
    truth_table[["id"]].assign(text="x").to_csv(project.folder / "test.csv", index=False)
    project.write_csv(
        "sample.csv", ["id", "score", "best", "three"], [[name, "1", "1", "0"] for name in frame["id"]]
    )
    columns = {
        "score": {"answer": {"expected": [1, 2, 3, 4, 5, 6]}, "format": "{{ answer }} of 6"},
        "best": {"answer": {"top": 2}},
        "three": "3",
    }
    config = {
        "data": {"path": "test.csv"},
        "labels": LABELS,
        "models": [{"name": name, "task_type": "csv", "path": f"{name}.csv"} for name in ("one", "two")],
        "submission": {"sample": "sample.csv", "columns": columns},
        "output_dir": "runs/test",
        "report": False,
    }
    project.write_config(config)
    train = {"path": "train.csv", "label_column": "label"}
    project.write_config({"data": train, "submission": None, "output_dir": "runs/train"}, "train.yaml")
    return project


def test_a_run_writes_the_columns_and_bare_files_print_them(scored: Project) -> None:
    assert scored.ensemble("run", "config.yaml", "train.yaml", "-q").returncode == 0
    done = scored.ensemble("fit", "config.yaml", "train.yaml", "--metric", "quadratic_kappa")
    assert done.returncode == 0, done.stderr
    columns = yaml.safe_load((scored.folder / "weights.yaml").read_text())["submission"]["columns"]
    thresholds = columns["score"]["answer"].pop("thresholds")
    assert len(thresholds) == 5
    assert thresholds == sorted(thresholds)
    before = yaml.safe_load((scored.folder / "config.yaml").read_text())["submission"]["columns"]
    assert columns == before
    assert f"{{answer: {{expected: [1, 2, 3, 4, 5, 6], thresholds: {thresholds}}}}}\n" in done.stdout
    assert "Against rounding" in done.stdout

    ran = scored.ensemble("run", "config.yaml", "weights.yaml")
    assert ran.returncode == 0, ran.stderr
    submission = pd.read_csv(scored.folder / "runs/test/submission.csv").set_index("id")
    merged = pd.read_csv(scored.folder / "runs/test/ensemble.csv").set_index("id")
    numbers = np.digitize(merged[LABELS] @ np.array(NUMBERS), thresholds) + 1
    assert submission["score"].tolist() == [f"{number} of 6" for number in numbers]
    # The labelled table has no submission, whose columns alone change nothing.
    again = scored.ensemble(
        "run", "config.yaml", "train.yaml", "weights.yaml", "--set", "output_dir=runs/again"
    )
    assert again.returncode == 0, again.stderr
    assert not (scored.folder / "runs/again/submission.csv").exists()

    command = (
        "fit",
        "one.csv",
        "two.csv",
        "--labels",
        "train.csv",
        "--metric",
        "quadratic_kappa",
        "-o",
        "w.yaml",
    )
    done = scored.ensemble(*command)
    assert done.returncode == 0, done.stderr
    assert f"{{answer: {{expected: [1, 2, 3, 4, 5, 6], thresholds: {thresholds}}}}}\n" in done.stdout
    assert "submission" not in yaml.safe_load((scored.folder / "w.yaml").read_text())


def test_the_score_is_of_rows_that_the_thresholds_were_not_fitted_to(scored: Project) -> None:
    report = ensemble.fit(
        [scored.folder / "one.csv"], labels=scored.folder / "train.csv", metric="quadratic_kappa", quiet=True
    )
    values = pd.read_csv(scored.folder / "one.csv")[LABELS].to_numpy()
    truth = pd.read_csv(scored.folder / "train.csv")["label"].to_numpy() - 1
    answers, fold_of = np.empty(ROWS, np.int64), folds(truth, 5, 0)
    for fold in range(5):
        answer = fit_thresholds(values[fold_of != fold], labelled(truth[fold_of != fold]), NUMBERS, 0)
        answers[fold_of == fold] = answer.choices(values[fold_of == fold])[:, 0]
    assert report.thresholds is not None
    expected = cohen_kappa_score(truth, answers, weights="quadratic")
    assert report.thresholds.score == pytest.approx(expected, abs=1e-12)
    assert report.thresholds.values == fit_thresholds(values, labelled(truth), NUMBERS, 0).thresholds
    rounded = np.round(values @ np.array(NUMBERS)) - 1
    halfway = cohen_kappa_score(truth, rounded.astype(int), weights="quadratic")
    assert report.thresholds.halfway == pytest.approx(halfway, abs=1e-12)
    assert report.thresholds.over_halfway.value == pytest.approx(expected - halfway, abs=1e-12)
