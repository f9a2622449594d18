"""Fit calibrations and weights to a truth, and measure them on rows that were held out.

The weights that are written are fitted to all rows. The scores that are reported come from cross-validation: each
row is scored by calibrations, weights and choices (the best member, the penalty of stacking) from the other folds
alone. Differences are paired and have a 95 % bootstrap interval over rows. A metric that compares rows with each
other is computed for each fold and averaged, because each fold has a model of its own.

``--method auto`` fits the simplest way to merge that is as good as the best. All ways are fitted to the same folds'
other rows and scored on the same held-out rows. As good as the best are those whose 95 % interval of the difference
holds 0. Of these the one with the fewest fitted numbers is chosen (the rule of one standard error of Breiman et
al., "Classification and Regression Trees", 1984, section 3.4.3, with the paired interval in its place); of several
the one with the best score, and then with the least log loss.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from numbers import Integral
from typing import Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ensemble.analysis.predictions import Predictions, taken
from ensemble.analysis.weights import (
    FittedThresholds,
    Pool,
    StackingFit,
    WeightedBlend,
    answered,
    fit_answer,
    fit_greedy,
    fit_isotonic,
    fit_stacking,
    fit_temperature,
    fit_vector_scaling,
    geometric_loss,
    kind_of,
    mean_loss,
    minimize_on_simplex,
    one_hot,
    rounding,
    sampled_rows,
)
from ensemble.common.errors import ConfigError, DataError
from ensemble.common.text import nearest_or_all, plural, quoted
from ensemble.config import CalibrationConfig, FittingConfig
from ensemble.data.answers import Answer, numbers_of
from ensemble.data.digests import truth_sha256
from ensemble.data.table import Truth
from ensemble.merging.methods.base import Values
from ensemble.merging.metrics import F1, QUADRATIC_KAPPA, Metric, UndefinedMetric, find_metric, order_remarks
from ensemble.merging.metrics import Rows as ScoredRows
from ensemble.merging.scoring import Bootstrap, Interval, Scored

Method: TypeAlias = Literal["equal", "best_member", "simplex", "greedy", "stacking", "auto"]
CalibrationMethod: TypeAlias = Literal["none", "temperature", "vector", "isotonic"]
Rows: TypeAlias = npt.NDArray[np.int64]
Blend: TypeAlias = WeightedBlend | StackingFit
Calibrations: TypeAlias = dict[str, CalibrationConfig | None]

LOG_LOSS: Final = "log_loss"
# What --method auto compares.
_POOLS: Final[tuple[Pool, ...]] = ("mean", "geometric_mean")
_CALIBRATIONS: Final[tuple[CalibrationMethod, ...]] = ("none", "temperature")
_LOG_LOSS_METHODS: Final = ("simplex", "stacking")
# Rows for each fitted number.  A fitted number costs log loss on new rows, on average 1 / (2 rows) nats (Akaike):
# with fewer rows all numbers together cost 0.05 or more, and weights hardly ever gain as much.
MIN_ROWS_PER_NUMBER: Final = 10
_STEPS = 10  # as so many numbers counts an isotonic regression


@dataclass(frozen=True)
class Options:
    """Say what to fit; ``pool`` is the merge method that the weights are for.

    For the quadratic kappa thresholds are fitted, too, between ``numbers`` of the labels; none: see ``numbers_of``.
    Without a ``method`` it is "simplex" for log loss and "greedy" for other metrics. ``group`` is the column of the
    groups over which the metric is averaged.

    Raises:
        ConfigError: a word is unknown, or a number out of range.
    """

    metric: str = LOG_LOSS
    method: Method | None = None
    calibration: CalibrationMethod = "none"
    folds: int = 5
    seed: int = 0
    pool: Pool = "mean"
    numbers: tuple[float, ...] = ()
    group: str | None = None

    def __post_init__(self) -> None:
        if self.method is None:
            object.__setattr__(self, "method", "simplex" if self.score_name == LOG_LOSS else "greedy")
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

    @property
    def score_name(self) -> str:
        """Return the metric, such as ``auc by rule``."""
        return self.metric if self.group is None else f"{self.metric} by {self.group}"

    @property
    def title(self) -> str:
        """Return the way to merge, such as ``simplex (geometric_mean, temperature)``."""
        words: list[str] = [] if self.method in ("best_member", "stacking") else [self.pool]
        words += [] if self.calibration == "none" else [self.calibration]
        return f"{self.method} ({', '.join(words)})" if words else str(self.method)


@dataclass(frozen=True)
class FittedMember:
    """Hold a member with its fitted calibration and weight; ``weight`` is None if the ensemble is stacked.

    ``alone`` is the metric of its predictions without the ensemble and without calibration. ``gain`` is how much
    better the ensemble is than one that is fitted without the member; None if there is no other member. A member
    that ``is_left_out`` did harm by more than noise, and the ensemble is fitted without it.
    """

    name: str
    calibration: CalibrationConfig | None
    weight: float | None
    alone: float
    gain: Interval | None
    is_left_out: bool = False


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Score a way to merge on held-out rows, beside the other ways of ``--method auto``.

    ``numbers`` says how many are fitted. ``behind`` is how much better its score is than that of the best candidate
    (below 0: worse). ``log_loss`` and ``log_loss_behind`` are the same by log loss, and None for regression.
    """

    options: Options
    numbers: int
    score: float
    behind: Interval
    log_loss: float | None
    log_loss_behind: Interval | None


