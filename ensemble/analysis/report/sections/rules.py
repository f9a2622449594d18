"""Rules of the config: what they made of which rows, after the merge."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.shown import NOTHING, percent, shortened

_MAX_CONDITION = 120


class Rules(Section):
    title: ClassVar[str] = "Rules"

    def html(self, data: ReportData) -> Markup | None:
        report = data.report
        if not report.rules:
            return None
        rows = [
            [
                shortened(" ".join(one.when.split()), _MAX_CONDITION),
                one.config.action,
                f"{one.rows:,}",
                percent(one.rows / report.rows) if report.rows else NOTHING,
            ]
            for one in report.rules
        ]
        return html(
            """
<p class="say">What was merged of these rows was replaced.</p>
{{ table }}
<p class="note">In this order, after the merge. All that is said of the ensemble is with them, also what it would
be without a member; what is said of members alone is without them.</p>
""",
            table=table(["when", "what", "rows", "of all"], rows, left=(0, 1)),
        )
