"""Fit calibrations and weights to a truth, and measure them on rows that were held out.

What is written is fitted to all rows. What is reported comes from cross-validation: each row is scored by
calibrations, weights and choices (the best member, the penalty of stacking) that come from the other folds alone.
Differences are paired and have a 95 % bootstrap interval over rows. A metric that compares rows with each other is
taken of each fold by itself and averaged, as each fold has a model of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ensemble.analysis.calibration import (
    Calibration,
    Kind,
    Truth,
    Values,
    calibrated,
    fit_temperature,
    fit_vector_scaling,
    one_hot,
    sampled_rows,
)
from ensemble.analysis.metrics import Bootstrap, Metric, Scored, UndefinedMetric, find_metric
from ensemble.analysis.metrics import Rows as ScoredRows
from ensemble.analysis.predictions import Predictions
from ensemble.analysis.stacking import StackingFit, fit_stacking
from ensemble.analysis.weights import (
    Pool,
    geometric_loss,
    greedy_selection,
    mean_loss,
    minimize_on_simplex,
    pooled,
)
from ensemble.common.errors import ConfigError, DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import nearest_or_all, plural, quoted
from ensemble.config import FittingConfig
from ensemble.data.digests import truth_sha256
from ensemble.merging.calibration import features, probabilities_of
from ensemble.merging.scoring import Interval

Method: TypeAlias = Literal["simplex", "greedy", "stacking"]
CalibrationMethod: TypeAlias = Literal["none", "temperature", "vector"]
Rows: TypeAlias = npt.NDArray[np.int64]

LOG_LOSS: Final = "log_loss"
# Rows for each fitted number.  A fitted number costs log loss on new rows, on average 1 / (2 rows) nats (Akaike):
# with fewer rows all numbers together cost 0.05 or more, and weights hardly ever gain as much.
MIN_ROWS_PER_NUMBER: Final = 10
# Of more rows a greedy selection, which tries hundreds of means, takes a random sample.
MAX_GREEDY_ROWS: Final = 20_000
# Rows with each label, and without it, for metrics that need both.
MIN_ROWS_OF_LABEL: Final = 5


@dataclass(frozen=True)
class Options:
    """Say what to fit.

    Attributes:
        method: None becomes "simplex" for log loss and "greedy" for other metrics.
        pool: the merge method that the weights are for.

    Raises:
        ConfigError: a word is unknown, or a number out of range.
    """

    metric: str = LOG_LOSS
    method: Method | None = None
    calibration: CalibrationMethod = "none"
    folds: int = 5
    seed: int = 0
    pool: Pool = "mean"

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", "simplex" if self.metric == LOG_LOSS else "greedy")
        for key, word, words in (
            ("method", self.method, get_args(Method)),
            ("calibration", self.calibration, get_args(CalibrationMethod)),
            ("merge_method", self.pool, get_args(Pool)),
        ):
            if word not in words:
                hint = nearest_or_all(str(word), words, key.replace("_", " "))
                raise ConfigError(f"{key}: {quoted(str(word))} is unknown; {hint}")
        for key, number, smallest in (("folds", self.folds, 2), ("seed", self.seed, 0)):
            if not hasattr(number, "__index__") or isinstance(number, bool) or number < smallest:
                raise ConfigError(
                    f"{key}: give a whole number of at least {smallest}, not {quoted(str(number))}"
                )


@dataclass(frozen=True)
class FittedMember:
    """A member and what was fitted of it.

    Attributes:
        weight: None if the ensemble is stacked.
        alone: the metric of its own predictions, as they are.
        gain: how much better the ensemble is than one that is fitted without the member; None of a single member.
    """

    name: str
    calibration: Calibration
    weight: float | None
    alone: float
    gain: Interval | None


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """Hold what was fitted to all rows, and its scores on held-out rows.

    Attributes:
        rows: labelled rows that all members have and that no rule decides; further ``rows_left_out`` lack a member,
            ``rows_decided`` are decided by rules.
        score: the metric of the held-out rows.
        equal: the same of equal weights, and ``best`` of the best member of the other folds; ``best_member`` is the
            one that it was most often.
        over_equal: how much better the score is than that of equal weights (below 0: worse); so is ``over_best``.
        stacking: None if the ensemble has weights.
        fitted_on: the labelled rows, and the score with its 95 % interval, as ``weights.yaml`` has them.
        folds_scored: how many folds the figures are the mean of, without those in which the metric is not defined;
            None if it is taken of all rows at once.
    """

    options: Options
    labels: tuple[str, ...]
    rows: int
    rows_left_out: int
    rows_decided: int
    greater_is_better: bool
    members: tuple[FittedMember, ...]
    score: float
    equal: float
    over_equal: Interval
    best: float
    best_member: str
    over_best: Interval
    stacking: StackingFit | None
    remarks: tuple[str, ...]
    fitted_on: FittingConfig
    folds_scored: int | None


def fit(predictions: Predictions, options: Options) -> FitReport:
    """Fit calibrations and weights, and cross-validate them.

    Raises:
        ConfigError: the options do not go together, or not with such predictions.
        DataError: there is no truth, it has too few rows or a single label, or a member is the same in every row.
    """
    if predictions.truth is None:
        raise DataError(
            "no true labels: --labels names the file that has them, or data.label_column the column"
        )
    metric = find_metric(options.metric)
    sample, rows_decided = _sample(predictions, predictions.truth, is_stacked=options.method == "stacking")
    _check(sample, options, metric)
    fold_of = folds(sample.truth, options.folds, options.seed)
    scorer = _Scorer(sample, metric, fold_of)
    fitter = _Fitter(sample, np.arange(sample.rows), options, metric)
    blend = fitter.fit()
    held_out = _cross_validated(sample, options, metric, fold_of)
    merged, equal, best = map(scorer.score, (held_out.merged, held_out.equal, held_out.best))
    gains = [scorer.gain(merged, scorer.score(values)) for values in held_out.without]
    members = tuple(
        FittedMember(
            name=name,
            calibration=fitter.calibrations[number],
            weight=None if blend.stacking is not None else float(blend.weights[number]),
            alone=metric.value(sample.truth, sample.members[number], sample.activation),
            gain=gains[number] if gains else None,
        )
        for number, name in enumerate(sample.names)
    )
    interval = merged.interval
    return FitReport(
        options=options,
        labels=sample.labels,
        rows=sample.rows,
        rows_left_out=predictions.rows - sample.rows - rows_decided,
        rows_decided=rows_decided,
        greater_is_better=metric.greater_is_better,
        members=members,
        score=merged.value,
        equal=equal.value,
        over_equal=scorer.gain(merged, equal),
        best=best.value,
        best_member=sample.names[Counter(held_out.best_members).most_common(1)[0][0]],
        over_best=scorer.gain(merged, best),
        stacking=blend.stacking,
        remarks=predictions.remarks,
        fitted_on=FittingConfig(
            rows=predictions.rows,
            sha256=truth_sha256(predictions.ids, predictions.labels, predictions.truth),
            metric=options.metric,
            value=merged.value,
            interval=None if np.isnan(interval.low) else (interval.low, interval.high),
        ),
        folds_scored=scorer.folds_scored,
    )


@dataclass(frozen=True)
class _Sample:
    """The rows that all members have, and their truth."""

    names: tuple[str, ...]
    labels: tuple[str, ...]
    members: tuple[Values, ...]
    activations: tuple[Activation, ...]  # of each member
    activation: Activation  # of all together
    truth: Truth

    @property
    def rows(self) -> int:
        return len(self.truth)

    @property
    def kind(self) -> Kind:
        return "softmax" if self.activation == "softmax" else "sigmoid"


def _sample(predictions: Predictions, truth: Truth, is_stacked: bool) -> tuple[_Sample, int]:
    """Return the sample, and the number of further rows that all members have and rules decide.

    A rule with ``set`` decides its rows. Masks are put on each member: for the geometric mean and for calibrations
    that is what they make of the merge, for the mean it is near to it. Stacking would take the logarithm of 0, so
    it does without these rows.
    """
    rules, members = predictions.rules, [*predictions.members.values()]
    is_complete = ~np.logical_or.reduce([np.isnan(values[:, 0]) for values in members])
    is_decided = np.zeros(predictions.rows, np.bool_)
    if rules is not None:
        is_decided = is_complete & (rules.rows.any(axis=0) if is_stacked else rules.has_set)
    rows = np.flatnonzero(is_complete & ~is_decided)
    members = [_taken(values, rows) for values in members]
    if rules is not None and rules.rows[:, rows].any():
        members = [values.copy(order="F") for values in members]
        for values in members:
            rules.taken(rows).apply(0, values, predictions.activation == "softmax")
    sample = _Sample(
        names=tuple(predictions.members),
        labels=predictions.labels,
        members=tuple(members),
        activations=tuple(predictions.activations[name] for name in predictions.members),
        activation=predictions.activation,
        truth=truth[rows],
    )
    return sample, int(is_decided.sum())


def _check(sample: _Sample, options: Options, metric: Metric) -> None:
    """Raise what is wrong with the options or the rows."""
    if options.method != "greedy" and options.metric != LOG_LOSS:
        raise ConfigError(
            f"--method {options.method} is for log_loss; for {options.metric} use --method greedy"
        )
    if sample.activation == "none" and (options.calibration != "none" or options.method != "greedy"):
        raise ConfigError(
            "the members give raw values (regression), which have no log loss: use --method greedy --calibration "
            "none, and a metric such as rmse"
        )
    if len(sample.names) == 1 and options.calibration == "none" and options.method != "stacking":
        raise ConfigError(f"{sample.names[0]} is the only member, and --calibration is none: nothing to fit")
    if not sample.rows:
        raise DataError(
            "no usable row: fit needs labelled rows that every member has and that no rule decides"
        )
    problems = [
        f"{name} gives every row the same values: it cannot help; leave it out"
        for name, values in zip(sample.names, sample.members, strict=True)
        if sample.rows > 1 and (values == values[0]).all()
    ]
    truth = sample.truth
    if (truth == truth[0]).all():
        label = f"{sample.labels[int(truth[0])]!r}" if truth.ndim == 1 else "the same"
        problems.append(f"the truth is {label} in every row; weights need rows of two labels or more")
    elif options.method == "stacking" or metric.kind == "ranks":
        problems += _rare_labels(sample, 1 if options.method == "stacking" else MIN_ROWS_OF_LABEL, options)
    numbers = _fitted_numbers(sample, options)
    if sample.rows < MIN_ROWS_PER_NUMBER * numbers:
        problems.append(
            f"{plural(sample.rows, 'labelled row')} for {plural(numbers, 'number')} to fit: too few, at least "
            f"{MIN_ROWS_PER_NUMBER} for each ({MIN_ROWS_PER_NUMBER * numbers:,}) are needed; use more rows, fewer "
            "members or --calibration none"
        )
    elif sample.rows < 2 * options.folds:
        problems.append(f"{plural(sample.rows, 'labelled row')} in {options.folds} folds: use fewer --folds")
    if problems:
        raise DataError(problems)
    metric.value(truth, sample.members[0], sample.activation)  # raises if it is not defined for these rows


def _rare_labels(sample: _Sample, needed: int, options: Options) -> list[str]:
    """Name the labels that too few rows have, or of labels that are not exclusive, lack."""
    has_label = ScoredRows(sample.truth, sample.members[0], sample.activation).true_each.sum(axis=0)
    what = f"--method {options.method}" if options.method == "stacking" else f"--metric {options.metric}"
    return [
        f"the truth {verb} {label!r} in {rows:,} of {plural(sample.rows, 'row')}: {what} needs at least {needed:,}"
        "; give more rows, or use log_loss without stacking"
        for label, count in zip(sample.labels, has_label.tolist(), strict=True)
        for verb, rows in (("has", count), ("lacks", sample.rows - count))
        if rows < needed and (verb == "has" or sample.activation != "softmax")
    ]


def _fitted_numbers(sample: _Sample, options: Options) -> int:
    """Return how many numbers are fitted to the rows."""
    members, labels = len(sample.names), len(sample.labels)
    calibrations = members * {"none": 0, "temperature": 1, "vector": 2 * labels}[options.calibration]
    if options.method != "stacking":
        return calibrations + members - 1
    if sample.kind == "softmax":
        return calibrations + (members * labels + 1) * (labels - 1)
    return calibrations + (members + 1) * labels


@dataclass(frozen=True)
class _Blend:
    """Merge calibrated members; for stacking, ``weights`` are 1 for the members that it uses."""

    weights: Values
    pool: Pool
    kind: Kind
    stacking: StackingFit | None = None

    def merge(self, members: Sequence[Values]) -> Values:
        if self.stacking is None:
            return pooled(members, self.weights, self.pool, self.kind)
        return self.stacking.merge([members[number] for number in np.flatnonzero(self.weights).tolist()])


class _Fitter:
    """Fits calibrations to some rows, then how the members become one, with all of them or without one."""

    def __init__(self, sample: _Sample, rows: Rows, options: Options, metric: Metric) -> None:
        self._sample, self._options, self._metric = sample, options, metric
        self._truth = sample.truth[rows]
        members = [_taken(values, rows) for values in sample.members]
        self.calibrations = tuple(map(self._calibration, members, sample.activations))
        self._members = self.calibrated(members)
        if options.method == "simplex":
            make_loss = mean_loss if options.pool == "mean" else geometric_loss
            self._loss = make_loss(self._members, self._truth, sample.kind)

    def _calibration(self, values: Values, activation: Activation) -> Calibration:
        if self._options.calibration == "none" or activation == "none":
            return None
        is_same_kind = activation == self._sample.kind
        truth = self._truth if is_same_kind else one_hot(self._truth, values.shape[1])
        if self._options.calibration == "temperature":
            return fit_temperature(values, truth, activation)
        return fit_vector_scaling(values, truth, activation)

    def calibrated(self, members: Sequence[Values]) -> list[Values]:
        """Return members' values with the fitted calibrations."""
        return [*map(calibrated, members, self.calibrations, self._sample.activations)]

    def fit(self, left_out: int | None = None, whole: _Blend | None = None) -> _Blend:
        """Fit the ensemble of all members, or without one; ``whole``, of all members, is where that begins."""
        options, kind, count = self._options, self._sample.kind, len(self.calibrations)
        used = [number for number in range(count) if number != left_out]
        members = [self._members[number] for number in used]
        weights, stacking = np.zeros(count), None
        if options.method == "simplex":
            weights = minimize_on_simplex(
                self._loss, count, left_out, None if whole is None else whole.weights
            )
        elif options.method == "greedy":
            weights[used] = self._greedy_weights(members)
        else:
            penalty = None if whole is None or whole.stacking is None else whole.stacking.penalty
            stacking = fit_stacking(members, self._truth, kind, options.seed, penalty)
            weights[used] = 1.0
        return _Blend(weights, options.pool, kind, stacking)

    def _greedy_weights(self, members: Sequence[Values]) -> Values:
        sample, rows = self._sample, sampled_rows(len(self._truth), MAX_GREEDY_ROWS, self._options.seed)
        members, truth = [_taken(values, rows) for values in members], self._truth[rows]
        is_geometric = self._options.pool == "geometric_mean"
        if is_geometric:
            members = [features(values, sample.kind) for values in members]

        def score(mean: Values) -> float:
            values = probabilities_of(mean, [sample.kind]) if is_geometric else mean
            value = self._metric.value(truth, values, sample.activation)
            return value if self._metric.greater_is_better else -value

        return greedy_selection(members, score)


