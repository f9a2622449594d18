"""Reliability diagrams and overconfidence, compared with scikit-learn and SciPy."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import binomtest, norm, sem
from sklearn.calibration import calibration_curve

from ensemble.analysis.report.results import reliability
from tests.labelled import labelled
from tests.sampling import one_in

ROWS = 70_000


def probabilities(labels: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(labels, 0.4), ROWS)


@pytest.mark.parametrize("labels", [2, 14])
def test_first_labels_are_binned_as_scikit_learn_does(labels: int) -> None:
    values = probabilities(labels)
    truth = np.random.default_rng(1).integers(0, labels, ROWS)
    curve = reliability(values, labelled(truth, "softmax"))
    right = values.argmax(axis=1) == truth
    accuracy, confidence = calibration_curve(right, values.max(axis=1), n_bins=10, strategy="uniform")
    filled = curve.counts > 0
    assert curve.accuracy[filled] == pytest.approx(accuracy)
    assert curve.confidence[filled] == pytest.approx(confidence)
    assert curve.counts.sum() == ROWS
    gap = curve.overconfidence
    assert gap.value == pytest.approx(values.max(axis=1).mean() - right.mean())
    low, high = norm.interval(0.95, gap.value, sem(values.max(axis=1) - right))
    assert (gap.low, gap.high) == pytest.approx((low, high), abs=0.1 * (high - low))
    for bin_ in np.flatnonzero(curve.counts > 1_000):
        hits, count = round(curve.accuracy[bin_] * curve.counts[bin_]), int(curve.counts[bin_])
        interval = binomtest(hits, count).proportion_ci(0.95, "wilson")
        width = interval.high - interval.low
        assert (curve.low[bin_], curve.high[bin_]) == pytest.approx(
            (interval.low, interval.high), abs=0.15 * width
        )


def test_labels_that_do_not_exclude_each_other_are_binned_cell_by_cell() -> None:
    chooser = np.random.default_rng(3)
    values = chooser.random((ROWS, 4))
    truth = (chooser.random(values.shape) < values**2).astype(np.float64)
    curve = reliability(values, labelled(truth, "sigmoid"))
    accuracy, confidence = calibration_curve(truth.ravel(), values.ravel(), n_bins=10)
    assert curve.accuracy == pytest.approx(accuracy)
    assert curve.confidence == pytest.approx(confidence)
    gap = curve.overconfidence
    # Rows are drawn, not cells: four copies of each label tell no more than one.
    copies = reliability(np.repeat(values, 4, axis=1), labelled(np.repeat(truth, 4, axis=1), "sigmoid"))
    again = copies.overconfidence
    assert (again.low, again.high) == pytest.approx((gap.low, gap.high))
    low, high = norm.interval(0.95, gap.value, sem((values - truth).mean(axis=1)))
    assert (gap.low, gap.high) == pytest.approx((low, high), abs=0.1 * (high - low))
    assert gap.low > 0.1


@pytest.mark.long
@pytest.mark.parametrize("tries", one_in(2, [100, 400]))
def test_the_interval_of_a_calibrated_member_holds_0_as_often_as_it_says(tries: int) -> None:
    """Confidence that varies from row to row is no noise: an interval of the accuracy alone is far too wide."""
    chooser, held = np.random.default_rng(4), 0
    for _ in range(tries):
        chance = np.clip(chooser.beta(0.3, 0.3, 300), 1e-9, 1 - 1e-9)
        truth = (chooser.random(300) < chance).astype(np.int64)
        values = np.stack([1 - chance, chance], axis=1)
        held += not reliability(values, labelled(truth, "softmax")).overconfidence.excludes_zero
    assert binomtest(held, tries, 0.95).pvalue > 1e-4


def test_probabilities_as_truth_count_as_they_are() -> None:
    values, truth = probabilities(3), probabilities(3, seed=9)
    curve = reliability(values, labelled(truth, "softmax"))
    expected = truth[np.arange(ROWS), values.argmax(axis=1)].mean()
    assert np.nansum(curve.accuracy * curve.counts) / ROWS == pytest.approx(expected)
    assert np.isnan(curve.accuracy[curve.counts == 0]).all()
