"""The file formats of the input table: CSV, Parquet and JSON lines, each read into the same `Contents`.

Owns what depends on the format: how ids and labels become text, what a cell becomes for a template, how far
to read when the rows are limited.  The checks that hold for every format are in ``table.py``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from ensemble.csvfile import UTF8_MARK, check_names, open_input, plural, read_header, scan_csv
from ensemble.errors import DataError
from ensemble.template import replace_lone_surrogates

# The worker knows this mark as well (worker/rows.py): the field's text is JSON for a value that is not text.
JSON_MARK = {b"ensemble": b"json"}
SUPPORTED = ".csv, .tsv (each also with .gz), .parquet, .pq, .jsonl, .ndjson, .json (each also with .gz)"
_CSV = {".csv", ".tsv"}
_PARQUET = {".parquet", ".pq"}
_JSONL = {".jsonl", ".ndjson", ".json"}
_PARQUET_ROWS = 8_192
_JSONL_ROWS = 8_192
_JSONL_BYTES = 1 << 24
_MOST_NAMES = 10_000
_SHOWN = 3


@dataclass(frozen=True)
class Wanted:
    """What to read: a column may be the id, the label and a text all at once."""

    id_column: str
    label_column: str | None
    columns: tuple[str, ...]
    limit: int | None


@dataclass(frozen=True)
class Contents:
    """What a file holds of the wanted columns.

    Attributes:
        rows: rows read.
        names: every column in the file.
        ids: shape (rows,), strings; None if the column is missing or cannot serve as an id.
        labels: the same for the label column.
        columns: those of the wanted columns that are there.  A field marked with JSON_MARK holds JSON text.
        problems: what is wrong with single cells or types.
    """

    rows: int
    names: tuple[str, ...]
    ids: pa.ChunkedArray | None
    labels: pa.ChunkedArray | None
    columns: pa.Table
    problems: tuple[str, ...]


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
        return _read_jsonl(path, wanted)
    if suffix in _PARQUET and not compressed:
        return _read_parquet(path, wanted)
    kind = (
        f"of type {''.join(suffixes[-2:] if compressed else suffixes[-1:])}"
        if suffix
        else "without extension"
    )
    raise DataError(f"{path}: cannot read files {kind}; use {SUPPORTED}")


def is_json_field(column: pa.Field) -> bool:
    """Whether a column's text is JSON for values that are not text."""
    return bool(column.metadata) and column.metadata.get(b"ensemble") == b"json"


def joined_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """A column of strings that stays usable as a whole: large strings once its text passes 2 GB."""
    if column.nbytes >= 1 << 31 and pa.types.is_string(column.type):
        return pc.cast(column, pa.large_string())
    return column


def _read_csv(path: Path, wanted: Wanted) -> Contents:
    names = read_header(path)
    present = [name for name in dict.fromkeys(_all_wanted(wanted)) if name in names]
    # With none of the columns there, one is still read, for the number of rows.
    text = scan_csv(path, present or names[:1], wanted.limit)
    return Contents(
        rows=text.table.num_rows,
        names=names,
        ids=_column_or_none(text.table, wanted.id_column),
        labels=_column_or_none(text.table, wanted.label_column),
        columns=text.table.select([name for name in wanted.columns if name in present]),
        problems=tuple(text.problems),
    )


def _all_wanted(wanted: Wanted) -> list[str]:
    label = [] if wanted.label_column is None else [wanted.label_column]
    return [wanted.id_column, *label, *wanted.columns]


def _column_or_none(table: pa.Table, name: str | None) -> pa.ChunkedArray | None:
    return joined_text(table.column(name)) if name in table.column_names else None


# ---- Parquet


def _read_parquet(path: Path, wanted: Wanted) -> Contents:
    from pyarrow import parquet

    with open_input(path):  # missing, empty and the like, in the same words as for the other formats
        pass
    try:
        with parquet.ParquetFile(path) as file:
            names = tuple(file.schema_arrow.names)
            check_names(path, names)
            present = [name for name in dict.fromkeys(_all_wanted(wanted)) if name in names]
            schema = pa.schema([file.schema_arrow.field(name) for name in present])
            rows, batches = 0, []
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS, columns=present):
                keep = batch.num_rows if wanted.limit is None else wanted.limit - rows
                batches.append(_checked(path, batch.select(present).slice(0, keep), rows))
                rows += batches[-1].num_rows
                if rows == wanted.limit:
                    break
            if not present:
                rows = min(file.metadata.num_rows, wanted.limit or file.metadata.num_rows)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet ({error})") from error
    table = _plain(batches, schema)
    problems: list[str] = []
    return Contents(
        rows=rows,
        names=names,
        ids=_parquet_ids(path, table, wanted.id_column, problems),
        labels=_parquet_labels(path, table, wanted.label_column, problems),
        columns=table.select([name for name in wanted.columns if name in present]),
        problems=tuple(problems),
    )


