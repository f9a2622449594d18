"""What went wrong and was survived, and rows that nobody could compute."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.common.protocol import Counters
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


class Faults(Section):
    title: ClassVar[str] = "Faults survived"

    def html(self, data: ReportData) -> Markup:
        report, parts = data.report, []
        faults = sorted(
            (fault for member in report.members for fault in member.faults), key=lambda one: one.after_seconds
        )
        if faults:
            rows = [
                (
                    duration(fault.after_seconds),
                    f"{fault.member}-{fault.replica}",
                    _KINDS.get(fault.kind, fault.kind),
                    html('<div class="words">{{ text }}</div>', text=fault.message),
                    "" if fault.rows is None else f"{fault.rows[1] - fault.rows[0]:,}",
                    fault.remedy,
                )
                for fault in faults[:_MAX_FAULTS]
            ]
            headers = ("after", "worker", "what", "it said", "rows", "what was done")
            parts.append(table(headers, rows, left=(1, 2, 3, 5)))
            if (more := len(faults) - _MAX_FAULTS) > 0:
                parts.append(
                    html('<p class="note">{{ text }} in run.json.</p>', text=plural(more, "more fault"))
                )
        notes = []
        for member in report.members:
            counters = sum(member.workers, Counters())
            if count := counters.oom_events:
                notes.append(
                    f"{member.name}: {plural(count, 'batch')} ran out of memory and ran again smaller"
                )
            if count := counters.recomputed_rows:
                notes.append(f"{member.name}: {plural(count, 'row')} came out non-finite, again in float32")
            if count := counters.float32_rows:
                notes.append(f"{member.name}: {plural(count, 'row')} in float32 at once, as most before them")
        bad = [
            (member.name, f"{int(row) + 1:,}", html('<div class="words">{{ text }}</div>', text=reason))
            for member in report.members
            for row, reason in [*member.bad_rows.items()][:_MAX_ROWS]
        ]
        if notes:
            parts.append(html("<ul>{% for text in notes %}<li>{{ text }}</li>{% endfor %}</ul>", notes=notes))
        if bad:
            counts = ", ".join(
                f"{plural(len(one.bad_rows), 'row')} of {one.name}" for one in report.members if one.bad_rows
            )
            parts.append(
                html(
                    "<h3>Rows that could not be computed</h3><p>{{ counts }} (on_bad_row: {{ policy }}).</p>",
                    counts=counts,
                    policy=report.on_bad_row,
                )
            )
            parts.append(table(("member", "row", "why"), bad, left=(0, 2)))
        return Markup().join(parts) or html('<p class="muted">None.</p>')
