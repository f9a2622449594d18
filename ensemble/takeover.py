"""Rows that other work has computed already: of a trial, of the table as it was, of a member under another name.

Settings, weights and tokenizer must be the same; rows are known by their digests, never by their ids.  What is
taken over becomes a part like any other.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.fingerprint import Fingerprint
from ensemble.parts import bad_rows_in, file_sha256, gather_parts, parts_in, rows_with_reasons
from ensemble.planning.facts import read_json
from ensemble.rowfile import RowFile
from ensemble.rundir import RunDir, atomic_path, part_name
from ensemble.tables.rowdigest import RowDigests, find_rows

# A part is text in memory while it is written and read.
_ROWS_PER_PART = 1 << 17
_ANY_TEXT = pa_csv.ParseOptions(newlines_in_values=True)


@dataclass(frozen=True)
class Source:
    """Work of some member, sealed or not, on ``rows_file.rows`` rows of a table.

    ``place`` is what messages call it: its path within the run directory.
    """

    place: str
    rows_file: RowFile
    predictions: Path | None
    parts_dir: Path | None

    def rows(self, labels: int) -> tuple[npt.NDArray[np.float64], dict[int, str]] | None:
        """Its rows' values, [rows, labels], NaN where it has none, and why some could not be computed.

        None: it is not what it should be.
        """
        count = self.rows_file.rows
        if self.parts_dir is not None:
            values = gather_parts(parts_in(self.parts_dir, count), count, labels)
            return values, bad_rows_in(self.parts_dir, count)
        assert self.predictions is not None
        seal = read_json(self.predictions.with_name(f"{self.predictions.name.removesuffix('.csv')}.json"))
        made_of = Fingerprint.from_dict(seal.get("fingerprint"))
        try:
            is_whole = seal.get("sha256") == file_sha256(self.predictions)
        except OSError:
            return None
        if made_of != self.rows_file.fingerprint or not is_whole:
            return None
        table = _read_predictions(self.predictions)
        if table.num_rows != count or table.num_columns != labels:
            return None
        values = np.stack([column.to_numpy() for column in table.columns], axis=1)
        bad_rows = rows_with_reasons(seal.get("bad_rows"), count)
        values[list(bad_rows)] = np.nan
        return values, bad_rows


def sources(rundir: RunDir) -> Iterator[Source]:
    """All work in a run directory that says of which rows it is, sealed work first."""
    for path in sorted(rundir.predictions_dir.glob("*.rows")):
        predictions = path.with_suffix(".csv") if path.suffix else path
        found = RowFile.at(path)
        if found is not None:
            yield Source(f"predictions/{predictions.name}", found, predictions, None)
    for path in sorted(rundir.work_dir.glob("*/rows.bin")):
        found = RowFile.at(path)
        if found is not None:
            yield Source(f"work/{path.parent.name}", found, None, path.parent)


def matches(source: Source, fingerprint: Fingerprint, wanted: RowDigests) -> npt.NDArray[np.int64] | None:
    """For each wanted row its place in the source, -1 where it has none like it; None: the work is another.

    Args:
        wanted: digests of the rows, [rows, 2].
    """
    made_of = source.rows_file.fingerprint
    if replace(made_of, rows=fingerprint.rows) != fingerprint:
        return None
    if made_of == fingerprint and source.rows_file.rows == len(wanted):
        return np.arange(len(wanted))
    there = source.rows_file.digests()
    return None if there is None else find_rows(wanted, there)


def write_rows(parts_dir: Path, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> None:
    """Leave rows as parts, in blocks.

    Args:
        rows: of the table, [n].
        values: theirs, [n, labels].

    Raises:
        WriteError: the disk is full or the like.
    """
    names = ["row", *(f"p{label}" for label in range(values.shape[1]))]
    for start in range(0, len(rows), _ROWS_PER_PART):
        stop = min(start + _ROWS_PER_PART, len(rows))
        columns = [pa.array(rows[start:stop]), *(pa.array(column) for column in values[start:stop].T)]
        sink = io.BytesIO()
        pa_csv.write_csv(pa.table(columns, names=names), sink)
        with atomic_path(parts_dir / part_name(start, stop, sink.getvalue())) as temporary:
            temporary.write_bytes(sink.getvalue())


def _read_predictions(path: Path) -> pa.Table:
    """The columns of a predictions CSV without the ids."""
    with path.open("rb") as file:
        names = pa_csv.open_csv(file, parse_options=_ANY_TEXT).schema.names
    types = {name: pa.float64() if number else pa.string() for number, name in enumerate(names)}
    options = pa_csv.ConvertOptions(column_types=types, include_columns=names[1:])
    return pa_csv.read_csv(path, parse_options=_ANY_TEXT, convert_options=options)
