"""The input table's formats by their extensions, CSV and Parquet; each is read into the same ``Contents``.

Owns what depends on the format: how ids and labels become text, what a cell becomes for a template, how far
to read when the rows are limited.  JSON lines are in ``jsonlines.py``, the checks that hold for every format
in ``table.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.text import quoted, told
from ensemble.data.cells import is_binary
from ensemble.data.csv_file import read_header, scan_csv
from ensemble.data.input_file import (
    Contents,
    Wanted,
    check_names,
    is_text,
    joined_text,
    open_input,
    shown_type,
)
from ensemble.data.jsonl import read_jsonl

if TYPE_CHECKING:
    from pyarrow import parquet

SUPPORTED = ".csv, .tsv (each also with .gz), .parquet, .pq, .jsonl, .ndjson, .json (each also with .gz)"
_CSV = {".csv", ".tsv"}
_PARQUET = {".parquet", ".pq"}
_JSONL = {".jsonl", ".ndjson", ".json"}
_PARQUET_ROWS = 8_192


def read_contents(path: Path, wanted: Wanted) -> Contents:
    """Reads the file by its extension.

    Raises:
        DataError: an unknown extension, a missing or unreadable file, or a broken structure (ragged CSV
            rows, lines that are not JSON objects, two columns with one name), after which no row number
            can be counted on.
    """
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compressed = suffixes[-1:] == [".gz"]
    suffix = suffixes[-2] if compressed and len(suffixes) > 1 else "".join(suffixes[-1:])
    if suffix in _CSV:
        return _read_csv(path, wanted)
    if suffix in _JSONL:
        return read_jsonl(path, wanted)
    if suffix in _PARQUET and not compressed:
        return _read_parquet(path, wanted)
    kind = (
        f"of type {''.join(suffixes[-2:] if compressed else suffixes[-1:])}"
        if suffix
        else "without extension"
    )
    raise DataError(f"{path}: cannot read files {kind}; use {SUPPORTED}")


def _read_csv(path: Path, wanted: Wanted) -> Contents:
    names = read_header(path)
    present = [name for name in wanted.names() if name in names]
    # With none of the columns there, one is still read, for the number of rows.
    text = scan_csv(path, names, present or names[:1], wanted.limit)
    return Contents(
        rows=text.table.num_rows,
        names=names,
        ids=_column_or_none(text.table, wanted.id_column),
        labels=_column_or_none(text.table, wanted.label_column),
        columns=text.table.select([name for name in wanted.columns if name in present]),
        problems=tuple(text.problems),
    )


def _column_or_none(table: pa.Table, name: str | None) -> pa.ChunkedArray | None:
    return joined_text(table.column(name)) if name in table.column_names else None


def _read_parquet(path: Path, wanted: Wanted) -> Contents:
    from pyarrow import parquet

    with open_input(path):  # missing, empty and the like, in the same words as for the other formats
        pass
    try:
        with parquet.ParquetFile(path) as file:
            names = tuple(file.schema_arrow.names)
            check_names(path, names)
            present = [name for name in wanted.names() if name in names]
            columns = [name for name in wanted.columns if name in names]
            fields = [file.schema_arrow.field(name) for name in present]
            schema = pa.schema([pa.field(field.name, _plain_type(field.type)) for field in fields])
            rows, batches = 0, []
            for batch in _batches(file, present):
                keep = batch.num_rows if wanted.limit is None else wanted.limit - rows
                batches.append(_plain(_checked(path, batch.select(present).slice(0, keep), rows), schema))
                _check_values(path, batches[-1].select(columns), rows)
                rows += batches[-1].num_rows
                if rows == wanted.limit:
                    break
            if not present:
                rows = min(file.metadata.num_rows, wanted.limit or file.metadata.num_rows)
    # UnicodeDecodeError: damaged names, which pyarrow hands over unchecked
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({told(error)}); write the file again") from error
    table = pa.Table.from_batches(batches, schema=schema)
    problems: list[str] = []
    return Contents(
        rows=rows,
        names=names,
        ids=_parquet_ids(path, table, wanted.id_column, problems),
        labels=_parquet_labels(path, table, wanted.label_column, problems),
        columns=table.select(columns),
        problems=tuple(problems),
    )


def _batches(file: parquet.ParquetFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    for group in range(file.num_row_groups):  # one by one: dictionaries in structs do not go together
        yield from file.iter_batches(batch_size=_PARQUET_ROWS, row_groups=[group], columns=columns)


def _checked(path: Path, batch: pa.RecordBatch, first_row: int) -> pa.RecordBatch:
    """Parquet promises UTF-8 and does not check it; a broken cell would end a worker hours later."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            where = f"{path}: column {quoted(name)} is broken near row {first_row + 1:,}"
            raise DataError(f"{where} ({told(error)}); write the file again") from error
    return batch


