"""Rows that other work has computed already: of a trial, of the table as it was, of a member under another name.

Settings, weights and tokenizer must be the same; rows are known by their digests, never by their ids.  What is
taken over becomes a part like any other.
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.common.files import atomic_path, read_json
from ensemble.common.shards import (
    bad_rows_in,
    file_sha256,
    gather_parts,
    part_name,
    parts_in,
    rows_with_reasons,
)
from ensemble.data.digests import DIGEST_BYTES, RowDigests, find_rows
from ensemble.pipeline.fingerprint import Fingerprint
from ensemble.pipeline.run_dir import RunDir

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
        table = read_predictions(self.predictions)
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


def read_predictions(path: Path, with_ids: bool = False) -> pa.Table:
    """A CSV of predictions as this program writes it: a column of numbers per label, before them the ids as text.

    Raises:
        OSError: it cannot be read.
        pa.ArrowInvalid: it is something else.
    """
    with path.open("rb") as file:
        names = pa_csv.open_csv(file, parse_options=_ANY_TEXT).schema.names
    types = {name: pa.float64() if number else pa.string() for number, name in enumerate(names)}
    wanted = names if with_ids else names[1:]
    options = pa_csv.ConvertOptions(column_types=types, include_columns=wanted)
    return pa_csv.read_csv(path, parse_options=_ANY_TEXT, convert_options=options)


_LONGEST_LINE = 4_096


@dataclass(frozen=True)
class RowFile:
    """A file of row digests, as its first line describes it; ``rows`` is how many its table has."""

    path: Path
    fingerprint: Fingerprint
    rows: int
    sha256: str

    @classmethod
    def at(cls, path: Path) -> RowFile | None:
        """The file's first line; None where there is no such file, or it is of another scheme, or cut short."""
        try:
            with path.open("rb") as file:
                line = file.readline(_LONGEST_LINE)
                expected = path.stat().st_size - len(line)
            document = json.loads(line)
            fingerprint = Fingerprint.from_dict(document["fingerprint"])
            rows, sha256 = int(document["rows"]), str(document["sha256"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if fingerprint is None or rows * DIGEST_BYTES != expected:
            return None
        return cls(path, fingerprint, rows, sha256)

    def digests(self) -> RowDigests | None:
        """The rows' digests, [rows, 2]; None where they are not what the first line says."""
        try:
            content = self.path.read_bytes().partition(b"\n")[2]
        except OSError:
            return None
        if hashlib.sha256(content).hexdigest() != self.sha256 or len(content) != self.rows * DIGEST_BYTES:
            return None
        return np.frombuffer(content, "<u8").reshape(-1, 2)


def write_row_file(path: Path, fingerprint: Fingerprint, digests: RowDigests) -> None:
    """Write the file, unless it is there already.

    Raises:
        WriteError: the disk is full or the like.
    """
    there = RowFile.at(path)
    content = np.ascontiguousarray(digests, "<u8").data.cast("B")
    sha256 = hashlib.sha256(content).hexdigest()
    if there is not None and (there.fingerprint, there.sha256) == (fingerprint, sha256):
        return
    line = json.dumps({"fingerprint": fingerprint.to_dict(), "rows": len(digests), "sha256": sha256})
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        file.write(f"{line}\n".encode())
        file.write(content)
