"""Show what ran, when, how it ended, and with which versions."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section
from ensemble.common.text import gib, plural, shown_path

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
        devices = [
            f"{device.title}, {gib(device.total_bytes)}" if device.is_gpu else device.title
            for device in report.devices
        ]
        if report.driver_version is not None:
            devices.append(f"driver {report.driver_version}")
        rules = [f"{rule.config.action} in {plural(rule.rows, 'row')}" for rule in report.rules]
        return self.render(
            title=data.title,
            ending=ending,
            kind=kind,
            seconds=report.timing.get("total_seconds", 0.0),
            report=report,
            merge=[report.ensemble.get("method", ""), *rules],
            devices=devices,
            table_path=shown_path(Path(report.table)) if report.table else "",
            time=datetime.fromisoformat,
        )
