"""Define each metric by the sums over rows that it is made of, in NumPy alone so that a run can use it.

``scoring.py`` adds them up, block by block and for resamples. If the truth of exclusive labels is probabilities,
the label of a row is the most likely label, or the first of several.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from numbers import Real
from pathlib import Path
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import first_line, listed, nearest_or_all, plural, quoted, similar_file
from ensemble.common.user_code import function_of, import_module, names_file
from ensemble.data.answers import Answer, are_numbers
from ensemble.data.table import DistinctCells, Truth
from ensemble.merging.calibration import EPSILON
from ensemble.merging.methods.base import Values, block_spans

QUADRATIC_KAPPA: Final = "quadratic_kappa"
MACRO_F1: Final = "macro_f1"
MICRO_F1: Final = "micro_f1"
F1: Final = (MACRO_F1, MICRO_F1)
# The fold of each row, [rows].
Folds: TypeAlias = npt.NDArray[np.int64]
# Bool [rows, labels], or [rows].
Flags: TypeAlias = npt.NDArray[np.bool_]
ECE_BINS: Final = 15
_ROUNDING = 1e-12
_ONE_LABEL = "the truth and the predictions hold one and the same label in all of them"
_NUMERIC: Final[tuple[Activation, ...]] = ("none", "sigmoid")
_ONE_SIDE = "each label needs rows that have it and rows that lack it"
_ONE_NUMBER = "the truth or the predictions are the same number in all of them"
_KINDS = {"softmax": "exclusive labels", "sigmoid": "labels that are not exclusive", "none": "regression"}
MetricKind: TypeAlias = Literal["mean", "sums", "ranks", "bins", "own"]
METRIC_KINDS: Final[Mapping[MetricKind, str]] = {
    "mean": "the mean of one number for each row",
    "sums": "a function of sums over rows",
    "ranks": "rows compared with each other",
    "bins": "rows put into bins",
    "own": "a function of yours",
}


class UndefinedMetric(DataError):
    """Say why a metric has no value for this truth."""


@dataclass(frozen=True, eq=False)
class LabelledRows:
    """Hold what must be known of rows to score what members, or the ensemble, give to them.

    Attributes:
        truth: label numbers, int64 [rows], of exclusive labels; or float64 [rows, labels]: of these probabilities
            that sum to 1, of others probabilities, of regression any numbers.
        activation: what truth and values are; "none" is regression.
        possible: which labels are possible in each row, bool [rows, labels]; None: all.
        folds: which rows were predicted by models of their own, the fold of each row; None: one model for all rows.
        groups: the cells of the columns that divide rows into groups, by column.
        labels: their names, which a metric of the user's gets.
        part: which part of other rows they are, in words; empty: these are all.
        partitions: those that were made of these rows, by metric.
    """

    truth: Truth
    activation: Activation
    possible: Flags | None
    folds: Folds | None
    groups: Mapping[str, DistinctCells] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    part: str = ""
    partitions: dict[str, Partition] = field(default_factory=dict, init=False)

    def __len__(self) -> int:
        return len(self.truth)

    @property
    def text(self) -> str:
        return f"{plural(len(self), 'row')}{f' of {self.part}' if self.part else ''}"

    def taken(self, rows: slice | npt.NDArray[np.int64] | Flags) -> LabelledRows:
        """Return these rows, in this order."""
        return replace(
            self,
            truth=self.truth[rows],
            possible=None if self.possible is None else self.possible[rows],
            folds=None if self.folds is None else self.folds[rows],
            groups={column: cells.taken(rows) for column, cells in self.groups.items()},
        )

    @property
    def true_labels(self) -> npt.NDArray[np.int64]:
        """Return the label of each row with exclusive labels, [rows]."""
        return np.asarray(self.truth.argmax(axis=1) if self.truth.ndim == 2 else self.truth, np.int64)


@dataclass(frozen=True, eq=False)
class Partition:
    """Hold the parts of rows, divided ``by`` group or fold or both, over which a metric is averaged.

    Attributes:
        parts: by number, the rows of each part in which the metric is defined, and what is known of them.
        undefined: the names of the other parts.
    """

    by: str
    parts: Mapping[int, tuple[npt.NDArray[np.int64], LabelledRows]]
    undefined: tuple[str, ...]

    @property
    def text(self) -> str:
        where = "" if self.by == "fold" else f" by {self.by}"
        text = f"the mean over {plural(len(self.parts), 'group' if where else 'fold')}{where}"
        if self.undefined:
            text += f"; not defined in {len(self.undefined):,} more: {listed(self.undefined, 5, str)}"
        return text


@dataclass(frozen=True, eq=False)
class Rows:
    """Hold rows with the values that are scored, float64 [rows, labels]; ``whole`` are all rows, of a part."""

    known: LabelledRows
    values: Values
    whole: Rows | None = None

    @property
    def is_exclusive(self) -> bool:
        return self.known.activation == "softmax"

    @cached_property
    def true_labels(self) -> npt.NDArray[np.int64]:
        return self.known.true_labels

    @cached_property
    def true_each(self) -> npt.NDArray[np.bool_]:
        """Return which labels are true, [rows, labels]."""
        if self.is_exclusive:
            return np.asarray(self.true_labels[:, None] == np.arange(self.values.shape[1]))
        return np.asarray(self.known.truth > 0.5)

    @cached_property
    def predicted_each(self) -> npt.NDArray[np.bool_]:
        return decisions(self.values, self.known.activation)

    @cached_property
    def probabilities(self) -> Values:
        """Return the values, [rows, labels]; those of exclusive labels scaled to sum to 1."""
        if not self.is_exclusive:
            return self.values
        sums = self.values.sum(axis=1, keepdims=True)
        return np.where(np.abs(sums - 1) > _ROUNDING, self.values / sums, self.values)

    @cached_property
    def means(self) -> tuple[Values, Values]:
        """Return the means of the truth and of the values over all rows, [labels] each."""
        if self.whole is not None:
            return self.whole.means
        return self.known.truth.mean(axis=0), self.values.mean(axis=0)

    def part(self, rows: slice) -> Rows:
        return Rows(self.known.taken(rows), self.values[rows], self)


def decisions(values: Values, activation: Activation) -> Flags:
    """Return which labels are predicted, [..., labels]: the likeliest, or all above 0.5."""
    if activation == "softmax":
        return np.asarray(values.argmax(axis=-1)[..., None] == np.arange(values.shape[-1]))
    return np.asarray(values > 0.5)


def _first_mean(sums: Values, count: Values, is_exclusive: bool) -> Values:
    return np.asarray(sums[..., 0] / count)


@dataclass(frozen=True)
class Metric:
    """Compute a metric as a function of sums over rows.

    Attributes:
        name: as users write it.
        kind: what it does with rows, see ``METRIC_KINDS``.
        statistics: what it sums, float64 [rows, statistics]; for "ranks" once for each label.
        of_sums: the metric from these sums, [..., statistics], the number of rows, [...], and whether labels are
            exclusive; NaN where it is not defined.
        takes: the kinds of values that it is defined for.
        why_undefined: why it has no value for some rows.
        group: the column that divides rows into groups, over which it is averaged; None: it is of all rows.
    """

    name: str
    kind: MetricKind
    statistics: Callable[[Rows], Values]
    of_sums: Callable[[Values, Values, bool], Values] = _first_mean
    greater_is_better: bool = True
    takes: tuple[Activation, ...] = ("softmax", "sigmoid")
    why_undefined: str = "its denominator is 0"
    group: str | None = None

    def value(self, known: LabelledRows, values: Values) -> float:
        """Return the metric of all rows, or its mean over the parts of their partition in which it is defined.

        Args:
            values: float64 [rows, labels].

        Raises:
            UndefinedMetric: there are no rows, or it has no value for this truth.
            DataError: it is not defined for such values, or some rows have none.
        """
        partition = self.partition(known, values)
        if partition is None:
            return self.of_rows(Rows(known, values))
        parts = partition.parts.values()
        return float(np.mean([self.of_rows(Rows(part, values[rows])) for rows, part in parts]))

    def of_rows(self, rows: Rows) -> float:
        """Return the metric of all rows at once; raises what ``value`` raises."""
        return self.of_all(rows, self.sums(rows, lambda _, statistics: statistics.sum(axis=0)))

    def partition(self, known: LabelledRows, values: Values) -> Partition | None:
        """Divide the rows by their groups and, if the metric ranks rows, by folds; None: they have neither.

        For all values these are the same parts, because the truth alone decides where a metric is defined.

        Raises:
            UndefinedMetric: it is defined in no part.
            DataError: all rows are in one group.
        """
        cells = None if self.group is None else known.groups[self.group]
        folds = known.folds if self.kind == "ranks" else None
        if cells is None and folds is None:
            return None
        if cells is not None and len(cells.values) < 2:
            only = f"column {quoted(cells.name)} is {quoted(cells.values[0])} in every row"
            raise DataError(f"{self.name}: {only}; name a column with two groups or more")
        if self.name not in known.partitions:
            known.partitions[self.name] = self._divided(known, values, cells, folds)
        return known.partitions[self.name]

    def _divided(
        self, known: LabelledRows, values: Values, cells: DistinctCells | None, folds: Folds | None
    ) -> Partition:
        by = {} if cells is None else {f"column {quoted(cells.name)}": cells.numbers}
        by |= {} if folds is None else {"fold": folds}
        part_of = np.unique(np.stack([*by.values()]), axis=1, return_inverse=True)[1].reshape(-1)
        rows_of = np.split(np.argsort(part_of, kind="stable"), np.cumsum(np.bincount(part_of))[:-1])
        parts, undefined = dict[int, tuple[npt.NDArray[np.int64], LabelledRows]](), list[str]()
        for place, rows in enumerate(rows_of if len(known) else ()):
            names = [] if cells is None else [quoted(cells.values[cells.numbers[rows[0]]])]
            names += [] if folds is None else [f"fold {folds[rows[0]]}"]
            part = replace(known.taken(rows), folds=None, groups={}, part=" in ".join(names))
            tried = Rows(part, values[rows])
            if self.kind != "own":  # a function may have no number for probabilities of 0 and 1
                truth = part.truth if part.truth.ndim == 2 else tried.true_each
                tried = Rows(part, np.asarray(truth, np.float64))
            try:
                self.of_rows(tried)
                parts[place] = rows, part
            except UndefinedMetric:
                undefined.append(part.part)
        names_of_all = " and ".join(by)
        if not parts:
            why = f"not defined in any part of the rows, by {names_of_all}: {self.why_undefined}"
            raise UndefinedMetric(f"{self.name}: {why}")
        return Partition(names_of_all, parts, tuple(undefined))

    def sums(self, rows: Rows, add: Callable[[slice, Values], Values]) -> Values:
        """Sum the statistics by ``add``, in blocks that take little memory; raises what ``value`` raises."""
        if not len(rows.values):
            raise UndefinedMetric(f"{self.name}: there are no rows to score")
        if rows.known.activation not in self.takes:
            takes = " and ".join(_KINDS[kind] for kind in self.takes)
            kind = _KINDS[rows.known.activation]
            raise DataError(f"{self.name}: is for {takes}, and these values are of {kind}")
        missing = int((~np.isfinite(rows.values).all(axis=1)).sum())
        if missing:
            raise DataError(f"{self.name}: {plural(missing, 'row')} without predictions; leave them out")
        if self.kind == "ranks":
            return np.hstack([add(slice(None), self.statistics(label)) for label in _by_label(rows)])
        spans = [slice(*span) for span in block_spans(*rows.values.shape)]
        return np.asarray(sum(add(span, self.statistics(rows.part(span))) for span in spans))

    def of_all(self, rows: Rows, sums: Values) -> float:
        """Return the metric from the sums over all rows; raises what ``value`` raises."""
        count = len(rows.values)
        with np.errstate(invalid="ignore", divide="ignore"):
            value = float(self.of_sums(sums, np.array(float(count)), rows.is_exclusive))
        if not np.isfinite(value):
            raise UndefinedMetric(
                f"{self.name}: not defined for these {rows.known.text}: {self.why_undefined}"
            )
        return value


@dataclass(frozen=True, kw_only=True)
class OwnMetric(Metric):
    """Compute a metric by a function of the user's, which gets the truth, probabilities and labels."""

    function: Callable[[Truth, Values, list[str]], object]

    def of_all(self, rows: Rows, sums: Values) -> float:
        truth, values = rows.known.truth.copy(), np.array(rows.values)  # it may change them
        try:
            with contextlib.redirect_stdout(sys.stderr):  # a program may read what the command prints
                value = self.function(truth, values, [*rows.known.labels])
        except (Exception, SystemExit) as error:
            raise DataError(f"metric {self.name}: raised {first_line(error)}") from error
        if not isinstance(value, Real):
            raise DataError(f"metric {self.name}: returned {value!r:.60}; it must return one number")
        if not np.isfinite(float(value)):
            raise UndefinedMetric(f"metric {self.name}: returned {value} for {rows.known.text}")
        return float(value)


