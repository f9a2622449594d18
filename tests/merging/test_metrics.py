"""Metrics against scikit-learn, or their definition where it has none; intervals against SciPy's bootstrap."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.stats
from sklearn import metrics as sk

from ensemble.common.errors import DataError
from ensemble.common.protocol import Activation
from ensemble.data.answers import numbers_of
from ensemble.merging import scoring
from ensemble.merging.metrics import (
    METRICS,
    UndefinedMetric,
    find_metric,
    krippendorff_alpha,
    order_remarks,
)
from ensemble.merging.scoring import Bootstrap
from tests.labelled import labelled

_Array = npt.NDArray[Any]
AVERAGES = ("macro", "micro", "weighted")


def softmax_rows(rows: int, labels: int, tenths: bool = False) -> tuple[_Array, _Array]:
    """Truth and better-than-chance probabilities; of tenths many are equal, and stand on the edges of bins."""
    generator = np.random.default_rng(0)
    truth = generator.integers(0, labels, rows)
    scores = generator.normal(size=(rows, labels))
    scores[np.arange(rows), truth] += 0.8
    values = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    if tenths:
        values = generator.multinomial(10, values) / 10
    return truth, values


def sigmoid_rows(rows: int, labels: int) -> tuple[_Array, _Array]:
    generator = np.random.default_rng(5)
    truth = (generator.random((rows, labels)) < 0.3).astype(np.float64)
    scores = generator.normal(size=(rows, labels)) + 1.2 * truth - 0.5
    return truth, 1 / (1 + np.exp(-scores))


def average_precision(truth: set[int], values: Sequence[float], k: int) -> float:
    """Kaggle's apk, as ml_metrics has it, written from its definition."""
    ranked = sorted(range(len(values)), key=lambda label: (-values[label], label))[:k]
    score, hits = 0.0, 0
    for place, label in enumerate(ranked, 1):
        if label in truth:
            hits += 1
            score += hits / place
    return score / min(len(truth), k) if truth else 0.0


def calibration_error(is_right: _Array, chances: _Array) -> float:
    """Guo et al. 2017, equations 2 to 5 of the paper, by loops."""
    error = 0.0
    for place in range(15):
        within = [i for i, chance in enumerate(chances) if place / 15 < chance <= (place + 1) / 15]
        if within:
            accuracy, confidence = np.mean(is_right[within]), np.mean(chances[within])
            error += len(within) / len(chances) * float(abs(accuracy - confidence))
    return error


def of_exclusive(name: str, truth: _Array, values: _Array) -> float:
    """What others say of exclusive labels."""
    labels, predicted = range(values.shape[1]), values.argmax(axis=1)
    one_hot = np.eye(len(labels))[truth]
    if name == "auc":
        if len(labels) == 2:
            return float(sk.roc_auc_score(truth, values[:, 1]))
        each = [sk.roc_auc_score(truth == label, values[:, label]) for label in labels]
        return float(np.mean(each))
    if name == "brier" and len(labels) == 2:
        return float(sk.brier_score_loss(truth, values[:, 1], pos_label=1))
    if name == "brier":
        return float(np.mean(((values - one_hot) ** 2).sum(axis=1)))
    if name == "ece":
        return calibration_error(predicted == truth, values.max(axis=1))
    if name.startswith("map@"):
        k = int(name[4:])
        each = [average_precision({label}, list(row), k) for label, row in zip(truth, values, strict=True)]
        return float(np.mean(each))
    references: dict[str, Callable[[], Any]] = {
        "log_loss": lambda: sk.log_loss(truth, values, labels=list(labels)),
        "accuracy": lambda: sk.accuracy_score(truth, predicted),
        **{f"{by}_f1": partial(sk.f1_score, truth, predicted, average=by) for by in AVERAGES},
        "mcc": lambda: sk.matthews_corrcoef(truth, predicted),
        "mrr": lambda: sk.label_ranking_average_precision_score(one_hot, values),
        **{f"ndcg@{k}": partial(sk.ndcg_score, one_hot, values, k=k) for k in (1, 3, 10)},
        "cohen_kappa": lambda: sk.cohen_kappa_score(truth, predicted),
        "quadratic_kappa": lambda: sk.cohen_kappa_score(
            truth, predicted, weights="quadratic", labels=list(labels)
        ),
    }
    return float(references[name]())


