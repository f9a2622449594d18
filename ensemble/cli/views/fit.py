"""What ``fit`` shows: the members, what was fitted of them and their worth; then what the whole fit is worth."""

from __future__ import annotations

from collections.abc import Iterator

from ensemble.analysis.fit import FitReport
from ensemble.analysis.weights_file import difference, verdicts
from ensemble.cli.layout import Table


def view(report: FitReport) -> Iterator[str | Table]:
    """A table of the members, and a sentence for each comparison and for each member that does not help."""
    rows = [
        [
            member.name,
            f"{member.calibration:.3f}" if isinstance(member.calibration, float) else "",
            "" if member.weight is None else f"{member.weight:.4f}",
            f"{member.alone:.4f}",
            "" if member.gain is None else difference(member.gain, -1),
        ]
        for member in report.members
    ]
    metric = report.options.metric.replace("_", " ")
    yield Table(["member", "temperature", "weight", f"{metric} alone", "without it"], rows)
    yield from verdicts(report)
    yield from (f"! {remark}" for remark in report.remarks)
