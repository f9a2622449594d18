"""Whether probabilities can be taken at their word: confidence against how often it was right."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ensemble.analysis.metrics import Interval
from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.blocks import block_spans
from ensemble.merging.methods.base import Values

# Of a diagram.
BINS: Final = 10
Counts = npt.NDArray[np.int64]
# Two-sided 95 % of the normal distribution.
_Z = 1.959963984540054


@dataclass(frozen=True)
class Reliability:
    """Bins of equal width from 0 to 1, without their lower edge; every array is [bins].

    Attributes:
        counts: predictions in the bin: rows by the probability of their first label, or with "sigmoid" all cells.
        confidence: their mean probability; NaN where the bin is empty.
        accuracy: the share of them that came true; NaN where the bin is empty.
        low, high: Wilson's interval (1927) of ``accuracy`` at 95 %.
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
    counts = np.zeros(bins, np.int64)
    sums, hits = np.zeros(bins), np.zeros(bins)
    edges = np.linspace(0.0, 1.0, bins + 1)[1:-1]
    rows, labels = values.shape
    for start, stop in block_spans(rows, labels):
        block = values[start:stop]
        there = ~np.isnan(block).any(axis=1)
        cells = _cells(block[there], truth[start:stop][there], activation)
        confidence, came_true = (part.ravel() for part in cells)
        homes = np.searchsorted(edges, confidence)
        counts += np.bincount(homes, minlength=bins)
        sums += np.bincount(homes, confidence, bins)
        hits += np.bincount(homes, came_true, bins)
    with np.errstate(invalid="ignore"):
        accuracy = hits / counts
        low, high = wilson(accuracy, counts)
        return Reliability(counts, sums / counts, accuracy, low, high)


def overconfidence(values: Values, activation: Activation, truth: Truth) -> Interval:
    """Mean confidence less the share that came true: above 0 where probabilities promise too much.

    With the normal 95 % interval of the mean of the rows' own differences, which knows that sure rows are right
    more often and, with "sigmoid", that the labels of a row go together.

    Args:
        values, truth: as for ``reliability``.
    """
    rows, labels = values.shape
    count, total, squares = 0, 0.0, 0.0
    for start, stop in block_spans(rows, labels):
        block = values[start:stop]
        there = ~np.isnan(block).any(axis=1)
        confidence, came_true = _cells(block[there], truth[start:stop][there], activation)
        differences = (confidence - came_true).mean(axis=1)
        count += len(differences)
        total += float(differences.sum())
        squares += float(np.square(differences).sum())
    if not count:
        return Interval(np.nan, np.nan, np.nan)
    mean = total / count
    variance = max(0.0, squares - count * mean**2) / max(1, count - 1)
    half = _Z * float(np.sqrt(variance / count)) if count > 1 else np.inf
    return Interval(mean, mean - half, mean + half)


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


def wilson(shares: Values, counts: Counts | Values) -> tuple[Values, Values]:
    """The 95 % interval of shares of so many trials (Wilson 1927); NaN where there were none."""
    with np.errstate(divide="ignore", invalid="ignore"):
        squared = _Z * _Z / counts
        middle = (shares + squared / 2) / (1 + squared)
        half = _Z / (1 + squared) * np.sqrt(shares * (1 - shares) / counts + squared / (4 * counts))
        return np.clip(middle - half, 0.0, 1.0), np.clip(middle + half, 0.0, 1.0)
