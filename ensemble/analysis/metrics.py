"""Metrics by name, with bootstrap intervals and paired differences.

Truth and values are those of ``predictions.Predictions``.  All metrics but the AUC are functions of sums over
rows, so that a value, a weighted value and a thousand resamples come from the same few lines.  Where the truth of
exclusive labels is probabilities itself, a row's label is the likeliest one, of equal ones the first, as in
predictions.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError
from ensemble.common.protocol import SUM_TOLERANCE, Activation
from ensemble.common.text import nearest_or_all, plural, quoted
from ensemble.data.table import Truth
from ensemble.merging.blocks import block_spans
from ensemble.merging.metrics import row_losses

ECE_BINS: Final = 15
REPLICATES: Final = 1_000
LEVEL: Final = 0.95
# Rows are resampled one by one up to so many, and in so many random groups where there are more.
MAX_GROUPS: Final = 8_192
# Numbers in memory at a time.
_CELLS = 1 << 20
_ROUNDING = 1e-12
_KINDS = {"softmax": "exclusive labels", "sigmoid": "labels that are not exclusive", "none": "regression"}
_Array = npt.NDArray[np.float64]
MetricKind: TypeAlias = Literal["mean", "sums", "ranks", "bins"]
METRIC_KINDS: Final[Mapping[MetricKind, str]] = {
    "mean": "the mean of one number for each row",
    "sums": "a function of sums over rows",
    "ranks": "rows compared with each other",
    "bins": "rows put into bins",
}


class UndefinedMetric(DataError):
    """A metric that has no value for this truth; says why."""


@dataclass(frozen=True)
class Rows:
    """Rows to be scored.

    Attributes:
        truth: int64 [rows] (exclusive labels), or float64 [rows, labels].
        values: float64 [rows, labels].
        activation: what the values are, "softmax", "sigmoid" or "none".
    """

    truth: Truth
    values: _Array
    activation: Activation

    @property
    def is_exclusive(self) -> bool:
        return self.activation == "softmax"

    @cached_property
    def true_labels(self) -> npt.NDArray[np.int64]:
        """Of exclusive labels, [rows]."""
        return np.asarray(self.truth.argmax(axis=1) if self.truth.ndim == 2 else self.truth, np.int64)

    @cached_property
    def predicted_labels(self) -> npt.NDArray[np.int64]:
        """Of exclusive labels, [rows]."""
        return np.asarray(self.values.argmax(axis=1))

    @cached_property
    def true_each(self) -> npt.NDArray[np.bool_]:
        """Which labels are true, [rows, labels]."""
        if self.is_exclusive:
            return np.asarray(self.true_labels[:, None] == np.arange(self.values.shape[1]))
        return np.asarray(self.truth > 0.5)

    @cached_property
    def predicted_each(self) -> npt.NDArray[np.bool_]:
        """Which labels are predicted, [rows, labels]; of labels that are not exclusive those above 0.5."""
        if self.is_exclusive:
            return np.asarray(self.predicted_labels[:, None] == np.arange(self.values.shape[1]))
        return np.asarray(self.values > 0.5)

    @cached_property
    def probabilities(self) -> _Array:
        """The values; those of exclusive labels scaled to sum to 1, [rows, labels]."""
        if not self.is_exclusive:
            return self.values
        sums = self.values.sum(axis=1, keepdims=True)
        return np.where(np.abs(sums - 1) > _ROUNDING, self.values / sums, self.values)

    @cached_property
    def true_probabilities(self) -> _Array:
        """How likely each label is by the truth, [rows, labels]."""
        return np.asarray(self.true_each if self.truth.ndim == 1 else self.truth, np.float64)

    def taken(self, places: npt.NDArray[np.int64] | slice) -> Rows:
        return Rows(self.truth[places], self.values[places], self.activation)


@dataclass(frozen=True)
class Interval:
    """A metric, or the difference of two, with its bootstrap percentile interval; NaN where it has none."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Of a difference: whether it is more than noise."""
        return self.low > 0 or self.high < 0


