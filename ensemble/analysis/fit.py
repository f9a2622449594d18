"""Fit calibrations and weights to a truth, and measure them on rows that were held out.

What is written is fitted to all rows. What is reported comes from cross-validation: each row is scored by
calibrations, weights and choices (the best member, the penalty of stacking) that come from the other folds alone.
Differences are paired and have a 95 % bootstrap interval over rows. A metric that compares rows with each other is
taken of each fold by itself and averaged, as each fold has a model of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from numbers import Integral
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
from ensemble.analysis.weights import Pool, WeightedBlend, fit_greedy, fit_simplex
from ensemble.common.errors import ConfigError, DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import nearest_or_all, plural, quoted
from ensemble.config import FittingConfig
from ensemble.data.digests import truth_sha256
from ensemble.merging.scoring import Interval

Method: TypeAlias = Literal["simplex", "greedy", "stacking"]
CalibrationMethod: TypeAlias = Literal["none", "temperature", "vector"]
Rows: TypeAlias = npt.NDArray[np.int64]
Blend: TypeAlias = WeightedBlend | StackingFit

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
    """Say what to fit; ``pool`` is the merge method that the weights are for.

    Without a ``method`` it is "simplex" for log loss and "greedy" for other metrics.

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
        for key, number, least in (("folds", self.folds, 2), ("seed", self.seed, 0)):
            if not isinstance(number, Integral) or isinstance(number, bool) or number < least:
                raise ConfigError(
                    f"{key}: give a whole number of at least {least}, not {quoted(str(number))}"
                )


@dataclass(frozen=True)
class FittedMember:
    """A member and what was fitted of it; ``weight`` is None if the ensemble is stacked.

    ``alone`` is the metric of its own predictions, as they are. ``gain`` says how much better the ensemble is than
    one that is fitted without the member; None of a single member.
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
    calibrations = _calibrations(sample, options)
    blend = _blend(sample.calibrated(calibrations), sample, options, metric)
    held_out, best_members = _cross_validated(sample, options, metric, fold_of)
    merged, equal, best, *without = map(scorer.score, held_out)
    members = tuple(
        FittedMember(
            name=name,
            calibration=calibrations[number],
            weight=float(blend.weights[number]) if isinstance(blend, WeightedBlend) else None,
            alone=metric.value(sample.truth, sample.members[number], sample.activation),
            gain=scorer.gain(merged, without[number]) if without else None,
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
        members=members,
        score=merged.value,
        equal=equal.value,
        over_equal=scorer.gain(merged, equal),
        best=best.value,
        best_member=sample.names[Counter(best_members).most_common(1)[0][0]],
        over_best=scorer.gain(merged, best),
        stacking=blend if isinstance(blend, StackingFit) else None,
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

    def taken(self, rows: Rows) -> _Sample:
        """Return these rows."""
        members = tuple(_taken(values, rows) for values in self.members)
        return replace(self, members=members, truth=self.truth[rows])

    def calibrated(self, calibrations: Sequence[Calibration]) -> list[Values]:
        return [*map(calibrated, self.members, calibrations, self.activations)]


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
    problems = [*_problems(sample, options, metric)]
    if problems:
        raise DataError(problems)
    metric.value(
        sample.truth, sample.members[0], sample.activation
    )  # raises if it is not defined for these rows


def _problems(sample: _Sample, options: Options, metric: Metric) -> Iterator[str]:
    """Yield why these rows cannot be fitted to, a sentence each."""
    for name, values in zip(sample.names, sample.members, strict=True):
        if sample.rows > 1 and (values == values[0]).all():
            yield f"{name} gives every row the same values: it cannot help; leave it out"
    truth = sample.truth
    has_label = ScoredRows(truth, sample.members[0], sample.activation).true_each.sum(axis=0)
    needed = MIN_ROWS_OF_LABEL if metric.kind == "ranks" else int(options.method == "stacking")
    if (truth == truth[0]).all():
        label = f"{sample.labels[int(truth[0])]!r}" if truth.ndim == 1 else "the same"
        yield f"the truth is {label} in every row; weights need rows of two labels or more"
    else:
        what = f"--metric {options.metric}" if metric.kind == "ranks" else f"--method {options.method}"
        for label, count in zip(sample.labels, has_label.tolist(), strict=True):
            lacks = needed if sample.activation == "softmax" else sample.rows - count
            if min(count, lacks) < needed:
                verb, rows = ("has", count) if count < needed else ("lacks", lacks)
                yield (
                    f"the truth {verb} {label!r} in {rows:,} of {plural(sample.rows, 'row')}: {what} needs at "
                    f"least {needed:,}; give more rows, or use log_loss without stacking"
                )
    numbers = _fitted_numbers(sample, options)
    if sample.rows < MIN_ROWS_PER_NUMBER * numbers:
        yield (
            f"{plural(sample.rows, 'labelled row')} for {plural(numbers, 'number')} to fit: too few, at least "
            f"{MIN_ROWS_PER_NUMBER} for each ({MIN_ROWS_PER_NUMBER * numbers:,}) are needed; use more rows, fewer "
            "members or --calibration none"
        )
    elif sample.rows < 2 * options.folds:
        yield f"{plural(sample.rows, 'labelled row')} in {options.folds} folds: use fewer --folds"


def _fitted_numbers(sample: _Sample, options: Options) -> int:
    """Return how many numbers are fitted to the rows."""
    members, labels = len(sample.names), len(sample.labels)
    calibrations = members * {"none": 0, "temperature": 1, "vector": 2 * labels}[options.calibration]
    if options.method != "stacking":
        return calibrations + members - 1
    if sample.kind == "softmax":
        return calibrations + (members * labels + 1) * (labels - 1)
    return calibrations + (members + 1) * labels


def _calibrations(sample: _Sample, options: Options) -> list[Calibration]:
    """Return the calibration of each member that is best for these rows."""
    calibrations: list[Calibration] = []
    for values, activation in zip(sample.members, sample.activations, strict=True):
        if options.calibration == "none" or activation == "none":
            calibrations.append(None)
            continue
        truth = sample.truth if activation == sample.kind else one_hot(sample.truth, values.shape[1])
        fit_one = fit_temperature if options.calibration == "temperature" else fit_vector_scaling
        calibrations.append(fit_one(values, truth, activation))
    return calibrations


def _blend(members: Sequence[Values], sample: _Sample, options: Options, metric: Metric) -> Blend:
    """Return how members, calibrated and of the sample's rows, are best merged: the method of the options."""
    truth, kind, pool = sample.truth, sample.kind, options.pool
    if options.method == "simplex":
        return fit_simplex(members, truth, pool, kind)
    if options.method == "stacking":
        return fit_stacking(members, truth, kind, options.seed)
    rows = sampled_rows(len(truth), MAX_GREEDY_ROWS, options.seed)

    def score(values: Values) -> float:
        value = metric.value(truth[rows], values, sample.activation)
        return value if metric.greater_is_better else -value

    return fit_greedy([_taken(values, rows) for values in members], score, pool, kind)


