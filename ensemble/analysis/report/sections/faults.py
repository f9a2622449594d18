"""List faults that the run survived, and rows that could not be computed."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section
from ensemble.common.text import duration, plural

_MAX_FAULTS = 50
_MAX_ROWS = 20
_KINDS = {
    "error": "an error",
    "death": "its process died",
    "hang": "it hung",
    "memory": "out of host memory",
    "lasting": "an error that lasts",
}
_COUNTERS = {
    "oom_events": ("batch", "ran out of memory and ran again smaller"),
    "recomputed_rows": ("row", "came out non-finite and ran again in float32"),
    "float32_rows": ("row", "ran in float32 at once, as most rows before them had to"),
}


class Faults(Section):
    title: ClassVar[str] = "Faults survived"

    def html(self, data: ReportData) -> Markup:
        members = data.report.members
        faults = sorted(
            (fault for member in members for fault in member.faults), key=lambda fault: fault.after_seconds
        )
        fault_rows = [
            (
                duration(fault.after_seconds),
                f"{fault.member}-{fault.replica}",
                _KINDS.get(fault.kind, fault.kind),
                fault.message,
                "" if fault.rows is None else f"{fault.rows[1] - fault.rows[0]:,}",
                fault.remedy,
            )
            for fault in faults[:_MAX_FAULTS]
        ]
        remarks, counts, bad_rows = [], [], []
        for member in members:
            counters = member.worker_counters
            for name, (noun, text) in _COUNTERS.items():
                if getattr(counters, name):
                    remarks.append(f"{member.name}: {plural(getattr(counters, name), noun)} {text}")
            if member.bad_rows:
                counts.append(f"{plural(len(member.bad_rows), 'row')} of {member.name}")
            for row, reason in list(member.bad_rows.items())[:_MAX_ROWS]:
                bad_rows.append((member.name, f"{int(row) + 1:,}", reason))
        return self.render(
            faults=fault_rows,
            more=len(faults) - _MAX_FAULTS,
            remarks=remarks,
            counts=counts,
            policy=data.report.on_bad_row,
            bad_rows=bad_rows,
        )
