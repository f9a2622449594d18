"""Copy rows of a table's file with all of its cells, and join rows of other files to them.

Each format has a function that writes a ``FileRows``; ``formats.copy_rows`` chooses it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.text import quoted
from ensemble.data.input_file import column_texts, is_json_field, is_text, shown_type
from ensemble.data.json_cells import refuse_constant


@dataclass(frozen=True)
class FileRows:
    """Say which rows of a file are copied, and what is written beside them.

    Attributes:
        numbers: rows of the file, rising, int64 [n].
        others: rows that follow, m in all, with some of the file's columns; and the path that each comes from.
        added: columns that the file lacks, by name, float64 [n + m].
    """

    numbers: npt.NDArray[np.int64]
    others: Sequence[tuple[Path, pa.Table]] = ()
    added: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict)

    def others_like(self, schema: pa.Schema) -> Iterator[pa.Table]:
        """Yield the rows that follow, in the file's types; raise DataError if a cell does not fit."""
        for path, table in self.others:
            fields = [column for column in schema if column.name in table.column_names]
            yield pa.Table.from_arrays(
                [
                    as_in(path, table.column(column.name), table.field(column.name), column)
                    for column in fields
                ],
                schema=pa.schema(fields),
            )

    def joined_to(self, table: pa.Table) -> pa.Table:
        """Return the rows of the file's whole table, and what is written beside them; cells that lack are null."""
        is_copied = np.zeros(table.num_rows, np.bool_)
        is_copied[self.numbers] = True
        tables = [table.filter(pa.array(is_copied)), *self.others_like(table.schema)]
        joined = pa.concat_tables(tables, promote_options="default")
        for name, values in self.added.items():
            joined = joined.append_column(name, pa.array(values))
        return joined


def as_in(path: Path, cells: pa.ChunkedArray, source: pa.Field, target: pa.Field) -> pa.ChunkedArray:
    """Return a column in the type that the column of this name has in another file.

    Args:
        path: of the file that has the cells, for messages.
        source: the field of the cells; one with JSON_MARK holds JSON text, here and in ``target``.

    Raises:
        DataError: a cell does not fit that type.
    """
    is_json, shall_be_json = is_json_field(source), is_json_field(target)
    if source.type == target.type and is_json == shall_be_json:
        return cells
    try:
        if shall_be_json and not is_json:
            return _converted(cells, _as_json, target.type)
        if is_json and not shall_be_json:
            return _converted(cells, _as_text if is_text(target.type) else json.loads, target.type)
        if is_text(target.type):
            return pc.cast(column_texts(cells), target.type)
        if is_text(source.type):  # CSV files have no other nulls
            cells = pc.if_else(pc.equal(cells, ""), None, cells)
        return pc.cast(cells, target.type)
    except (pa.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"{path}: column {quoted(source.name)} holds cells that are not of type {shown_type(target.type)}, "
            "as that column is in the training table; write both in the same way"
        ) from error


def _converted(
    cells: pa.ChunkedArray, convert: Callable[[str], object], kind: pa.DataType
) -> pa.ChunkedArray:
    texts = column_texts(cells).to_pylist()
    return pa.chunked_array([pa.array([None if text is None else convert(text) for text in texts], kind)])


def _as_json(text: str) -> str:
    """Return a cell that is JSON as it is, and any other text as a JSON string."""
    try:
        json.loads(text, parse_constant=refuse_constant)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    return text


def _as_text(cell: str) -> str:
    """Return a JSON string's text, and any other JSON as it is."""
    value = json.loads(cell)
    return value if isinstance(value, str) else cell


def is_gzipped(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


@contextmanager
def open_output(path: Path, gzipped: bool) -> Iterator[BinaryIO]:
    """Open a file for writing, compressed if it is to be; the same content gives the same bytes."""
    with path.open("wb") as stream:
        if not gzipped:
            yield stream
            return
        with gzip.GzipFile("", "wb", fileobj=stream, mtime=0) as compressed:
            yield cast(BinaryIO, compressed)