def _log_losses(rows: Rows) -> Values:
    return row_losses(rows.known, rows.values)[:, None]


def _hits(rows: Rows) -> Values:
    """Return whether the likeliest label is the true one, or if not exclusive whether all labels are right."""
    if rows.is_exclusive:
        is_right = rows.values.argmax(axis=1) == rows.true_labels
    else:
        is_right = (rows.predicted_each == rows.true_each).all(axis=1)
    return np.asarray(is_right[:, None], np.float64)


def _brier(rows: Rows) -> Values:
    """Return squared errors (Brier 1950), summed over more than two exclusive labels, else their mean."""
    truth = rows.true_each if rows.known.truth.ndim == 1 else rows.known.truth
    squares = np.square(rows.probabilities - truth)
    if rows.is_exclusive and squares.shape[1] > 2:
        return np.asarray(squares.sum(axis=1, keepdims=True))
    return np.asarray(squares.mean(axis=1, keepdims=True))


def _average_precision(rows: Rows, k: int) -> Values:
    """Return the average precision at k (Kaggle's ``apk``); of equal values the first label goes first."""
    likeliest = np.argsort(-rows.values, axis=1, kind="stable")[:, :k]
    is_hit = np.take_along_axis(rows.true_each, likeliest, axis=1)
    return _precisions(is_hit, rows.true_each.sum(axis=1))[:, None]


