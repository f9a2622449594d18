"""Show what ran, when, how it ended, and with which versions."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html, notes
from ensemble.common.text import duration, gib, plural, shown_path
from ensemble.pipeline.run_report import RunReport

_ENDINGS = {
    "complete": ("Complete", "good"),
    "time_limit": ("Stopped at its time limit, with a complete submission", ""),
    "failed": ("Failed", "bad"),
    "interrupted": ("Interrupted", "bad"),
    "running": ("Still running when this page was written", ""),
}


class Header(Section):
    title: ClassVar[str] = "Run"

    def html(self, data: ReportData) -> Markup:
        report = data.report
        ending, kind = _ENDINGS[report.status]
        problems = [failure.message for failure in report.failures]
        if report.left_out:
            problems.append(f"merged without {', '.join(report.left_out)}")
        if report.filled_rows:
            problems.append(f"{plural(report.filled_rows, 'row')} that no member reached filled in")
        if report.explanation:
            problems.append(report.explanation)
        return html(
            """
<h1>{{ title }}</h1>
<p><strong class="{{ kind }}">{{ ending }}</strong> in {{ seconds }}, {{ when }} UTC.</p>
{% for text in problems %}<p class="problem">{{ text }}</p>
{% endfor %}
{{ notes }}
<dl>{% for name, text in facts.items() if text %}<dt>{{ name }}</dt><dd>{{ text }}</dd>
{% endfor %}</dl>
""",
            title=data.title,
            kind=kind,
            ending=ending,
            seconds=duration(report.timing.get("total_seconds", 0.0)),
            when=datetime.fromisoformat(report.written_at).strftime("%d %B %Y, %H:%M"),
            problems=problems,
            notes=notes([*_computed_before(report), *report.warnings]),
            facts=_facts(report),
        )


def _facts(report: RunReport) -> dict[str, str]:
    devices = [
        f"{device.title}, {gib(device.total_bytes)}" if device.is_gpu else device.title
        for device in report.devices
    ]
    if report.driver_version is not None:
        devices.append(f"driver {report.driver_version}")
    rules = [f"{rule.config.action} in {plural(rule.rows, 'row')}" for rule in report.rules]
    allowed = report.allowed_labels
    tuned = report.tuned_on
    return {
        "members": ", ".join(member.name for member in report.members),
        "merge": "; ".join([str(report.ensemble.get("method", "")), *rules]),
        "labels": "" if allowed is None else allowed.text,
        "devices": "; ".join(devices),
        "versions": _versions(report.versions),
        "tuned": f"on {tuned['date']}, {', '.join(tuned['devices'])}" if tuned else "",
        "table": shown_path(Path(report.table)) if report.table else "",
    }


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _computed_before(report: RunReport) -> list[str]:
    """Return what earlier runs computed, when and with what."""
    lines = []
    for member in report.members:
        rows = f"{plural(member.reused_rows, 'row')} of {member.name}" if member.chunks else member.name
        for run in member.computed_before:
            day = datetime.fromisoformat(run.at).strftime("%d %B %Y")
            devices = ", ".join(dict.fromkeys(run.devices.values()))
            lines.append(
                f"{rows} ({duration(run.seconds)}): computed by an earlier run on {day}: "
                f"{_versions(run.versions)}, on {devices}"
            )
    return lines
