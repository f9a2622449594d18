"""Thresholds of labels fitted for F1: held against a search of all, other rows, and through the commands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import yaml
from sklearn.metrics import f1_score

import ensemble
from ensemble.analysis.fit import FitReport, Method, Options, fit, folds
from ensemble.analysis.predictions import Predictions
from ensemble.analysis.weights import answered, fit_answer
from ensemble.data.answers import Answer
from ensemble.data.table import DistinctCells
from ensemble.merging.metrics import METRICS
from tests.labelled import labelled
from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")

LABELS = ["anger", "fear", "joy", "sadness", "surprise"]
# Of their logits: the first label is true in 3 % of rows, the last in half.
MEANS = np.array([-4.5, -3.5, -2.5, -1.0, 0.0])
HALVES = Answer(texts=(), above=(0.5,) * len(LABELS))
BINARY = Answer(texts=(), above=(np.inf, 0.5))


def emotions(rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return calibrated probabilities of rare and frequent labels, [rows, labels], and which labels are true."""
    random = np.random.default_rng(seed)
    values = 1 / (1 + np.exp(-MEANS - 1.5 * random.normal(size=(rows, len(MEANS)))))
    return values, (random.random(values.shape) < values).astype(np.float64)


def f1(truth: np.ndarray, is_above: np.ndarray, metric: str) -> float:
    average = {"macro_f1": "macro", "micro_f1": "micro"}[metric] if is_above.ndim == 2 else "binary"
    return float(f1_score(truth, is_above, average=average, zero_division=0))


def quick_f1(truth: np.ndarray, is_above: np.ndarray) -> float:
    return float(2 * (truth * is_above).sum() / max(1, truth.sum() + is_above.sum()))


def fitted(values: np.ndarray, truth: np.ndarray, metric: str, start: Answer = HALVES) -> Answer:
    known = labelled(truth, "sigmoid" if truth.ndim == 2 else "softmax")
    return fit_answer(values, known, start, metric, seed=0)


@pytest.mark.parametrize("seed", range(12))
def test_no_threshold_is_better(seed: int) -> None:
    random = np.random.default_rng(seed)
    shape, digits = (random.integers(1, 40), random.integers(2, 4)), random.integers(0, 3)
    values = random.random(shape).round(digits)
    truth = (random.random(shape) < random.random(shape[1]) * random.integers(0, 2, shape[1])).astype(
        np.float64
    )
    start = Answer(texts=(), above=(0.5,) * shape[1])
    # Every way to divide the rows; a probability of 0 is never above.
    candidates = [*np.unique(values[values > 0]).tolist(), 1.0]
    macro, micro = fitted(values, truth, "macro_f1", start), fitted(values, truth, "micro_f1", start)
    for label, threshold in enumerate(macro.above):
        true, chances = truth[:, label], values[:, label]
        best = max(quick_f1(true, chances >= other) for other in candidates)
        assert f1(true, chances >= threshold, "macro_f1") == pytest.approx(best, abs=1e-12)
    best = max(quick_f1(truth, values >= other) for other in candidates)
    assert f1(truth, values >= micro.above[0], "micro_f1") == pytest.approx(best, abs=1e-12)
    assert len(set(micro.above)) == 1
    for metric, answer in (("macro_f1", macro), ("micro_f1", micro)):
        assert all(0 < threshold <= 1 for threshold in answer.above)
        decided = answered(answer, values)
        np.testing.assert_array_equal(decided, values >= answer.above)
        score = METRICS[metric].value(labelled(truth, "sigmoid"), decided)
        assert score == pytest.approx(f1(truth, decided, metric), abs=1e-12)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("metric", ["macro_f1", "micro_f1"])