def _precisions(is_hit: Flags, true_counts: npt.NDArray[np.int64]) -> Values:
    """Return each row's average precision, [rows], of k answers that are hits or not, [rows, k]."""
    precisions = is_hit.cumsum(axis=1) / np.arange(1, is_hit.shape[1] + 1)
    return np.asarray((precisions * is_hit).sum(axis=1) / np.clip(true_counts, 1, is_hit.shape[1]))


def _discounts(places: int) -> Values:
    return np.asarray(1 / np.log2(np.arange(2, places + 2)))


def _discounted_gains(rows: Rows, k: int) -> Values:
    """Return nDCG at k (Järvelin and Kekäläinen 2002); equal values share their places, as in scikit-learn."""
    relevance = (rows.true_each if rows.is_exclusive else rows.known.truth).astype(np.float64)
    order = np.argsort(-rows.values, axis=1)
    ranked, gains = (np.take_along_axis(cells, order, axis=1) for cells in (rows.values, relevance))
    group = np.insert(ranked[:, 1:] < ranked[:, :-1], 0, True, axis=1).cumsum() - 1
    shared = (np.bincount(group, gains.ravel()) / np.bincount(group))[group].reshape(gains.shape)
    discounts = _discounts(relevance.shape[1]) * (np.arange(relevance.shape[1]) < k)
    return _quotient(shared @ discounts, np.sort(relevance, axis=1)[:, ::-1] @ discounts)[:, None]