class Metric(ABC):
    """Attributes:
    name: as users write it.
    kind: what it does with rows, see ``METRIC_KINDS``.
    greater_is_better: False for losses and errors.
    takes: the kinds of values that it is defined for.
    needs_every_label: it is not defined for rows of which none, or all, have some label.
    """

    name: str
    kind: ClassVar[MetricKind]
    greater_is_better: ClassVar[bool] = True
    takes: ClassVar[tuple[Activation, ...]] = ("softmax", "sigmoid")
    needs_every_label: ClassVar[bool] = False

    def value(
        self,
        truth: Truth,
        values: _Array,
        weights: _Array | None = None,
        activation: Activation | None = None,
    ) -> float:
        """The metric of all rows.

        Args:
            truth: int64 [rows], or float64 [rows, labels].
            values: float64 [rows, labels], numbers in every row.
            weights: of the rows, not negative, [rows]; None: all the same.
            activation: what the values are; None: "softmax" with a truth of label numbers, or where the rows of
                both sum to 1, else "sigmoid" where all values are from 0 to 1, else "none".

        Raises:
            UndefinedMetric: there are no rows, or it has no value for this truth.
            DataError: it is not defined for such values, or there are rows without any.
        """
        rows = self.checked(truth, values, activation)
        if weights is not None and not weights.any():
            raise UndefinedMetric(f"{self.name}: the weights of all rows are 0")
        found = self.of_rows(rows, np.ones(len(values)) if weights is None else weights)
        if why := "" if np.isfinite(found) else self.why_undefined(rows) or "its denominator is 0":
            raise UndefinedMetric(f"{self.name}: not defined for these {plural(len(values), 'row')}: {why}")
        return found

    @abstractmethod
    def of_rows(self, rows: Rows, weights: _Array) -> float:
        """The metric of rows by their weights, [rows]; NaN where it is not defined."""

    @abstractmethod
    def of_resamples(self, rows: Rows, sample: Bootstrap, value: float) -> _Array:
        """The metric of each resample, [replicates], ``value`` being that of all; NaN where it is not defined."""

    def why_undefined(self, rows: Rows) -> str:
        """Why there is no value; empty where that is not known."""
        return ""

    def checked(self, truth: Truth, values: _Array, activation: Activation | None) -> Rows:
        """The rows, once the metric can be asked of them.

        Raises:
            UndefinedMetric, DataError: as for ``value``.
        """
        if not len(values):
            raise UndefinedMetric(f"{self.name}: there are no rows to score")
        if len(truth) != len(values):
            raise DataError(f"{self.name}: {len(truth):,} rows of truth for {len(values):,} of predictions")
        activation = activation or _activation(truth, values)
        if activation not in self.takes:
            takes = " and ".join(_KINDS[kind] for kind in self.takes)
            raise DataError(f"{self.name}: is for {takes}, and these values are of {_KINDS[activation]}")
        if not np.isfinite(values).all():
            missing = plural(int((~np.isfinite(values).all(axis=1)).sum()), "row")
            raise DataError(f"{self.name}: {missing} without predictions; leave them out")
        return Rows(truth, values, activation)


class SumMetric(Metric):
    """A metric that is a function of sums over rows."""

    @abstractmethod
    def statistics(self, rows: Rows) -> _Array:
        """What is summed over rows: float64 [rows, statistics]."""

    def of_sums(self, sums: _Array, total: _Array, is_exclusive: bool) -> _Array:
        """The metric; NaN where it is not defined.

        Args:
            sums: of the statistics, each row's by its weight, [..., statistics].
            total: of the weights, [...].
            is_exclusive: whether the values are "softmax".
        """
        mean: _Array = sums[..., 0] / total
        return mean

    def of_rows(self, rows: Rows, weights: _Array) -> float:
        sums: _Array = np.zeros(1)
        for start, stop in block_spans(*rows.values.shape):
            part = slice(start, stop)
            sums = sums + weights[part] @ self.statistics(rows.taken(part))
        return float(self.of_sums(sums, np.asarray(weights.sum()), rows.is_exclusive))

    def of_resamples(self, rows: Rows, sample: Bootstrap, value: float) -> _Array:
        sums, totals = sample.sums(lambda places: self.statistics(rows.taken(places)), rows.values.shape[1])
        return self.of_sums(sums, totals, rows.is_exclusive)


def _activation(truth: Truth, values: _Array) -> Activation:
    if truth.ndim == 1 or all(np.abs(one.sum(axis=1) - 1).max() <= SUM_TOLERANCE for one in (truth, values)):
        return "softmax"
    return "sigmoid" if values.min() >= 0 and values.max() <= 1 else "none"


