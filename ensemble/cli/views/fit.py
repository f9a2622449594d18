"""Show a fit: each member with its weight, calibration and gain; then how good the fit is on held-out rows."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.analysis.fit import FitReport
from ensemble.analysis.weights_file import difference, verdicts
from ensemble.cli.layout import Table
from ensemble.config import CalibrationConfig


def view(report: FitReport) -> Iterator[str | Table]:
    if report.candidates:
        yield _comparison(report)
    rows = [
        [
            member.name,
            _calibration(member.calibration),
            "" if member.weight is None else f"{member.weight:.4f}",
            f"{member.alone:.4f}",
            "" if member.gain is None else difference(member.gain, "worse", "better"),
        ]
        for member in report.members
    ]
    how = "temperature" if report.options.calibration == "temperature" else "calibration"
    metric = report.options.metric.replace("_", " ")
    yield Table(["member", how, "weight", f"{metric} alone", "without it"], rows)
    yield from verdicts(report)
    yield from (f"! {remark}" for remark in report.remarks)


def _comparison(report: FitReport) -> Table:
    """Return the ways to merge, each against the best one; with the log loss if another metric decides."""
    metric = report.options.metric.replace("_", " ")
    headers = ["way to merge", "numbers", metric, "against the best", "", ""]
    if report.candidates[0].log_loss is not None and metric != "log loss":
        headers[4] = "log loss"
    rows = [
        [
            way.options.title,
            f"{way.numbers:,}",
            f"{way.score:.4f}",
            difference(way.behind),
            f"{way.log_loss:.4f}" if headers[4] else "",
            "fitted" if way is report.chosen else "",
        ]
        for way in report.candidates
    ]
    return Table(headers, rows)


def _calibration(calibration: CalibrationConfig | None) -> str:
    if calibration is None:
        return ""
    return "vector" if calibration.scale else f"{calibration.temperature:.3f}"
