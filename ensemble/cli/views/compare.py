"""Show the differences of two runs or files: settings, rows, metrics, time and memory."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ensemble.analysis.compare import Change, Comparison, MetricChange
from ensemble.analysis.metrics import METRIC_KINDS, Interval
from ensemble.cli.layout import Table
from ensemble.common.text import duration, gib, rate
from ensemble.pipeline.run_report import MemberReport

_ROWS = ("prediction", "rows", "changed", "share", "mean difference", "largest")
_METRICS = ("metric", "kind", "of", "rows", "A", "B", "B - A", "better")
_COSTS = ("member", "run", "computing", "start-up", "rows/s", "host memory", "GPU memory")


def view(comparison: Comparison) -> Iterator[str | Table]:
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
        yield Table(_ROWS, [_change_cells(change) for change in changes])
    if unchanged := [change.name for change in comparison.changes if not change.largest]:
        yield f"Predictions that are the same in all rows: {', '.join(unchanged)}"
    if comparison.changes:
        first = comparison.changes[0]  # of the ensemble, as a rule
        for example in first.examples:
            yield f"{first.name}: id {example.id!r}: {example.first} -> {example.second}"
    if comparison.metrics:
        rows = [_metric_cells(metric) for metric in comparison.metrics]
        yield Table(_METRICS, rows, texts=["kind", "of", "better"])
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
    seconds = member.seconds
    if not member.workers_now:
        return "reused" if member.replicas else "given", "", "", "", ""
    startup = max((worker.start_seconds or 0.0) + (worker.load_seconds or 0.0) for worker in member.workers)
    host, gpu = member.peak("peak_memory_bytes"), member.peak("peak_gpu_memory_bytes")
    return (
        duration(seconds) if seconds else "",
        duration(startup) if startup else "",
        rate(member.counters.rows / seconds) if seconds else "",
        gib(host) if host else "",
        gib(gpu) if gpu else "",
    )


def _change_cells(change: Change) -> tuple[str, ...]:
    share = f"{change.changed / change.rows:.1%}" if change.rows else ""
    differences = (
        f"{size:.2g}" if 0 < size < 0.0005 else f"{size:.4f}" for size in (change.mean, change.largest)
    )
    return change.name, f"{change.rows:,}", f"{change.changed:,}", share, *differences


def _metric_cells(change: MetricChange) -> tuple[str, ...]:
    better = {"first": "A", "second": "B", "": "neither"}[change.better]
    difference = f"{change.difference.value:+.4f} {_interval(change.difference, '+')}"
    values = (f"{side.value:.4f} {_interval(side)}".rstrip() for side in (change.first, change.second))
    return change.metric, change.kind, change.name, f"{change.rows:,}", *values, difference, better


def _interval(interval: Interval, sign: str = "") -> str:
    return "" if math.isnan(interval.low) else f"[{interval.low:{sign}.4f}, {interval.high:{sign}.4f}]"
