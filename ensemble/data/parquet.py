"""Read and write Parquet files; values keep the types that they have in the file."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.text import error_text, quoted
from ensemble.data.file_rows import FileRows
from ensemble.data.input_file import (
    Contents,
    Wanted,
    check_names,
    is_text,
    joined_text,
    open_input,
    shown_type,
)

_ROWS = 8_192


def read_parquet(path: Path, wanted: Wanted) -> Contents:
    """Read a Parquet file, up to the limit of rows."""
    from pyarrow import parquet

    with open_input(path):  # refuses missing and empty files in the same words as for other formats
        pass
    try:
        with parquet.ParquetFile(path) as file:

            def batches(columns: list[str]) -> Iterable[pa.RecordBatch]:
                # Group by group, because dictionaries within structs cannot be joined.
                for group in range(file.num_row_groups):
                    yield from file.iter_batches(batch_size=_ROWS, row_groups=[group], columns=columns)

            return arrow_contents(path, wanted, file.schema_arrow, file.metadata.num_rows, batches)
    # UnicodeDecodeError: damaged names, which pyarrow hands over unchecked
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read as Parquet ({error_text(error)})"
        raise DataError(f"{path}: {problem}; write the file again") from error


def write_parquet(
    path: Path, names: Sequence[str], blocks: Iterable[Iterable[pa.Array | pa.ChunkedArray]]
) -> None:
    """Write a Parquet file in place, of columns in one or more blocks of rows; ids stay text, numbers numbers."""
    from pyarrow import parquet

    tables = (pa.Table.from_arrays(list(columns), names=list(names)) for columns in blocks)
    first = next(tables)
    with parquet.ParquetWriter(path, first.schema) as writer:
        for table in itertools.chain([first], tables):
            writer.write_table(table)


def copy_parquet_rows(source: Path, rows: FileRows, path: Path) -> None:
    """Write rows of a Parquet file with all of its cells and types; see ``FileRows``.

    Categories become plain values if rows of other files follow, which may have other categories.
    """
    from pyarrow import parquet

    with parquet.ParquetFile(source) as file:
        table = file.read()
    check_names(source, table.column_names, table.column_names)
    if rows.others:
        fields = [field.with_type(_plain_type(field.type)).with_nullable(True) for field in table.schema]
        table = table.cast(pa.schema(fields, table.schema.metadata))
    parquet.write_table(rows.joined_to(table), path)


def arrow_contents(
    path: Path,
    wanted: Wanted,
    schema: pa.Schema,
    num_rows: int,
    batches: Callable[[list[str]], Iterable[pa.RecordBatch]],
) -> Contents:
    """Return the contents of a file of typed columns, which has ``num_rows`` in all.

    ``batches`` reads some of the columns, a few thousand rows at a time.

    Raises:
        DataError: two columns have one name, text is not UTF-8, values cannot be used by a template.
    """
    names = tuple(schema.names)
    present = [name for name in wanted.names() if name in names]
    check_names(path, names, present)
    columns = [name for name in wanted.columns if name in names]
    plain = pa.schema([pa.field(name, _plain_type(schema.field(name).type)) for name in present])

    def checked() -> Iterator[pa.RecordBatch]:
        rows = 0
        for batch in batches(present):
            limit = batch.num_rows if wanted.limit is None else wanted.limit - rows
            yield _checked(path, batch.select(present).slice(0, limit), plain, columns, rows)
            rows += min(batch.num_rows, limit)
            if rows == wanted.limit:
                break

    table = pa.Table.from_batches(checked(), plain)
    rows = table.num_rows if present else min(num_rows, wanted.limit or num_rows)
    ids = labels = None
    problems: list[str] = []
    if wanted.id_column in names:
        ids = table.column(wanted.id_column)
        if not pa.types.is_integer(ids.type) and not is_text(ids.type):
            where = f"{path}: id column {quoted(wanted.id_column)} is of type {shown_type(ids.type)}"
            advice = "write the file again with that column cast to int64 or string"
            problems.append(f"{where}, which cannot be an id; {advice}")
            ids = None
    if wanted.label_column is not None and wanted.label_column in names:
        column = table.column(wanted.label_column)
        try:
            labels = pc.cast(column, pa.string())
        except pa.ArrowException:
            where = f"{path}: label column {quoted(wanted.label_column)} is of type {shown_type(column.type)}"
            problems.append(f"{where}; write it as text or numbers")
    return Contents(
        rows=rows,
        names=names,
        ids=None if ids is None else joined_text(ids),
        labels=None if labels is None else joined_text(labels),
        columns=table.select(columns),
        problems=tuple(problems),
    )


def _checked(
    path: Path, batch: pa.RecordBatch, schema: pa.Schema, columns: list[str], first_row: int
) -> pa.RecordBatch:
    """Return a batch of the types in ``schema``, once its cells are checked.

    A broken cell in ``columns``, which templates will see, would end a worker hours later: text may not be UTF-8 as
    the file promises, and Arrow has times that Python lacks.
    """
    arrays = []
    for field, column in zip(schema, batch.columns, strict=True):
        where = f"{path}: column {quoted(field.name)}"
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            problem = f"is broken near row {first_row + 1:,} ({error_text(error)})"
            raise DataError(f"{where} {problem}; write the file again") from error
        cells = column if column.type == field.type else pc.cast(column, field.type)
        if field.name in columns and len(cells) and not is_text(field.type):
            try:
                cells.take(pa.array([0]))  # as workers do, which some types cannot
                cells.to_pylist()
            except (ArithmeticError, LookupError, TypeError, ValueError, pa.ArrowException) as error:
                raise DataError(
                    f"{where} holds {shown_type(field.type)} values that cannot be used, near row "
                    f"{first_row + 1:,} ({error_text(error)}); write it as text"
                ) from error
        arrays.append(cells)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain_type(kind: pa.DataType) -> pa.DataType:
    """Return the type without dictionaries and views."""
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_plain_type(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_plain_type(field.type)) for field in kind])
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    return pa.large_string() if pa.types.is_string_view(kind) else kind