def _checked(path: Path, batch: pa.RecordBatch, first_row: int) -> pa.RecordBatch:
    """Parquet promises UTF-8 and does not check it; a broken cell would end a worker hours later."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            column.validate(full=True)
        except pa.ArrowInvalid as error:
            where = f"{path}: column {name!r} is broken near row {first_row + 1:,}"
            raise DataError(f"{where} ({error}); write the file again") from error
    return batch


def _plain(batches: Sequence[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    """Without dictionaries (each batch has one of its own), string views and pandas' metadata."""
    fields = [pa.field(column.name, _plain_type(column.type)) for column in schema]
    plain = []
    for batch in batches:
        arrays = [
            column if column.type == target.type else pc.cast(column, target.type)
            for column, target in zip(batch.columns, fields, strict=True)
        ]
        plain.append(pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))
    return pa.Table.from_batches(plain, schema=pa.schema(fields))


def _plain_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain_type(kind.value_type)
    return pa.large_string() if pa.types.is_string_view(kind) else kind


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _parquet_ids(path: Path, table: pa.Table, name: str, problems: list[str]) -> pa.ChunkedArray | None:
    if name not in table.column_names:
        return None
    column = table.column(name)
    if is_text(column.type):
        return joined_text(column)
    if pa.types.is_integer(column.type):
        return pc.cast(column, pa.string())
    advice = "write the file again with that column cast to int64 or string"
    problems.append(f"{path}: id column {name!r} is of type {column.type}, which is no id; {advice}")
    return None


def _parquet_labels(
    path: Path, table: pa.Table, name: str | None, problems: list[str]
) -> pa.ChunkedArray | None:
    if name is None or name not in table.column_names:
        return None
    try:
        return joined_text(pc.cast(table.column(name), pa.string()))
    except pa.ArrowException:
        kind = table.column(name).type
        problems.append(f"{path}: label column {name!r} is of type {kind}; write it as text or numbers")
        return None


# ---- JSON lines


class _Integer(int):
    """An integer that remembers how the file spells it, for ids and labels."""

    text: str

    def __new__(cls, text: str) -> _Integer:
        number = super().__new__(cls, text)
        number.text = text
        return number


class _Float(float):
    """The same for other numbers: ``1.50`` is not the id ``1.5``."""

    text: str

    def __new__(cls, text: str) -> _Float:
        number = super().__new__(cls, text)
        number.text = text
        return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; write null or a string")


@dataclass
class _BrokenLines:
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def add(self, line_number: int, detail: str) -> None:
        self.count += 1
        if self.count <= _SHOWN:
            self.shown.append(f"line {line_number:,}: {detail}")


@dataclass
class _Column:
    """One column while it grows: plain text until a value comes that is not, JSON text from then on."""

    is_json: bool = False
    chunks: list[pa.Array] = field(default_factory=list)
    values: list[object] = field(default_factory=list)

    def flush(self) -> None:
        if not self.is_json and not all(value is None or isinstance(value, str) for value in self.values):
            self.is_json = True
            self.chunks = [pa.array(map(_json_text, chunk.to_pylist()), pa.string()) for chunk in self.chunks]
        cells = map(_json_text, self.values) if self.is_json else map(_clean, self.values)
        self.chunks.append(pa.array(cells, pa.string()))
        self.values = []


@dataclass
class _TextCells:
    """Ids or labels while they grow: text, numbers as the file spells them, nothing else."""

    role: str
    name: str
    chunks: list[pa.Array] = field(default_factory=list)
    values: list[str | None] = field(default_factory=list)
    refused: int = 0
    first_refused: str = ""

    def add(self, value: object, row: int) -> None:
        text: str | None
        if value is None or isinstance(value, str):
            text = value
        elif isinstance(value, (_Integer, _Float)):
            text = value.text
        else:
            text = _json_text(value)
        clean = None if text is None else replace_lone_surrogates(text)
        if clean != text or isinstance(value, (list, dict)):
            self.refused += 1
            self.first_refused = self.first_refused or f"row {row:,}: {json.dumps(value)[:60]}"
        self.values.append(clean)

    def flush(self) -> None:
        self.chunks.append(pa.array(self.values, pa.string()))
        self.values = []

    def problems(self, path: Path) -> list[str]:
        if not self.refused:
            return []
        count = plural(self.refused, "value")
        where = f"{path}: {self.role} column {self.name!r}"
        return [f"{where}: {count} neither text nor a number, the first in {self.first_refused}"]