@dataclass(frozen=True, kw_only=True)
class FitReport:
    """Hold what was fitted to all rows, and its scores on held-out rows.

    Attributes:
        options: what was fitted; of ``--method auto`` the options of the candidate that was chosen.
        rows: labelled rows that all members have and that no rule decides; further ``rows_left_out`` lack a member,
            ``rows_decided`` are decided by rules.
        score: the metric on held-out rows. Where each label has a threshold, this score, and each that it is
            compared with, is by thresholds of its own, which are fitted to the other folds.
        equal: the same metric with equal weights; ``best`` is that of the member that is best on the other folds.
        best_member: the member that is best most often; ``best_in`` counts the folds in which it is.
        over_equal: how much better the score is than ``equal`` (below 0: worse); ``over_best`` compares it with
            ``best``.
        stacking: None if the ensemble has weights.
        fitted_on: the labelled rows, and the score with its 95 % interval, as ``weights.yaml`` has them.
        thresholds: None unless the metric is the quadratic kappa, or F1 of labels that are answers or not.
        mean_over: the folds or groups over which the figures are means, in words; empty if they are of all rows.
        rejected: a fit that is worse than equal weights by more than noise, so that these were taken instead.
        candidates: what ``--method auto`` compared, the fewest numbers to fit first; empty without it.
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
    best_in: int
    over_best: Interval
    stacking: StackingFit | None
    remarks: tuple[str, ...]
    fitted_on: FittingConfig
    mean_over: str
    thresholds: FittedThresholds | None = None
    candidates: tuple[Candidate, ...] = ()
    rejected: FitReport | None = None

    @property
    def chosen(self) -> Candidate | None:
        """Return the candidate that was fitted; None without ``--method auto``."""
        return next((way for way in self.candidates if way.options == self.options), None)


def fit(predictions: Predictions, options: Options) -> FitReport:
    """Fit calibrations and weights, and cross-validate them; take equal weights where the fitted ones do worse.

    With ``--method auto`` compare the ways to merge, fit the chosen one, and leave out members that do harm.

    Raises:
        ConfigError: the options do not go together, or not with such predictions.
        DataError: there is no truth, it has too few rows or a single label, or a member is the same in every row.
    """
    is_auto = options.method == "auto"
    if is_auto and options.calibration != "none":
        raise ConfigError(
            "--method auto: compares members with and without temperatures; leave --calibration out"
        )
    metric = find_metric(options.metric, options.numbers or numbers_of(predictions.labels), options.group)
    # Stacking cannot use rows with a mask, and all candidates are compared on the same rows.
    sample, rows_decided = usable_rows(predictions, is_stacked=is_auto or options.method == "stacking")
    check(sample, options, metric)
    sample, options = with_folds_to_score(sample, options, metric)
    predictions = replace(predictions, remarks=sample.remarks)
    if is_auto:
        return _fit_simplest(sample, options, metric, predictions, rows_decided)
    report = fit_sample(sample, options, metric, predictions, rows_decided, equal_pool=options.pool)
    if not report.over_equal.high < 0:
        return report
    equal = replace(options, method="equal", calibration="none")
    kept = fit_sample(sample, equal, metric, predictions, rows_decided, equal_pool=options.pool)
    return replace(kept, rejected=report)


def fit_sample(
    sample: Predictions,
    options: Options,
    metric: Metric,
    predictions: Predictions,
    rows_decided: int,
    equal_pool: Pool,
) -> FitReport:
    """Fit to rows that were checked, those of ``usable_rows(predictions)``, and cross-validate.

    ``equal_pool`` is the merge method of the equal weights that the fit is compared with.
    """
    fold_of = folds_of(sample, options)
    scorer = HeldOutScorer(sample, metric, fold_of)
    calibrations = fit_calibrations(sample, options)
    blend = blend_fitter(values_to_merge(sample, calibrations, options), sample, options, metric)(None)
    order = [] if options.numbers else order_remarks([options.metric], sample.labels)
    usual = usual_answer(sample, options)
    held_out, decided, best_members = _cross_validated(sample, options, metric, fold_of, usual, equal_pool)
    merged, equal, best, *of_members = map(scorer.score, decided if len(decided) > 1 else held_out)
    if len(decided) <= 1:
        of_members += map(scorer.score, sample.as_merged({}).members.values())
    alone = of_members[-len(sample.members) :]
    thresholds: FittedThresholds | None = None
    if usual is not None:
        score, of_usual = scorer.score(decided[0]), scorer.score(answered(usual, held_out[0]))
        fitted = fit_answer(held_out[0], sample.labelled, usual, options.metric, options.seed)
        thresholds = FittedThresholds(
            numbers=fitted.numbers,
            labels=tuple(sample.labels[label] for label in fitted.labels),
            values=fitted.thresholds or tuple(fitted.above[label] for label in fitted.labels),
            score=score.value,
            halfway=of_usual.value,
            over_halfway=scorer.gain(score, of_usual),
        )
    members = tuple(
        FittedMember(
            name=name,
            calibration=calibrations[name],
            weight=float(blend.weights[number]) if isinstance(blend, WeightedBlend) else None,
            alone=alone[number].value,
            gain=scorer.gain(merged, of_members[number]) if len(alone) > 1 else None,
        )
        for number, name in enumerate(sample.members)
    )
    interval = merged.interval
    ((best_number, best_in),) = Counter(best_members).most_common(1)
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
        best_member=members[best_number].name,
        best_in=best_in,
        over_best=scorer.gain(merged, best),
        stacking=blend if isinstance(blend, StackingFit) else None,
        remarks=(*predictions.remarks, *order),
        fitted_on=FittingConfig(
            rows=predictions.rows,
            sha256=truth_sha256(predictions.ids, predictions.labels, predictions.labelled.truth),
            metric=options.score_name,
            value=merged.value,
            interval=None if np.isnan(interval.low) else (interval.low, interval.high),
        ),
        mean_over="" if scorer.partition is None else scorer.partition.text,
        thresholds=thresholds,
    )


def usable_rows(predictions: Predictions, is_stacked: bool) -> tuple[Predictions, int]:
    """Return the rows that all members have, and the number of further rows that rules decide.

    A rule with ``set`` decides its rows. A mask is applied to each member, although a run applies it to the merged
    values: for the geometric mean the result is the same, for the mean nearly so. Stacking leaves masked rows out,
    because it would take the logarithm of 0.
    """
    rules, members = predictions.post.rules, predictions.members.values()
    is_complete = ~np.logical_or.reduce([np.isnan(values[:, 0]) for values in members])
    is_decided = np.zeros(predictions.rows, np.bool_)
    if rules is not None:
        is_decided = is_complete & (rules.rows.any(axis=0) if is_stacked else rules.has_set)
    if rules is None and is_complete.all():
        return predictions, 0
    sample = predictions.taken(np.flatnonzero(is_complete & ~is_decided))
    if sample.post.rules is not None:
        for values in sample.members.values():  # copies of the run's
            sample.post.rules.apply(0, values, predictions.activation == "softmax")
    return replace(sample, post=replace(sample.post, rules=None)), int(is_decided.sum())


def values_to_merge(sample: Predictions, calibrations: Calibrations, options: Options) -> list[Values]:
    """Return members as they are merged: calibrated, and with 0 for impossible labels, except for stacking."""
    merged = sample.as_merged(calibrations, keeps_impossible=options.method == "stacking")
    return [*merged.members.values()]


def check(sample: Predictions, options: Options, metric: Metric) -> None:
    """Raise what is wrong with the options or the rows."""
    if options.method in _LOG_LOSS_METHODS and options.score_name != LOG_LOSS:
        raise ConfigError(
            f"--method {options.method} is for log_loss; for {options.score_name} use --method greedy"
        )
    if sample.activation == "none" and (options.calibration != "none" or options.method in _LOG_LOSS_METHODS):
        raise ConfigError(
            "the members give raw values (regression), which have no log loss: use --method greedy --calibration "
            "none, and a metric such as rmse"
        )
    if sample.activation == "none" and options.metric == LOG_LOSS:
        raise ConfigError(
            "the members give raw values (regression), which have no log loss: use another metric, such as "
            "--metric rmse"
        )
    fits_more = (
        options.calibration != "none"
        or options.method in ("stacking", "auto")
        or usual_answer(sample, options) is not None
    )
    if not fits_more:
        if len(sample.members) == 1:
            (name,) = sample.members
            raise ConfigError(f"{name} is the only member, and --calibration is none: nothing to fit")
        if options.method == "equal":
            raise ConfigError("--method equal without --calibration: nothing to fit")
    if not sample.rows:
        raise DataError(
            "no usable row: fit needs labelled rows that every member has and that no rule decides"
        )
    problems = [*problems_of(sample, options, metric)]
    if problems:
        raise DataError(problems)
    metric.value(sample.labelled, next(iter(sample.members.values())))  # or raise


def problems_of(sample: Predictions, options: Options, metric: Metric) -> Iterator[str]:
    """Yield why these rows cannot be fitted to, a sentence each."""
    for name, values in sample.members.items():
        if sample.rows > 1 and (values == values[0]).all():
            yield f"{name} gives every row the same values: it cannot help; leave it out"
    truth = sample.labelled.truth
    has_label = ScoredRows(sample.labelled, next(iter(sample.members.values()))).true_each.sum(axis=0)
    # With and without each label; metrics of numbers do without.
    ranks_labels = metric.kind == "ranks" and "none" not in metric.takes
    needed = 5 if ranks_labels else int(options.method == "stacking")
    if (truth == truth[0]).all():
        label = f"{sample.labels[int(truth[0])]!r}" if truth.ndim == 1 else "the same"
        yield f"the truth is {label} in every row; weights need rows of two labels or more"
    else:
        option = f"--metric {options.metric}" if ranks_labels else f"--method {options.method}"
        for label, count in zip(sample.labels, has_label.tolist(), strict=True):
            lacks = needed if sample.activation == "softmax" else sample.rows - count
            if min(count, lacks) < needed:
                verb, rows = ("has", count) if count < needed else ("lacks", lacks)
                yield (
                    f"the truth {verb} {label!r} in {rows:,} of {plural(sample.rows, 'row')}: {option} needs at "
                    f"least {needed:,}; give more rows, or use log_loss without stacking"
                )
    numbers = fitted_numbers(sample, options)
    if sample.rows < MIN_ROWS_PER_NUMBER * numbers:
        yield (
            f"{plural(sample.rows, 'labelled row')} for {plural(numbers, 'number')} to fit: too few, at least "
            f"{MIN_ROWS_PER_NUMBER} for each ({MIN_ROWS_PER_NUMBER * numbers:,}) are needed; use more rows, fewer "
            "members or --calibration none"
        )
    elif sample.rows < 2 * options.folds:
        yield f"{plural(sample.rows, 'labelled row')} in {options.folds} folds: use fewer --folds"


def fitted_numbers(sample: Predictions, options: Options) -> int:
    """Return how many numbers are fitted to the rows."""
    members, labels = len(sample.members), len(sample.labels)
    of_member = {"none": 0, "temperature": 1, "vector": 2 * labels, "isotonic": _STEPS * labels}
    numbers = members * of_member[options.calibration]
    if options.method == "best_member":
        numbers //= members
    elif options.method in ("simplex", "greedy"):
        numbers += members - 1
    elif options.method == "stacking" and sample.activation == "softmax":
        numbers += (members * labels + 1) * (labels - 1)
    elif options.method == "stacking":
        numbers += (members + 1) * labels
    usual = usual_answer(sample, options)
    if usual is not None:  # the thresholds between the labels, or one: each label's is fitted by itself
        numbers += max(1, len(usual.thresholds))
    return numbers


def usual_answer(sample: Predictions, options: Options) -> Answer | None:
    """Return the answer whose thresholds the metric fits, with usual ones; None: it fits none.

    F1 has one for each label, of two exclusive labels one for the second; of more it is of the likeliest label.
    """
    if options.metric == QUADRATIC_KAPPA:
        return rounding(options.numbers or numbers_of(sample.labels))
    labels, is_exclusive = len(sample.labels), sample.activation == "softmax"
    if options.metric not in F1 or sample.activation == "none" or (is_exclusive and labels != 2):
        return None
    return Answer(texts=(), above=(np.inf, 0.5) if is_exclusive else (0.5,) * labels)


def fit_calibrations(sample: Predictions, options: Options) -> Calibrations:
    """Return the calibration of each member that is best for these rows."""
    calibrations: Calibrations = {}
    for name, values in sample.members.items():
        known = replace(sample.labelled, activation=sample.activations[name])
        if options.calibration == "none" or known.activation == "none":
            calibrations[name] = None
            continue
        if known.activation != kind_of(sample.labelled):
            known = replace(known, truth=one_hot(known.truth, values.shape[1]))
        if options.calibration == "temperature":
            settings = CalibrationConfig(temperature=fit_temperature(values, known))
        elif options.calibration == "isotonic":
            lines = fit_isotonic(values, known).items()
            settings = CalibrationConfig(isotonic={sample.labels[label]: line for label, line in lines})
        else:
            scale, bias = fit_vector_scaling(values, known)
            settings = CalibrationConfig(
                scale=dict(zip(sample.labels, scale.tolist(), strict=True)),
                bias=dict(zip(sample.labels, bias.tolist(), strict=True)),
            )
        calibrations[name] = settings
    return calibrations


def blend_fitter(
    members: Sequence[Values], sample: Predictions, options: Options, metric: Metric
) -> Callable[[int | None], Blend]:
    """Return a function that fits the merge of calibrated members by the method of the options.

    Its argument is the number of a member to leave out; None: no member is left out.
    """
    known, kind, pool = sample.labelled, kind_of(sample.labelled), options.pool
    if options.method == "stacking":
        return partial(fit_stacking, members, known, options.seed)
    numbers = range(len(members))
    if options.method == "equal":
        return lambda left_out: WeightedBlend(
            np.array([float(number != left_out) for number in numbers]), pool, kind
        )
    if options.method == "best_member":
        scores = [*map(score_to_fit(sample, options, metric), members)]

        def best(left_out: int | None) -> Blend:
            allowed = [number for number in numbers if number != left_out]
            return WeightedBlend(np.eye(len(members))[max(allowed, key=lambda n: scores[n])], pool, kind)

        return best
    if options.method == "simplex":
        loss = (mean_loss if pool == "mean" else geometric_loss)(members, known)
        start = minimize_on_simplex(loss, len(members))
        return lambda left_out: WeightedBlend(
            minimize_on_simplex(loss, len(members), left_out, start), pool, kind
        )
    # A greedy selection tries hundreds of means, so that a sample of the rows must do; a smaller one if thresholds
    # are fitted to each of them.
    usual = usual_answer(sample, options)
    most_rows = 5_000 if usual is not None and usual.above else 20_000
    rows = sampled_rows(len(known), most_rows, options.seed)
    score = score_to_fit(sample.taken(rows), options, metric)
    return partial(fit_greedy, [taken(values, rows) for values in members], score, pool, kind)


def score_to_fit(sample: Predictions, options: Options, metric: Metric) -> Callable[[Values], float]:
    """Return a function that scores values of these rows, float64 [rows, labels]; higher is better.

    Where each label has a threshold, it is the score by the thresholds that are best for these values.
    """
    usual = usual_answer(sample, options)

    def score(values: Values) -> float:
        if usual is not None and usual.above:
            values = answered(
                fit_answer(values, sample.labelled, usual, options.metric, options.seed), values
            )
        value = metric.value(sample.labelled, values)
        return value if metric.greater_is_better else -value

    return score


def _cross_validated(
    sample: Predictions,
    options: Options,
    metric: Metric,
    fold_of: Rows,
    usual: Answer | None,
    equal_pool: Pool,
) -> tuple[list[Values], list[Values], list[int]]:
    """Merge each row by what was fitted to the other folds.

    Returns:
        values, float64 [rows, labels] each, of the ensemble, of equal weights, of the best member and, if there are
        several members, of the ensembles without each of them; answers in the same form, by fitted thresholds in
        place of the ``usual`` ones: of the ensemble, and where each label has a threshold of all these and of the
        members; and the number of the best member of each fold.
    """
    count, shape = len(sample.members), (sample.rows, len(sample.labels))
    held_out = [np.empty(shape, order="F") for _ in range(3 + count * (count > 1))]
    decided: list[Values] = []
    if usual is not None:
        decided = [np.empty(shape) for _ in range(len(held_out) + count if usual.above else 1)]
    best_members = []
    equal_blend = WeightedBlend(np.ones(count), equal_pool, kind_of(sample.labelled))
    for fold in range(options.folds):
        is_scored = np.flatnonzero(fold_of == fold)
        others, scored = sample.taken(np.flatnonzero(fold_of != fold)), sample.taken(is_scored)
        scores = map(score_to_fit(others, options, metric), others.as_merged({}).members.values())
        best_members.append(int(np.argmax([*scores])))
        calibrations = fit_calibrations(others, options)
        members, ready = (values_to_merge(part, calibrations, options) for part in (others, scored))
        method = blend_fitter(members, others, options, metric)
        blends = [method(None)]
        for number in range(count if count > 1 else 0):
            has_weight = isinstance(blends[0], StackingFit) or blends[0].weights[number] > 0
            blends.append(method(number) if has_weight else blends[0])
        merged = partial(_merged_ways, blends, equal_blend, best_members[-1])
        ways = [*islice(merged(scored, ready), max(len(held_out), len(decided)))]
        for target, values in zip(held_out, ways, strict=False):
            target[is_scored] = values
        for target, fitted_to, values in zip(decided, merged(others, members), ways, strict=False):
            assert usual is not None
            answer = fit_answer(fitted_to, others.labelled, usual, options.metric, options.seed)
            target[is_scored] = answered(answer, values)
    return held_out, decided, best_members


def _merged_ways(
    blends: Sequence[Blend],
    equal: WeightedBlend,
    best_member: int,
    part: Predictions,
    ready: Sequence[Values],
) -> Iterator[Values]:
    """Yield what rows get from the first blend, equal weights, the best member, other blends and each member."""
    raw, first = [*part.as_merged({}).members.values()], blends[0]
    merged = first.merge(ready)
    without = (merged if blend is first else blend.merge(ready) for blend in blends[1:])
    for values in chain((merged, equal.merge(raw), raw[best_member]), without, raw):
        values = values.copy(order="F")
        part.post.merged(0, values, part.activation == "softmax")
        yield values


def with_folds_to_score(sample: Predictions, options: Options, metric: Metric) -> tuple[Predictions, Options]:
    """Return the sample with its models' folds, numbered from 0, and options with as many folds.

    It keeps no folds unless the metric ranks rows and is defined in several folds; if it is not known whether there
    are any, a remark says it.
    """
    if metric.kind != "ranks" or sample.folds is None:
        remarks = (*sample.remarks, *sample.ranking_remarks([metric]))
        return replace(sample, folds=None, remarks=remarks), options
    partition = metric.partition(sample.labelled, next(iter(sample.members.values())))
    if partition is None or len(partition.parts) < 2:
        remark = f"{metric.name}: defined in one of the models' folds alone, so all rows are ranked together"
        return replace(sample, folds=None, remarks=(*sample.remarks, remark)), options
    numbers, fold_of = np.unique(sample.folds, return_inverse=True)
    return replace(sample, folds=fold_of.astype(np.int64)), replace(options, folds=len(numbers))


def folds_of(sample: Predictions, options: Options) -> Rows:
    """Return the fold of each row, [rows]: that of its model where ``with_folds_to_score`` keeps it."""
    if sample.folds is not None:
        return sample.folds
    return folds(sample.labelled.truth, options.folds, options.seed)


def folds(truth: Truth, count: int, seed: int) -> Rows:
    """Return the fold of each row: rows drawn at random, each label dealt out evenly."""
    order = np.random.default_rng(seed).permutation(len(truth))
    if truth.ndim == 1 or truth.shape[1] > 1:
        likeliest = truth if truth.ndim == 1 else truth.argmax(axis=1)
        order = order[np.argsort(likeliest[order], kind="stable")]
    fold_of = np.empty(len(truth), dtype=np.int64)
    fold_of[order] = np.arange(len(truth)) % count
    return fold_of


class HeldOutScorer:
    """Score held-out values on the same resamples; for the means over folds or groups see ``Metric.partition``."""

    def __init__(self, sample: Predictions, metric: Metric, fold_of: Rows) -> None:
        self._metric = metric
        self._bootstrap = Bootstrap(replace(sample.labelled, folds=fold_of))
        try:
            self.partition = self.score(next(iter(sample.members.values()))).partition
        except UndefinedMetric as error:
            raise DataError(
                [f"{problem}; use fewer --folds, or --metric log_loss" for problem in error.problems]
            ) from None

    def score(self, values: Values) -> Scored:
        return self._bootstrap.score(self._metric, values)

    def gain(self, score: Scored, other: Scored) -> Interval:
        """Return by how much a score is better than another (below 0: worse)."""
        return score.minus(other) if self._metric.greater_is_better else other.minus(score)


def _fit_simplest(
    sample: Predictions, options: Options, metric: Metric, predictions: Predictions, rows_decided: int
) -> FitReport:
    """Compare the ways to merge, fit the chosen one to all rows, and leave out members that do harm.

    A member does harm if the chosen way is better without it by more than noise. Of several the one that does most
    is left out, and the others are compared anew.
    """
    names, left_out = [*sample.members], dict[str, FittedMember]()
    while True:
        candidates, remarks = compare_candidates(sample, options, metric)
        as_good = [way for way in candidates if not way.behind.excludes_zero]
        chosen = min(as_good, key=lambda way: (way.numbers, -way.behind.value, way.log_loss or 0.0))
        report = fit_sample(
            sample, chosen.options, metric, predictions, rows_decided, equal_pool=options.pool
        )
        harmful = [member for member in report.members if member.gain is not None and member.gain.high < 0]
        if not harmful:
            break
        worst = min(harmful, key=lambda member: member.gain.value if member.gain else 0.0)
        left_out[worst.name] = replace(worst, calibration=None, is_left_out=True)
        kept = {name: values for name, values in sample.members.items() if name != worst.name}
        activations = {name: sample.activations[name] for name in kept}
        sample = replace(sample, members=kept, activations=activations)
    report = _with_members(report, names, left_out)
    return replace(report, candidates=candidates, remarks=(*report.remarks, *remarks))


def _with_members(report: FitReport, names: Sequence[str], left_out: dict[str, FittedMember]) -> FitReport:
    """Return the report with members that were left out in their places, with a weight or coefficients of 0."""
    members = {member.name: member for member in report.members}
    stacking = report.stacking
    for number, name in enumerate(names):
        if name not in left_out:
            continue
        members[name] = replace(left_out[name], weight=0.0 if stacking is None else None)
        if stacking is not None:
            coefficients = np.insert(stacking.coefficients, number, 0.0, axis=1)
            stacking = replace(stacking, coefficients=coefficients)
    return replace(report, members=tuple(members[name] for name in names), stacking=stacking)


def compare_candidates(
    sample: Predictions, options: Options, metric: Metric
) -> tuple[tuple[Candidate, ...], list[str]]:
    """Score the ways to merge on held-out rows.

    Returns:
        the ways, the fewest numbers to fit first; and why others are not among them, a sentence each.
    """
    problems = {way: next(problems_of(sample, way, metric), "") for way in _ways(sample, options)}
    remarks = [
        f"{way.title} is not compared: {problem.partition(';')[0]}"
        for way, problem in problems.items()
        if problem
    ]
    ways = sorted((way for way in problems if not problems[way]), key=lambda way: fitted_numbers(sample, way))
    fold_of = folds_of(sample, options)
    held_out, decided = _held_out(ways, sample, metric, fold_of)
    scores = _scores(decided or held_out, sample, metric, fold_of)
    log_losses: dict[Options, tuple[float, Interval]] = {}
    if options.score_name == LOG_LOSS:
        log_losses = scores
    elif sample.activation != "none":
        log_losses = _scores(held_out, sample, find_metric(LOG_LOSS), fold_of)
    candidates = tuple(
        Candidate(
            options=way,
            numbers=fitted_numbers(sample, way),
            score=scores[way][0],
            behind=scores[way][1],
            log_loss=log_losses[way][0] if log_losses else None,
            log_loss_behind=log_losses[way][1] if log_losses else None,
        )
        for way in ways
    )
    return candidates, remarks


def _ways(sample: Predictions, options: Options) -> Iterator[Options]:
    """Yield the options of each way to merge these members."""
    methods: list[Method] = ["equal"]
    if len(sample.members) > 1:
        methods += ["best_member", "greedy"]
    if sample.activation == "none":
        for method in methods:
            yield replace(options, method=method, pool="mean")
        return
    for calibration in _CALIBRATIONS:
        for method in methods:
            yield replace(options, method=method, calibration=calibration, pool="mean")
        if len(sample.members) > 1:
            yield replace(options, method="equal", calibration=calibration, pool="geometric_mean")
            for pool in _POOLS:
                yield replace(options, method="simplex", calibration=calibration, pool=pool)
        yield replace(options, method="stacking", calibration=calibration, pool="mean")


def _held_out(
    ways: Sequence[Options], sample: Predictions, metric: Metric, fold_of: Rows
) -> tuple[dict[Options, Values], dict[Options, Values]]:
    """Merge each row in each way, by a fit to the other folds.

    Returns:
        values, float64 [rows, labels], by way; and where each label has a threshold, answers in the same form.
    """
    shape, is_exclusive = (sample.rows, len(sample.labels)), sample.activation == "softmax"
    held_out, decided = {way: np.empty(shape, order="F") for way in ways}, dict[Options, Values]()
    usual = usual_answer(sample, ways[0])
    if usual is not None and usual.above:
        decided = {way: np.empty(shape) for way in ways}
    for fold in range(int(fold_of.max()) + 1):
        is_scored = np.flatnonzero(fold_of == fold)
        others, scored = sample.taken(np.flatnonzero(fold_of != fold)), sample.taken(is_scored)
        for calibration in dict.fromkeys(way.calibration for way in ways):
            of_calibration = [way for way in ways if way.calibration == calibration]
            calibrations = fit_calibrations(others, of_calibration[0])
            for way in of_calibration:
                members, ready = (values_to_merge(part, calibrations, way) for part in (others, scored))
                blend = blend_fitter(members, others, way, metric)(None)
                values = blend.merge(ready)
                scored.post.merged(0, values, is_exclusive)
                held_out[way][is_scored] = values
                if usual is not None and decided:
                    fitted_to = blend.merge(members)
                    others.post.merged(0, fitted_to, is_exclusive)
                    answer = fit_answer(fitted_to, others.labelled, usual, way.metric, way.seed)
                    decided[way][is_scored] = answered(answer, values)
    return held_out, decided


def _scores(
    held_out: Mapping[Options, Values], sample: Predictions, metric: Metric, fold_of: Rows
) -> dict[Options, tuple[float, Interval]]:
    """Return each way's score, and how much better it is than the best one (below 0: worse)."""
    scorer = HeldOutScorer(sample, metric, fold_of)
    scores = {way: scorer.score(values) for way, values in held_out.items()}
    choose = max if metric.greater_is_better else min
    best = choose(scores.values(), key=lambda score: score.value)
    return {way: (score.value, scorer.gain(score, best)) for way, score in scores.items()}
