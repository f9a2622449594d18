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


@dataclass(frozen=True)
class Reliability:
    """Bins of equal width from 0 to 1, without their lower edge; every array is [bins].

    Attributes:
        counts: predictions in the bin: rows by the probability of their first label, or with "sigmoid" all cells.
        confidence: their mean probability; NaN in an empty bin.
        accuracy: the share of them that came true; NaN in an empty bin.
        low, high: the 95 % bootstrap interval of ``accuracy``.
        overconfidence: mean confidence minus the share that came true, over all predictions.
    """

    counts: npt.NDArray[np.int64]
    confidence: Values
    accuracy: Values
    low: Values
    high: Values
    overconfidence: Interval


def reliability(values: Values, activation: Activation, truth: Truth) -> Reliability:
    """Sort predictions into bins by their probability.

    Args:
        values: probabilities, float64 [rows, labels].
        activation: "softmax": the first label of each row counts; "sigmoid": every label by itself.
        truth: label numbers, int64 [rows], or probabilities, float64 [rows, labels].
    """
    confidence, came_true = values, one_hot(truth, values.shape[1])
    if activation == "softmax":
        first = values.argmax(axis=1)[:, None]
        confidence = np.take_along_axis(values, first, axis=1)
        came_true = np.take_along_axis(came_true, first, axis=1)
    resamples = Resamples(len(values))
    bin_of = np.searchsorted(np.linspace(0.0, 1.0, BINS + 1)[1:-1], confidence)
    counts, confidences = np.zeros(BINS, np.int64), np.full(BINS, np.nan)
    intervals = []
    for number in range(BINS):
        is_in = bin_of == number
        counts[number] = is_in.sum()
        if counts[number]:
            confidences[number] = confidence[is_in].mean()
        columns = np.column_stack([(came_true * is_in).sum(axis=1), is_in.sum(axis=1)])
        by_group = resamples.by_group(slice(None), columns)
        intervals.append(resamples.mean(by_group[:, 0], by_group[:, 1]))
    differences = (confidence - came_true).mean(axis=1, keepdims=True)
    return Reliability(
        counts=counts,
        confidence=confidences,
        accuracy=np.array([interval.value for interval in intervals]),
        low=np.array([interval.low for interval in intervals]),
        high=np.array([interval.high for interval in intervals]),
        overconfidence=resamples.mean(resamples.by_group(slice(None), differences)[:, 0]),
    )
