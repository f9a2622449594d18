"""What ran, when, how it ended, and with which versions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html
from ensemble.common.text import duration, gib, listed, plural, shown_path
from ensemble.pipeline.run_report import RunReport

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
            told.append(f"merged without {', '.join(report.left_out)}")
        if report.filled_rows:
            told.append(f"{plural(report.filled_rows, 'row')} that no member reached filled in")
        devices = [
            f"{one.title}, {gib(one.total_bytes)}" if one.is_gpu else one.title for one in report.devices
        ]
        driver = f"; driver {report.driver_version}" if report.driver_version else ""
        facts = {
            "members": ", ".join(member.name for member in report.members),
            "merge": str(report.ensemble.get("method", "")),
            "devices": "; ".join(devices) + driver,
            "versions": _versions(report.versions),
            "tuned": ""
            if (tuned := report.tuned_on) is None
            else f"on {tuned['date']}, {', '.join(tuned['devices'])}, by {plural(tuned['rows'], 'row')}, "
            f"tolerance {tuned['tolerance']:g}, " + _versions(tuned["versions"]),
            "table": shown_path(Path(report.table)) if report.table else "",
        }
        return html(
            """
<h1>{{ title }}</h1>
<p><strong class="{{ kind }}">{{ ending }}</strong> in {{ seconds }}, {{ when }} UTC.</p>
{% for text in told %}<p class="problem">{{ text }}</p>
{% endfor %}
{% for text in notes %}<p class="note">{{ text }}</p>
{% endfor %}
<dl>{% for name, text in facts.items() if text %}<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}</dl>
""",
            title=data.title,
            kind=kind,
            ending=ending,
            seconds=duration(report.timing.get("total_seconds", 0.0)),
            when=datetime.fromisoformat(report.written_at).strftime("%d %B %Y, %H:%M"),
            told=filter(None, [*told, report.explanation]),
            notes=[*_computed_before(report), *report.warnings],
            facts=facts,
        )


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _computed_before(report: RunReport) -> Iterator[str]:
    """What earlier runs computed, when and with what: a sentence for all members of which it is the same."""
    members: dict[str, list[str]] = {}
    for member in report.members:
        name = member.name
        if member.chunks:
            name = f"{plural(member.reused_rows, 'row')} of {name}"
        for run in member.computed_before:
            day = datetime.fromisoformat(run.at).strftime("%d %B %Y")
            devices = ", ".join(dict.fromkeys(run.devices.values()))
            how = f"on {day}: {_versions(run.versions)}, on {devices}"
            members.setdefault(how, []).append(f"{name} ({duration(run.seconds)})")
    for how, names in members.items():
        yield f"{listed(names, show=str)}: computed by an earlier run {how}"