def _reciprocal_ranks(rows: Rows) -> Values:
    """Return 1 / the place of the likeliest true label, behind false labels of the same value; 0 without one."""
    is_true = rows.true_each
    best = np.where(is_true, rows.values, -np.inf).max(axis=1, keepdims=True)
    places = 1 + (~is_true & (rows.values >= best)).sum(axis=1)
    return np.where(is_true.any(axis=1), 1 / places, 0.0)[:, None]


def _label_counts(rows: Rows) -> Values:
    true, predicted = rows.true_each, rows.predicted_each
    return np.concatenate([true & predicted, true, predicted], axis=1).astype(np.float64)


def _f1(sums: Values, count: Values, is_exclusive: bool, average: str) -> Values:
    """Return the mean of the labels' F1, 2 tp / (2 tp + fp + fn), of exclusive labels over those that occur.

    It is weighted by nothing ("macro"), by how often labels are true, or by the denominator ("micro").
    """
    right, true, predicted = np.split(sums, 3, axis=-1)
    total = true + predicted
    weights = {"macro": np.where(is_exclusive, total > 0, 1.0), "micro": total, "weighted": true}[average]
    return _quotient((weights * _quotient(2 * right, total)).sum(axis=-1), weights.sum(axis=-1))


def _quotient(above: Values, below: Values) -> Values:
    """Divide; what is divided by 0 is 0, as scikit-learn's scores are by default."""
    return np.divide(above, below, out=np.zeros_like(below), where=below > 0)


def _matthews(sums: Values, count: Values, is_exclusive: bool) -> Values:
    """Return Matthews' correlation coefficient: R_K of exclusive labels (Gorodkin 2004), else the labels' mean."""
    right, true, predicted = np.split(sums, 3, axis=-1)
    rows = np.asarray(count)[..., None]
    parts = [right * rows - true * predicted, true * (rows - true), predicted * (rows - predicted)]
    if is_exclusive:
        parts = [part.sum(axis=-1, keepdims=True) for part in parts]
    covariance, true_spread, predicted_spread = parts
    return np.asarray(_quotient(covariance, np.sqrt(true_spread * predicted_spread)).mean(axis=-1))


