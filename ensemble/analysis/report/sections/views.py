"""Members that got each row in several views: what each view counts, and of how many rows some are missing."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.shown import MAX_NAME, NOTHING, percent, shortened
from ensemble.common.text import plural


class Views(Section):
    title: ClassVar[str] = "Views of a row"

    def html(self, data: ReportData) -> Markup | None:
        members = [one for one in data.report.members if one.views]
        if not members:
            return None
        rows: list[list[object]] = []
        for member in members:
            whole = sum(view.weight for view in member.views.values())
            for name, view in member.views.items():
                there = NOTHING if view.rows is None else f"{view.rows:,}"
                rows.append([shortened(member.name, MAX_NAME), name, percent(view.weight / whole), there])
        lacking = [one for one in members if one.partial_rows]
        return html(
            """
<p class="say">What {{ who }} predicted is the mean over several views of each row.</p>
{% for one in lacking %}<p class="problem">{{ one.name }}: {{ rows_of(one.partial_rows) }} without some of the
views; they are the mean of the others.</p>
{% endfor %}
{{ table }}
""",
            who=members[0].name if len(members) == 1 else "these members",
            lacking=lacking,
            rows_of=lambda count: plural(count, "row"),
            table=table(["member", "view", "weight", "rows"], rows, left=(0, 1)),
        )
