"""Confidence compared with how often it was right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.blocks import block_spans
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
        confidence: their mean probability; NaN where the bin is empty.
        accuracy: the share of them that came true; NaN where the bin is empty.
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
        values: probabilities, float64 [rows, labels]; rows of NaN are passed over.
        activation: "softmax": the first label of each row counts; "sigmoid": every label by itself.
        truth: label numbers, int64 [rows], or probabilities, float64 [rows, labels]; these count as they are.
    """
    resamples = Resamples(len(values))
    groups = len(resamples.sizes)
    edges = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    sums = np.zeros((3, groups * bins))  # counts, confidence and hits
    for rows, confidence, came_true in _blocks(values, activation, truth):
        groups_of_rows = resamples.group_of[rows].astype(np.int64)
        cells = groups_of_rows[:, None] * bins + np.searchsorted(edges, confidence)
        for row, numbers in zip(sums, (np.ones(confidence.shape), confidence, came_true), strict=True):
            row += np.bincount(cells.ravel(), numbers.ravel(), groups * bins)
    by_group = sums.reshape(3, groups, bins)
    counts, confidences, right = by_group.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):  # of empty bins
        accuracy = right / counts
        resampled = resamples.sums(np.hstack([by_group[0], by_group[2]]))
        resampled = resampled[:, bins:] / resampled[:, :bins]
        intervals = [resamples.interval(*each) for each in zip(accuracy, resampled.T, strict=True)]
        low, high = np.array([(each.low, each.high) for each in intervals]).T
        return Reliability(counts.astype(np.int64), confidences / counts, accuracy, low, high)


def overconfidence(values: Values, activation: Activation, truth: Truth) -> Interval:
    """Return mean confidence less the share that came true: above 0 where probabilities promise too much.

    Args:
        values, truth: as for ``reliability``.
    """
    resamples = Resamples(len(values))
    sums = np.zeros((len(resamples.sizes), 2))
    for rows, confidence, came_true in _blocks(values, activation, truth):
        differences = (confidence - came_true).mean(axis=1)
        sums += resamples.by_group(rows, np.column_stack([differences, np.ones(len(rows))]))
    return resamples.mean(sums[:, 0], sums[:, 1])


def _blocks(
    values: Values, activation: Activation, truth: Truth
) -> Iterator[tuple[npt.NDArray[np.int64], Values, Values]]:
    """Yield row numbers, and what ``_cells`` says of these rows; without rows of NaN."""
    for start, stop in block_spans(*values.shape):
        rows = start + np.flatnonzero(~np.isnan(values[start:stop]).any(axis=1))
        yield rows, *_cells(values[rows], truth[rows], activation)


def _cells(block: Values, actual: Truth, activation: Activation) -> tuple[Values, Values]:
    """Return the probabilities that count and the truth of each, [rows, 1] or with "sigmoid" [rows, labels]."""
    labels = block.shape[1]
    if actual.ndim == 2:
        came_true = actual.astype(np.float64)
    else:
        came_true = (actual[:, None] == np.arange(labels)).astype(np.float64)
    if activation != "softmax":
        return block, came_true
    first = block.argmax(axis=1)[:, None]
    return np.take_along_axis(block, first, axis=1), np.take_along_axis(came_true, first, axis=1)
