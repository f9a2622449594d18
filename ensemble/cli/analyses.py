"""Show what comparing two runs, fitting weights and tuning settings have found."""

from __future__ import annotations

import math
from collections.abc import Iterator

import yaml

from ensemble.analysis.compare import Comparison
from ensemble.analysis.fit import FitReport
from ensemble.analysis.tune import MemberTuning, Trial, Tuning
from ensemble.analysis.weights_file import difference, verdicts
from ensemble.cli.layout import Table, table
from ensemble.common.text import duration, gib, metric_words, percent_of, plural, rate, written
from ensemble.config import CalibrationConfig
from ensemble.merging.metrics import METRIC_KINDS
from ensemble.merging.scoring import Interval
from ensemble.pipeline.run_report import MemberReport

_COSTS = ("member", "run", "computing", "start-up", "rows/s", "host memory", "GPU memory")
_BETTER = {"first": "A", "second": "B", "": "neither"}
_REMEDY = "run it again once the machine is quiet, with more --rows if the sample takes less than a second"


def compare(comparison: Comparison) -> Iterator[str | Table]:
    """Yield the differences of two runs or files: settings, rows, metrics, time and memory."""
    sides = {"A": comparison.first, "B": comparison.second}
    for letter, side in sides.items():
        ended = "" if side.report is None or side.report.status == "complete" else f", {side.report.status}"
        yield f"{letter}: {side.name}{ended}"
    for setting in comparison.settings or ():
        yield f"{setting.key}: {setting.first} -> {setting.second}"
    if comparison.settings == ():
        yield "The settings are the same."
    changes = [change for change in comparison.changes if change.largest]
    if changes:
        yield table(
            changes,
            {
                "prediction": lambda change: change.name,
                "rows": lambda change: change.rows,
                "changed": lambda change: change.changed,
                "share": lambda change: percent_of(change.changed, change.rows, 1),
                "mean difference": lambda change: _small(change.mean),
                "largest": lambda change: _small(change.largest),
            },
        )
    if unchanged := [change.name for change in comparison.changes if not change.largest]:
        yield f"Predictions that are the same in all rows: {', '.join(unchanged)}"
    if comparison.changes:
        first = comparison.changes[0]  # of the ensemble, as a rule
        for example in first.examples:
            yield f"{first.name}: id {example.id!r}: {example.first} -> {example.second}"
    if comparison.metrics:
        yield table(
            comparison.metrics,
            {
                "metric": lambda metric: metric.metric,
                "kind": lambda metric: metric.kind,
                "of": lambda metric: metric.name,
                "rows": lambda metric: metric.rows,
                "A": lambda metric: _with_interval(metric.first),
                "B": lambda metric: _with_interval(metric.second),
                "B - A": lambda metric: _with_interval(metric.difference, "+"),
                "better": lambda metric: _BETTER[metric.better],
            },
            texts=["kind", "of", "better"],
        )
        yield (
            f"In brackets: {comparison.level:.0%} bootstrap intervals, those of B - A of the same rows for both; "
            "neither is better where that one holds 0"
        )
        for name in dict.fromkeys(metric.metric for metric in comparison.metrics if metric.kind == "bins"):
            yield f"{name}: no interval of A or B, as every resample tends to have more of it; that of B - A holds"
        kinds = dict.fromkeys(metric.kind for metric in comparison.metrics)
        yield f"Kind: {'; '.join(f'{kind}: {METRIC_KINDS[kind]}' for kind in kinds)}"
    reports = {letter: side.report for letter, side in sides.items() if side.report is not None}
    names = dict.fromkeys(member.name for report in reports.values() for member in report.members)
    costs = [
        (name, letter, *_cost_cells(member))
        for name in names
        for letter, report in reports.items()
        for member in report.members
        if member.name == name
    ]
    totals = [
        ("whole run", letter, duration(report.timing["total_seconds"]))
        for letter, report in reports.items()
        if "total_seconds" in report.timing
    ]
    if costs or totals:
        yield Table(_COSTS, costs, totals, texts=["run"])
    yield from (f"! {remark}" for remark in comparison.remarks)


def _cost_cells(member: MemberReport) -> tuple[str, ...]:
    # Not the workers of an earlier run, whose time is no part of this one's.
    seconds = member.seconds or None
    if not member.workers_now:
        return "reused" if member.replicas else "given", "", "", "", ""
    startup = max((worker.start_seconds or 0.0) + (worker.load_seconds or 0.0) for worker in member.workers)
    return (
        duration(seconds),
        duration(startup or None),
        rate(seconds and member.counters.rows / seconds),
        gib(member.peak("peak_memory_bytes") or None),
        gib(member.peak("peak_gpu_memory_bytes") or None),
    )


def _small(size: float) -> str:
    return f"{size:.2g}" if 0 < size < 0.0005 else f"{size:.4f}"


def _with_interval(interval: Interval, sign: str = "") -> str:
    text = f"{interval.value:{sign}.4f}"
    if math.isnan(interval.low):
        return text
    return f"{text} [{interval.low:{sign}.4f}, {interval.high:{sign}.4f}]"


