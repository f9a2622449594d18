"""What a section of the report is, what it is made from, and the few tools that all sections share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import jinja2
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from ensemble.common.errors import DataError
from ensemble.common.host import available_memory_bytes
from ensemble.common.text import gib, plural, shown_path
from ensemble.data.csv_file import read_header
from ensemble.data.formats import read_contents
from ensemble.data.input_file import Contents, Wanted, cell_texts
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport

if TYPE_CHECKING:
    from ensemble.analysis.predictions import Predictions
    from ensemble.analysis.report.results import Results


# Of memory, for each value of a member or the ensemble;
# 40 were measured with 600,000 rows, 5 members, 2 labels and no truth.
BYTES_PER_VALUE = 50
_TITLE_NAMES = 3


class Section(ABC):
    """One section of the page: a class in a file of its own, and a line in ``SECTIONS``."""

    title: ClassVar[str]  # the heading, and what the list of contents calls it

    @abstractmethod
    def html(self, data: ReportData) -> Markup | None:
        """What stands below the heading, made with ``html``, ``table`` and ``picture``; None: nothing to show.

        Where it raises, the page says so in its place, and has the other sections.  A ``DataError`` is no fault:
        what it would show is not there, as in a run that failed.
        """


@dataclass
class ReportData:
    """What a report is made from; what takes long to read is read when it is first asked for.

    Attributes:
        run_dir: the run's ``output_dir``.
        report: its run.json.
    """

    run_dir: Path
    report: RunReport

    @property
    def title(self) -> str:
        """What the page is: of which run, members and rows."""
        names = [member.name for member in self.report.members]
        more = f" and {len(names) - _TITLE_NAMES:,} more" if len(names) > _TITLE_NAMES else ""
        members = f"{' + '.join(names[:_TITLE_NAMES])}{more}"
        return f"Run report: {shown_path(self.run_dir)}, {members}, {plural(self.report.rows, 'row')}"

    @cached_property
    def predictions(self) -> Predictions:
        """All members' probabilities and the ensemble's, with the truth where the run knew it.

        Raises:
            DataError: a file is missing or does not fit the others, or all of them do not fit in memory.
        """
        from ensemble.analysis.predictions import read_run

        if self._too_large:
            raise DataError(self._too_large)
        return read_run(self.run_dir)

    @cached_property
    def results(self) -> Results:
        """The predictions as they were merged, and the merge, which can be made again without a member.

        Raises:
            DataError: as ``predictions`` does.
        """
        from ensemble.analysis.report.results import Results

        return Results(self)

    @cached_property
    def _too_large(self) -> str:
        """Why predictions are not read, in the same words each time; empty where they can be."""
        written = [path for path in self._written if path.exists()]
        values = sum(self.report.rows * len(read_header(path)[1:]) for path in written)
        available = available_memory_bytes()
        if available is None or values * BYTES_PER_VALUE <= available:
            return ""
        needed = gib(values * BYTES_PER_VALUE)
        return (
            f"the predictions of {self.report.rows:,} rows take about {needed} of memory, and {gib(available)} are "
            "available; `python -m ensemble report` shows them where there is more"
        )

    @property
    def _written(self) -> list[Path]:
        rundir = RunDir(self.run_dir)
        return [rundir.ensemble, *(rundir.predictions(one.name) for one in self.report.members)]

    def texts(self, rows: Sequence[int]) -> dict[int, dict[str, str]]:
        """What members read of these rows of the table, as text by column, whole; rows count from 0.

        Raises:
            DataError: the table is no longer there, or has other rows or texts than the run had.
        """
        from ensemble.analysis.texts import row_texts

        return row_texts(self.run_dir, self.report, self.predictions.ids, rows)

    @cached_property
    def text_bytes(self) -> npt.NDArray[np.int64]:
        """UTF-8 bytes of all that members read of each row of the table, [rows].

        Raises:
            DataError: the table is no longer there.
        """
        total = np.zeros(self._table.rows, dtype=np.int64)
        for column in self._table.columns.columns:
            cells = [pc.binary_length(cell_texts(chunk)) for chunk in column.chunks]
            total += pc.fill_null(pa.chunked_array(cells), 0).to_numpy()
        return total

    @cached_property
    def _table(self) -> Contents:
        id_column = next((read_header(path)[0] for path in self._written if path.exists()), "")
        wanted = Wanted(id_column, None, tuple(self.report.null_texts), self.report.rows)
        return read_contents(self.report.table_path(), wanted)


_ENVIRONMENT = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)


def html(template: str, **values: object) -> Markup:
    """A Jinja template with its values, which are escaped unless they are ``Markup`` themselves.

    The template is a literal of the code, never a text that comes from anywhere else.  A value must not stand where
    escaping is not enough: unquoted, in a name, in an address (``href``, ``src``), or, but for a number, in
    ``style``.  The page has classes for what is common: ``note``, ``muted``, ``good``, ``bad``, ``problem``, and
    ``words`` for a ``div`` in a cell of a table that holds text of any length.
    """
    return Markup(_ENVIRONMENT.from_string(template).render(values))


def table(headers: Sequence[object], rows: Sequence[Sequence[object]], left: Sequence[int] = (0,)) -> Markup:
    """A table, which scrolls sideways in its own frame where the window is narrow.

    Args:
        rows: of cells: texts, or ``Markup``.
        left: the columns by number that are text; the others are numbers, aligned to the right.
    """
    return html(_TABLE, headers=headers, rows=rows, left=set(left))


_TABLE = """
<div class="table"><table>
<thead><tr>
{% for cell in headers %}
<th scope="col"{% if loop.index0 in left %} class="left"{% endif %}>{{ cell }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in rows %}
<tr>{% for cell in row %}<td{% if loop.index0 in left %} class="left"{% endif %}>{{ cell }}</td>{% endfor %}</tr>

{% endfor %}
</tbody></table></div>
"""
