"""The texts of a run's table, if it is still the table that the members have read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.files import unreadable
from ensemble.data.csv_file import read_header
from ensemble.data.formats import read_contents
from ensemble.data.input_file import Wanted, cell_texts
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport


class TableTexts:
    """The columns that members read; none if they read no column.

    Args:
        ids: of all rows, as the predictions have them.

    Raises:
        DataError: the table is gone, was written after the run, or has other rows.
    """

    def __init__(self, rundir: RunDir, report: RunReport, ids: pa.ChunkedArray) -> None:
        self._rows = report.rows
        self._columns: dict[str, pa.ChunkedArray] = {}
        if not report.null_texts:
            return
        path = report.table_path()
        changed = f"{path} has changed since the run"
        id_column = read_header(next(rundir.predictions_dir.glob("*.csv")))[0]
        try:
            if path.stat().st_mtime > rundir.run_json.stat().st_mtime:
                raise DataError(f"{changed}; run the config again")
            contents = read_contents(path, Wanted(id_column, None, tuple(report.null_texts), report.rows))
        except OSError as error:
            raise DataError(unreadable(path, error)) from error
        if contents.ids is None or contents.rows < report.rows:
            raise DataError(f"{changed}: it has fewer rows, or no column {id_column!r} of ids")
        is_same = pc.equal(pc.cast(contents.ids, pa.large_string()), pc.cast(ids, pa.large_string()))
        others = np.flatnonzero(~np.asarray(pc.fill_null(is_same, False)))
        if len(others):
            raise DataError(f"{changed}: row {others[0] + 1:,} is another one")
        for name in report.null_texts:
            self._columns[name] = contents.ids if name == id_column else contents.columns.column(name)

    def of_rows(self, rows: Sequence[int]) -> dict[int, dict[str, str]]:
        """Return the whole texts of some rows, by row (from 0) and column."""
        texts: dict[int, dict[str, str]] = {row: {} for row in rows}
        for name, column in self._columns.items():
            cells = cell_texts(pa.concat_arrays(column.take(pa.array([*texts])).chunks)).to_pylist()
            for row, cell in zip(texts, cells, strict=True):
                texts[row][name] = cell.decode("utf-8", "replace") if isinstance(cell, bytes) else cell or ""
        return texts

    def sizes(self) -> npt.NDArray[np.int64]:
        """Return the UTF-8 bytes of the texts in each row, [rows]."""
        total = np.zeros(self._rows, np.int64)
        for column in self._columns.values():
            sizes = [pc.binary_length(cell_texts(chunk)) for chunk in column.chunks]
            total += np.concatenate([pc.fill_null(of_chunk, 0).to_numpy() for of_chunk in sizes])
        return total
