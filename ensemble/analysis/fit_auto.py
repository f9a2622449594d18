"""Compare ways to merge on held-out rows, and fit the simplest that is as good as the best: ``fit --method auto``.

All candidates are fitted to the same folds' other rows, and scored on the same held-out rows, so that differences
are paired. As good as the best are those whose 95 % interval of the difference holds 0. Of these the one with the
fewest fitted numbers is chosen (the rule of one standard error of Breiman et al., "Classification and Regression
Trees", 1984, section 3.4.3, with the paired interval in its place); of several the one with the best score, and
then with the least log loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from ensemble.analysis.fit import (
    LOG_LOSS,
    CalibrationMethod,
    Candidate,
    FitReport,
    FittedMember,
    HeldOutScorer,
    Method,
    Options,
    Rows,
    blend_fitter,
    check,
    fit_calibrations,
    fit_sample,
    fitted_numbers,
    folds_of,
    metric_of,
    problems_of,
    usable_rows,
    values_to_merge,
    with_folds_to_score,
)
from ensemble.analysis.metrics import Metric, find_metric
from ensemble.analysis.predictions import Predictions
from ensemble.analysis.weights import Pool
from ensemble.common.errors import ConfigError
from ensemble.merging.methods.base import Values
from ensemble.merging.scoring import Interval

_POOLS: Final[tuple[Pool, ...]] = ("mean", "geometric_mean")
_CALIBRATIONS: Final[tuple[CalibrationMethod, ...]] = ("none", "temperature")


def fit_auto(predictions: Predictions, options: Options) -> FitReport:
    """Compare the ways to merge, fit the chosen one to all rows, and leave out members that do harm.

    A member does harm if the chosen way is better without it by more than noise. Of several the one that does most
    is left out, and the others are compared anew.

    Raises:
        ConfigError: the options do not go together, or not with such predictions.
        DataError: there is no truth, it has too few rows or a single label, or a member is the same in every row.
    """
    if options.calibration != "none":
        raise ConfigError(
            "--method auto: compares members with and without temperatures; leave --calibration out"
        )
    metric = metric_of(options, predictions)
    # Stacking cannot use rows with a mask, and all candidates are compared on the same rows.
    sample, rows_decided = usable_rows(predictions, is_stacked=True)
    check(sample, options, metric)
    sample, options = with_folds_to_score(sample, options, metric)
    predictions = replace(predictions, remarks=sample.remarks)
    names, left_out = [*sample.members], dict[str, FittedMember]()
    while True:
        candidates, remarks = compare_candidates(sample, options, metric)
        chosen = _simplest(candidates)
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
    held_out = _held_out(ways, sample, metric, fold_of)
    scores = _scores(held_out, sample, metric, fold_of)
    log_losses: dict[Options, tuple[float, Interval]] = {}
    if options.metric == LOG_LOSS:
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
) -> dict[Options, Values]:
    """Return what each way merges, float64 [rows, labels], each row by a fit to the other folds."""
    held_out = {way: np.empty((sample.rows, len(sample.labels)), order="F") for way in ways}
    for fold in range(int(fold_of.max()) + 1):
        is_scored = np.flatnonzero(fold_of == fold)
        others, scored = sample.taken(np.flatnonzero(fold_of != fold)), sample.taken(is_scored)
        for calibration in _CALIBRATIONS:
            of_calibration = [way for way in ways if way.calibration == calibration]
            if not of_calibration:
                continue
            calibrations = fit_calibrations(others, of_calibration[0])
            for way in of_calibration:
                members, ready = (values_to_merge(part, calibrations, way) for part in (others, scored))
                held_out[way][is_scored] = blend_fitter(members, others, way, metric)(None).merge(ready)
    for values in held_out.values():
        sample.post.merged(0, values, sample.activation == "softmax")
    return held_out


def _scores(
    held_out: Mapping[Options, Values], sample: Predictions, metric: Metric, fold_of: Rows
) -> dict[Options, tuple[float, Interval]]:
    """Return each way's score, and how much better it is than the best one (below 0: worse)."""
    scorer = HeldOutScorer(sample, metric, fold_of)
    scores = {way: scorer.score(values) for way, values in held_out.items()}
    choose = max if metric.greater_is_better else min
    best = choose(scores.values(), key=lambda score: score.value)
    return {way: (score.value, scorer.gain(score, best)) for way, score in scores.items()}


def _simplest(candidates: Sequence[Candidate]) -> Candidate:
    """Return the candidate with the fewest numbers of those as good as the best; see the module for several."""
    as_good = [candidate for candidate in candidates if not candidate.behind.excludes_zero]

    def rank(candidate: Candidate) -> tuple[float, ...]:
        return candidate.numbers, -candidate.behind.value, candidate.log_loss or 0.0

    return min(as_good, key=rank)
