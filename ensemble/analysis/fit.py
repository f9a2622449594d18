"""Calibrations and weights that are fitted to a truth, and what they are worth on rows that were held out.

What is written is fitted to all rows.  What is reported is from cross-validation: each row is scored by
calibrations, weights and whatever else there was to choose (the best member, the penalty of stacking) that come
from the other folds alone.  A metric that compares rows with each other is taken of each fold by itself, as each
fold has a model of its own, and averaged over folds.  A difference has the standard error of the rows' paired
differences; what is within 1.96 of them is called noise.  That error knows nothing of what other rows to fit to
would have given.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, get_args

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
)
from ensemble.analysis.metrics import Metric, UndefinedMetric, find_metric
from ensemble.analysis.metrics import Rows as ScoredRows
from ensemble.analysis.predictions import Predictions
from ensemble.analysis.stacking import Stacking, fit_stacking
from ensemble.analysis.weights import (
    GeometricLoss,
    MeanLoss,
    Pool,
    greedy_selection,
    minimize_on_simplex,
    pooled,
)
from ensemble.common.errors import ConfigError, DataError
from ensemble.common.protocol import Activation
from ensemble.common.text import listed, nearest_or_all, plural, quoted
from ensemble.config import FittingConfig
from ensemble.data.digests import truth_sha256
from ensemble.merging.calibration import features, probabilities_of
from ensemble.merging.metrics import row_losses

Method: TypeAlias = Literal["simplex", "greedy", "stacking"]
CalibrationMethod: TypeAlias = Literal["none", "temperature", "vector"]
Calibration: TypeAlias = float | VectorScaling | None
Rows: TypeAlias = npt.NDArray[np.int64]

LOG_LOSS: Final = "log_loss"
# Rows for each fitted number.  A fitted number costs log loss on new rows, on average 1 / (2 rows) nats (Akaike):
# with fewer rows all numbers together cost 0.05 or more, and weights hardly ever gain as much.
MIN_ROWS_PER_NUMBER: Final = 10
ERRORS: Final = 1.96  # standard errors up to which a difference is noise: those of a 95 % interval
# Of more rows a greedy selection looks at so many, drawn at random: it tries hundreds of means.
MAX_GREEDY_ROWS: Final = 20_000
# Of each label, and without it, for metrics that need both.
MIN_ROWS_OF_LABEL: Final = 5
_GROUPS = 20  # of rows, left out one by one for the standard error of a metric that is no mean over rows


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
        for key, given, known in (
            ("method", self.method, get_args(Method)),
            ("calibration", self.calibration, get_args(CalibrationMethod)),
            ("merge_method", self.pool, get_args(Pool)),
        ):
            if given not in known:
                hint = nearest_or_all(str(given), known, key.replace("_", " "))
                problems.append(f"{key}: {quoted(str(given))} is unknown; {hint}")
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
class Gain:
    """By how much the metric of held-out rows is better (below 0: worse), and its standard error."""

    value: float
    error: float

    @property
    def is_noise(self) -> bool:
        return abs(self.value) <= ERRORS * self.error


@dataclass(frozen=True)
class FittedMember:
    """A member and what was fitted of it.

    Attributes:
        weight: None where the ensemble is stacked.
        alone: the metric of its own predictions, as they are.
        gain: what the ensemble gains by it, against one that is fitted without it; None of a single member.
    """

    name: str
    calibration: Calibration
    weight: float | None
    alone: float
    gain: Gain | None


@dataclass(frozen=True)
class FitReport:
    """What was fitted to all rows, and what that is worth on rows that were held out.

    Attributes:
        rows: rows with a truth that all members have and that the run's rules leave to them; further
            ``rows_left_out`` lack a member, ``rows_decided`` are decided by rules.
        score: the metric of the held-out rows; of a metric that compares rows with each other (AUC) the plain
            mean of the folds' values, like every other held-out figure here.
        equal: the same of equal weights, and ``best`` of the best member of the other folds; ``best_member`` is the
            one that it was most often.
        stacking: None where the ensemble has weights.
        fitted_on: the labelled rows, and the score with its 95 % interval, as ``weights.yaml`` has them.
        folds_scored: how many folds the figures are the mean of, without those in which the metric is not defined;
            None where it is taken of all rows at once.
    """

    options: Options
    labels: tuple[str, ...]
    rows: int
    rows_left_out: int
    greater_is_better: bool
    members: tuple[FittedMember, ...]
    score: float
    equal: float
    over_equal: Gain
    best: float
    best_member: str
    over_best: Gain
    stacking: Stacking | None
    remarks: tuple[str, ...]
    fitted_on: FittingConfig
    rows_decided: int = 0
    folds_scored: int | None = None


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
    sample, decided = _Sample.of(predictions, predictions.truth, is_stacked=options.method == "stacking")
    aim = _checked(sample, options)
    fold_of = folds(sample.truth, options.folds, options.seed)
    judge = _Judge(sample, aim, options, fold_of)
    names, everything = sample.names, np.arange(sample.rows)
    blend, calibrations = _fitted(sample, everything, options, aim)[:2]
    found = _cross_validated(sample, options, aim, fold_of)
    merged, equal, best = map(judge.score, (found.merged, found.equal, found.best))
    gains: list[Gain | None] = [None] * len(names)
    if len(names) > 1:
        gains = [judge.gain(merged, judge.score(one)) for one in found.without]
    members = tuple(
        FittedMember(name, calibration, blend.weight(number), aim.value(sample.truth, values), gain)
        for number, (name, calibration, values, gain) in enumerate(
            zip(names, calibrations, sample.members, gains, strict=True)
        )
    )
    return FitReport(
        options,
        sample.labels,
        sample.rows,
        predictions.rows - sample.rows - decided,
        aim.metric.greater_is_better,
        members,
        merged.value,
        equal.value,
        judge.gain(merged, equal),
        best.value,
        names[Counter(found.best_members).most_common(1)[0][0]],
        judge.gain(merged, best),
        blend.stacking,
        predictions.remarks,
        FittingConfig(
            rows=predictions.rows,
            sha256=truth_sha256(predictions.ids, predictions.labels, predictions.truth),
            metric=options.metric,
            value=merged.value,
            interval=judge.interval(merged),
        ),
        decided,
        merged.folds,
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
        """The sample, and how many rows more all members have that rules decide.

        These are the rows that a rule with ``set`` is for.  Masks are put on each member: for the geometric mean
        and for calibrations that is what they make of the merge, for the mean it is near to it.  Stacking goes by
        the logarithms of what would be 0 then, so it does without these rows.
        """
        names, rules = tuple(predictions.members), predictions.rules
        values = [*predictions.members.values()]
        is_left = ~np.logical_or.reduce([np.isnan(one[:, 0]) for one in values])
        decided = 0
        if rules is not None:
            is_decided = is_left & (rules.rows.any(axis=0) if is_stacked else rules.has_set)
            decided, is_left = int(is_decided.sum()), is_left & ~is_decided
        if not is_left.all():
            taken = np.flatnonzero(is_left)
            values, truth = [_taken(one, taken) for one in values], truth[taken]
            rules = None if rules is None else rules.taken(taken)
        kinds = tuple(predictions.activations[name] for name in names)
        if rules is not None and rules.rows.any():
            values = [one.copy(order="F") for one in values]
            for one in values:
                rules.apply(0, one, predictions.activation == "softmax")
        return cls(names, predictions.labels, tuple(values), kinds, predictions.activation, truth), decided

    @property
    def rows(self) -> int:
        return len(self.truth)

    @property
    def kind(self) -> Kind:
        return "softmax" if self.activation == "softmax" else "sigmoid"


@dataclass(frozen=True)
class _Aim:
    """A metric of the ensemble's values; ``sign`` is 1 where more is better, else -1."""

    metric: Metric
    activation: Activation

    @property
    def sign(self) -> int:
        return 1 if self.metric.greater_is_better else -1

    def value(self, truth: Truth, values: Values) -> float:
        return float(self.metric.value(truth, values, activation=self.activation))