def test_of_two_exclusive_labels_the_second_has_the_threshold(metric: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    chances = random.random(random.integers(1, 30)).round(1)
    truth = (random.random(len(chances)) < chances * random.integers(0, 3)).astype(np.int64)
    values = np.column_stack([1 - chances, chances])
    answer = fitted(values, truth, metric, BINARY)
    candidates = [*np.unique(chances[chances > 0]).tolist(), *([1.0] if chances.max() < 1 else [])]

    def score(threshold: float) -> float:
        average = metric.removesuffix("_f1")
        return float(f1_score(truth, chances >= threshold, average=average, zero_division=0))

    best = max(map(score, candidates))
    assert answer.above[0] == np.inf
    assert score(answer.above[1]) == pytest.approx(best, abs=1e-12)
    value = METRICS[metric].value(labelled(truth), answered(answer, values))
    assert value == pytest.approx(best, abs=1e-12)


def test_thresholds_stand_in_the_middle_and_near_one_half() -> None:
    truth, values = np.zeros((4, 1)), np.array([[0.1], [0.2], [0.7], [0.9]])
    start = Answer(texts=(), above=(0.5,))
    assert fitted(values, truth, "macro_f1", start).above == (0.5,), "no row has the label"
    truth[2:] = 1
    assert fitted(values, truth, "macro_f1", start).above == (0.5,)
    truth[1] = 1
    assert fitted(values, truth, "macro_f1", start).above == (0.15,)
    close = np.array([[0.3], [0.3 + 1e-9], [0.9], [0.9]])
    (threshold,) = fitted(close, truth, "macro_f1", start).above
    assert 0.3 < threshold <= 0.3 + 1e-9
    # The last bits, which depend on how many rows are merged at a time, decide nothing.
    same = np.array([[0.3], [0.1 + 0.2], [0.9], [0.9]])
    assert fitted(same, truth, "macro_f1", start).above[0] <= 0.3


@pytest.mark.parametrize("metric", ["macro_f1", "micro_f1"])
def test_on_the_other_half_they_are_hardly_ever_worse_than_one_half(metric: str) -> None:
    better = 0
    for seed in range(40):
        values, truth = emotions(2_000, seed)
        answer = fitted(values[:1_000], truth[:1_000], metric)
        scores = [f1(truth[1_000:], values[1_000:] >= edges, metric) for edges in (answer.above, 0.5)]
        better += scores[0] >= scores[1]
    assert better >= 38


def report_of(
    values: np.ndarray, truth: np.ndarray, metric: str, *others: np.ndarray, method: Method | None = None
) -> FitReport:
    ids = pa.chunked_array([[str(row) for row in range(len(values))]])
    members = {f"member {number}": np.asfortranarray(each) for number, each in enumerate((values, *others))}
    predictions = Predictions(ids, tuple(LABELS), members, dict.fromkeys(members, "sigmoid"), truth)
    return fit(predictions, Options(metric=metric, method=method))


def decided_by_other_folds(values: np.ndarray, truth: np.ndarray, metric: str) -> np.ndarray:
    """Return which labels are above thresholds that are fitted to the other folds, [rows, labels]."""
    fold_of, decided = folds(truth, 5, 0), np.empty(values.shape)
    for fold in range(5):
        answer = fitted(values[fold_of != fold], truth[fold_of != fold], metric)
        assert answer.above != HALVES.above
        decided[fold_of == fold] = values[fold_of == fold] >= answer.above
    return decided


def test_a_common_threshold_is_common_in_all_groups() -> None:
    values, truth = emotions(400, 3)
    parity = np.arange(len(values)) % 2
    ids = pa.chunked_array([[str(row) for row in range(len(values))]])
    members = {"member": np.asfortranarray(values)}
    groups = {"parity": DistinctCells("parity", parity.astype(np.int64), ("even", "odd"))}
    predictions = Predictions(ids, tuple(LABELS), members, {"member": "sigmoid"}, truth, groups=groups)
    thresholds = fit(predictions, Options(metric="micro_f1", group="parity")).thresholds
    assert thresholds is not None
    assert thresholds.values == fitted(values, truth, "micro_f1").above
    assert len({*thresholds.values}) == 1


@pytest.mark.long
@pytest.mark.parametrize("metric", ["macro_f1", "micro_f1"])
def test_the_interval_of_the_gain_holds_the_true_gain(metric: str) -> None:
    values, truth = emotions(100_000, 999)
    held = 0
    for seed in range(40):
        thresholds = report_of(*emotions(1_000, seed), metric).thresholds
        assert thresholds is not None
        gain = f1(truth, values >= thresholds.values, metric) - f1(truth, values >= 0.5, metric)
        held += thresholds.over_halfway.low <= gain <= thresholds.over_halfway.high
    assert held >= 36


def test_the_score_is_of_rows_that_the_thresholds_were_not_fitted_to() -> None:
    values, truth = emotions(400, 1)
    report = report_of(values, truth, "macro_f1")
    decided = decided_by_other_folds(values, truth, "macro_f1")
    assert report.thresholds is not None
    assert report.thresholds.labels == tuple(LABELS)
    assert report.thresholds.values == fitted(values, truth, "macro_f1").above
    assert report.thresholds.score == pytest.approx(f1(truth, decided, "macro_f1"), abs=1e-12)
    assert report.thresholds.halfway == pytest.approx(f1(truth, values >= 0.5, "macro_f1"), abs=1e-12)
    gain = report.thresholds.score - report.thresholds.halfway
    assert report.thresholds.over_halfway.value == pytest.approx(gain, abs=1e-12)


@pytest.mark.parametrize("metric", ["macro_f1", "micro_f1"])
def test_weights_and_all_that_they_are_compared_with_have_thresholds_of_their_own(metric: str) -> None:
    """At 0.5 a mean of unsure members has few labels, and its best member, which is surer, would win."""
    truth = emotions(900, 2)[1]
    members = [
        1 / (1 + np.exp(-MEANS / 2 - scale * truth - np.random.default_rng(seed).normal(size=truth.shape)))
        for seed, scale in enumerate((2.5, 2.3))
    ]
    report = report_of(members[0], truth, metric, members[1])
    expected = [
        f1(truth, decided_by_other_folds(values, truth, metric), metric)
        for values in (np.mean(members, axis=0), *members)
    ]
    reported = [report.equal, *(member.alone for member in report.members)]
    assert reported == pytest.approx(expected, abs=1e-12)
    assert report.thresholds is not None
    assert report.score == report.thresholds.score
    assert report.score > report.thresholds.halfway
    assert report.over_best.low > 0
    candidates = report_of(members[0], truth, metric, members[1], method="auto").candidates
    equal = [way for way in candidates if way.options.title == "equal (mean)"]
    assert [way.score for way in equal] == pytest.approx(expected[:1], abs=1e-12)


ROWS = 300


def write(project: Project, columns: dict[str, Any]) -> None:
    """Write two members' CSVs, a table with the true labels, and configs with and without a submission."""
    truth = emotions(ROWS, 3)[1]
    for name, seed in (("one", 0), ("two", 1)):
        noise = np.random.default_rng(seed).normal(size=truth.shape)
        frame = pd.DataFrame(1 / (1 + np.exp(-MEANS / 2 - 1.5 * truth - noise)), columns=LABELS)
        frame.insert(0, "id", [f"r{row}" for row in range(ROWS)])
        frame.to_csv(project.folder / f"{name}.csv", index=False)
    frame[["id"]].join(pd.DataFrame(truth.astype(int), columns=LABELS)).to_csv(
        project.folder / "train.csv", index=False
    )
    frame[["id"]].assign(**dict.fromkeys(columns, "?")).to_csv(project.folder / "sample.csv", index=False)
    config = {
        "data": {"path": "train.csv"},
        "labels": LABELS,
        "models": [
            {"name": name, "task_type": "csv", "path": f"{name}.csv", "activation": "sigmoid"}
            for name in ("one", "two")
        ],
        "submission": {"sample": "sample.csv", "columns": columns},
        "output_dir": "runs/test",
        "report": False,
    }
    project.write_config(config)
    data = {"path": "train.csv", "label_columns": LABELS}
    project.write_config({"data": data, "submission": None, "output_dir": "runs/train"}, "train.yaml")


def test_a_run_writes_the_columns_and_bare_files_print_the_thresholds(project: Project) -> None:
    columns = {
        "labels": {"answer": {"above": 0.5, "separator": ","}, "names": {"joy": "happy"}},
        "joy": {"answer": {"above": 0.5}},
        "sad": {"answer": {"above": {"sadness": 0.9}, "none": "no"}},
        "both": {"answer": {"above": {"fear": 0.5, "anger": 0.1}}},
        "surprise": "surprise",
        "best": {"answer": {"top": 2}},
    }
    write(project, columns)
    assert project.ensemble("run", "config.yaml", "train.yaml", "-q").returncode == 0
    done = project.ensemble("fit", "config.yaml", "train.yaml", "--metric", "macro_f1")
    assert done.returncode == 0, done.stderr
    written = yaml.safe_load((project.folder / "weights.yaml").read_text())["submission"]["columns"]
    edges = written["labels"]["answer"]["above"]
    assert [*edges] == LABELS
    above = {
        "labels": edges,
        "joy": {"joy": edges["joy"]},
        "sad": {"sadness": edges["sadness"]},
        "both": {label: edges[label] for label in ("fear", "anger")},
    }
    for name, column in columns.items():
        if name in above and isinstance(column, dict):
            column["answer"] |= {"above": above[name]}
    assert written == columns
    assert f"{{answer: {{above: {edges}}}}}\n" in done.stdout
    assert "Against thresholds of 0.5 (0." in done.stdout

    ran = project.ensemble("run", "config.yaml", "weights.yaml")
    assert ran.returncode == 0, ran.stderr
    submission = pd.read_csv(project.folder / "runs/test/submission.csv", keep_default_na=False)
    merged = pd.read_csv(project.folder / "runs/test/ensemble.csv")
    is_above = merged[LABELS] >= pd.Series(edges)
    words = is_above.rename(columns={"joy": "happy"}).apply(lambda row: ",".join(row.index[row]), axis=1)
    assert submission["labels"].tolist() == words.tolist()
    assert submission["joy"].tolist() == is_above["joy"].astype(int).tolist()
    assert submission["sad"].tolist() == is_above["sadness"].map({True: "1", False: "no"}).tolist()

    # Again, with the thresholds as they are now: the file that has them is written anew.
    overlays = ("train.yaml", "weights.yaml")
    done = project.ensemble("fit", "config.yaml", *overlays, "--metric", "macro_f1", "--force")
    assert done.returncode == 0, done.stderr
    again = yaml.safe_load((project.folder / "weights.yaml").read_text())["submission"]["columns"]
    assert again == written

    command = ("--labels", "train.csv", "--activation", "sigmoid", "--metric", "micro_f1", "-o", "w.yaml")
    done = project.ensemble("fit", "one.csv", *command)
    assert done.returncode == 0, done.stderr
    assert "Thresholds, as a column of the submission has them: {answer: {above: {'anger': 0." in done.stdout
    assert "submission" not in yaml.safe_load((project.folder / "w.yaml").read_text())


def test_more_than_two_exclusive_labels_have_no_thresholds(project: Project) -> None:
    random = np.random.default_rng(0)
    values = random.dirichlet(np.ones(3), 100)
    frame = pd.DataFrame(values, columns=["a", "b", "c"])
    frame.insert(0, "id", range(100))
    for name in ("one", "two"):
        frame.to_csv(project.folder / f"{name}.csv", index=False)
    truth = pd.DataFrame({"id": range(100), "label": random.choice(["a", "b", "c"], 100)})
    truth.to_csv(project.folder / "train.csv", index=False)
    sources = [project.folder / f"{name}.csv" for name in ("one", "two")]
    labels = project.folder / "train.csv"
    report = ensemble.fit(sources, labels=labels, metric="macro_f1", quiet=True)
    assert report.thresholds is None
    with pytest.raises(ensemble.EnsembleError, match="nothing to fit"):
        ensemble.fit(sources[:1], labels=labels, metric="macro_f1", quiet=True)
    frame[["id", "a"]].assign(b=1 - frame["a"]).to_csv(sources[0], index=False)
    truth.assign(label=truth["label"].replace("c", "b")).to_csv(labels, index=False)
    report = ensemble.fit(sources[:1], labels=labels, metric="macro_f1", quiet=True)
    assert report.thresholds is not None
    assert report.thresholds.labels == ("b",)
