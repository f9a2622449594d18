"""Calibrations and weights that are fitted to a truth, and what they are worth on rows that were held out.

What is written is fitted to all rows. What is reported comes from cross-validation: each row is scored by
calibrations, weights and choices (the best member, the penalty of stacking) that come from the other folds alone.
Differences are paired and have a 95 % bootstrap interval over rows, which does not know what other rows to fit to
would have given. A metric that compares rows with each other is taken of each fold by itself and averaged, as each
fold has a model of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ensemble.analysis.calibration import (
    Kind,
    Truth,
    Values,
    VectorScaling,
    calibrated,
    fit_temperature,
    fit_vector_scaling,
    one_hot,
    sampled_rows,
)
from ensemble.analysis.metrics import Bootstrap, Metric, Scored, UndefinedMetric, find_metric
from ensemble.analysis.metrics import Rows as ScoredRows
from ensemble.analysis.predictions import Predictions
from ensemble.analysis.stacking import Stacking, fit_stacking
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
from ensemble.common.text import listed, nearest_or_all, plural, quoted
from ensemble.config import FittingConfig
from ensemble.data.digests import truth_sha256
from ensemble.merging.calibration import features, probabilities_of
from ensemble.merging.scoring import Interval

Method: TypeAlias = Literal["simplex", "greedy", "stacking"]
CalibrationMethod: TypeAlias = Literal["none", "temperature", "vector"]
Calibration: TypeAlias = float | VectorScaling | None
Rows: TypeAlias = npt.NDArray[np.int64]

LOG_LOSS: Final = "log_loss"
# Rows for each fitted number.  A fitted number costs log loss on new rows, on average 1 / (2 rows) nats (Akaike):
# with fewer rows all numbers together cost 0.05 or more, and weights hardly ever gain as much.
MIN_ROWS_PER_NUMBER: Final = 10
# Of more rows a greedy selection looks at so many, drawn at random: it tries hundreds of means.
MAX_GREEDY_ROWS: Final = 20_000
# Of each label, and without it, for metrics that need both.
MIN_ROWS_OF_LABEL: Final = 5


@dataclass(frozen=True)
class Options:
    """What is asked of a fit.

    Attributes:
        method: None becomes "simplex" for log loss and "greedy" for other metrics.
        pool: the merge method that the weights are for.

    Raises:
        ConfigError: a word that means nothing here, or a number out of range.
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
        problems = []
        for key, word, words in (
            ("method", self.method, get_args(Method)),
            ("calibration", self.calibration, get_args(CalibrationMethod)),
            ("merge_method", self.pool, get_args(Pool)),
        ):
            if word not in words:
                hint = nearest_or_all(str(word), words, key.replace("_", " "))
                problems.append(f"{key}: {quoted(str(word))} is unknown; {hint}")
        for key, number, smallest in (("folds", self.folds, 2), ("seed", self.seed, 0)):
            is_whole = hasattr(number, "__index__") and not isinstance(number, bool)
            if not is_whole or number < smallest:
                problems.append(
                    f"{key}: give a whole number of at least {smallest}, not {quoted(str(number))}"
                )
        if not isinstance(self.metric, str):
            problems.append(
                f"metric: give the name of one, such as {LOG_LOSS}, not {quoted(str(self.metric))}"
            )
        if problems:
            raise ConfigError(problems)


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
    """What was fitted to all rows, and what that is worth on rows that were held out.

    Attributes:
        rows: rows with a truth that all members have and that the run's rules leave to them; further
            ``rows_left_out`` lack a member, ``rows_decided`` are decided by rules.
        score: the metric of the held-out rows; of a metric that compares rows with each other (AUC) the plain
            mean of the folds' values, like every other held-out figure here.
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
    stacking: Stacking | None
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
    sample, rows_decided = _Sample.of(predictions, predictions.truth, is_stacked=options.method == "stacking")
    _check(sample, options, metric)
    fold_of = folds(sample.truth, options.folds, options.seed)
    scorer = _Scorer(sample, metric, fold_of)
    blend, calibrations = _fitted_to_all(sample, options, metric)
    held_out = _cross_validated(sample, options, metric, fold_of)
    merged, equal, best = (scorer.score(each) for each in (held_out.merged, held_out.equal, held_out.best))
    gains = [scorer.gain(merged, scorer.score(values)) for values in held_out.without]
    members = tuple(
        FittedMember(
            name=name,
            calibration=calibrations[number],
            weight=None if blend.stacking is not None else float(blend.weights[number]),
            alone=sample.value(metric, sample.members[number]),
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
    kinds: tuple[Activation, ...]
    activation: Activation  # of all together
    truth: Truth

    @classmethod
    def of(cls, predictions: Predictions, truth: Truth, is_stacked: bool) -> tuple[_Sample, int]:
        """Return the sample, and the number of further rows that all members have and rules decide.

        A rule with ``set`` decides its rows. Masks are put on each member: for the geometric mean and for
        calibrations that is what they make of the merge, for the mean it is near to it. Stacking goes by the
        logarithms of what would be 0 then, so it does without these rows.
        """
        names, rules = tuple(predictions.members), predictions.rules
        members = [*predictions.members.values()]
        is_complete = ~np.logical_or.reduce([np.isnan(values[:, 0]) for values in members])
        is_decided = np.zeros(predictions.rows, np.bool_)
        if rules is not None:
            is_decided = is_complete & (rules.rows.any(axis=0) if is_stacked else rules.has_set)
        rows = np.flatnonzero(is_complete & ~is_decided)
        if len(rows) < predictions.rows:
            members, truth = [_taken(values, rows) for values in members], truth[rows]
        if rules is not None and rules.rows[:, rows].any():
            members = [values.copy(order="F") for values in members]
            for values in members:
                rules.taken(rows).apply(0, values, predictions.activation == "softmax")
        sample = cls(
            names=names,
            labels=predictions.labels,
            members=tuple(members),
            kinds=tuple(predictions.activations[name] for name in names),
            activation=predictions.activation,
            truth=truth,
        )
        return sample, int(is_decided.sum())

    @property
    def rows(self) -> int:
        return len(self.truth)

    @property
    def kind(self) -> Kind:
        return "softmax" if self.activation == "softmax" else "sigmoid"

    def value(self, metric: Metric, values: Values, rows: Rows | None = None) -> float:
        """Return the metric of values of all rows, or of these."""
        if rows is None:
            return metric.value(self.truth, values, self.activation)
        return metric.value(self.truth[rows], _taken(values, rows), self.activation)


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
    if options.method == "stacking":
        problems += _unseen_labels(sample)
    if metric.needs_every_label and sample.activation in metric.takes and not problems:
        problems += _rare_labels(sample, options)
    numbers = _fitted_numbers(sample, options)
    if sample.rows < MIN_ROWS_PER_NUMBER * numbers:
        without_calibration = ", --calibration none" if options.calibration != "none" else ""
        problems.append(
            f"{plural(sample.rows, 'labelled row')} for {plural(numbers, 'number')} to fit: too few, at least "
            f"{MIN_ROWS_PER_NUMBER} for each ({MIN_ROWS_PER_NUMBER * numbers:,}) are needed; fewer members"
            f"{without_calibration} or more rows would do"
        )
    elif sample.rows < 2 * options.folds:
        problems.append(f"{plural(sample.rows, 'labelled row')} in {options.folds} folds: use fewer --folds")
    if problems:
        raise DataError(problems)
    sample.value(metric, sample.members[0])  # raises if it is not defined for these rows


def _unseen_labels(sample: _Sample) -> list[str]:
    """Name the labels that stacking has no row of."""
    targets = one_hot(sample.truth, len(sample.labels))
    is_unseen = ~targets.any(axis=0)
    if sample.kind == "sigmoid":
        is_unseen |= (targets == 1).all(axis=0)
    missing = [sample.labels[number] for number in np.flatnonzero(is_unseen)]
    if not missing:
        return []
    return [f"no row tells {listed(missing)} from the others; stacking needs rows of each label"]


def _rare_labels(sample: _Sample, options: Options) -> list[str]:
    """Name the labels that the rows which are fitted to might lack."""
    # Greedy selection looks at some rows alone, drawn at random.
    needed = max(MIN_ROWS_OF_LABEL, -(-2 * MIN_ROWS_OF_LABEL * sample.rows // MAX_GREEDY_ROWS))
    true = ScoredRows(sample.truth, sample.members[0], sample.activation).true_each.sum(axis=0)
    problems = []
    for label, count in zip(sample.labels, true.tolist(), strict=True):
        counts = {"has": count}
        if sample.activation != "softmax":
            counts["lacks"] = sample.rows - count
        problems += [
            f"the truth {what} {label!r} in {rows:,} of {plural(sample.rows, 'row')}: --metric {options.metric} "
            f"needs {needed:,} at least; give more rows, or use --metric log_loss"
            for what, rows in counts.items()
            if rows < needed
        ]
    return problems


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
    """How calibrated members become one; of stacking ``weights`` are 1 for the members that it uses."""

    weights: Values
    pool: Pool
    kind: Kind
    stacking: Stacking | None = None

    def merge(self, members: Sequence[Values]) -> Values:
        if self.stacking is None:
            return pooled(members, self.weights, self.pool, self.kind)
        return self.stacking.merge([members[number] for number in np.flatnonzero(self.weights).tolist()])


class _Fitter:
    """Fits calibrations to some rows, then how the members become one, with all of them or without one."""

    def __init__(self, sample: _Sample, rows: Rows, options: Options, metric: Metric) -> None:
        self._sample, self._options, self._metric = sample, options, metric
        self._truth = sample.truth[rows]
        calibrations, ready = list[Calibration](), list[Values]()
        for values, kind in zip(sample.members, sample.kinds, strict=True):
            chosen = _taken(values, rows)
            calibrations.append(self._calibration(chosen, kind))
            ready.append(_calibrated(chosen, calibrations[-1], kind))
        self.calibrations = tuple(calibrations)
        self._whole: _Blend | None = None  # of all members
        if options.method == "simplex":
            make_loss = mean_loss if options.pool == "mean" else geometric_loss
            self._loss = make_loss(ready, self._truth, sample.kind)
        else:
            self._members = ready

    def calibrated(self, members: Sequence[Values]) -> list[Values]:
        """Return members' values with the fitted calibrations."""
        each = zip(members, self.calibrations, self._sample.kinds, strict=True)
        return [_calibrated(*of_member) for of_member in each]

    def fit(self, left_out: int | None = None) -> _Blend:
        """Fit the ensemble of all members first, then any without one."""
        options, kind, count = self._options, self._sample.kind, len(self.calibrations)
        used = [number for number in range(count) if number != left_out]
        weights = np.zeros(count)
        stacking = None
        if options.method == "stacking":
            penalty = (
                None if self._whole is None or self._whole.stacking is None else self._whole.stacking.penalty
            )
            members = [self._members[number] for number in used]
            stacking = fit_stacking(members, self._truth, kind, options.seed, penalty)
            weights[used] = 1.0
        elif options.method == "greedy":
            weights[used] = self._greedy_weights([self._members[number] for number in used])
        else:
            start = None if self._whole is None else self._whole.weights
            weights = minimize_on_simplex(self._loss, count, left_out, start)
        blend = _Blend(weights, options.pool, kind, stacking)
        if left_out is None:
            self._whole = blend
        return blend

    def _greedy_weights(self, members: Sequence[Values]) -> Values:
        sample, rows = self._sample, sampled_rows(len(self._truth), MAX_GREEDY_ROWS, self._options.seed)
        members, truth = [_taken(values, rows) for values in members], self._truth[rows]
        is_geometric = self._options.pool == "geometric_mean"
        if is_geometric:
            members = [features(values, sample.kind) for values in members]

        def score(mean: Values) -> float:
            value = self._metric.value(truth, mean, sample.activation)
            return value if self._metric.greater_is_better else -value

        def finish(mean: Values) -> Values:
            return probabilities_of(mean, [sample.kind]) if is_geometric else mean

        return greedy_selection(members, score, finish)

    def _calibration(self, values: Values, kind: Activation) -> Calibration:
        if self._options.calibration == "none" or kind == "none":
            return None
        truth = self._truth if kind == self._sample.kind else one_hot(self._truth, values.shape[1])
        fit_one = fit_temperature if self._options.calibration == "temperature" else fit_vector_scaling
        return fit_one(values, truth, kind)


