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
        accuracy: the share of them that came true; NaN where the bin is empty or without a truth.
        low, high: Wilson's interval (1927) of ``accuracy`` at 95 %.
    """

    counts: Counts
    confidence: Values
    accuracy: Values
    low: Values
    high: Values


def reliability(
    values: Values, activation: Activation, truth: Truth | None = None, bins: int = BINS
) -> Reliability:
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
        block = block[there]
        actual = None if truth is None else truth[start:stop][there]
        confidence, came_true = (one.ravel() for one in _cells(block, actual, activation))
        homes = np.searchsorted(edges, confidence)
        counts += np.bincount(homes, minlength=bins)
        sums += np.bincount(homes, confidence, bins)
        hits += np.bincount(homes, came_true, bins)
    with np.errstate(invalid="ignore"):
        accuracy = hits / counts if truth is not None else np.full(bins, np.nan)
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


def _cells(block: Values, actual: Truth | None, activation: Activation) -> tuple[Values, Values]:
    """What is looked at of each row, [rows, 1] or with "sigmoid" [rows, labels]: its probability, and the truth.

    Without a truth that is 0.
    """
    labels = block.shape[1]
    if actual is None:
        came_true = np.zeros(block.shape)
    elif actual.ndim == 2:
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


@dataclass(frozen=True)
class Coverage:
    """How right the most certain rows are: the accuracy of those above a confidence, down to all rows.

    Attributes:
        shares: of all rows, [points], the last is 1.
        accuracy: of the most certain rows of that share, [points].
        thresholds: the least confidence among these, [points].
    """

    shares: Values
    accuracy: Values
    thresholds: Values


def coverage(confidence: Values, came_true: Values, points: int = 20) -> Coverage:
    """Accuracy against the share of rows that are kept, the most certain first.

    Rows of the same confidence count with their mean, so their order makes no difference.

    Args:
        confidence: float64 [rows], no NaN, at least one row.
        came_true: float64 [rows], 1 where the first label was right.
    """
    order = np.argsort(-confidence, kind="stable")
    ordered = confidence[order]
    begins = np.flatnonzero(np.r_[True, ordered[1:] != ordered[:-1]])
    means = np.add.reduceat(came_true[order], begins) / np.diff(np.r_[begins, len(order)])
    hits = np.cumsum(np.repeat(means, np.diff(np.r_[begins, len(order)])))
    kept = np.unique(np.maximum(1, np.rint(len(order) * np.arange(1, points + 1) / points).astype(np.int64)))
    return Coverage(kept / len(order), hits[kept - 1] / kept, ordered[kept - 1])


@dataclass(frozen=True)
class Confusion:
    """Rows of the label ``true`` whose first label was ``first``, and what share of ``true``'s rows they are."""

    true: int
    first: int
    rows: int
    share: float


def confusions(values: Values, truth: Truth, most: int = 10) -> tuple[list[Confusion], Counts]:
    """The most frequent mistakes, and all counts [true label, first label].

    Args:
        values: float64 [rows, labels]; rows of NaN are passed over.
        truth: as for ``reliability``; of probabilities the likeliest label counts.
    """
    rows, labels = values.shape
    counts = np.zeros((labels, labels), np.int64)
    for start, stop in block_spans(rows, labels):
        block, actual = values[start:stop], truth[start:stop]
        there = ~np.isnan(block).any(axis=1)
        true = (actual.argmax(axis=1) if actual.ndim == 2 else actual)[there]
        cells = true * labels + block[there].argmax(axis=1)
        counts += np.bincount(cells, minlength=labels * labels).reshape(labels, labels)
    wrong = counts.copy()
    np.fill_diagonal(wrong, 0)
    order = np.argsort(-wrong, axis=None, kind="stable")[:most]
    places = [divmod(int(cell), labels) for cell in order]
    return [
        Confusion(true, first, int(wrong[true, first]), float(wrong[true, first] / counts[true].sum()))
        for true, first in places
        if wrong[true, first]
    ], counts
