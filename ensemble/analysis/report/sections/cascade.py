"""Members with ``when``: what share of the rows each one had to compute, and what that cost or gained."""

from __future__ import annotations

from typing import ClassVar

from markupsafe import Markup

from ensemble.analysis.predictions import run_settings
from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.shown import MAX_NAME, NOTHING, number, percent, shortened, signed
from ensemble.pipeline.run_report import CascadeReport, MemberReport, RunReport

# Standard errors that count as chance.
_ERRORS = 2.0


class Cascade(Section):
    title: ClassVar[str] = "Members for unsure rows"

    def html(self, data: ReportData) -> Markup | None:
        found = [(one, one.cascade) for one in data.report.members if one.cascade is not None]
        if not found:
            return None
        rows = [_row(data.report, member.name, one) for member, one in found]
        compared = [one.comparison for _, one in found if one.comparison is not None]
        headers = ["member", "when", "rows", "of all"]
        if compared:
            headers += ["log loss with it", "without", "difference"]
        if any(one.accuracy is not None for one in compared):
            headers += ["accuracy with it", "without"]
        return html(
            """
{% for line in lines %}<p class="{{ 'say' if loop.first }}">{{ line }}</p>
{% endfor %}
{{ table }}
<p class="note">{{ note }}</p>
""",
            lines=[_line(data.report, member, one) for member, one in found],
            table=table(headers, [row[: len(headers)] for row in rows], left=(0, 1)),
            note=_note(data.report, bool(compared)),
        )


def _note(report: RunReport, compared: bool) -> str:
    if compared:
        return (
            "Both are the ensemble's on the rows that the member gave; differences with a standard error of the "
            "paired rows, in nats."
        )
    data = run_settings(report).get("data")
    if not isinstance(data, dict) or not (data.get("label_column") or data.get("label_columns")):
        return "What they gained is known only with true labels."
    if not any(one.cascade is not None and one.cascade.rows for one in report.members):
        return "Without rows of theirs there is nothing to compare."
    return "What they gained is compared only where the merge gives probabilities, and once a run has merged them."


def _line(report: RunReport, member: MemberReport, one: CascadeReport) -> str:
    share = percent(one.rows / report.rows) if report.rows else NOTHING
    if one.rows:
        of_which = "of which the members before it were unsure"
        line = f"{member.name} saw {one.rows:,} of {report.rows:,} rows ({share}), {of_which}"
    else:
        line = f"{member.name} saw none of the {report.rows:,} rows"
        line += "" if one.unknown_rows else ": of none were the members before it as unsure as its when asks"
    if one.unknown_rows:
        more = "more " if one.rows else ""
        line += f"; of {one.unknown_rows:,} {more}that is not decided"
    if not member.has_weight:
        return f"{line}; with weight 0 it is no part of the ensemble."
    if (found := one.comparison) is None:
        return f"{line}."
    if abs(found.difference) <= _ERRORS * found.error:
        return f"{line}; there it made no difference beyond chance."
    word = "lower" if found.difference < 0 else "higher"
    return (
        f"{line}; there it made the ensemble's log loss {number(abs(found.difference))} nats {word}, over all rows "
        f"{number(abs(found.difference_over_all))}."
    )


def _row(report: RunReport, name: str, one: CascadeReport) -> list[object]:
    when = ", ".join(f"{key} {value:g}" for key, value in one.when.items())
    share = percent(one.rows / report.rows) if report.rows else NOTHING
    row: list[object] = [shortened(name, MAX_NAME), when, f"{one.rows:,}", share]
    if (found := one.comparison) is None:
        return [*row, *[NOTHING] * 5]
    return [
        *row,
        number(found.log_loss),
        number(found.log_loss_without),
        f"{signed(found.difference)} (\N{PLUS-MINUS SIGN} {number(found.error)})",
        *(NOTHING if share is None else percent(share) for share in (found.accuracy, found.accuracy_without)),
    ]