EXCLUSIVE = [
    *("log_loss", "accuracy", "macro_f1", "auc", "brier", "ece"),
    *("cohen_kappa", "quadratic_kappa", "map@2", "map@7"),
    *("micro_f1", "weighted_f1", "mcc", "mrr", "ndcg@1", "ndcg@3", "ndcg@10"),
]


@pytest.mark.parametrize("name", EXCLUSIVE)
@pytest.mark.parametrize("labels", [2, 3, 6])
def test_exclusive_labels(name: str, labels: int) -> None:
    for tenths in (False, True):
        truth, values = softmax_rows(400, labels, tenths)
        expected = of_exclusive(name, truth, values)
        assert find_metric(name).value(labelled(truth), values) == pytest.approx(expected, rel=1e-9)


def _exactly(expected: Any) -> object:
    return pytest.approx(float(expected), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("seed", range(12))
def test_tables_with_equal_values_and_labels_that_never_occur(seed: int) -> None:
    """What scikit-learn says of any table, and not only of one that is as it should be."""
    chooser = np.random.default_rng(seed)
    labels, rows = int(chooser.integers(2, 7)), int(chooser.integers(1, 40))
    truth = chooser.integers(0, max(1, labels - seed % 3), rows)
    values = chooser.multinomial(5, np.ones(labels) / labels, rows) / 5
    one_hot, each = np.eye(labels)[truth], (chooser.random((rows, labels)) < chooser.random(labels)) * 1.0
    graded = chooser.integers(0, 5, (rows, labels)) / 4
    of_each = np.where(chooser.random(each.shape) < 0.5, values, 1 - values)
    predicted = values.argmax(axis=1)
    for average in AVERAGES:
        metric = METRICS[f"{average}_f1"]
        expected = sk.f1_score(truth, predicted, average=average, zero_division=0)
        assert metric.value(labelled(truth), values) == _exactly(expected)
        expected = sk.f1_score(each, of_each > 0.5, average=average, zero_division=0)
        assert metric.value(labelled(each, "sigmoid"), of_each) == _exactly(expected)
    expected = sk.matthews_corrcoef(truth, predicted)
    assert METRICS["mcc"].value(labelled(truth), values) == _exactly(expected)
    expected = np.mean([sk.matthews_corrcoef(*pair) for pair in zip(each.T, of_each.T > 0.5, strict=True)])
    assert METRICS["mcc"].value(labelled(each, "sigmoid"), of_each) == _exactly(expected)
    expected = sk.label_ranking_average_precision_score(one_hot, values)
    assert METRICS["mrr"].value(labelled(truth), values) == _exactly(expected)
    for k in (1, 2, labels, 99):
        metric = find_metric(f"ndcg@{k}")
        assert metric.value(labelled(truth), values) == _exactly(sk.ndcg_score(one_hot, values, k=k))
        expected = sk.ndcg_score(graded, of_each, k=k)
        assert metric.value(labelled(graded, "sigmoid"), of_each) == _exactly(expected)


def test_the_reciprocal_rank_of_several_true_labels() -> None:
    """By hand: the first true label counts, behind false labels of its value; no true label gives 0."""
    truth = np.array([[0, 1, 1, 0], [1, 1, 0, 0], [0, 0, 0, 1], [0, 0, 0, 0.4]])
    values = np.array([[0.9, 0.8, 0.1, 0.2], [0.5, 0.5, 0.5, 0.1], [0.0] * 4, [0.1] * 4])
    expected = (1 / 2 + 1 / 2 + 1 / 4 + 0) / 4
    assert METRICS["mrr"].value(labelled(truth, "sigmoid"), values) == _exactly(expected)


CORRELATIONS = {"pearson": scipy.stats.pearsonr, "spearman": scipy.stats.spearmanr}


@pytest.mark.parametrize("name", CORRELATIONS)
@pytest.mark.parametrize("activation", ["none", "sigmoid"])
@pytest.mark.parametrize("origin", [0.0, 1e6])
@pytest.mark.parametrize("rows", [2, 3, 40, 70_000])  # more than a block
def test_correlations_are_those_of_scipy(name: str, activation: Activation, origin: float, rows: int) -> None:
    chooser = np.random.default_rng(rows)
    truth = chooser.normal(size=(rows, 3)).round(chooser.integers(0, 3)) + origin
    values = (truth + chooser.normal(size=truth.shape)).round(chooser.integers(0, 4))
    truth[0], values[0] = origin - 5, origin - 4
    expected = np.mean([CORRELATIONS[name](*pair)[0] for pair in zip(truth.T, values.T, strict=True)])
    result = METRICS[name].value(labelled(truth, activation), values)
    assert result == _exactly(expected)
    assert METRICS[name].value(labelled(truth, activation), origin - values) == _exactly(-expected)


@pytest.mark.parametrize("name", CORRELATIONS)
def test_a_constant_has_no_correlation(name: str) -> None:
    truth = np.random.default_rng(0).normal(size=(7, 1))
    for pair in [(truth, np.full((7, 1), 0.1)), (np.full((7, 1), 1e6 + 0.1), truth), (truth[:1], truth[:1])]:
        with pytest.raises(UndefinedMetric, match="the truth or the predictions are the same number in all"):
            METRICS[name].value(labelled(pair[0], "none"), pair[1])
    with pytest.raises(DataError, match=f"{name}: is for regression and labels that are not exclusive, and"):
        METRICS[name].value(labelled(np.array([0, 1])), np.eye(2))


def test_spearman_is_the_mean_of_folds_and_pearson_that_of_all_rows() -> None:
    chooser = np.random.default_rng(0)
    truth, folds = chooser.normal(size=(90, 1)), np.arange(90) % 3
    values = truth + chooser.normal(size=truth.shape) + 100 * folds[:, None]
    known = replace(labelled(truth, "none"), folds=folds)
    of_folds = [scipy.stats.spearmanr(truth[folds == fold], values[folds == fold])[0] for fold in range(3)]
    assert METRICS["spearman"].value(known, values) == _exactly(np.mean(of_folds))
    scored = Bootstrap(known).score(METRICS["spearman"], values)
    assert scored.value == _exactly(np.mean(of_folds))
    assert scored.partition is not None
    assert len(scored.partition.parts) == 3
    assert METRICS["pearson"].value(known, values) == _exactly(scipy.stats.pearsonr(truth, values)[0][0])


@pytest.mark.parametrize("name", CORRELATIONS)
@pytest.mark.parametrize("noise", [0.3, 5.0])
def test_intervals_of_correlations_are_those_of_scipy(name: str, noise: float) -> None:
    """SciPy's resamples are ranked anew, for which their correlation is a little lower: see ``_rank_sums``."""
    chooser = np.random.default_rng(2)
    truth = chooser.normal(size=(500, 1)).round(1)
    values = truth + noise * chooser.normal(size=truth.shape)
    result = Bootstrap(labelled(truth, "none")).score(METRICS[name], values)
    expected = scipy.stats.bootstrap(
        (truth[:, 0], values[:, 0]), lambda *pair: CORRELATIONS[name](*pair)[0], paired=True, n_resamples=1_000,
        vectorized=False, method="percentile", random_state=np.random.default_rng(11),
    )  # fmt: skip
    limits = expected.confidence_interval
    assert result.interval.low == pytest.approx(limits.low, abs=0.1 * (limits.high - limits.low))
    assert result.interval.high == pytest.approx(limits.high, abs=0.1 * (limits.high - limits.low))
    assert np.std(result.replicates) == pytest.approx(expected.standard_error, rel=0.1)


# Four observers and twelve units, in Krippendorff, "Computing Krippendorff's Alpha-Reliability" (2011), part C.
OBSERVERS = [
    *("123321412   ", "1233224125 3", " 3332342251 ", "12332441251 "),
]


def test_alpha_is_that_of_its_author() -> None:
    given = [[float(cell) if cell.strip() else np.nan for cell in row] for row in OBSERVERS]
    numbers = [np.array(row)[:, None] for row in given]
    one_hot = [np.where(np.isnan(column), np.nan, column == np.arange(1, 6)) for column in numbers]
    assert krippendorff_alpha(one_hot, "softmax") == pytest.approx(0.743, abs=5e-4)
    assert krippendorff_alpha(numbers, "none") == pytest.approx(0.849, abs=5e-4)
    # Values of the package krippendorff 0.9.0.
    assert krippendorff_alpha(one_hot, "softmax") == _exactly(0.743421052631579)
    assert krippendorff_alpha([column + 1e6 for column in numbers], "none") == _exactly(0.8491071428571428)


def test_alpha_counts_pairs_of_members() -> None:
    """By its definition, pair by pair; a label that nobody gives does not count."""
    chooser = np.random.default_rng(4)
    members = [np.column_stack([chooser.random((30, 2)), np.zeros(30)]) for _ in range(3)]
    members[0][:9], members[1][5:12] = np.nan, np.nan
    alphas = []
    for label in range(2):
        units = [
            [float(values[row, label] > 0.5) for values in members if np.isfinite(values[row, label])]
            for row in range(30)
        ]
        units = [unit for unit in units if len(unit) > 1]
        cells = [cell for unit in units for cell in unit]
        observed = sum(sum(a != b for a in unit for b in unit) / (len(unit) - 1) for unit in units) / len(
            cells
        )
        expected = sum(a != b for a in cells for b in cells) / len(cells) / (len(cells) - 1)
        alphas.append(1 - observed / expected)
    assert krippendorff_alpha(members, "sigmoid") == _exactly(np.mean(alphas))
    assert np.isnan(krippendorff_alpha([members[0][:9], members[1][:9]], "sigmoid")), "no row of two members"
    assert np.isnan(krippendorff_alpha([members[2][:, 2:]] * 2, "sigmoid"))


def test_labels_in_text_order_have_the_kappa_of_their_numbers() -> None:
    labels = sorted(map(str, range(1, 11)))  # 1, 10, 2, ...
    truth, values = softmax_rows(400, 10, False)
    grades = [int(label) for label in labels]
    true, predicted = ([grades[place] for place in places] for places in (truth, values.argmax(axis=1)))
    expected = sk.cohen_kappa_score(true, predicted, weights="quadratic", labels=range(1, 11))
    metric = find_metric("quadratic_kappa", numbers_of(labels))
    assert metric.value(labelled(truth), values) == pytest.approx(expected, rel=1e-9)
    words = order_remarks(["quadratic_kappa"], ["low", "mid", "high"])
    assert order_remarks(["quadratic_kappa"], labels) == order_remarks(["auc"], ["a"]) == []
    assert len(words) == 1
    assert "'low' < 'mid' < 'high'" in words[0]


@pytest.mark.parametrize("name", ["log_loss", "accuracy", "macro_f1", "auc", "brier", "ece", "map@2", "rmse"])
def test_labels_that_are_not_exclusive(name: str) -> None:
    truth, values = sigmoid_rows(300, 4)
    columns = list(zip(truth.T, values.T, strict=True))
    references: dict[str, Callable[[], Any]] = {
        "log_loss": lambda: np.mean([sk.log_loss(t, v) for t, v in columns]),
        "accuracy": lambda: sk.accuracy_score(truth, values > 0.5),
        "macro_f1": lambda: sk.f1_score(truth, values > 0.5, average="macro"),
        "auc": lambda: sk.roc_auc_score(truth, values, average="macro"),
        "brier": lambda: np.mean([sk.brier_score_loss(t, v) for t, v in columns]),
        "ece": lambda: np.mean([calibration_error(t, v) for t, v in columns]),
        "map@2": lambda: np.mean(
            [
                average_precision({*np.flatnonzero(row)}, list(own), 2)
                for row, own in zip(truth, values, strict=True)
            ]
        ),
        "rmse": lambda: np.mean([math.sqrt(sk.mean_squared_error(t, v)) for t, v in columns]),
    }
    result = find_metric(name).value(labelled(truth, "sigmoid"), values)
    assert result == pytest.approx(float(references[name]()), rel=1e-9)


def test_a_truth_that_is_not_sure() -> None:
    truth, values = softmax_rows(200, 3)
    soft = 0.7 * np.eye(3)[truth] + 0.1
    cross_entropy = -(soft * np.log(values)).sum(axis=1).mean()
    assert METRICS["log_loss"].value(labelled(soft), values) == pytest.approx(cross_entropy, rel=1e-12)
    assert METRICS["brier"].value(labelled(soft), values) == pytest.approx(
        ((values - soft) ** 2).sum(axis=1).mean()
    )
    for name in EXCLUSIVE:
        if name not in ("log_loss", "brier"):
            assert find_metric(name).value(labelled(soft), values) == find_metric(name).value(
                labelled(truth), values
            )


def test_regression() -> None:
    generator = np.random.default_rng(3)
    truth = generator.normal(size=(500, 1))
    values = truth + generator.normal(size=(500, 1))
    expected = math.sqrt(sk.mean_squared_error(truth, values))
    assert METRICS["rmse"].value(labelled(truth, "none"), values) == pytest.approx(expected)
    with pytest.raises(
        DataError, match="log_loss: is for exclusive labels and labels that are not exclusive, and"
    ):
        METRICS["log_loss"].value(labelled(truth, "none"), values)


def test_rows_that_do_not_quite_sum_to_one_and_certainty_that_is_wrong() -> None:
    values = np.array([[0.5004, 0.4999], [0.0, 1.0]])
    expected = (-math.log(0.5004 / 1.0003) - math.log(np.finfo(float).eps)) / 2
    assert METRICS["log_loss"].value(labelled(np.array([0, 0])), values) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "truth", "message"),
    [
        (
            "auc",
            [1, 1, 1],
            "auc: not defined for these 3 rows: each label needs rows that have it and rows that lack it",
        ),
        ("auc", [1, 1, 0], "auc: not defined for these 3 rows: each label needs rows that have it"),
        ("cohen_kappa", [1, 1, 1], "the truth and the predictions hold one and the same label"),
        ("quadratic_kappa", [1, 1, 1], "the truth and the predictions hold one and the same label"),
        ("log_loss", [], "log_loss: there are no rows to score"),
    ],
)
def test_metrics_that_are_not_defined(name: str, truth: list[int], message: str) -> None:
    values = np.tile([0.2, 0.5, 0.3], (len(truth), 1))
    own = np.array(truth, dtype=np.int64)
    with pytest.raises(UndefinedMetric) as caught:
        METRICS[name].value(labelled(own), values)
    assert message in str(caught.value)
    with pytest.raises(UndefinedMetric):
        Bootstrap(labelled(own)).score(METRICS[name], values)