def _label_moments(rows: Rows, numbers: Sequence[float]) -> Values:
    """Return what the quadratic kappa sums, of the labels' places in rising order of their numbers."""
    places = np.argsort(np.argsort(numbers or range(rows.values.shape[1]))).astype(np.float64)
    return np.stack([*_moments(places[rows.true_labels], places[rows.values.argmax(axis=1)])], axis=1)


def _moments(true: Values, predicted: Values) -> Iterator[Values]:
    yield (true - predicted) ** 2
    for places in (true, predicted):
        yield places
        yield places**2


def _quadratic_kappa(sums: Values, count: Values, is_exclusive: bool) -> Values:
    """Return Cohen's kappa with quadratic weights (1968): 1 - squared distance / the one expected by chance."""
    observed, true, true_squares, predicted, predicted_squares = np.moveaxis(sums, -1, 0) / count
    expected = true_squares + predicted_squares - 2 * true * predicted
    return np.asarray(1 - observed / np.where(expected > _ROUNDING, expected, np.nan))


def _cohen_kappa(sums: Values, count: Values, is_exclusive: bool) -> Values:
    """Return the agreement with the truth beyond chance (Cohen 1960): (observed - chance) / (1 - chance)."""
    same, true, predicted = np.split(sums / np.asarray(count)[..., None], 3, axis=-1)
    chance = (true * predicted).sum(axis=-1)
    return np.asarray((same.sum(axis=-1) - chance) / np.where(chance < 1 - _ROUNDING, 1 - chance, np.nan))


def _calibration_gaps(rows: Rows) -> Values:
    """Return right minus probability in 15 bins of the likeliest label's probability, or of each label's own."""
    if rows.is_exclusive:
        chance = rows.probabilities.max(axis=1, keepdims=True)
        is_right = _hits(rows)
    else:
        chance, is_right = rows.values, rows.known.truth.astype(np.float64)
    labels = chance.shape[1]
    # (0, 1/15], (1/15, 2/15], ...; 0 belongs to the first.
    bins = np.searchsorted(np.arange(1, ECE_BINS) / ECE_BINS, chance, side="left")
    gaps = np.zeros((len(chance), labels * ECE_BINS))
    np.put_along_axis(gaps, bins + ECE_BINS * np.arange(labels), (is_right - chance) / labels, axis=1)
    return gaps


def _calibration_error(sums: Values, count: Values, is_exclusive: bool) -> Values:
    """Return the expected calibration error (Naeini et al. 2015), of which resamples tend to have more."""
    return np.asarray(np.abs(sums).sum(axis=-1) / count)


def _squared_errors(rows: Rows) -> Values:
    return np.asarray(np.square(rows.values - rows.known.truth))


def _rmse(sums: Values, count: Values, is_exclusive: bool) -> Values:
    return np.asarray(np.sqrt(sums / np.asarray(count)[..., None]).mean(axis=-1))


def _products(rows: Rows) -> Values:
    """Return what Pearson's correlation sums, 5 numbers a label, of distances from means: large ones cancel."""
    true_mean, mean = rows.means
    true, values = rows.known.truth - true_mean, rows.values - mean
    return np.stack([true, values, true**2, values**2, true * values], axis=2).reshape(len(true), -1)


def _correlation(sums: Values, count: Values, is_exclusive: bool) -> Values:
    """Return Pearson's correlation of the truth and the values, the mean over labels."""
    means = sums.reshape(*sums.shape[:-1], -1, 5) / np.asarray(count)[..., None, None]
    true, values, true_squares, value_squares, products = np.moveaxis(means, -1, 0)
    true_variance, variance = true_squares - true**2, value_squares - values**2
    is_constant = ~(np.minimum(true_variance / true_squares, variance / value_squares) > _ROUNDING)
    spread = np.where(is_constant, np.nan, np.sqrt(true_variance * variance))
    return np.asarray(((products - true * values) / spread).mean(axis=-1))


def _by_label(rows: Rows) -> Iterator[Rows]:
    """Yield each label against the rest as if it were the only one; of two exclusive labels the second alone."""
    labels = rows.values.shape[1]
    for label in (1,) if rows.is_exclusive and labels == 2 else range(labels):
        truth = (rows.true_each if rows.is_exclusive else rows.known.truth)[:, label].astype(np.float64)
        yield Rows(LabelledRows(truth, "sigmoid", possible=None, folds=None), rows.values[:, label])