class LogLoss(SumMetric):
    """Log loss in nats per row (Good, "Rational Decisions", 1952), as scikit-learn's ``log_loss``.

    Exclusive labels: the mean of -ln p(true label), rows scaled to sum to 1 and p clipped to the smallest step of
    float64; with probabilities as truth the cross-entropy -sum(truth * ln p).  Others: the mean over labels of
    -truth * ln p - (1 - truth) * ln(1 - p).
    """

    name = "log_loss"
    kind = "mean"
    greater_is_better = False

    def statistics(self, rows: Rows) -> _Array:
        return row_losses(rows.truth, rows.values, rows.activation)[:, None]


class Accuracy(SumMetric):
    """The share of rows that are right, as scikit-learn's ``accuracy_score``.

    Exclusive labels: the likeliest label is the true one.  Others: all labels of the row are right, at 0.5.
    """

    name = "accuracy"
    kind = "mean"

    def statistics(self, rows: Rows) -> _Array:
        if rows.is_exclusive:
            hits = rows.predicted_labels == rows.true_labels
        else:
            hits = (rows.predicted_each == rows.true_each).all(axis=1)
        return np.asarray(hits[:, None], np.float64)


class MacroF1(SumMetric):
    """The mean over labels of 2 tp / (2 tp + fp + fn) (van Rijsbergen 1979), scikit-learn's ``f1_score`` "macro".

    Exclusive labels: of the likeliest label, over the labels that are in truth or predictions.  Others: at 0.5,
    over all labels, 0 for one in neither.
    """

    name = "macro_f1"
    kind = "sums"

    def statistics(self, rows: Rows) -> _Array:
        true, predicted = rows.true_each, rows.predicted_each
        return np.concatenate([true & predicted, true, predicted], axis=1).astype(np.float64)

    def of_sums(self, sums: _Array, total: _Array, is_exclusive: bool) -> _Array:
        hits, true, predicted = np.split(sums, 3, axis=-1)
        both = true + predicted
        scores = np.divide(2 * hits, both, out=np.zeros_like(both), where=both > 0)
        labels = (both > 0).sum(axis=-1) if is_exclusive else both.shape[-1]
        return np.asarray(scores.sum(axis=-1) / labels)


class Brier(SumMetric):
    """Brier score (Brier, "Verification of forecasts expressed in terms of probability", 1950).

    Exclusive labels: the mean over rows of sum over labels of (p - truth)**2, halved where there are two labels, as
    scikit-learn's ``brier_score_loss`` has it.  Others: the mean over rows and labels of (p - truth)**2.
    """

    name = "brier"
    kind = "mean"
    greater_is_better = False

    def statistics(self, rows: Rows) -> _Array:
        squares = np.square(rows.probabilities - rows.true_probabilities)
        if rows.is_exclusive and squares.shape[1] > 2:
            return np.asarray(squares.sum(axis=1, keepdims=True))
        return np.asarray(squares.mean(axis=1, keepdims=True))


class CalibrationError(SumMetric):
    """Expected calibration error (Naeini et al. 2015; with 15 bins: Guo et al., "On Calibration of Modern Neural
    Networks", 2017).

    Exclusive labels: rows fall into 15 bins of equal width by the probability of their likeliest label; the sum
    over bins of |share that is right - mean probability|, by the share of rows.  Others: the mean over labels of
    the same of each label's own probability.  Resamples have more of it than the sample, as no term is negative:
    an interval by them would lie too high, so that it has none.  In a difference of two that cancels.
    """

    name = "ece"
    kind = "bins"
    greater_is_better = False

    def statistics(self, rows: Rows) -> _Array:
        if rows.is_exclusive:
            chance = rows.probabilities.max(axis=1, keepdims=True)
            is_right = (rows.predicted_labels == rows.true_labels)[:, None].astype(np.float64)
        else:
            chance, is_right = rows.values, rows.truth
        # (0, 1/15], (1/15, 2/15], ...; 0 belongs to the first.
        edges = np.arange(1, ECE_BINS) / ECE_BINS
        bins = np.searchsorted(edges, chance, side="left")
        labels = chance.shape[1]
        gaps = np.zeros((len(chance), labels * ECE_BINS))
        columns = bins + ECE_BINS * np.arange(labels)
        np.put_along_axis(gaps, columns, (is_right - chance) / labels, axis=1)
        return gaps

    def of_sums(self, sums: _Array, total: _Array, is_exclusive: bool) -> _Array:
        return np.asarray(np.abs(sums).sum(axis=-1) / total)


