"""Score values whose truth is known, with 95 % bootstrap intervals and paired differences, for runs and analyses.

A value and its thousand resamples come from the same sums over rows (``metrics.py``), so that a million rows take a
second.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError
from ensemble.merging.methods.base import Values
from ensemble.merging.metrics import METRICS, LabelledRows, Metric, Partition, Rows, row_losses

LEVEL: Final = 0.95
# More rows than these are resampled in groups.
MAX_GROUPS: Final = 8_192
# A function of the user's is called for so many resamples, if one call, or one for each part, is as fast.
_CALLS, _SECONDS_OF_A_CALL = 200, 0.05
# Nats; rows that are all alike may seem to be so far from their own mean.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Interval:
    """Hold a number, or the difference of two, with its 95 % bootstrap interval; without one, both ends are NaN."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """Return whether a difference is more than noise."""
        return self.low > 0 or self.high < 0

    @property
    def size(self) -> Interval:
        """Return the difference without its sign, as in "0.01 worse"."""
        return self if self.value >= 0 else Interval(-self.value, -self.high, -self.low)


class Resamples:
    """Draw a thousand bootstrap resamples of rows, the same for all scores of these rows: differences are paired.

    Intervals are percentiles (Efron and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13). Up to
    8,192 rows are drawn one by one. More rows are dealt into as many random groups of like size, and groups are
    drawn: their sums vary as sums over rows do (Wolter, "Introduction to Variance Estimation", 2007, chapter 2).
    """

    def __init__(self, rows: int, seed: int = 0, most: int = MAX_GROUPS) -> None:
        self._generator = np.random.default_rng(seed)
        self._groups = max(1, min(rows, most))
        self.group_of = np.resize(np.arange(self._groups, dtype=np.uint16), rows)
        self._generator.shuffle(self.group_of)
        self.sizes: Values = np.bincount(self.group_of, minlength=self._groups).astype(np.float64)

    @cached_property
    def counts(self) -> npt.NDArray[np.uint16]:
        """Return how often each group is in each resample, [resamples, groups]."""
        counts = np.zeros((1_000, self._groups), np.uint16)
        for block in np.array_split(counts, 1 + counts.size // 1_000_000):
            drawn = self._generator.integers(0, self._groups, block.shape)
            drawn += self._groups * np.arange(len(block))[:, None]
            block[:] = np.bincount(drawn.ravel(), minlength=block.size).reshape(block.shape)
        return counts

    def by_group(self, rows: slice | npt.NDArray[np.int64], columns: Values) -> Values:
        """Sum the columns of these rows, float64 [rows, columns], by group: [groups, columns]."""
        groups = self.group_of[rows]
        return np.stack([np.bincount(groups, column, self._groups) for column in columns.T], axis=1)

    def sums(self, by_group: Values) -> Values:
        """Sum the groups, [groups] or [groups, columns], of each resample: float64 [resamples, ...]."""
        parts = np.array_split(self.counts, 16)
        with np.errstate(invalid="ignore"):  # of infinite errors
            return np.concatenate([part.astype(np.float64) @ by_group for part in parts])

    def interval(self, value: float, resampled: Values) -> Interval:
        """Return the interval of a value from the resampled ones; those that are not defined are left out."""
        defined = resampled[np.isfinite(resampled)]
        if self._groups < 2 or not len(defined):
            return Interval(value, np.nan, np.nan)
        low, high = np.quantile(defined, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return Interval(value, float(low), float(high))

    @cached_property
    def _resampled_sizes(self) -> Values:
        return self.sums(self.sizes)

    def mean(self, sums: Values, counts: Values | None = None) -> Interval:
        """Return the mean of numbers by their sums and counts in each group, [groups] each; None: of all rows."""
        resampled_counts = self._resampled_sizes if counts is None else self.sums(counts)
        total_count = (self.sizes if counts is None else counts).sum()
        with np.errstate(invalid="ignore", divide="ignore"):
            return self.interval(float(sums.sum() / total_count), self.sums(sums) / resampled_counts)


@dataclass(frozen=True)
class Scored:
    """Hold a metric of all rows and of each resample; a biased one has an interval only in a difference.

    It is the mean over the parts of the ``partition``; None: it is of all rows at once.
    """

    value: float
    replicates: Values
    resamples: Resamples
    is_biased: bool = False
    partition: Partition | None = None

    @property
    def interval(self) -> Interval:
        if self.is_biased:
            return Interval(self.value, np.nan, np.nan)
        return self.resamples.interval(self.value, self.replicates)

    def minus(self, other: Scored) -> Interval:
        """Return how much this value is above another one of the same rows."""
        return self.resamples.interval(self.value - other.value, self.replicates - other.replicates)


class Bootstrap:
    """Score predictions of the same rows on the same resamples, so that differences are paired.

    ``seed`` is that of the resamples. Where rows are divided, see ``Metric.partition``, they are resampled within
    each part.
    """

    def __init__(self, known: LabelledRows, seed: int = 0, parts: int = 1) -> None:
        self._known, self._parts_of_all = known, parts
        # All parts together take little memory.
        self._resamples = Resamples(len(known), seed, max(16, min(MAX_GROUPS, 8 * MAX_GROUPS // parts)))
        self._parts: dict[tuple[str, int], Bootstrap] = {}

    def score(self, metric: Metric, values: Values) -> Scored:
        """Return a metric of float64 [rows, labels] with its resamples; raises what ``Metric.value`` raises."""
        partition = metric.partition(self._known, values)
        if partition is None:
            return self._of_all(metric, values)
        scores = list[Scored]()
        for number, (rows, part) in partition.parts.items():
            key = partition.by, number
            if key not in self._parts:
                self._parts[key] = Bootstrap(part, number, len(partition.parts))
            scores.append(self._parts[key]._of_all(metric, values[rows]))
        value = float(np.mean([score.value for score in scores]))
        resampled = np.stack([score.replicates for score in scores])
        is_defined = np.isfinite(resampled)
        with np.errstate(invalid="ignore"):  # resamples in which no part has the metric
            replicates = np.where(is_defined, resampled, 0.0).sum(axis=0) / is_defined.sum(axis=0)
        if not is_defined.any(axis=1).all():  # a part has no interval
            replicates[:] = np.nan
        return replace(
            scores[0], value=value, replicates=replicates, resamples=self._resamples, partition=partition
        )

    def _of_all(self, metric: Metric, values: Values) -> Scored:
        rows = Rows(self._known, values)
        by_group = metric.sums(rows, self._resamples.by_group)
        value = metric.of_all(rows, by_group.sum(axis=0))
        if metric.kind == "own":
            return Scored(value, self._called(metric, rows), self._resamples)
        resampled = self._resamples.sums(np.column_stack([by_group, self._resamples.sizes]))
        with np.errstate(invalid="ignore", divide="ignore"):  # resamples in which it is not defined
            replicates = metric.of_sums(resampled[:, :-1], resampled[:, -1], rows.is_exclusive)
        return Scored(value, replicates, self._resamples, is_biased=metric.kind == "bins")

    def _called(self, metric: Metric, rows: Rows) -> Values:
        """Return a metric of the user's for 200 resamples; NaN where it has no value, or for all if it is slow."""
        replicates, began = np.full(_CALLS, np.nan), time.perf_counter()
        for number, counts in enumerate(self._resamples.counts[:_CALLS]):
            drawn = np.repeat(np.arange(len(rows.values)), counts[self._resamples.group_of])
            with contextlib.suppress(DataError):
                replicates[number] = metric.of_rows(Rows(self._known.taken(drawn), rows.values[drawn]))
            if not number and (time.perf_counter() - began) * self._parts_of_all > _SECONDS_OF_A_CALL:
                return np.full(_CALLS, np.nan)
        return replicates

    def of_common_rows(self, *values: Values) -> tuple[Bootstrap, list[Values]]:
        """Return the values without rows in which any of them is NaN, and what scores these rows."""
        is_common = ~np.any([np.isnan(part).any(axis=1) for part in values], axis=0)
        if is_common.all():
            return self, [*values]
        return Bootstrap(self._known.taken(is_common)), [part[is_common] for part in values]