@dataclass(frozen=True)
class _HeldOut:
    """The values of all rows, each from what was fitted to the other folds; float64 [rows, labels] each.

    ``without``, by member, are those of ensembles that are fitted without it; ``best_members`` is by fold.
    """

    merged: Values
    equal: Values
    best: Values
    without: list[Values]
    best_members: list[int]


def _cross_validated(sample: _Sample, options: Options, metric: Metric, fold_of: Rows) -> _HeldOut:
    count, shape = len(sample.names), (sample.rows, len(sample.labels))
    merged, equal, best = (np.empty(shape, order="F") for _ in range(3))
    result = _HeldOut(
        merged, equal, best, [np.empty(shape, order="F") for _ in range(count * (count > 1))], []
    )
    for fold in range(options.folds):
        scored, others = np.flatnonzero(fold_of == fold), np.flatnonzero(fold_of != fold)
        scores = [
            metric.value(sample.truth[others], _taken(values, others), sample.activation)
            for values in sample.members
        ]
        best_member = int(np.argmax(scores) if metric.greater_is_better else np.argmin(scores))
        result.best_members.append(best_member)
        fitter = _Fitter(sample, others, options, metric)
        blend = fitter.fit()
        raw = [_taken(values, scored) for values in sample.members]
        ready = fitter.calibrated(raw)
        best[scored] = raw[best_member]
        equal[scored] = pooled(raw, np.ones(count), options.pool, sample.kind)
        merged[scored] = blend.merge(ready)
        for number, values in enumerate(result.without):
            has_weight = blend.weights[number] > 0
            values[scored] = fitter.fit(number, blend).merge(ready) if has_weight else merged[scored]
    return result


