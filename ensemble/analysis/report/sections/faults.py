"""What went wrong and was survived, and rows that could not be computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.common.protocol import Counters
from ensemble.common.text import duration, plural
from ensemble.pipeline.run_report import MemberReport

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
        members = data.report.members
        faults = [fault for member in members for fault in member.faults]
        fault_rows = [
            (
                duration(fault.after_seconds),
                f"{fault.member}-{fault.replica}",
                _KINDS.get(fault.kind, fault.kind),
                fault.message,
                "" if fault.rows is None else f"{fault.rows[1] - fault.rows[0]:,}",
                fault.remedy,
            )
            for fault in sorted(faults, key=lambda fault: fault.after_seconds)[:_MAX_FAULTS]
        ]
        bad_rows = [
            (member.name, f"{int(row) + 1:,}", reason)
            for member in members
            for row, reason in list(member.bad_rows.items())[:_MAX_ROWS]
        ]
        counts = [
            f"{plural(len(member.bad_rows), 'row')} of {member.name}" for member in members if member.bad_rows
        ]
        content = html(
            _CONTENT,
            faults=table(
                ("after", "worker", "fault", "message", "rows", "remedy"), fault_rows, left=(1, 2, 3, 5)
            ),
            more=plural(len(faults) - _MAX_FAULTS, "more fault") if len(faults) > _MAX_FAULTS else "",
            remarks=[remark for member in members for remark in _remarks(member)],
            counts=", ".join(counts),
            policy=data.report.on_bad_row,
            bad_rows=table(("member", "row", "reason"), bad_rows, left=(0, 2)),
        )
        return content if content.strip() else html('<p class="muted">None.</p>')


_CONTENT = """
{{ faults }}{% if more %}<p class="note">{{ more }} in run.json.</p>{% endif %}
{% if remarks %}<ul>{% for text in remarks %}<li>{{ text }}</li>{% endfor %}</ul>{% endif %}
{% if counts %}<h3>Rows that could not be computed</h3><p>{{ counts }} (on_bad_row: {{ policy }}).</p>{% endif %}
{{ bad_rows }}
"""


def _remarks(member: MemberReport) -> Iterator[str]:
    counters = sum(member.workers, Counters())
    if counters.oom_events:
        batches = plural(counters.oom_events, "batch")
        yield f"{member.name}: {batches} ran out of memory and ran again smaller"
    if counters.recomputed_rows:
        rows = plural(counters.recomputed_rows, "row")
        yield f"{member.name}: {rows} came out non-finite and ran again in float32"
    if counters.float32_rows:
        rows = plural(counters.float32_rows, "row")
        yield f"{member.name}: {rows} ran in float32 at once, as most rows before them had to"
