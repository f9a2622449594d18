"""The texts of some rows of a run's table, if it is still the table that the members have read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.files import unreadable
from ensemble.data.csv_file import read_header
from ensemble.data.formats import read_contents
from ensemble.data.input_file import Wanted, cell_texts
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport


def row_texts(
    run_dir: Path, report: RunReport, ids: pa.ChunkedArray, rows: Sequence[int]
) -> dict[int, dict[str, str]]:
    """Return whole texts of rows of the table, by row and column; none if members read no column.

    Args:
        ids: of all rows, as the predictions have them.
        rows: numbers of rows, from 0.

    Raises:
        DataError: the table is gone, was written after the run, or has other rows.
    """
    columns = tuple(report.null_texts)
    if not columns or not rows:
        return {row: {} for row in rows}
    path, numbers = report.table_path(), sorted({*rows})
    changed = f"{path} has changed since the run"
    id_column = _id_column(run_dir)
    try:
        if path.stat().st_mtime > RunDir(run_dir).run_json.stat().st_mtime:
            raise DataError(f"{changed}; run the config again")
        contents = read_contents(path, Wanted(id_column, None, columns, report.rows))
    except OSError as error:
        raise DataError(unreadable(path, error)) from error
    if contents.ids is None or contents.rows <= numbers[-1]:
        raise DataError(f"{changed}: it has fewer rows, or no column {id_column!r} of ids")
    places = pa.array(numbers)
    is_same = pc.equal(*(pc.cast(each.take(places), pa.large_string()) for each in (contents.ids, ids)))
    differ = np.flatnonzero(~np.asarray(pc.fill_null(is_same, False)))
    if len(differ):
        raise DataError(f"{changed}: row {numbers[differ[0]] + 1:,} is another one")
    texts: dict[int, dict[str, str]] = {row: {} for row in numbers}
    for name in columns:
        cells = contents.ids if name == id_column else contents.columns.column(name)
        chosen = cell_texts(pa.concat_arrays(cells.take(places).chunks)).to_pylist()
        for row, cell in zip(numbers, chosen, strict=True):
            texts[row][name] = cell.decode("utf-8", "replace") if isinstance(cell, bytes) else cell or ""
    return texts


def _id_column(run_dir: Path) -> str:
    rundir = RunDir(run_dir)
    paths = [rundir.ensemble, *sorted(rundir.predictions_dir.glob("*.csv"))]
    return read_header(next(path for path in paths if path.exists()))[0]
