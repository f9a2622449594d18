"""Members with ``when``: what share of the rows each one had to compute, and what that cost or gained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from markupsafe import Markup

from ensemble.analysis.report.base import ReportData, Section, html, table
from ensemble.analysis.report.shown import MAX_NAME, NOTHING, number, percent, shortened, signed
from ensemble.pipeline.run_report import RunReport

# Standard errors that count as chance.
_ERRORS = 2.0


class Cascade(Section):
    title: ClassVar[str] = "Members for unsure rows"

    def html(self, data: ReportData) -> Markup | None:
        members = ((one.name, one.cascade) for one in data.report.members)
        found = [(name, one) for name, one in members if one is not None]
        if not found:
            return None
        rows = [_row(data.report, name, one) for name, one in found]
        compared = any(one.comparison is not None for _, one in found)
        headers = ["member", "when", "rows", "of all"]
        if compared:
            headers += ["log loss with it", "without", "difference", "accuracy with it", "without"]
        return html(
            """
{% for line in lines %}<p class="{{ 'say' if loop.first }}">{{ line }}</p>
{% endfor %}
{{ table }}
<p class="note">{% if compared %}Both are the ensemble's on the rows that the member gave; differences with a
standard error of the paired rows, in nats.{% else %}What they gained is known only with true labels.{% endif %}</p>
""",
            lines=[line for name, one in found for line in _lines(data.report, name, one)],
            table=table(headers, [row[: len(headers)] for row in rows], left=(0, 1)),
            compared=compared,
        )


def _lines(report: RunReport, name: str, one: Any) -> Iterator[str]:
    share = percent(one.rows / report.rows) if report.rows else NOTHING
    line = f"{name} saw {one.rows:,} of {report.rows:,} rows ({share}), of which the members before it were unsure"
    if one.unknown_rows:
        line += f"; of {one.unknown_rows:,} more that is not decided"
    if (found := one.comparison) is None:
        yield f"{line}."
    elif abs(found.difference) <= _ERRORS * found.error:
        yield f"{line}; there it made no difference beyond chance."
    else:
        word = "lower" if found.difference < 0 else "higher"
        yield (
            f"{line}; there it made the ensemble's log loss {number(abs(found.difference))} nats {word}, over all "
            f"rows {number(abs(found.difference_over_all))}."
        )


def _row(report: RunReport, name: str, one: Any) -> list[object]:
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
        percent(found.accuracy),
        percent(found.accuracy_without),
    ]