def test_constant_predictions_are_no_better_than_chance() -> None:
    truth, _ = softmax_rows(60, 3)
    values = np.tile([0.2, 0.5, 0.3], (60, 1))
    assert METRICS["auc"].value(labelled(truth), values) == 0.5
    assert METRICS["quadratic_kappa"].value(labelled(truth), values) == pytest.approx(0.0, abs=1e-12)
    values[3:5] = np.nan
    with pytest.raises(DataError, match="auc: 2 rows without predictions; leave them out"):
        METRICS["auc"].value(labelled(truth), values)


def test_names() -> None:
    assert [find_metric(name).name for name in ("map@12", "ndcg@7")] == ["map@12", "ndcg@7"]
    for name, advice in [
        ("logloss", "did you mean log_loss?"),
        ("map@0", "map@3"),
        ("ndcg@0", "did you mean ndcg@10?"),
        ("f1", "f1"),
        ("zzz", "the metrics here are"),
    ]:
        with pytest.raises(DataError) as caught:
            find_metric(name)
        assert f"metric '{name}': unknown; " in str(caught.value)
        assert advice in str(caught.value)


@pytest.mark.parametrize(
    "name", ["log_loss", "accuracy", "macro_f1", "weighted_f1", "mcc", "auc", "cohen_kappa", "brier"]
)
def test_intervals_are_those_of_scipy(name: str) -> None:
    truth, values = softmax_rows(150, 3)
    own = METRICS[name]
    result = Bootstrap(labelled(truth)).score(own, values)

    def statistic(places: _Array) -> float:
        return own.value(labelled(truth[places]), values[places])

    expected = scipy.stats.bootstrap(
        (np.arange(150),), statistic, n_resamples=1_000, vectorized=False, confidence_level=0.95,
        method="percentile", random_state=np.random.default_rng(11),
    )  # fmt: skip
    width = expected.confidence_interval.high - expected.confidence_interval.low
    low, high = result.interval.low, result.interval.high
    assert result.interval.value == pytest.approx(own.value(labelled(truth), values), rel=1e-12)
    assert low == pytest.approx(expected.confidence_interval.low, abs=0.1 * width)
    assert high == pytest.approx(expected.confidence_interval.high, abs=0.1 * width)
    assert np.std(result.replicates) == pytest.approx(expected.standard_error, rel=0.1)