@dataclass(frozen=True)
class Score:
    """Hold the score of a member, or of the ensemble, over ``rows``; None for metrics that such values do not have.

    ``log_loss`` is in nats per row, of labels that do not exclude each other the mean over labels, as ``rmse`` is.
    ``prior_log_loss`` is that of always predicting the labels' frequencies, among the labels that are possible in a
    row; ``above_prior`` is the log loss minus it.
    ``metrics`` are those that the config asks for, by name.
    ``no_better_than_prior``: not even the low end of that interval is 1 % of the way from the prior to the truth.
    """

    log_loss: float | None
    accuracy: float | None
    rows: int
    prior_log_loss: float | None
    no_better_than_prior: bool
    rmse: float | None = None
    above_prior: Interval | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Gain:
    """Hold by how much the ensemble's mean loss is below that of its best member on the same rows.

    ``low`` to ``high`` is the paired 95 % interval, None of a single row. It does not know that the best member was
    chosen on the same rows, nor of weights that were fitted on them.
    """

    best_member: str
    gain: float
    low: float | None
    high: float | None
    rows: int
    of: Literal["log loss", "squared error"] = "log loss"


@dataclass(frozen=True)
class CascadeComparison:
    """Compare the ensemble with and without a member on the rows that the member has: below 0 is a gain."""

    rows: int
    log_loss: float
    log_loss_without: float
    accuracy: float | None
    accuracy_without: float | None
    difference: Interval
    difference_over_all: Interval