def _checked(sample: _Sample, options: Options) -> _Aim:
    """What is to be good, where all goes together."""
    metric = find_metric(options.metric)
    if options.method != "greedy" and options.metric != LOG_LOSS:
        raise ConfigError(
            f"--method {options.method} is for log_loss; for {options.metric} use --method greedy"
        )
    if sample.activation == "none" and (options.calibration != "none" or options.method != "greedy"):
        raise ConfigError(
            "the members give raw values (regression), of which no log loss can be told: use --method greedy "
            "--calibration none, and a metric such as rmse"
        )
    members, labels = len(sample.names), len(sample.labels)
    if members == 1 and options.calibration == "none" and options.method != "stacking":
        raise ConfigError(f"{sample.names[0]} is the only member, and --calibration is none: nothing to fit")
    if not sample.rows:
        raise DataError(
            "no row has a truth and all members, and is not decided by rules; fit needs rows that every member has"
        )
    problems = [
        f"{name} gives every row the same values: it cannot help; leave it out"
        for name, values in zip(sample.names, sample.members, strict=True)
        if sample.rows > 1 and (values == values[0]).all()
    ]
    truth = sample.truth
    alike = truth if truth.ndim == 2 else truth[:, None]
    if (alike == alike[0]).all():
        known = f"{sample.labels[int(truth[0])]!r}" if truth.ndim == 1 else "the same"
        problems.append(f"the truth is {known} in every row; weights need rows of two labels or more")
    if options.method == "stacking":
        seen = one_hot(truth, labels).sum(axis=0) > 0
        if sample.kind == "sigmoid":
            seen &= (1 - one_hot(truth, labels)).sum(axis=0) > 0
        if not seen.all():
            missing = [label for label, is_seen in zip(sample.labels, seen, strict=True) if not is_seen]
            problems.append(
                f"no row tells {listed(missing)} from the others; stacking needs rows of each label"
            )
    if metric.needs_every_label and sample.activation in metric.takes and not problems:
        problems += _rare_labels(sample, options)
    numbers = _numbers(sample, options)
    if sample.rows < MIN_ROWS_PER_NUMBER * numbers:
        problems.append(
            f"{plural(sample.rows, 'labelled row')} for {plural(numbers, 'number')} to fit: too few, at least "
            f"{MIN_ROWS_PER_NUMBER} for each ({MIN_ROWS_PER_NUMBER * numbers:,}) are needed; fewer members"
            f"{', --calibration none or' if options.calibration != 'none' else ' or'} more rows would do"
        )
    elif sample.rows < 2 * options.folds:
        problems.append(f"{plural(sample.rows, 'labelled row')} in {options.folds} folds: use fewer --folds")
    if problems:
        raise DataError(problems)
    aim = _Aim(metric, sample.activation)
    aim.value(truth, sample.members[0])  # where it is not defined for these, it says so
    return aim


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
        for what, many in counts.items():
            if many < needed:
                problems.append(
                    f"the truth {what} {label!r} in {many:,} of {plural(sample.rows, 'row')}: --metric "
                    f"{options.metric} needs {needed:,} at least; give more rows, or use --metric log_loss"
                )
    return problems


