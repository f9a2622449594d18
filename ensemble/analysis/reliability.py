"""Compare predicted probabilities with how often they came true."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ensemble.analysis.calibration import one_hot
from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.methods.base import Values
from ensemble.merging.scoring import Interval, Resamples

# Of a diagram.
BINS: Final = 10
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Reliability:
    """Bins of equal width from 0 to 1, without their lower edge; every array is [bins].

    Attributes:
        counts: predictions in the bin: rows by the probability of their first label, or with "sigmoid" all cells.
        confidence: their mean probability; NaN in an empty bin.
        accuracy: the share of them that came true; NaN in an empty bin.
        low, high: the 95 % bootstrap interval of ``accuracy``.
    """

    counts: Counts
    confidence: Values
    accuracy: Values
    low: Values
    high: Values


def reliability(values: Values, activation: Activation, truth: Truth, bins: int = BINS) -> Reliability:
    """Sort predictions into bins by their probability.

    Args:
        values: probabilities, float64 [rows, labels]; rows of NaN are left out.
        activation: "softmax": the first label of each row counts; "sigmoid": every label by itself.
        truth: label numbers, int64 [rows], or probabilities, float64 [rows, labels].
    """
    rows, confidence, came_true = _predictions(values, activation, truth)
    resamples = Resamples(len(values))
    bin_of = np.searchsorted(np.linspace(0.0, 1.0, bins + 1)[1:-1], confidence)
    counts, confidences, intervals = np.zeros(bins, np.int64), np.full(bins, np.nan), list[Interval]()
    for number in range(bins):
        is_in = bin_of == number
        counts[number] = is_in.sum()
        if counts[number]:
            confidences[number] = confidence[is_in].mean()
        by_group = resamples.by_group(
            rows, np.column_stack([(came_true * is_in).sum(axis=1), is_in.sum(axis=1)])
        )
        intervals.append(resamples.mean(by_group[:, 0], by_group[:, 1]))
    accuracy, low, high = np.array([(each.value, each.low, each.high) for each in intervals]).T
    return Reliability(counts, confidences, accuracy, low, high)


def overconfidence(values: Values, activation: Activation, truth: Truth) -> Interval:
    """Return mean confidence minus the share that came true; arguments are as for ``reliability``."""
    rows, confidence, came_true = _predictions(values, activation, truth)
    resamples = Resamples(len(values))
    differences = (confidence - came_true).mean(axis=1)
    sums = resamples.by_group(rows, np.column_stack([differences, np.ones(len(rows))]))
    return resamples.mean(sums[:, 0], sums[:, 1])


def _predictions(values: Values, activation: Activation, truth: Truth) -> tuple[Counts, Values, Values]:
    """Return row numbers, [n], and for each the probabilities that count and their truth, [n, 1 or labels]."""
    rows = np.flatnonzero(~np.isnan(values).any(axis=1))
    values, came_true = values[rows], one_hot(truth[rows], values.shape[1])
    if activation != "softmax":
        return rows, values, came_true
    first = values.argmax(axis=1)[:, None]
    return rows, np.take_along_axis(values, first, axis=1), np.take_along_axis(came_true, first, axis=1)