class Scoring:
    """Add up log loss and accuracy of probabilities, or errors of regression, block by block.

    Args:
        resamples: of the rows, shared by all scorings that are compared.
        has_loss: False for values that are no probabilities; they have an accuracy at most.
    """

    def __init__(self, known: LabelledRows, resamples: Resamples, has_loss: bool = True) -> None:
        self._known = known
        self._resamples = resamples
        self._has_loss = has_loss
        self._loss = METRICS["rmse" if known.activation == "none" else "log_loss"]
        self._hits = 0.0
        # What the loss sums, by group: [groups, 1], or of errors [groups, labels].
        self._sums = np.zeros(
            (len(resamples.sizes), known.truth.shape[1] if known.activation == "none" else 1)
        )

    def add(self, start: int, values: Values) -> None:
        """Add the rows from ``start`` on, float64 [rows, labels]."""
        span = slice(start, start + len(values))
        rows = Rows(self._known.taken(span), values)
        if rows.is_exclusive:
            self._hits += float(METRICS["accuracy"].statistics(rows).sum())
        if self._has_loss:
            self._sums += self._resamples.by_group(span, self._loss.statistics(rows))

    @property
    def loss(self) -> float:
        """Return the sum of all rows' losses, of several errors in a row their mean."""
        return float(self._losses.sum())

    @property
    def _losses(self) -> Values:
        """Return the sums of the losses, [groups]."""
        return np.asarray(self._sums.mean(axis=1))

    def score(self) -> Score | None:
        """Return the score of all rows, once each was added; None if such values have none."""
        rows, known = len(self._known), self._known
        accuracy = self._hits / rows if known.activation == "softmax" else None
        score = Score(None, accuracy, rows, prior_log_loss=None, no_better_than_prior=False)
        if not self._has_loss:
            return None if accuracy is None else score
        loss = float(self._loss.of_sums(self._sums.sum(axis=0), np.array(float(rows)), accuracy is not None))
        if known.activation == "none":
            return replace(score, rmse=loss)
        prior_losses = _prior_losses(known)
        prior = float(prior_losses.mean())
        by_group = self._resamples.by_group(slice(None), prior_losses[:, None])
        above_prior = self._resamples.mean(self._losses - by_group[:, 0])
        # The truth's own loss is above 0 where it is probabilities.
        least = (
            float(row_losses(known, known.truth.astype(np.float64)).mean()) if known.truth.ndim > 1 else 0.0
        )
        # One per cent of what can be gained over the prior counts as no gain.
        is_no_better = prior - least > _ROUNDING and above_prior.low > (least - prior) * 0.01
        return replace(
            score,
            log_loss=loss,
            prior_log_loss=prior,
            no_better_than_prior=is_no_better,
            above_prior=above_prior,
        )

    def gain_over(self, member: Scoring, name: str) -> Gain:
        """Return how much less the loss is than a member's on the same rows."""
        gain = self._resamples.mean(member._losses - self._losses)
        has_interval = not np.isnan(gain.low)
        return Gain(
            best_member=name,
            gain=gain.value,
            low=gain.low if has_interval else None,
            high=gain.high if has_interval else None,
            rows=len(self._known),
            of="squared error" if self._known.activation == "none" else "log loss",
        )