def fit(report: FitReport) -> Iterator[str | Table]:
    """Yield each member's weight, calibration and gain; then how good the fit is on held-out rows."""
    metric = metric_words(report.options.score_name)
    if report.candidates:
        yield table(  # the ways to merge, each against the best one; with the log loss if another metric decides
            report.candidates,
            {
                "way to merge": lambda way: way.options.title,
                "numbers": lambda way: way.numbers,
                metric: lambda way: f"{way.score:.4f}",
                "against the best": lambda way: difference(way.behind),
                **({} if metric == "log loss" else {"log loss": lambda way: written(way.log_loss, ".4f")}),
                "": lambda way: "fitted" if way is report.chosen else None,
            },
        )
    how = "temperature" if report.options.calibration == "temperature" else "calibration"
    yield table(
        report.members,
        {
            "member": lambda member: member.name,
            how: lambda member: _calibration(member.calibration),
            "weight": lambda member: written(member.weight, ".4f"),
            f"{metric} alone": lambda member: f"{member.alone:.4f}",
            "without it": lambda member: (
                None if member.gain is None else difference(member.gain, "worse", "better")
            ),
        },
    )
    yield from verdicts(report)
    yield from (f"! {remark}" for remark in report.remarks)


def _calibration(calibration: CalibrationConfig | None) -> str:
    if calibration is None:
        return ""
    if calibration.isotonic:
        return "isotonic"
    return "vector" if calibration.scale else f"{calibration.temperature:.3f}"


def tune(tuning: Tuning) -> Iterator[str | Table]:
    """Yield each member's trials, and the keys to change in the config."""
    yield f"by {plural(tuning.rows, 'row')} of every length, in {duration(tuning.seconds)}:"
    for member in tuning.members:
        yield from _member(member, tuning.tolerance)
    for name in tuning.skipped:
        yield f"{name}: has no settings to choose"


def _member(member: MemberTuning, tolerance: float) -> Iterator[str | Table]:
    name, done = member.name, [trial for trial in member.trials if not trial.failure]
    if member.trials:
        yield _trials(member)
    metrics = list(dict.fromkeys(metric for trial in done for metric in trial.metrics))
    others = [trial for trial in done if trial.name != member.reference]
    if metrics:
        compared = [[trial.name, *(_difference(trial, metric) for metric in metrics)] for trial in others]
        yield Table([f"minus {member.reference}", *metrics], compared)
    reasons: dict[str, list[str]] = {}
    for trial in member.trials:
        if trial.failure:
            reasons.setdefault(trial.failure, []).append(trial.name)
    yield from (f"{name}: {'; '.join(names)}: {why}" for why, names in reasons.items())
    if not member.reference:
        yield f"! {name}: nothing that was tried gave a result; its settings stay as they are"
        return
    if member.lost_references:
        lost = " and ".join(member.lost_references)
        yield f"! {name}: {lost} gave no result, so all is compared with {member.reference}"
    for trial in done:
        if trial.name == member.reference and trial.why_lacking:
            yield f"! {name}: {trial.why_lacking}; nothing above counts them"
    if member.is_noisy:
        result = "nothing is chosen" if member.has_moved else "the speeds above say little"
        yield (
            f"! {name}: {result}, as {member.reference} took {member.again:.2g} times as long when it was measured "
            f"again at the end; {_REMEDY}"
        )
    if member.has_moved:
        return
    precisions = [trial.is_within for trial in others if trial.is_precision]
    if precisions and not any(precisions):
        yield (
            f"! {name}: no other precision comes within {tolerance:g} of {member.reference}; it is kept, and a "
            "larger --tolerance is yours to choose"
        )
    changes = ", ".join(f"{key}: {_yaml(value)}" for key, value in member.keys.items())
    yield f"{name}: {member.best} is the fastest{f': {changes}' if changes else ', and what the config says'}"


def _trials(member: MemberTuning) -> Table:
    def is_compared(trial: Trial) -> bool:
        return not trial.failure and trial.name != member.reference

    def marks(trial: Trial) -> str:
        texts = ["<- fastest"] if trial.name == member.best else []
        if trial.failure:  # the reason, which may be long, is said below
            texts.append("stopped" if trial.rows_per_second else "no result")
        elif trial.name == member.reference:
            texts.append("the reference")
        elif not trial.is_within:
            texts.append("too far")
        return ", ".join(texts)

    return table(
        member.trials,
        {
            member.name: lambda trial: trial.name,
            "tokens/s": lambda trial: written(trial.tokens_per_second, ",.0f"),
            "rows/s": lambda trial: rate(trial.rows_per_second),
            "load": lambda trial: duration(trial.load_seconds),
            "peak memory": lambda trial: gib(trial.peak_bytes),
            "whole table": lambda trial: duration(trial.whole_seconds),
            "mean": lambda trial: f"{trial.mean:.4f}" if is_compared(trial) else None,
            "largest": lambda trial: f"{trial.largest:.4f}" if is_compared(trial) else None,
            "changed": lambda trial: f"{trial.changed:.1%}" if is_compared(trial) else None,
            "": marks,
        },
        texts=[""],
    )


def _difference(trial: Trial, metric: str) -> str:
    gain = trial.metrics.get(metric)
    return "" if gain is None else f"{gain.value:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"


def _yaml(value: object) -> str:
    """Return a value as people write it in one line of YAML."""
    return yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("...\n").strip()
