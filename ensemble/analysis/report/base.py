"""What a section of the report is, the data that it is made from, and the tools that all sections share."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, Final

import jinja2
from markupsafe import Markup

from ensemble.analysis.metrics import Interval
from ensemble.analysis.predictions import Predictions, read_run
from ensemble.analysis.report.results import MergedRows
from ensemble.analysis.texts import TableTexts
from ensemble.common.text import plural, shown_path
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

ENSEMBLE: Final = "ensemble"
NOTHING: Final = "\N{EN DASH}"
METRIC_NAMES: Final = {"log_loss": "log loss", "accuracy": "accuracy", "auc": "AUC", "rmse": "RMSE"}
# Characters of a text in a table that gets a wide column.
_LONG = 40


class Section(ABC):
    """Make a section of the page; each is a class in its own file, and a line in ``SECTIONS``."""

    title: ClassVar[str]  # the heading, also in the list of contents

    @abstractmethod
    def html(self, data: ReportData) -> Markup | None:
        """Return what stands below the heading, or None if there is nothing to show.

        ``html``, ``table`` and ``picture`` make it.  If this method raises, the page says so in the section's
        place and keeps the other sections.  A ``DataError`` is no fault: what the section would show is not
        there, as in a run that failed.
        """


@dataclass
class ReportData:
    """The data of a report; what takes long to read is read when a section first asks for it.

    Attributes:
        run_dir: the run's ``output_dir``.
        report: its run.json.
    """

    run_dir: Path
    report: RunReport

    @property
    def title(self) -> str:
        names = [member.name for member in self.report.members]
        more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
        members = f"{' + '.join(names[:3])}{more}"
        return f"Run report: {shown_path(self.run_dir)}, {members}, {plural(self.report.rows, 'row')}"

    @cached_property
    def predictions(self) -> Predictions:
        """Return all probabilities of the members and the ensemble, with the true labels if the run had them.

        Raises:
            DataError: a file is missing or does not fit the others.
        """
        return read_run(self.run_dir)

    @cached_property
    def results(self) -> MergedRows:
        """Return the predictions as they were merged, and how to score them; raises as ``predictions`` does."""
        return MergedRows(self.report, self.predictions)

    @cached_property
    def table_texts(self) -> TableTexts:
        """Return the texts that members read in the rows of the run's table.

        Raises:
            DataError: the table is gone or has changed since the run, or ``predictions`` raises it.
        """
        return TableTexts(RunDir(self.run_dir), self.report, self.predictions.ids)


_ENVIRONMENT = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def html(template: str, **values: object) -> Markup:
    """Render a Jinja template; values are escaped unless they are ``Markup`` themselves.

    The template is a literal in the code, never text from anywhere else.  A value must not stand where escaping
    is not enough: unquoted, in a name, in an address (``href``, ``src``) or, except for a number, in ``style``.
    Classes of the page: ``say`` for the first sentence, ``note``, ``muted``, ``good``, ``bad``, ``problem``.
    """
    return Markup(_ENVIRONMENT.from_string(template).render(values))


def paragraphs(lines: Sequence[object]) -> Markup:
    """Return sentences, one paragraph each; the first one is the larger."""
    template = """{% for line in lines %}<p{% if loop.first %} class="say"{% endif %}>{{ line }}</p>
{% endfor %}"""
    return html(template, lines=lines)


def notes(lines: Sequence[object]) -> Markup:
    """Return remarks in small type, one paragraph each."""
    return html('{% for line in lines %}<p class="note">{{ line }}</p>\n{% endfor %}', lines=lines)


def table(headers: Sequence[object], rows: Sequence[Sequence[object]], left: Sequence[int] = (0,)) -> Markup:
    """Return a table, which scrolls sideways in a frame of its own if the window is narrow.

    Columns without any content are left out; without rows there is no table.

    Args:
        rows: cells of each row: texts, or ``Markup``.
        left: numbers of the columns that hold text; the others hold numbers and are aligned to the right.
    """
    if not rows:
        return Markup()
    places = [place for place in range(len(headers)) if any(str(row[place]) for row in rows)]
    return html(_TABLE, headers=headers, rows=rows, places=places, left=left, long=_LONG)


_TABLE = """
<div class="table"><table>
<thead><tr>{% for place in places %}
<th scope="col"{% if place in left %} class="left"{% endif %}>{{ headers[place] }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for place in places %}
{% set kind = "words" if row[place]|string|striptags|length > long else "left" if place in left else "" %}
<td{% if kind %} class="{{ kind }}"{% endif %}>{{ row[place] }}</td>{% endfor %}</tr>

{% endfor %}
</tbody></table></div>
"""


def percent(share: float, digits: int = 1) -> str:
    """Return a share, such as 0.884, in percent."""
    return f"{number(100 * share, digits)}\N{NO-BREAK SPACE}%"


def number(value: float, digits: int = 4, sign: str = "") -> str:
    """Return a number with a minus sign; with ``sign="+"`` one above 0 has a sign, too."""
    if not math.isfinite(value):
        return NOTHING
    return f"{value:{sign}z.{digits}f}".replace("-", "\N{MINUS SIGN}")


def with_interval(metric: str, interval: Interval, is_difference: bool = False) -> Markup:
    """Return a metric, or a difference of two, with its interval, which is muted."""
    factor, digits, unit = 1, 4, ""
    if metric == "accuracy":  # in percent
        factor, digits = 100, 1
        unit = "\N{NO-BREAK SPACE}points" if is_difference else "\N{NO-BREAK SPACE}%"
    return html(
        "{{ value }}{{ unit }} <span class=muted>({{ low }} to {{ high }})</span>",
        value=number(factor * interval.value, digits, "+" if is_difference else ""),
        low=number(factor * interval.low, digits),
        high=number(factor * interval.high, digits),
        unit=unit,
    )


def shortened(name: str, most: int) -> str:
    """Return a name without its middle if it is too long, as names often differ in their ends."""
    if len(name) <= most:
        return name
    end = (most - 1) // 2
    return f"{name[: most - 1 - end]}\N{HORIZONTAL ELLIPSIS}{name[-end:]}"