def _prior_losses(known: LabelledRows) -> Values:
    """Return the losses of always predicting the labels' frequencies, [rows].

    Labels that are not possible in every row are weighed by how often they occur against how often even odds
    among a row's possible labels would give them: the first step of Hunter's "MM algorithms for generalized
    Bradley-Terry models" (2004), which is exact where all labels are equally likely. Where a true label is
    impossible, all labels of the row count as possible.
    """
    truth = known.truth
    possible = np.ones((1, truth.shape[1] if truth.ndim == 2 else int(truth.max()) + 1), np.bool_)
    if known.possible is not None:
        possible = known.possible
        is_true = truth > 0 if truth.ndim == 2 else truth[:, None] == np.arange(possible.shape[1])
        possible = possible | (is_true & ~possible).any(axis=1, keepdims=True)
    counts = truth.sum(axis=0)
    if truth.ndim == 1:
        counts = np.bincount(truth.astype(np.int64), minlength=possible.shape[1])
    if known.activation == "sigmoid":
        rows_of_labels = np.maximum(1, possible.mean(axis=0) * len(truth))
        return row_losses(known, possible * (counts / rows_of_labels))
    even_counts = (possible.shape[1] / possible.sum(axis=1)) @ possible
    shares = counts / np.where(even_counts > 0, even_counts, np.inf)
    losses = -np.log(np.where(shares > 0, shares, 1 / len(truth)))
    losses_of_rows = losses[truth.astype(np.int64)] if truth.ndim == 1 else truth @ losses
    return np.asarray(losses_of_rows + np.log(possible @ shares))


class CascadeScoring:
    """Add up a ``CascadeComparison`` of probabilities block by block."""

    def __init__(self, known: LabelledRows, resamples: Resamples) -> None:
        self._known = known
        self._resamples = resamples
        # Rows, losses with and without the member, hits with and without it.
        self._sums = np.zeros((len(resamples.sizes), 5))

    def add(self, rows: npt.NDArray[np.int64], values: Values, without: Values) -> None:
        """Add rows of the table with what the ensemble gives to them, float64 [n, labels] each."""
        known = self._known.taken(rows)
        scored = [Rows(known, values), Rows(known, without)]
        columns = [METRICS[name].statistics(side) for name in ("log_loss", "accuracy") for side in scored]
        self._sums += self._resamples.by_group(rows, np.hstack([np.ones((len(rows), 1)), *columns]))

    def result(self) -> CascadeComparison | None:
        """Return the comparison, or None if there were no rows."""
        rows, loss, loss_without, right, right_without = self._sums.sum(axis=0).tolist()
        if not rows:
            return None
        is_exclusive = self._known.activation == "softmax"
        differences = self._sums[:, 1] - self._sums[:, 2]
        return CascadeComparison(
            rows=int(rows),
            log_loss=loss / rows,
            log_loss_without=loss_without / rows,
            accuracy=right / rows if is_exclusive else None,
            accuracy_without=right_without / rows if is_exclusive else None,
            difference=self._resamples.mean(differences, self._sums[:, 0]),
            difference_over_all=self._resamples.mean(differences),
        )