def _placements(rows: Rows) -> Values:
    """Return structural components of the AUC of one label (DeLong et al. 1988), [rows, 3].

    For a positive row the share of negative ones below it, for a negative row the share of positive ones above it,
    ties by half, each less half the AUC; then whether the row is positive. The AUC of a resample is the sum of both
    sides' means, but for terms of the order of 1 / rows.
    """
    is_positive = rows.known.truth > 0.5
    _, score_of, counts = np.unique(rows.values, return_inverse=True, return_counts=True)
    positives = np.bincount(score_of, is_positive, len(counts))
    negatives = counts - positives
    with np.errstate(invalid="ignore"):  # no row of one side
        below = (negatives.cumsum() - negatives / 2) / negatives.sum()
        above = (positives.sum() - positives.cumsum() + positives / 2) / positives.sum()
        half = positives @ below / positives.sum() / 2
    columns = [
        np.where(is_positive, below[score_of] - half, 0.0),
        np.where(is_positive, 0.0, above[score_of] - half),
        is_positive,
    ]
    return np.column_stack(columns)


def _auc(sums: Values, count: Values, is_exclusive: bool) -> Values:
    """Return the area under the ROC curve (Hanley and McNeil 1982), the mean of each label against the rest."""
    above, below, positives = np.moveaxis(sums.reshape(*sums.shape[:-1], -1, 3), -1, 0)
    negatives = np.asarray(count)[..., None] - positives
    return np.asarray((above / positives + below / negatives).mean(axis=-1))


def _rank_sums(rows: Rows) -> Values:
    """Return structural components of the ranks' covariance and of both variances, of one label, [rows, 3].

    A rank is the share of rows below, equal ones by half, less 1/2. A row counts by its ranks, and by those above,
    which it raises (minus those below: all sum to 0). So resamples are ranked anew, but for terms of 1 / rows.
    """
    sides = [np.unique(side, return_inverse=True)[1] for side in (rows.known.truth, rows.values)]
    ranks = [_below(side, np.ones(len(side))) - 0.5 for side in sides]
    columns = []
    for first, second in ((0, 1), (0, 0), (1, 1)):
        products = ranks[first] * ranks[second]
        raised = -_below(sides[first], ranks[second]) - _below(sides[second], ranks[first])
        columns.append(products - 2 * products.mean() + raised)
    return np.column_stack(columns)


def _below(places: npt.NDArray[np.int64], numbers: Values) -> Values:
    """Return the sum of the numbers of rows below each row, equal ones by half, over the count of rows."""
    totals = np.bincount(places, numbers)
    return np.asarray((totals.cumsum() - totals / 2)[places] / len(places))


def _rank_correlation(sums: Values, count: Values, is_exclusive: bool) -> Values:
    """Return Spearman's correlation, the mean over labels."""
    covariance, true_variance, variance = np.moveaxis(sums.reshape(*sums.shape[:-1], -1, 3), -1, 0)
    return np.asarray((covariance / np.sqrt(true_variance * variance)).mean(axis=-1))


def _at_k(name: str, k: int) -> Metric:
    statistics = {"map": _average_precision, "ndcg": _discounted_gains}[name]
    return Metric(f"{name}@{k}", "mean", partial(statistics, k=k))


# Metrics without a number in their name.
METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric("log_loss", "mean", _log_losses, greater_is_better=False),
        Metric("accuracy", "mean", _hits),
        Metric(MACRO_F1, "sums", _label_counts, partial(_f1, average="macro")),
        Metric(MICRO_F1, "sums", _label_counts, partial(_f1, average="micro")),
        Metric("weighted_f1", "sums", _label_counts, partial(_f1, average="weighted")),
        Metric("mcc", "sums", _label_counts, _matthews),
        Metric("auc", "ranks", _placements, _auc, why_undefined=_ONE_SIDE),
        Metric("brier", "mean", _brier, greater_is_better=False),
        Metric("ece", "bins", _calibration_gaps, _calibration_error, greater_is_better=False),
        Metric(
            "cohen_kappa", "sums", _label_counts, _cohen_kappa, takes=("softmax",), why_undefined=_ONE_LABEL
        ),
        Metric(
            QUADRATIC_KAPPA,
            "sums",
            partial(_label_moments, numbers=()),
            _quadratic_kappa,
            takes=("softmax",),
            why_undefined=_ONE_LABEL,
        ),
        _at_k("map", 3),
        _at_k("ndcg", 10),
        Metric("mrr", "mean", _reciprocal_ranks),
        Metric("rmse", "sums", _squared_errors, _rmse, greater_is_better=False, takes=_NUMERIC),
        Metric("pearson", "sums", _products, _correlation, takes=_NUMERIC, why_undefined=_ONE_NUMBER),
        Metric("spearman", "ranks", _rank_sums, _rank_correlation, takes=_NUMERIC, why_undefined=_ONE_NUMBER),
    )
}
# Shown by default.
USUAL: Final[Mapping[Activation, tuple[str, ...]]] = {
    "softmax": ("log_loss", "accuracy"),
    "sigmoid": ("log_loss", "auc"),
    "none": ("rmse",),
}


