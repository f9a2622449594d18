"""What ran, when, how it ended, and with which versions."""

from __future__ import annotations

from datetime import datetime
from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html
from ensemble.common.text import duration, plural

_ENDINGS = {
    "complete": ("complete", "good"),
    "time_limit": ("stopped at its time limit, with a complete submission", ""),
    "failed": ("failed", "bad"),
    "interrupted": ("interrupted", "bad"),
    "running": ("had not ended when this was written", ""),
}


class Header(Section):
    title: ClassVar[str] = "Run"

    def html(self, data: ReportData) -> Markup:
        report = data.report
        ending, kind = _ENDINGS[report.status]
        return html(
            """
<h1>{{ name }}</h1>
<p><strong class="{{ kind }}">{{ ending }}</strong>: {{ members }} over {{ rows }} in {{ seconds }},
{{ when }} UTC</p>
""",
            name=data.run_dir.absolute().name,
            kind=kind,
            ending=ending,
            members=plural(len(report.members), "member"),
            rows=plural(report.rows, "row"),
            seconds=duration(report.timing.get("total_seconds", 0.0)),
            when=datetime.fromisoformat(report.written_at).strftime("%d %B %Y, %H:%M"),
        )