def _numbers(sample: _Sample, options: Options) -> int:
    """How many numbers are fitted to the rows."""
    members, labels = len(sample.names), len(sample.labels)
    each = {"none": 0, "temperature": 1, "vector": 2 * labels}[options.calibration]
    if options.method != "stacking":
        return members - 1 + members * each
    of_label = members * labels + 1 if sample.kind == "softmax" else members + 1
    return members * each + of_label * (labels - 1 if sample.kind == "softmax" else labels)


class _Blend(Protocol):
    """How calibrated members become one."""

    @property
    def stacking(self) -> Stacking | None: ...

    def merge(self, members: Sequence[Values]) -> Values: ...

    def weight(self, member: int) -> float | None: ...

    def uses(self, member: int) -> bool: ...


@dataclass(frozen=True)
class _Weighted:
    weights: Values
    pool: Pool
    kind: Kind
    stacking: None = None

    def merge(self, members: Sequence[Values]) -> Values:
        return pooled(members, self.weights, self.pool, self.kind)

    def weight(self, member: int) -> float:
        return float(self.weights[member])

    def uses(self, member: int) -> bool:
        return bool(self.weights[member])


@dataclass(frozen=True)
class _Stacked:
    stacking: Stacking
    kept: Rows  # the members that it stacks

    def merge(self, members: Sequence[Values]) -> Values:
        return self.stacking.merge([members[number] for number in self.kept])

    def weight(self, member: int) -> None:
        return None

    def uses(self, member: int) -> bool:
        return member in self.kept


