"""The texts of some rows of a run's table, once it is sure that they are those that the members have read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import ConfigError, DataError, EnsembleError
from ensemble.common.files import unreadable
from ensemble.data.csv_file import read_header
from ensemble.data.digests import DIGEST_BYTES, row_digests
from ensemble.data.formats import read_contents
from ensemble.data.input_file import Wanted, cell_texts
from ensemble.data.json_cells import TemplateProblem
from ensemble.members.registry import member_kind
from ensemble.pipeline.load import load
from ensemble.pipeline.reuse import EarlierWork
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport


def row_texts(
    run_dir: Path, report: RunReport, ids: pa.ChunkedArray, rows: Sequence[int]
) -> dict[int, dict[str, str]]:
    """What members read of these rows of the table, as text by column, whole.

    Args:
        ids: of all rows, as the predictions have them.
        rows: numbers of rows, from 0.

    Returns:
        by row, text by column; nothing where members read no column.

    Raises:
        DataError: the table is not there any more, or has other rows or other texts than those that were predicted.
    """
    columns = tuple(report.null_texts)
    if not columns or not rows:
        return {row: {} for row in rows}
    path = report.table_path()
    wanted = np.unique(np.asarray(rows, dtype=np.int64))
    changed = f"{path} has changed since the run"
    try:
        found = _taken(path, (_id_column(run_dir), *columns), wanted, report.rows)
    except OSError as error:
        raise DataError(unreadable(path, error)) from error
    if found.num_rows < len(wanted):
        raise DataError(f"{changed}: it has fewer rows")
    there, expected = pc.cast(found.column(0), pa.large_string()), ids.take(pa.array(wanted))
    differ = np.flatnonzero(
        ~np.asarray(pc.fill_null(pc.equal(there, pc.cast(expected, pa.large_string())), False))
    )
    if len(differ):
        raise DataError(f"{changed}: row {wanted[differ[0]] + 1:,} is another one")
    for member, names in _columns_read(run_dir).items():
        digests = _digests(RunDir(run_dir), member, wanted)
        if digests is None or not names or not set(names) <= {*columns}:
            continue
        differ = np.flatnonzero((row_digests(found, names) != digests).any(axis=1))
        if len(differ):
            raise DataError(f"{changed}: row {wanted[differ[0]] + 1:,} has other texts")
    texts: dict[int, dict[str, str]] = {int(row): {} for row in wanted}
    for name in columns:
        cells = cell_texts(pa.concat_arrays(found.column(name).chunks)).to_pylist()
        for row, cell in zip(wanted.tolist(), cells, strict=True):
            texts[row][name] = cell.decode("utf-8", "replace") if isinstance(cell, bytes) else cell or ""
    return texts


def _id_column(run_dir: Path) -> str:
    rundir = RunDir(run_dir)
    paths = [rundir.ensemble, *sorted(rundir.predictions_dir.glob("*.csv"))]
    return read_header(next(path for path in paths if path.exists()))[0]


def _taken(path: Path, names: tuple[str, ...], wanted: npt.NDArray[np.int64], limit: int) -> pa.Table:
    """Columns of some rows, the ids first."""
    names = tuple(dict.fromkeys(names))
    contents = read_contents(path, Wanted(names[0], None, names[1:], limit))
    if contents.ids is None:
        raise DataError(f"{path} has changed since the run: it has no column {names[0]!r} of ids")
    places = pa.array(wanted[wanted < contents.rows])
    columns = contents.columns.take(places)
    return columns.add_column(0, pa.field(names[0], contents.ids.type), contents.ids.take(places))


def _columns_read(run_dir: Path) -> Mapping[str, tuple[str, ...]]:
    """The columns that each member reads, in its order; none where the config cannot be read here."""
    found = dict[str, tuple[str, ...]]()
    try:
        models = load(RunDir(run_dir).config, environ={**os.environ}).config.models
    except (ConfigError, OSError):  # a variable is not set here, or a package is missing
        return found
    for model in models:
        with contextlib.suppress(EnsembleError, TemplateProblem):
            reads = member_kind(model).reads()
            if reads.files is not None:  # whose digests are of files as well
                continue
            if reads.template is None:
                found[model.name] = reads.columns
            else:
                from ensemble.data.template import compile_template

                found[model.name] = compile_template(reads.template).columns
    return found


def _digests(rundir: RunDir, member: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64] | None:
    """Of what the member has read of these rows, [rows, 2]; None where that was not written down."""
    work = EarlierWork.at(rundir.rows(member))
    if work is None or rows[-1] >= work.rows:
        return None
    with work.path.open("rb") as file:
        offset = len(file.readline())
    digests: npt.NDArray[np.uint64] = np.memmap(work.path, "<u8", "r", offset, (work.rows, DIGEST_BYTES // 8))
    return np.array(digests[rows])