def test_a_calibration_error_has_no_interval_and_its_difference_has_one() -> None:
    """Resamples have more of it than the rows, in which the truth is drawn from the probabilities themselves."""
    generator = np.random.default_rng(0)
    chances = generator.uniform(0.5, 1, 300)
    truth = (generator.random(300) < chances).astype(np.int64)
    values = np.column_stack([1 - chances, chances])
    sample = Bootstrap(labelled(truth))
    first = sample.score(METRICS["ece"], values)
    second = sample.score(METRICS["ece"], np.clip(values + np.array([-0.2, 0.2]), 0, 1))
    assert first.interval.value == pytest.approx(calibration_error(truth == 1, chances))
    assert np.mean(first.replicates) > 1.1 * first.value
    assert np.isnan([first.interval.low, first.interval.high]).all()
    result = second.minus(first)
    assert result.low < result.value < result.high


def test_the_difference_of_two_is_paired() -> None:
    truth, values = softmax_rows(500, 3)
    better = values**1.2 / (values**1.2).sum(axis=1, keepdims=True)
    sample = Bootstrap(labelled(truth))
    first, second = (sample.score(METRICS["log_loss"], item) for item in (better, values))
    result = first.minus(second)
    losses = [-np.log(item[np.arange(500), truth]) for item in (better, values)]
    error = np.std(losses[0] - losses[1], ddof=1) / math.sqrt(500)
    assert result.value == pytest.approx(np.mean(losses[0] - losses[1]))
    assert result.high - result.low == pytest.approx(2 * 1.96 * error, rel=0.1)
    assert result.high - result.low < (first.interval.high - first.interval.low) / 3
    nothing = first.minus(first)
    assert (nothing.value, nothing.low, nothing.high, nothing.excludes_zero) == (0, 0, 0, False)


