"""Show the config as it was written, without secrets, and the files of the run."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section


class Settings(Section):
    title: ClassVar[str] = "Settings and files"

    def html(self, data: ReportData) -> Markup:
        return self.render(report=data.report)
