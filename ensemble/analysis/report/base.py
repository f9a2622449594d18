"""What a section of the report is, the data that it is made from, and the tools that all sections share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import jinja2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from ensemble.analysis.predictions import Predictions, read_run
from ensemble.analysis.report.results import Results
from ensemble.analysis.texts import row_texts
from ensemble.common.errors import DataError
from ensemble.common.host import available_memory_bytes
from ensemble.common.text import gib, plural, shown_path
from ensemble.data.csv_file import read_header
from ensemble.data.formats import read_contents
from ensemble.data.input_file import Wanted, cell_texts
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

# Memory for each value of a member or the ensemble;
# 40 were measured with 600,000 rows, 5 members, 2 labels and no truth.
BYTES_PER_VALUE = 50
_TITLE_NAMES = 3
# Characters of a text in a table that gets a wide column.
_LONG = 40


class Section(ABC):
    """One section of the page: a class in a file of its own, and a line in ``SECTIONS``."""

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
        """Return the page's title: the run, its members and how many rows it has."""
        names = [member.name for member in self.report.members]
        more = f" and {len(names) - _TITLE_NAMES:,} more" if len(names) > _TITLE_NAMES else ""
        members = f"{' + '.join(names[:_TITLE_NAMES])}{more}"
        return f"Run report: {shown_path(self.run_dir)}, {members}, {plural(self.report.rows, 'row')}"

    @cached_property
    def predictions(self) -> Predictions:
        """Return all probabilities of the members and the ensemble, with the true labels if the run had them.

        Raises:
            DataError: a file is missing or does not fit the others, or memory is too small for all of them.
        """
        paths = [path for path in self._prediction_paths if path.exists()]
        rows, available = self.report.rows, available_memory_bytes()
        needed = BYTES_PER_VALUE * rows * sum(len(read_header(path)) - 1 for path in paths)
        if available is not None and needed > available:
            raise DataError(
                f"the predictions of {rows:,} rows take about {gib(needed)} of memory, more than is available; run "
                "`python -m ensemble report` on a machine that has more"
            )
        return read_run(self.run_dir)

    @cached_property
    def results(self) -> Results:
        """Return the predictions as they were merged, and how to score them; raises as ``predictions`` does."""
        return Results(self.report, self.predictions)

    @property
    def _prediction_paths(self) -> list[Path]:
        rundir = RunDir(self.run_dir)
        return [rundir.ensemble, *(rundir.predictions(member.name) for member in self.report.members)]

    def texts(self, rows: Sequence[int]) -> dict[int, dict[str, str]]:
        """Return the whole texts that members read in these rows, by row (from 0) and column.

        Raises:
            DataError: the table is gone, or its rows or texts have changed since the run.
        """
        return row_texts(self.run_dir, self.report, self.predictions.ids, rows)

    @cached_property
    def text_bytes(self) -> npt.NDArray[np.int64]:
        """Return the UTF-8 bytes of the texts that members read in each row of the table, [rows].

        Raises:
            DataError: the table is gone.
        """
        paths = self._prediction_paths
        id_column = next((read_header(path)[0] for path in paths if path.exists()), "")
        wanted = Wanted(id_column, None, tuple(self.report.null_texts), self.report.rows)
        contents = read_contents(self.report.table_path(), wanted)
        total = np.zeros(contents.rows, dtype=np.int64)
        for column in contents.columns.columns:
            cells = [pc.binary_length(cell_texts(chunk)) for chunk in column.chunks]
            total += pc.fill_null(pa.chunked_array(cells), 0).to_numpy()
        return total


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