class _Solver:
    """Fits how calibrated members become one, with all of them or without one.

    Args:
        members: of the rows to fit to, calibrated, float64 [rows, labels] each.
    """

    def __init__(
        self, members: Sequence[Values], truth: Truth, kind: Kind, options: Options, aim: _Aim
    ) -> None:
        self._options, self._aim, self._kind = options, aim, kind
        self._count = len(members)
        # What was found with all members, for the ensembles without one.
        self._whole: Values | None = None
        self._penalty: float | None = None
        if options.method == "simplex":
            loss = MeanLoss if options.pool == "mean" else GeometricLoss
            self._loss = loss.of(members, truth, kind)
            return
        if options.method == "greedy" and len(truth) > MAX_GREEDY_ROWS:
            drawn = np.random.default_rng(options.seed).permutation(len(truth))[:MAX_GREEDY_ROWS]
            members, truth = [_taken(one, drawn) for one in members], truth[drawn]
        is_geometric = options.method == "greedy" and options.pool == "geometric_mean"
        self._members = [features(one, kind) for one in members] if is_geometric else [*members]
        self._truth = truth

    def fit(self, left_out: int | None = None) -> _Blend:
        kept = np.array([number for number in range(self._count) if number != left_out])
        options = self._options
        if options.method == "stacking":
            chosen = [self._members[number] for number in kept]
            stacking = fit_stacking(chosen, self._truth, self._kind, options.seed, self._penalty)
            if left_out is None:
                self._penalty = stacking.penalty
            return _Stacked(stacking, kept)
        weights = np.zeros(self._count)
        if options.method == "greedy":
            sign = self._aim.sign
            finish = (
                (lambda v: probabilities_of(v, [self._kind])) if options.pool != "mean" else (lambda v: v)
            )
            weights[kept], _ = greedy_selection(
                [self._members[number] for number in kept],
                lambda values: sign * self._aim.value(self._truth, values),
                finish,
            )
        elif left_out is None:
            weights = self._whole = minimize_on_simplex(self._loss).weights
        else:
            # From near where the others were; on the edge of the simplex Newton's first step would be blind.
            start = None if self._whole is None else self._whole[kept] + 1 / self._count
            weights[kept] = minimize_on_simplex(self._loss.without(left_out), start).weights
        return _Weighted(weights, options.pool, self._kind)


def _fitted(
    sample: _Sample, rows: Rows, options: Options, aim: _Aim
) -> tuple[_Blend, tuple[Calibration, ...], _Solver]:
    """Calibrations, then how the members become one, fitted to these rows."""
    truth = sample.truth[rows]
    calibrations = list[Calibration]()
    ready = list[Values]()
    for values, activation in zip(sample.members, sample.kinds, strict=True):
        own = values if len(rows) == sample.rows else _taken(values, rows)
        calibration: Calibration = None
        if options.calibration != "none" and activation != "none":
            known = truth if activation == sample.kind else one_hot(truth, len(sample.labels))
            fit_one = fit_temperature if options.calibration == "temperature" else fit_vector_scaling
            calibration = fit_one(own, known, activation)
        calibrations.append(calibration)
        ready.append(_calibrated(own, calibration, activation))
    solver = _Solver(ready, truth, sample.kind, options, aim)
    return solver.fit(), tuple(calibrations), solver


@dataclass(frozen=True)
class _HeldOut:
    """The values of all rows, each from what was fitted to the other folds; float64 [rows, labels] each.

    ``without``, by member, are those of ensembles that are fitted without it; ``best_members`` is by fold.
    """

    merged: Values
    equal: Values
    best: Values
    best_members: tuple[int, ...]
    without: tuple[Values, ...]


def _cross_validated(sample: _Sample, options: Options, aim: _Aim, fold_of: Rows) -> _HeldOut:
    count, shape = len(sample.names), (sample.rows, len(sample.labels))
    merged, equal, best = (np.empty(shape, order="F") for _ in range(3))
    without = tuple(np.empty(shape, order="F") for _ in range(count if count > 1 else 0))
    sign = aim.sign
    best_members = list[int]()
    for fold in range(options.folds):
        held, others = np.flatnonzero(fold_of == fold), np.flatnonzero(fold_of != fold)
        truth = sample.truth[others]
        scores = [sign * aim.value(truth, _taken(values, others)) for values in sample.members]
        best_members.append(int(np.argmax(scores)))
        blend, calibrations, solver = _fitted(sample, others, options, aim)
        raw = [_taken(values, held) for values in sample.members]
        best[held] = raw[best_members[-1]]
        equal[held] = pooled(raw, np.ones(count), options.pool, sample.kind)
        ready = [_calibrated(*one) for one in zip(raw, calibrations, sample.kinds, strict=True)]
        merged[held] = blend.merge(ready)
        for number, one in enumerate(without):
            one[held] = solver.fit(number).merge(ready) if blend.uses(number) else merged[held]
    return _HeldOut(merged, equal, best, tuple(best_members), without)