class QuadraticKappa(SumMetric):
    """Cohen's kappa with quadratic weights (Cohen 1968), scikit-learn's ``cohen_kappa_score(weights="quadratic")``.

    Of exclusive labels in ascending order, such as grades: 1 - sum((i - j)**2) over the same as if predictions had
    nothing to do with the truth.
    """

    name = "quadratic_kappa"
    kind = "sums"
    takes = ("softmax",)

    def statistics(self, rows: Rows) -> _Array:
        true, predicted = rows.true_labels.astype(np.float64), rows.predicted_labels.astype(np.float64)
        return np.stack([(true - predicted) ** 2, true, true**2, predicted, predicted**2], axis=1)

    def of_sums(self, sums: _Array, total: _Array, is_exclusive: bool) -> _Array:
        observed, true, true_squares, predicted, predicted_squares = np.moveaxis(sums, -1, 0) / total
        expected = true_squares + predicted_squares - 2 * true * predicted
        nothing = np.full_like(expected, np.nan)
        return np.asarray(1 - np.divide(observed, expected, out=nothing, where=expected > _ROUNDING))

    def why_undefined(self, rows: Rows) -> str:
        return "the truth and the predictions hold one and the same label in all of them"


class MeanAveragePrecision(SumMetric):
    """Mean average precision of the k likeliest labels, as Kaggle's MAP@k and ``apk`` of ml_metrics have it.

    With exclusive labels 1 / (the true label's rank), or 0 behind k.  With others, the sum of the precision at
    each true label's rank, by the lower of k and the number of true labels; 0 for a row without a true label.  Of
    equal values the first label goes first.
    """

    kind = "mean"

    def __init__(self, k: int) -> None:
        self.name = f"map@{k}"
        self.k = k

    def statistics(self, rows: Rows) -> _Array:
        likeliest = np.argsort(-rows.values, axis=1, kind="stable")[:, : self.k]
        hits = np.take_along_axis(rows.true_each, likeliest, axis=1)
        precisions = hits.cumsum(axis=1) / np.arange(1, hits.shape[1] + 1)
        most = np.clip(rows.true_each.sum(axis=1), 1, self.k)
        return np.asarray(((precisions * hits).sum(axis=1) / most)[:, None])


class RootMeanSquaredError(SumMetric):
    """The root of the mean of (value - truth)**2; of several labels the mean, as scikit-learn has it."""

    name = "rmse"
    kind = "sums"
    greater_is_better = False
    takes = ("none", "sigmoid")

    def statistics(self, rows: Rows) -> _Array:
        return np.asarray(np.square(rows.values - rows.truth))

    def of_sums(self, sums: _Array, total: _Array, is_exclusive: bool) -> _Array:
        return np.asarray(np.sqrt(sums / total[..., None]).mean(axis=-1))


class Auc(Metric):
    """Area under the ROC curve (Hanley and McNeil 1982), ties counting half, as scikit-learn's ``roc_auc_score``.

    Two exclusive labels: of the second's probability.  More of them: the mean over labels of each against the
    rest ("ovr", "macro").  Others: the mean over labels.
    """

    name = "auc"
    kind = "ranks"
    needs_every_label = True

    def of_rows(self, rows: Rows, weights: _Array) -> float:
        return float(np.mean([ranking.areas(weights[None])[0] for ranking in self._rankings(rows)]))

    def of_resamples(self, rows: Rows, sample: Bootstrap, value: float) -> _Array:
        rankings = [*self._rankings(rows)]
        if sample.has_single_rows:
            parts = ([one.areas(weights) for one in rankings] for weights in sample.row_weights())
            return np.concatenate([np.mean(areas, axis=0) for areas in parts])
        # Of many rows: the projection on single rows, off by the order of 1 / rows, is as good and is of sums.
        found = list[_Array]()
        for ranking in rankings:
            placements = ranking.placements(sample.weights)
            sums, _ = sample.sums(lambda places, all_rows=placements: all_rows[places], 4)  # type: ignore[misc]
            found.append(sums[:, 0] / sums[:, 1] + sums[:, 2] / sums[:, 3])
        return np.asarray(np.mean(found, axis=0) - value)

    def why_undefined(self, rows: Rows) -> str:
        counts = rows.true_each.sum(axis=0)
        if rows.is_exclusive and (counts > 0).sum() == 1:
            return "the truth holds a single label in all of them, and two are needed"
        number = next(index for index, count in enumerate(counts) if count in (0, len(rows.values)))
        return f"the truth has label {number + 1} of {len(counts)} in {'all' if counts[number] else 'none'} of them"

    def _rankings(self, rows: Rows) -> Iterator[_Ranking]:
        labels = rows.values.shape[1]
        for label in (1,) if rows.is_exclusive and labels == 2 else range(labels):
            yield _Ranking(rows.values[:, label], rows.true_each[:, label])


