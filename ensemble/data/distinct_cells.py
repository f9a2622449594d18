"""Number the distinct cells of a column, such as one of groups or folds."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.text import plural, quoted
from ensemble.data.csv_file import text_as_numbers
from ensemble.data.table import InputTable, row_text


@dataclass(frozen=True)
class DistinctCells:
    """Hold a column's distinct cells, sorted, and the number of each row's cell among them, int64 [rows]."""

    name: str
    numbers: npt.NDArray[np.int64]
    values: tuple[str, ...]


def distinct_cells(path: Path, table: InputTable, column: str) -> DistinctCells:
    """Return a column's distinct cells; if all of them are numbers, they are sorted as numbers.

    Args:
        path: of the table, for messages.

    Raises:
        DataError: a cell is empty.
    """
    cells = table.texts(column)
    empty = np.flatnonzero(pc.equal(pc.fill_null(cells, ""), "").to_numpy())
    if len(empty):
        first = row_text(int(empty[0]), table.ids)
        raise DataError(
            f"column {quoted(column)} of {path} is empty in {plural(len(empty), 'row')}, first: {first}; fill it "
            "in every row"
        )
    values = pa.array(sorted(cells.unique().to_pylist()), cells.type)
    numbers, is_text = text_as_numbers(values)
    if not is_text.any() and np.isfinite(numbers).all():
        values = values.take(pa.array(np.argsort(numbers, kind="stable")))
    places = pc.index_in(cells, value_set=values)
    return DistinctCells(column, np.asarray(places.to_numpy(), np.int64), tuple(values.to_pylist()))