def find_metric(name: str, numbers: Sequence[float] = (), group: str | None = None) -> Metric:
    """Return a metric by its name, ``map@K`` and ``ndcg@K`` for any K, or FILE.py:FUNCTION; else raise a DataError.

    ``numbers`` of the labels order them for the quadratic kappa; without any, they rise as the labels do. ``group``
    names the column that divides the rows into groups.
    """
    if group is not None:
        return replace(find_metric(name, numbers), name=f"{name} by {group}", group=group)
    if ":" in str(name) or names_file(str(name)):
        return _own_metric(name)
    if name == QUADRATIC_KAPPA:
        return replace(METRICS[name], statistics=partial(_label_moments, numbers=numbers))
    if name in METRICS:
        return METRICS[name]
    if numbered := re.fullmatch(r"(map|ndcg)@([1-9]\d{0,5})", str(name)):
        return _at_k(numbered[1], int(numbered[2]))
    raise DataError(f"metric {quoted(str(name))}: unknown; {nearest_or_all(str(name), [*METRICS], 'metric')}")


def _own_metric(name: str) -> Metric:
    """Return the metric that a function of the user's computes; ``greater_is_better`` is its attribute."""
    module, _, function_name = name.rpartition(":")
    if not module:
        raise DataError(f"metric {name}: give the file and its function, as in my_metric.py:score")
    path = Path(module).expanduser().absolute() if names_file(module) else None
    if path is not None and not path.is_file():
        raise DataError(f"metric {name}: {path}: no such file{similar_file(path)}")
    writes_bytecode = sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # nothing is written beside the user's files
    try:
        with contextlib.redirect_stdout(sys.stderr):
            file = None if path is None else str(path)
            imported = import_module(f"metric_{path.stem}" if path else module, file)
    except (Exception, SystemExit) as error:
        raise DataError(f"metric {name}: {first_line(error)}") from error
    finally:
        sys.dont_write_bytecode = writes_bytecode
    arguments = ("truth", "probabilities", "labels")
    try:
        function = function_of(imported, function_name, f"metric {name}", arguments)
    except ValueError as error:
        raise DataError(str(error)) from error
    is_greater = bool(getattr(function, "greater_is_better", True))
    kinds: tuple[Activation, ...] = ("softmax", "sigmoid", "none")
    return OwnMetric(name, "own", lambda rows: rows.values, _first_mean, is_greater, kinds, function=function)


def order_remarks(metrics: Iterable[str], labels: Sequence[str]) -> list[str]:
    """Return the sentence on the order of labels that the quadratic kappa takes, where it is not their numbers'."""
    if QUADRATIC_KAPPA not in metrics or are_numbers(labels):
        return []
    order = " < ".join(map(quoted, labels))
    return [
        f"{QUADRATIC_KAPPA}: the labels are no numbers, and rise in the order in which they are listed: {order}"
    ]