class _Ranking:
    """Rows in the order of their scores, [rows], of which some are positive, [rows]."""

    def __init__(self, scores: _Array, positive: npt.NDArray[np.bool_]) -> None:
        self._order = np.argsort(scores, kind="stable")
        ordered = scores[self._order]
        self._starts = np.flatnonzero(np.concatenate([[True], ordered[1:] > ordered[:-1]]))  # of each score
        self._positive = positive

    def areas(self, weights: _Array) -> _Array:
        """The AUC by rows of weights, [several, rows]; NaN where there is a single side: [several]."""
        positive, negative, below = self._by_score(weights)
        with np.errstate(invalid="ignore"):
            areas = (positive * below).sum(axis=1) / (positive.sum(axis=1) * negative.sum(axis=1))
        return np.asarray(areas)

    def placements(self, weights: _Array) -> _Array:
        """Structural components (DeLong et al. 1988), of which the AUC is the mean, [rows, 4].

        Of a positive row the share of negative ones below it, ties by half, and 1; then of a negative row the
        share of positive ones above it, and 1; 0 in the other two.  Shares by the rows' weights, [rows].
        """
        positive, negative, below = self._by_score(weights[None])
        above = positive.sum() - positive.cumsum(axis=1) + positive / 2
        shares = np.stack([below[0] / negative.sum(), above[0] / positive.sum()], axis=1)
        counts = np.diff(np.append(self._starts, len(weights)))
        found = np.zeros((len(weights), 4))
        found[self._order, ::2] = np.repeat(shares, counts, axis=0)
        found[:, 1::2] = 1.0
        found[~self._positive, :2] = 0.0
        found[self._positive, 2:] = 0.0
        return found

    def _by_score(self, weights: _Array) -> tuple[_Array, _Array, _Array]:
        """By score: the weight of positive and of negative rows, and of negative ones below; [several, scores]."""
        ordered, is_positive = weights[:, self._order], self._positive[self._order]
        positive = np.add.reduceat(ordered * is_positive, self._starts, axis=1)
        negative = np.add.reduceat(ordered * ~is_positive, self._starts, axis=1)
        return positive, negative, negative.cumsum(axis=1) - negative / 2


@dataclass(frozen=True)
class Scored:
    """A metric of all rows, and of each resample, [replicates].

    With ``is_biased`` resamples lie to one side of the value, so that only a difference has an interval.
    """

    value: float
    replicates: _Array
    level: float
    is_biased: bool = False

    @property
    def interval(self) -> Interval:
        if self.is_biased:
            return Interval(self.value, np.nan, np.nan)
        return self._interval(self.value, self.replicates)

    def minus(self, other: Scored) -> Interval:
        """How much this one is above another one's value on the same rows: a paired difference."""
        return self._interval(self.value - other.value, self.replicates - other.replicates)

    def _interval(self, value: float, replicates: _Array) -> Interval:
        found = replicates[np.isfinite(replicates)]
        if not len(found):
            return Interval(value, np.nan, np.nan)
        low, high = np.quantile(found, [(1 - self.level) / 2, (1 + self.level) / 2], method="linear")
        return Interval(value, float(low), float(high))