def _check_values(path: Path, batch: pa.RecordBatch, first_row: int) -> None:
    """Arrow knows times that Python does not, such as nanoseconds; they too would end a worker hours later."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if not len(column) or _is_plain(column.type):
            continue
        try:
            # Where pandas is imported, pyarrow gives its values, which know nanoseconds; a worker has none.
            if column.type == pa.duration("ns"):
                column.cast(pa.duration("us"))
            elif pa.types.is_timestamp(column.type) and column.type.unit == "ns":
                column.cast(pa.timestamp("us", column.type.tz))
            column.take(pa.array([0])).to_pylist()
            column.to_pylist()
        except (ArithmeticError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
            kind, place = shown_type(column.type), f"near row {first_row + 1:,}"
            reason = told(error).partition(". ")[0].rstrip(".")  # what follows is advice for programmers
            where = f"{path}: column {quoted(name)} holds {kind} values that cannot be used, {place}"
            raise DataError(f"{where} ({reason}); write it as text") from error


def _is_plain(kind: pa.DataType) -> bool:
    """Whether every value of the type is one of Python's, and a worker can pick rows of it."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_plain(kind.value_type)
    if pa.types.is_struct(kind):
        inner = [kind.field(index) for index in range(kind.num_fields)]
        return len({field.name for field in inner}) == len(inner) and all(
            _is_plain(field.type) for field in inner
        )
    checks = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_null, is_binary)
    return is_text(kind) or any(check(kind) for check in checks)


def _plain(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Without dictionaries (each batch has one of its own), string views and pandas' metadata."""
    arrays = [
        column if column.type == target.type else pc.cast(column, target.type)
        for column, target in zip(batch.columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_struct(kind):
        inner = [kind.field(index) for index in range(kind.num_fields)]
        return pa.struct([field.with_type(_plain_type(field.type)) for field in inner])
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return pa.large_string() if pa.types.is_string_view(kind) else kind


def _parquet_ids(path: Path, table: pa.Table, name: str, problems: list[str]) -> pa.ChunkedArray | None:
    if name not in table.column_names:
        return None
    column = table.column(name)
    if is_text(column.type):
        return joined_text(column)
    if pa.types.is_integer(column.type):
        return pc.cast(column, pa.string())
    advice = "write the file again with that column cast to int64 or string"
    problems.append(
        f"{path}: id column {quoted(name)} is of type {shown_type(column.type)}, which cannot be an id; {advice}"
    )
    return None


def _parquet_labels(
    path: Path, table: pa.Table, name: str | None, problems: list[str]
) -> pa.ChunkedArray | None:
    if name is None or name not in table.column_names:
        return None
    try:
        return joined_text(pc.cast(table.column(name), pa.string()))
    except pa.ArrowException:
        kind = shown_type(table.column(name).type)
        problems.append(f"{path}: label column {quoted(name)} is of type {kind}; write it as text or numbers")
        return None
