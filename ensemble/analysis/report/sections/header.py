"""What ran, when, how it ended, and with which versions."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html
from ensemble.common.text import duration, gib, plural, shown_path
from ensemble.config.values import weight_text

_ENDINGS = {
    "complete": ("Complete", "good"),
    "time_limit": ("Stopped at its time limit, with a complete submission", ""),
    "failed": ("Failed", "bad"),
    "interrupted": ("Interrupted", "bad"),
    "running": ("Not ended when this was written", ""),
}


class Header(Section):
    title: ClassVar[str] = "Run"

    def html(self, data: ReportData) -> Markup:
        report = data.report
        ending, kind = _ENDINGS[report.status]
        told = [failure.message for failure in report.failures]
        if report.left_out:
            told.append(f"merged without {', '.join(sorted(report.left_out))}")
        if report.filled_rows:
            told.append(f"{plural(report.filled_rows, 'row')} that no member reached filled in")
        devices = [
            f"{one.title}, {gib(one.total_bytes)}" if one.is_gpu else one.title for one in report.devices
        ]
        driver = f"; driver {report.driver_version}" if report.driver_version else ""
        names = ", ".join(f"{one.name} (weight {weight_text(one.weight)})" for one in report.members)
        facts = {
            "members": names,
            "merge": str(report.ensemble.get("method", "")),
            "devices": "; ".join(devices) + driver,
            "versions": ", ".join(f"{name} {version}" for name, version in report.versions.items()),
            "tuned": ""
            if (tuned := report.tuned_on) is None
            else f"on {tuned['date']}, {', '.join(tuned['devices'])}, by {plural(tuned['rows'], 'row')}, "
            f"tolerance {tuned['tolerance']:g}, "
            + ", ".join(f"{name} {version}" for name, version in tuned["versions"].items()),
            "table": shown_path(Path(report.table)) if report.table else "",
        }
        return html(
            """
<h1>{{ name }}</h1>
<p><strong class="{{ kind }}">{{ ending }}</strong>: {{ members }} over {{ rows }} in {{ seconds }},
{{ when }} UTC.</p>
{% for text in told %}<p class="problem">{{ text }}</p>
{% endfor %}
{% for text in warnings %}<p class="note">{{ text }}</p>
{% endfor %}
<dl>{% for name, text in facts.items() if text %}<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}</dl>
""",
            name=data.run_dir.absolute().name,
            kind=kind,
            ending=ending,
            members=plural(len(report.members), "member"),
            rows=plural(report.rows, "row"),
            seconds=duration(report.timing.get("total_seconds", 0.0)),
            when=datetime.fromisoformat(report.written_at).strftime("%d %B %Y, %H:%M"),
            told=filter(None, [*told, report.explanation]),
            warnings=report.warnings,
            facts=facts,
        )