def folds(truth: Truth, count: int, seed: int) -> Rows:
    """The fold of each row: rows drawn at random, each label dealt out evenly."""
    order = np.random.default_rng(seed).permutation(len(truth))
    if truth.ndim == 1 or truth.shape[1] > 1:
        likeliest = truth if truth.ndim == 1 else truth.argmax(axis=1)
        order = order[np.argsort(likeliest[order], kind="stable")]
    fold_of = np.empty(len(truth), dtype=np.int64)
    fold_of[order] = np.arange(len(truth)) % count
    return fold_of


@dataclass(frozen=True)
class _Score:
    """The metric of values, and what its differences' standard errors are told by.

    Log loss is a mean over rows: ``parts`` are the rows' losses.  Of other metrics they are those of all rows but a
    group, 20 groups drawn at random, for the jackknife.  ``folds`` is how many folds ``value`` is the mean of; None
    where it is of all rows at once.
    """

    value: float
    parts: Values
    folds: int | None = None


class _Judge:
    """Scores values of all rows, and compares the scores."""

    def __init__(self, sample: _Sample, aim: _Aim, options: Options, fold_of: Rows) -> None:
        self._truth, self._kind, self._aim, self._fold_of = sample.truth, sample.kind, aim, fold_of
        self._is_log_loss = options.metric == LOG_LOSS
        self._group_of = np.random.default_rng(options.seed).permutation(sample.rows) % _GROUPS

    def score(self, values: Values) -> _Score:
        if self._is_log_loss:
            losses = row_losses(self._truth, values, self._kind)
            return _Score(float(losses.mean()), losses)
        parts = []
        for group in range(min(_GROUPS, len(self._truth))):
            kept, _ = self._value(values, self._group_of != group)
            parts.append(kept)
        value, scored = self._value(values, np.ones(len(self._truth), np.bool_))
        return _Score(value, np.array(parts), scored)

    def _value(self, values: Values, is_kept: npt.NDArray[np.bool_]) -> tuple[float, int | None]:
        """The metric of these rows, and how many folds it is the mean of."""
        if self._aim.metric.kind != "ranks":
            kept = np.flatnonzero(is_kept)
            return self._aim.value(self._truth[kept], _taken(values, kept)), None
        by_fold = list[float]()
        for fold in range(int(self._fold_of.max()) + 1):
            kept = np.flatnonzero(is_kept & (self._fold_of == fold))
            try:
                by_fold.append(self._aim.value(self._truth[kept], _taken(values, kept)))
            except UndefinedMetric:
                continue  # the truth does not tell the labels apart in this fold
        if not by_fold:
            raise DataError(
                f"--metric {self._aim.metric.name}: no fold has rows with and without each label; use fewer "
                "--folds, or --metric log_loss"
            )
        return float(np.mean(by_fold)), len(by_fold)

    def gain(self, score: _Score, other: _Score) -> Gain:
        """What a score is better than another."""
        sign = self._aim.sign
        return Gain(sign * (score.value - other.value), self._error(score.parts - other.parts))

    def interval(self, score: _Score) -> tuple[float, float] | None:
        """The 95 % interval of a score; None where parts of the rows tend to have more of it than all."""
        if self._aim.metric.kind == "bins":
            return None
        margin = ERRORS * self._error(score.parts)
        return score.value - margin, score.value + margin

    def _error(self, parts: Values) -> float:
        """The standard error of a score, or of a difference of two, by its parts."""
        count = len(parts)
        if self._is_log_loss:
            return float(parts.std(ddof=1) / count**0.5)
        return float(((count - 1) / count * np.square(parts - parts.mean()).sum()) ** 0.5)


def _calibrated(values: Values, calibration: Calibration, activation: Activation) -> Values:
    return values if activation == "none" else calibrated(values, calibration, activation)


def _taken(values: Values, rows: Rows) -> Values:
    """These rows, each column in one piece."""
    return np.take(values.T, rows, axis=1).T