def folds(truth: Truth, count: int, seed: int) -> Rows:
    """Return the fold of each row: rows drawn at random, each label dealt out evenly."""
    order = np.random.default_rng(seed).permutation(len(truth))
    if truth.ndim == 1 or truth.shape[1] > 1:
        likeliest = truth if truth.ndim == 1 else truth.argmax(axis=1)
        order = order[np.argsort(likeliest[order], kind="stable")]
    fold_of = np.empty(len(truth), dtype=np.int64)
    fold_of[order] = np.arange(len(truth)) % count
    return fold_of


class _Scorer:
    """Scores held-out values on the same resamples; a metric that ranks rows in each fold, as a mean."""

    def __init__(self, sample: _Sample, metric: Metric, fold_of: Rows) -> None:
        self._metric = metric
        parts = [np.arange(sample.rows)]
        if metric.kind == "ranks":
            parts = [np.flatnonzero(fold_of == fold) for fold in range(int(fold_of.max()) + 1)]
            parts = [rows for rows in parts if _is_defined(sample, metric, rows)]
            if not parts:
                raise DataError(
                    f"--metric {metric.name}: no fold has rows with and without each label; use fewer --folds, or "
                    "--metric log_loss"
                )
        self.folds_scored = len(parts) if metric.kind == "ranks" else None
        self._parts = [
            (rows, Bootstrap(sample.truth[rows], sample.activation, seed)) for seed, rows in enumerate(parts)
        ]

    def score(self, values: Values) -> Scored:
        scores = [bootstrap.score(self._metric, _taken(values, rows)) for rows, bootstrap in self._parts]
        if len(scores) == 1:
            return scores[0]
        value = float(np.mean([score.value for score in scores]))
        return Scored(value, np.mean([score.replicates for score in scores], axis=0), scores[0].resamples)

    def gain(self, score: Scored, other: Scored) -> Interval:
        """Return by how much a score is better than another (below 0: worse)."""
        return score.minus(other) if self._metric.greater_is_better else other.minus(score)


def _is_defined(sample: _Sample, metric: Metric, rows: Rows) -> bool:
    try:
        metric.value(sample.truth[rows], sample.members[0][rows], sample.activation)
    except UndefinedMetric:
        return False
    return True


def _taken(values: Values, rows: Rows) -> Values:
    """Return these rows, each column in one piece."""
    return values if len(rows) == len(values) else np.take(values.T, rows, axis=1).T