class Bootstrap:
    """Resamples of rows, the same ones for all predictions of them, so that differences are paired.

    Percentile intervals (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13).  Rows are
    drawn with replacement, one by one up to ``MAX_GROUPS`` of them.  Where there are more, they are put into as
    many groups at random, of like size, and whole groups are drawn: the variance of a sum over such groups is
    that of the rows (random groups: Wolter, "Introduction to Variance Estimation", 2007, chapter 2), estimated
    within about 1 %, which is less than what a thousand replicates themselves are off.  A replicate in which a
    metric is not defined, such as one without a rare label, is left out.

    Args:
        truth: int64 [rows], or float64 [rows, labels].
        activation: of the values; None: see ``Metric.value``.
        weights: of the rows, not negative, [rows]; None: all the same.
        replicates: how many resamples.
        level: of the intervals.
        seed: of all that is random.
    """

    def __init__(
        self,
        truth: Truth,
        activation: Activation | None = None,
        weights: _Array | None = None,
        replicates: int = REPLICATES,
        level: float = LEVEL,
        seed: int = 0,
    ) -> None:
        self._truth = truth
        self._activation = activation
        self._level = level
        self.weights = np.ones(len(truth)) if weights is None else weights
        generator, rows = np.random.default_rng(seed), len(truth)
        groups = min(rows, MAX_GROUPS)
        self.has_single_rows = groups == rows
        self._order = np.arange(rows) if self.has_single_rows else generator.permutation(rows)
        self._starts = np.linspace(0, rows, groups, endpoint=False).astype(np.int64) if rows else np.arange(0)
        # How often each group is in each replicate.
        self._counts = np.zeros((replicates, groups), np.uint16)
        for counts in self._counts if rows else ():
            counts[:] = np.bincount(generator.integers(0, groups, groups), minlength=groups)

    def score(self, metric: Metric, values: _Array) -> Scored:
        """A metric of values, [rows, labels], with its replicates.

        Raises:
            DataError: as ``Metric.value`` does.
        """
        value = metric.value(self._truth, values, self.weights, self._activation)
        rows = metric.checked(self._truth, values, self._activation)
        with np.errstate(invalid="ignore", divide="ignore"):  # of resamples in which it is not defined
            return Scored(value, metric.of_resamples(rows, self, value), self._level, metric.kind == "bins")

    def sums(
        self, statistics: Callable[[npt.NDArray[np.int64]], _Array], width: int
    ) -> tuple[_Array, _Array]:
        """What statistics sum to in each replicate, [replicates, statistics], and the weights, [replicates].

        Args:
            statistics: gives those of the rows with these numbers, [some rows, statistics].
            width: how many columns they take to be computed, about.
        """
        groups, rows = len(self._starts), len(self._order)
        bounds, found = np.append(self._starts, rows), list[_Array]()
        first = 0
        while first < groups:
            # As many groups as are within the next so many rows.
            limit = bounds[first] + _rows_at_once(width)
            last = max(first + 1, int(np.searchsorted(bounds, limit, side="right")) - 1)
            places = self._order[bounds[first] : bounds[last]]
            own = self.weights[places, None]
            weighted = np.concatenate([statistics(places) * own, own], axis=1)
            found.append(np.add.reduceat(weighted, bounds[first:last] - bounds[first], axis=0))
            first = last
        by_group = np.concatenate(found)
        parts = [part.astype(np.float64) @ by_group for part in self._count_parts()]
        sums = np.concatenate(parts)
        return sums[:, :-1], sums[:, -1]

    def row_weights(self) -> Iterator[_Array]:
        """The rows' weights in some replicates at a time, [some, rows]; where each row is a group of its own."""
        return (part * self.weights for part in self._count_parts())

    def _count_parts(self) -> Iterator[npt.NDArray[np.uint16]]:
        step = max(1, _CELLS // max(1, self._counts.shape[1]))
        return (self._counts[start : start + step] for start in range(0, len(self._counts), step))


def _rows_at_once(width: int) -> int:
    return max(1, _CELLS // max(ECE_BINS, 3 * width))


# Those that need no number behind their name.
METRICS: Final[Mapping[str, Metric]] = {
    one.name: one
    for one in (
        LogLoss(),
        Accuracy(),
        MacroF1(),
        Auc(),
        Brier(),
        CalibrationError(),
        QuadraticKappa(),
        MeanAveragePrecision(3),
        RootMeanSquaredError(),
    )
}
# What is shown where nobody asks for others.
USUAL: Final[Mapping[Activation, tuple[str, ...]]] = {
    "softmax": ("log_loss", "accuracy"),
    "sigmoid": ("log_loss", "auc"),
    "none": ("rmse",),
}


def find_metric(name: str) -> Metric:
    """A metric by its name; ``map@K`` for any K.

    Raises:
        DataError: there is none of that name; names the nearest.
    """
    if name in METRICS:
        return METRICS[name]
    if found := re.fullmatch(r"map@([1-9]\d{0,5})", name):
        return MeanAveragePrecision(int(found[1]))
    raise DataError(f"metric {quoted(name)}: unknown; {nearest_or_all(name, [*METRICS], 'metric')}")