def _json_text(value: object) -> str | None:
    if value is None:
        return None
    text = json.dumps(_clean(value) if isinstance(value, str) else value, ensure_ascii=False)
    # A lone surrogate inside a list or an object has no UTF-8; its escape does.
    return text if replace_lone_surrogates(text) == text else json.dumps(value)


def _clean(value: object) -> str | None:
    return replace_lone_surrogates(value) if isinstance(value, str) else None


def _read_jsonl(path: Path, wanted: Wanted) -> Contents:
    ids = _TextCells("id", wanted.id_column)
    labels = None if wanted.label_column is None else _TextCells("label", wanted.label_column)
    columns = {name: _Column() for name in wanted.columns}
    names: dict[str, None] = {}
    wanted_names = set(_all_wanted(wanted))
    rows, pending_bytes = 0, 0
    growing: list[_TextCells | _Column] = [ids, *columns.values()]
    if labels is not None:
        growing.append(labels)
    for record, size in _records(path, wanted.limit):
        rows += 1
        names.update(dict.fromkeys(record if len(names) < _MOST_NAMES else wanted_names & record.keys()))
        ids.add(record.get(wanted.id_column), rows)
        if labels is not None:
            labels.add(record.get(labels.name), rows)
        for name, column in columns.items():
            column.values.append(record.get(name))
        pending_bytes += size
        if rows % _JSONL_ROWS == 0 or pending_bytes > _JSONL_BYTES:
            pending_bytes = 0
            for part in growing:
                part.flush()
    for part in growing:
        part.flush()
    present = {name: column for name, column in columns.items() if name in names}
    return Contents(
        rows=rows,
        names=tuple(names),
        ids=_chunked(ids) if ids.name in names else None,
        labels=_chunked(labels) if labels is not None and labels.name in names else None,
        columns=pa.Table.from_arrays(
            [pa.chunked_array(column.chunks, pa.string()) for column in present.values()],
            schema=pa.schema(
                pa.field(name, pa.string(), metadata=JSON_MARK if column.is_json else None)
                for name, column in present.items()
            ),
        ),
        problems=tuple(ids.problems(path) + ([] if labels is None else labels.problems(path))),
    )


def _chunked(cells: _TextCells) -> pa.ChunkedArray:
    return joined_text(pa.chunked_array(cells.chunks, pa.string()))


def _records(path: Path, limit: int | None) -> Iterator[tuple[dict[str, object], int]]:
    """Yields (record, bytes in its line) for every line that is not blank.

    Raises:
        DataError: once at the end, for every line that is not a JSON object in UTF-8.
    """
    decoder = json.JSONDecoder(parse_int=_Integer, parse_float=_Float, parse_constant=_refuse_constant)
    broken, found = _BrokenLines(), 0
    with open_input(path) as stream:
        for number, line in enumerate(stream, 1):
            data = (line.removeprefix(UTF8_MARK) if number == 1 else line).strip()
            if not data:
                continue
            if (
                number == 1
                and data.startswith(b"[")
                and path.name.lower().removesuffix(".gz").endswith(".json")
            ):
                raise DataError(f"{path}: holds one JSON array; write one object per line (JSON lines)")
            found += 1
            try:
                record = decoder.decode(data.decode())
                if not isinstance(record, dict):
                    raise ValueError(f"an object was expected, not {data[:40].decode(errors='replace')!r}")
            except json.JSONDecodeError as error:
                broken.add(number, f"{error.msg} at character {error.colno}")
            except UnicodeDecodeError as error:
                broken.add(number, f"not UTF-8 at byte {error.start + 1:,}")
            except (ValueError, RecursionError) as error:
                broken.add(number, str(error))
            else:
                yield record, len(data)
            if found == limit:
                break
    if broken.count:
        raise DataError(f"{path}: {plural(broken.count, 'broken line')}; {'; '.join(broken.shown)}")