def test_the_same_seed_gives_the_same_interval() -> None:
    truth, values = softmax_rows(80, 2)
    scores = [Bootstrap(labelled(truth), seed).score(METRICS["auc"], values).interval for seed in (1, 1, 2)]
    assert scores[0] == scores[1] != scores[2]


@pytest.mark.parametrize("name", [*METRICS])
def test_groups_of_rows_stand_for_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a sorted table, where neighbours are alike."""
    of_numbers = "none" in METRICS[name].takes
    activation: Activation = "sigmoid" if of_numbers else "softmax"
    truth, values = sigmoid_rows(3_000, 3) if of_numbers else softmax_rows(3_000, 3)
    order = np.argsort(values[:, 0])
    truth, values = truth[order], values[order]
    by_row = Bootstrap(labelled(truth, activation)).score(METRICS[name], values)
    monkeypatch.setattr(scoring, "MAX_GROUPS", 1_000)
    by_group = Bootstrap(labelled(truth, activation)).score(METRICS[name], values)
    assert by_group.value == pytest.approx(by_row.value, rel=1e-12)
    spread = float(np.std(by_row.replicates))
    assert np.std(by_group.replicates) == pytest.approx(spread, rel=0.15)
    assert np.mean(by_group.replicates) == pytest.approx(np.mean(by_row.replicates), abs=0.2 * spread)


def test_what_is_not_defined_in_a_resample_is_left_out() -> None:
    truth, values = softmax_rows(40, 3)
    truth[truth == 2] = 0
    truth[0] = 2
    scored = Bootstrap(labelled(truth)).score(METRICS["auc"], values)
    undefined = np.isnan(scored.replicates).mean()
    assert undefined == pytest.approx((39 / 40) ** 40, abs=0.06)
    assert scored.interval.low < scored.value < scored.interval.high