def _fitted_to_all(
    sample: _Sample, options: Options, metric: Metric
) -> tuple[_Blend, tuple[Calibration, ...]]:
    fitter = _Fitter(sample, np.arange(sample.rows), options, metric)
    return fitter.fit(), fitter.calibrations


@dataclass(frozen=True)
class _HeldOut:
    """The values of all rows, each from what was fitted to the other folds; float64 [rows, labels] each.

    ``without``, by member, are those of ensembles that are fitted without it; ``best_members`` is by fold.
    """

    merged: Values
    equal: Values
    best: Values
    without: tuple[Values, ...]
    best_members: tuple[int, ...]


def _cross_validated(sample: _Sample, options: Options, metric: Metric, fold_of: Rows) -> _HeldOut:
    count, shape = len(sample.names), (sample.rows, len(sample.labels))
    merged, equal, best = (np.empty(shape, order="F") for _ in range(3))
    without = tuple(np.empty(shape, order="F") for _ in range(count if count > 1 else 0))
    best_members = []
    for fold in range(options.folds):
        scored, others = np.flatnonzero(fold_of == fold), np.flatnonzero(fold_of != fold)
        scores = [sample.value(metric, values, others) for values in sample.members]
        best_members.append(int(np.argmax(scores) if metric.greater_is_better else np.argmin(scores)))
        fitter = _Fitter(sample, others, options, metric)
        blend = fitter.fit()
        raw = [_taken(values, scored) for values in sample.members]
        ready = fitter.calibrated(raw)
        best[scored] = raw[best_members[-1]]
        equal[scored] = pooled(raw, np.ones(count), options.pool, sample.kind)
        merged[scored] = blend.merge(ready)
        for number, values in enumerate(without):
            values[scored] = fitter.fit(number).merge(ready) if blend.weights[number] else merged[scored]
    return _HeldOut(merged, equal, best, without, tuple(best_members))


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
    """Scores held-out values of all rows, on the same resamples; a metric that ranks rows by the mean of the folds.

    Attributes:
        folds_scored: see ``FitReport``.
    """

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


def _calibrated(values: Values, calibration: Calibration, kind: Activation) -> Values:
    return values if kind == "none" else calibrated(values, calibration, kind)


def _is_defined(sample: _Sample, metric: Metric, rows: Rows) -> bool:
    try:
        sample.value(metric, sample.members[0], rows)
    except UndefinedMetric:
        return False
    return True


def _taken(values: Values, rows: Rows) -> Values:
    """Return these rows, each column in one piece."""
    return values if len(rows) == len(values) else np.take(values.T, rows, axis=1).T
