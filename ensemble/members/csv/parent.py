"""Predictions that were made elsewhere, as a member: a CSV with an id and one column per label, joined by id.

The file must hold every row of the table, each once; ids that the table does not have are left out and counted, and
so are columns that are neither the id nor a label.  It is read in blocks: what is in memory at a time is the values
of the table's rows and a part of the file.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from ensemble.common.digests import FileDigests
from ensemble.common.errors import DataError
from ensemble.common.files import unreadable
from ensemble.common.text import did_you_mean, listed, plural, quoted, shown_path, similar_file
from ensemble.config import MemberConfig
from ensemble.data.predictions_csv import WantedRows
from ensemble.members.base import Assigned, Given, Inspection, MemberKind, OutputColumns
from ensemble.members.csv.settings import CsvSettings

# pyarrow reads up to 32 blocks of a file ahead.
_BLOCK_BYTES = 1 << 18
_MAX_BLOCK_BYTES = (1 << 31) - 1
# Ids are looked up for so many rows at a time: to look up any takes a pass over all ids of the table.
_MIN_ROWS_AT_ONCE = 1 << 17
_PASSES = 8
_SHOWN = 3
_ANY_TEXT = pa_csv.ParseOptions(newlines_in_values=True)


@dataclass(frozen=True)
class CsvInspection(Inspection):
    """``id_column`` is the one of the file."""

    id_column: str


class CsvPredictions(MemberKind[CsvSettings, CsvInspection]):
    """Predictions that were made elsewhere."""

    Settings: ClassVar[type[MemberConfig]] = CsvSettings
    needs_worker: ClassVar[bool] = False
    activation_key: ClassVar[str] = "activation"

    def sources(self) -> tuple[str, ...]:
        return (str(self.settings.path),)

    def inspect(self, columns: OutputColumns) -> CsvInspection:
        path, id_column = self.settings.path, self.settings.id_column or columns.id_column
        with _reading(path), pa_csv.open_csv(path, parse_options=_ANY_TEXT) as header:
            names = header.schema.names
        problems = []
        if id_column in columns.labels:
            problems.append(f"{path}: id_column: {quoted(id_column)} is a label; name the column of the ids")
        for name in (id_column, *columns.labels):
            if name not in names:
                what = "id column" if name == id_column else "column of the label"
                near = did_you_mean(name, names)
                problems.append(f"{path}: no {what} {quoted(name)}{near}; its columns are {listed(names)}")
            elif names.count(name) > 1:
                problems.append(
                    f"{path}: {quoted(name)} is the name of {names.count(name)} columns; keep one"
                )
        if problems:
            raise DataError(problems)
        return CsvInspection(
            activation=self.settings.activation,
            label_order=tuple(range(len(columns.labels))),
            summary=f"predictions in {shown_path(path)}",
            warnings=(),
            id_column=id_column,
        )

    def fingerprint(self, inspected: CsvInspection, assigned: Assigned) -> Mapping[str, object]:
        return {"id_column": inspected.id_column, "activation": inspected.activation}

    def content(self, inspected: CsvInspection, files: FileDigests) -> Mapping[str, str]:
        return {"file": files.digest(self.settings.path)}

    def predictions(self, ids: pa.ChunkedArray, columns: OutputColumns) -> Given:
        path, id_column = self.settings.path, self.settings.id_column or columns.id_column
        joined, wanted = _Joined(ids, len(columns.labels)), WantedRows(ids)
        types = {id_column: pa.large_string()} | dict.fromkeys(columns.labels, pa.float64())
        # An empty cell is no number here.
        converting = pa_csv.ConvertOptions(
            column_types=types, include_columns=list(types), strings_can_be_null=False, null_values=[]
        )
        with _reading(path):
            block_bytes = max(_BLOCK_BYTES, 4 * wanted.longest_bytes)
            if wanted.has_lines:  # pyarrow loses the second half of a \r\n that two blocks share
                packed = path.suffix == ".gz"
                block_bytes = _MAX_BLOCK_BYTES if packed else max(block_bytes, path.stat().st_size + 1)
            reading = pa_csv.ReadOptions(block_size=min(block_bytes, _MAX_BLOCK_BYTES))
            try:
                with pa_csv.open_csv(path, reading, _ANY_TEXT, converting) as reader:
                    for batch in reader:
                        joined.add(batch)
            except pa.ArrowInvalid:
                if found := _first_text(path, columns.labels):
                    raise DataError(f"{path}: {found}; write a number in every row") from None
                raise
        joined.look_up()
        if problems := [f"{path}: {problem}" for problem in joined.problems()]:
            raise DataError(problems)
        return Given(joined.values, joined.ignored)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    # Not Path's methods, which raise an error where a folder above may not be entered.
    if not os.path.lexists(path) and os.path.isdir(path.parent):  # noqa: PTH112
        raise DataError(f"{path}: no such file{similar_file(path)}")
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):  # noqa: PTH110, PTH112, PTH113
        raise DataError(f"{path}: is not a regular file; name a CSV file")
    try:
        path.open("rb").close()  # pyarrow says why not in words of its own
        yield
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: the names of its columns are not UTF-8; save it as UTF-8") from error
    except OSError as error:
        raise DataError(unreadable(path, error, "name a CSV file")) from error
    except pa.ArrowInvalid as error:
        raise DataError(f"{path}: cannot be read as a CSV ({error})") from error


def _first_text(path: Path, labels: Sequence[str]) -> str:
    """Where the file first has something else than a number for a label; empty where that cannot be told."""
    with (
        contextlib.suppress(OSError, ValueError, csv.Error),
        path.open(newline="", encoding="utf-8-sig") as file,
    ):
        lines = itertools.dropwhile(lambda line: not line.strip(), file)
        for number, row in enumerate(csv.DictReader(lines), start=1):
            for label in labels:
                cell = row.get(label)
                try:
                    float(cell)  # type: ignore[arg-type]
                except (TypeError, ValueError):
                    return f"row {number:,}: {quoted(cell or '')} in column {quoted(label)} is no number"
    return ""


class _Joined:
    """Rows of a file in the order of the table.

    Args:
        ids: the table's.

    Attributes:
        values: float64 [rows, labels], NaN where no row has come yet.
        ignored: rows of ids that the table does not have.
    """

    def __init__(self, ids: pa.ChunkedArray, labels: int) -> None:
        self._ids = ids.cast(pa.large_string())
        self.values: npt.NDArray[np.float64] = np.full((len(ids), labels), np.nan, order="F")
        self.ignored = 0
        self._is_there = np.zeros(len(ids), dtype=np.bool_)
        self._start = 0  # of the row that comes next, as long as they come in the table's order
        self._waiting: list[pa.RecordBatch] = []
        self._rows_at_once = max(_MIN_ROWS_AT_ONCE, len(ids) // _PASSES)
        self._repeated = 0
        self._first_repeated: list[str] = []

    def add(self, batch: pa.RecordBatch) -> None:
        """The next rows: their ids, then a column for each label."""
        stop = self._start + len(batch)
        is_next = not self._waiting and not self._is_there[self._start : stop].any()
        if is_next and pa.chunked_array([batch.column(0)]).equals(self._ids.slice(self._start, len(batch))):
            for index in range(self.values.shape[1]):
                self.values[self._start : stop, index] = batch.column(1 + index).to_numpy()
            self._is_there[self._start : stop] = True
            self._start = stop
            return
        self._waiting.append(batch)
        if sum(map(len, self._waiting)) >= self._rows_at_once:
            self.look_up()

    def look_up(self) -> None:
        """Find the places of the rows that are waiting for it."""
        if not self._waiting:
            return
        table, self._waiting = pa.Table.from_batches(self._waiting), []
        places = pc.index_in(table.column(0), value_set=self._ids)
        is_known = places.is_valid().to_numpy()
        rows = places.drop_null().to_numpy()
        self.ignored += len(is_known) - len(rows)
        _, first = np.unique(rows, return_index=True)
        is_first = np.zeros(len(rows), dtype=np.bool_)
        is_first[first] = True
        repeated = rows[self._is_there[rows] | ~is_first]
        self._repeated += len(repeated)
        self._first_repeated += [str(self._ids[int(row)]) for row in repeated[:_SHOWN]]
        for index in range(self.values.shape[1]):
            self.values[rows, index] = table.column(1 + index).to_numpy()[is_known]
        self._is_there[rows] = True

    def problems(self) -> Iterator[str]:
        """What is wrong with the ids, once all rows have come."""
        if self._repeated:
            shown = _few(self._first_repeated, self._repeated)
            yield f"{plural(self._repeated, 'row')} with an id that came before ({shown}); keep one for each id"
        missing = np.flatnonzero(~self._is_there)
        if len(missing):
            shown = _few([str(self._ids[int(row)]) for row in missing[:_SHOWN]], len(missing))
            yield f"{plural(len(missing), 'id')} of the table missing ({shown}); a row is needed for each of them"


def _few(ids: Sequence[str], count: int) -> str:
    return ", ".join(map(quoted, ids[:_SHOWN])) + (", ..." if count > _SHOWN else "")