def _cross_validated(
    sample: _Sample, options: Options, metric: Metric, fold_of: Rows
) -> tuple[list[Values], list[int]]:
    """Return the values of all rows, each from what was fitted to the other folds, and each fold's best member.

    Returns:
        float64 [rows, labels] each: the ensemble, equal weights, the best member, and of two members or more the
        ensembles without each of them; and the numbers of the best members.
    """
    count, shape = len(sample.names), (sample.rows, len(sample.labels))
    merged, equal, best, *without = (np.empty(shape, order="F") for _ in range(3 + count * (count > 1)))
    best_members = []
    equal_blend = WeightedBlend(np.ones(count), options.pool, sample.kind)
    for fold in range(options.folds):
        is_scored = np.flatnonzero(fold_of == fold)
        others, scored = sample.taken(np.flatnonzero(fold_of != fold)), sample.taken(is_scored)
        scores = [metric.value(others.truth, values, sample.activation) for values in others.members]
        best_members.append(int(np.argmax(scores) if metric.greater_is_better else np.argmin(scores)))
        calibrations = _calibrations(others, options)
        members, ready = others.calibrated(calibrations), scored.calibrated(calibrations)
        blend = _blend(members, others, options, metric)
        best[is_scored] = scored.members[best_members[-1]]
        equal[is_scored] = equal_blend.merge(scored.members)
        merged[is_scored] = blend.merge(ready)
        for number, values in enumerate(without):
            if isinstance(blend, WeightedBlend) and not blend.weights[number]:
                values[is_scored] = merged[is_scored]
                continue
            rest = [members[other] for other in range(count) if other != number]
            without_it = _blend(rest, others, options, metric)
            values[is_scored] = without_it.merge([ready[other] for other in range(count) if other != number])
    return [merged, equal, best, *without], best_members


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
        self.folds_scored: int | None = None
        parts = [np.arange(sample.rows)]
        if metric.kind == "ranks":
            parts = [np.flatnonzero(fold_of == fold) for fold in range(int(fold_of.max()) + 1)]
            parts = [rows for rows in parts if _is_defined(sample.taken(rows), metric)]
            self.folds_scored = len(parts)
            if not parts:
                raise DataError(
                    f"--metric {metric.name}: no fold has rows with and without each label; use fewer --folds, or "
                    "--metric log_loss"
                )
        self._parts = [
            (rows, Bootstrap(sample.truth[rows], sample.activation, seed)) for seed, rows in enumerate(parts)
        ]

    def score(self, values: Values) -> Scored:
        scores = [bootstrap.score(self._metric, _taken(values, rows)) for rows, bootstrap in self._parts]
        value = float(np.mean([score.value for score in scores]))
        return replace(
            scores[0], value=value, replicates=np.mean([score.replicates for score in scores], axis=0)
        )

    def gain(self, score: Scored, other: Scored) -> Interval:
        """Return by how much a score is better than another (below 0: worse)."""
        return score.minus(other) if self._metric.greater_is_better else other.minus(score)


def _is_defined(sample: _Sample, metric: Metric) -> bool:
    try:
        metric.value(sample.truth, sample.members[0], sample.activation)
    except UndefinedMetric:
        return False
    return True


def _taken(values: Values, rows: Rows) -> Values:
    """Return these rows, each column in one piece."""
    return values if len(rows) == len(values) else np.take(values.T, rows, axis=1).T