def answer_scores(answer: Answer, known: LabelledRows, values: Values) -> dict[str, float]:
    """Return the scores of the answers to rows, of whose values float64 [rows, labels] they are made, by metric.

    These are the accuracy of a single answer, and of a number Cohen's quadratic kappa, too, if it is defined (of
    the numbers' places in rising order, as scikit-learn has it); or of the ``top`` labels MAP, nDCG and MRR, for
    which unlike in metrics of values a label of probability 0 is no answer. Of labels that are ``above`` they are
    the share of rows with all of them right, and F1.
    """
    if answer.above:
        labels, truth = answer.labels, Rows(known, values).true_each.astype(np.float64)
        decided = answer.decisions(values)[:, labels].astype(np.float64)
        of_labels = LabelledRows(truth[:, labels], "sigmoid", possible=None, folds=None)
        names = ("accuracy", *F1) if len(labels) > 1 else ("accuracy", MACRO_F1)
        return {name: METRICS[name].value(of_labels, decided) for name in names}
    choices = answer.choices(values)
    if answer.numbers:
        numbers = np.array(answer.numbers)
        answered = numbers[choices[:, 0]]
        true = known.truth[:, 0] if values.shape[1] == 1 else numbers[known.true_labels]
        scores = {"accuracy": float((answered == true).mean())}
        rising = np.unique(np.append(numbers, true))
        places, true_places = (
            np.searchsorted(rising, cells).astype(np.float64) for cells in (answered, true)
        )
        sums = np.array([column.sum() for column in _moments(true_places, places)])
        kappa = float(_quadratic_kappa(sums, np.array(float(len(true))), True))
        return scores if np.isnan(kappa) else scores | {QUADRATIC_KAPPA: kappa}
    if known.activation == "softmax":
        is_hit, true_counts = choices == known.true_labels[:, None], np.ones(len(values), np.int64)
    else:
        is_true = known.truth > 0.5
        is_hit, true_counts = (
            np.take_along_axis(is_true, choices, axis=1) & (choices >= 0),
            is_true.sum(axis=1),
        )
    if answer.top == 1:
        return {"accuracy": float(is_hit.mean())}
    places = is_hit.shape[1]
    best = _discounts(places).cumsum()[np.clip(true_counts, 1, places) - 1]
    return {
        f"map@{answer.top}": float(_precisions(is_hit, true_counts).mean()),
        f"ndcg@{answer.top}": float((is_hit @ _discounts(places) / best).mean()),
        "mrr": float((is_hit / np.arange(1, places + 1)).max(axis=1).mean()),
    }


def krippendorff_alpha(members: Sequence[Values], activation: Activation) -> float:
    """Return the agreement of members, float64 [rows, labels] each: 1 is perfect, 0 that of chance.

    Krippendorff's alpha (1970) of the likeliest label (nominal); else its mean over labels, of what is above 0.5,
    or of the numbers (interval). A row of NaN is one that a member lacks. NaN: all answers are the same.
    """
    origin = np.nan_to_num(np.fmax.reduce(members[0]))  # large numbers would cancel
    observed, total, sums, squares = np.zeros((4, members[0].shape[1]))
    for span in block_spans(*members[0].shape):
        values = np.stack([member[slice(*span)] for member in members])
        is_given = np.isfinite(values).all(axis=2, keepdims=True)
        is_given &= is_given.sum(axis=0) > 1
        given = values - origin if activation == "none" else decisions(values, activation)
        answers = np.where(is_given, given, 0.0)
        counts, row_sums, row_squares = (cells.sum(axis=0) for cells in (is_given, answers, answers**2))
        observed += ((counts * row_squares - row_sums**2) / np.maximum(counts - 1, 1)).sum(axis=0)
        total += counts.sum()
        sums += row_sums.sum(axis=0)
        squares += row_squares.sum(axis=0)
    expected = (total * squares - sums**2) / np.maximum(total - 1, 1)
    if activation == "softmax":
        observed, expected = observed.sum(keepdims=True), expected.sum(keepdims=True)
    has_several = expected > 0
    alphas = 1 - observed[has_several] / expected[has_several]
    return float(alphas.mean()) if len(alphas) else float("nan")


def row_losses(known: LabelledRows, values: Values) -> Values:
    """Return the log loss of each row in nats, [rows], or in regression the mean of squared errors.

    Exclusive labels: -ln p(true label) of rows scaled to sum to 1, with p clipped to float64's epsilon as
    scikit-learn does; with probabilities as truth the cross-entropy, -sum(truth * ln p). Others: the mean over
    labels of -truth * ln p - (1 - truth) * ln(1 - p).
    """
    truth = known.truth
    if known.activation == "none":
        return np.asarray(np.square(values - truth).mean(axis=1))
    if known.activation == "sigmoid":
        yes = np.clip(values, EPSILON, 1 - EPSILON)
        return np.asarray(-(truth * np.log(yes) + (1 - truth) * np.log1p(-yes)).mean(axis=1))
    sums = values.sum(axis=1)
    if truth.ndim == 1:
        chosen = values[np.arange(len(truth)), truth.astype(np.int64)]
        return np.asarray(-np.log(np.clip(chosen / sums, EPSILON, 1 - EPSILON)))
    shares = np.clip(values / sums[:, None], EPSILON, 1 - EPSILON)
    return np.asarray(-(truth * np.log(shares)).sum(axis=1))
