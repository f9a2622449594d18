"""Read JSON lines: one object per line.

A column of strings stays text; other columns become JSON text with a mark, so that templates get lists, numbers and
objects back.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa

from ensemble.common.errors import DataError
from ensemble.common.text import plural, quoted
from ensemble.data.file_rows import FileRows, is_gzipped, open_output
from ensemble.data.input_file import JSON_MARK, Contents, Wanted, joined_text, open_input
from ensemble.data.json_cells import json_detail, python_rows, refuse_constant, replace_lone_surrogates

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How many records are Python objects at a time.
_ROWS = 8_192
_SHOWN = 3


class _Float(float):
    """Keep a number's text from the file: the id ``1.50`` is not ``1.5``."""

    text: str


def _float(text: str) -> _Float:
    number = _Float(text)
    number.text = text
    return number


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON; raise ValueError if a key comes twice, of which each reader takes another one."""
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {quoted(twice)} comes more than once")
    return value


class _Column:
    """Collect a column: plain text as long as all values are text, then JSON text."""

    def __init__(self) -> None:
        self.is_json = False
        self.chunks: list[pa.Array] = []

    def add(self, values: list[object]) -> None:
        if not self.is_json and not all(value is None or isinstance(value, str) for value in values):
            self.is_json = True
            self.chunks = [pa.array(map(_json_text, chunk.to_pylist()), pa.string()) for chunk in self.chunks]
        self.chunks.append(pa.array(map(_json_text if self.is_json else _key_text, values), pa.string()))


def _json_text(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = replace_lone_surrogates(value)
    text = json.dumps(value, ensure_ascii=False)
    # A lone surrogate inside a list or an object has no UTF-8; its escape does.
    return text if replace_lone_surrogates(text) == text else json.dumps(value)


def _key_text(value: object) -> str | None:
    """Return an id or a label as text, numbers as the file spells them."""
    if value is None:
        return None
    if isinstance(value, _Float):
        return value.text
    return replace_lone_surrogates(value) if isinstance(value, str) else json.dumps(value)


def read_jsonl(path: Path, wanted: Wanted) -> Contents:
    """Read a file of JSON lines; a key that a line lacks is a null."""
    keys: dict[str, list[pa.Array]] = {wanted.id_column: []}
    if wanted.label_column is not None:
        keys[wanted.label_column] = []
    columns = {name: _Column() for name in wanted.columns}
    names: dict[str, None] = {}
    rows = 0
    problems: list[str] = []
    for records in _blocks(path, wanted.limit):
        for record in records:
            names.update(dict.fromkeys(record))
        for name, chunks in keys.items():
            values = [record.get(name) for record in records]
            chunks.append(pa.array(map(_key_text, values), pa.string()))
            for row, value in enumerate(values, rows + 1):
                if isinstance(value, list | dict) and not any(quoted(name) in text for text in problems):
                    shown = json.dumps(value)[:60]
                    problems.append(
                        f"{path}: column {quoted(name)}: row {row:,} is neither text nor a number: {shown}"
                    )
        for name, column in columns.items():
            column.add([record.get(name) for record in records])
        rows += len(records)
    texts = {
        name: joined_text(pa.chunked_array(chunks, pa.string()))
        for name, chunks in keys.items()
        if name in names
    }
    present = {name: column for name, column in columns.items() if name in names}
    fields = [
        pa.field(name, pa.string(), metadata=JSON_MARK if column.is_json else None)
        for name, column in present.items()
    ]
    return Contents(
        rows=rows,
        names=tuple(names),
        ids=texts.get(wanted.id_column),
        labels=None if wanted.label_column is None else texts.get(wanted.label_column),
        columns=pa.Table.from_arrays(
            [pa.chunked_array(column.chunks, pa.string()) for column in present.values()],
            schema=pa.schema(fields),
        ),
        problems=tuple(problems),
    )


def copy_jsonl_rows(source: Path, rows: FileRows, path: Path) -> None:
    """Write lines of a file as they are, gzipped as it is; see ``FileRows``."""
    with open_input(source) as stream:
        stripped = (line.removeprefix(_BYTE_ORDER_MARK).strip() for line in stream)
        all_lines = [line for line in stripped if line]
    lines = [all_lines[row] for row in rows.numbers.tolist()]
    if rows.others:
        names = dict.fromkeys(name for _, table in rows.others for name in table.column_names)
        schema = read_jsonl(source, Wanted("", None, tuple(names), None)).columns.schema
        for table in rows.others_like(schema):
            for record in python_rows(table):
                lines.append(json.dumps(record, ensure_ascii=False).encode())
    if rows.added:
        for number, line in enumerate(lines):
            added = {name: float(values[number]) for name, values in rows.added.items()}
            lines[number] = line[:-1] + b", " + json.dumps(added, ensure_ascii=False).encode()[1:]
    with open_output(path, gzipped=is_gzipped(source)) as file:
        file.writelines(line + b"\n" for line in lines)


def write_jsonl(path: Path, names: Sequence[str], batches: Iterable[pa.RecordBatch]) -> None:
    """Write batches of these columns as JSON lines, without bytes; what JSON does not have becomes text."""
    with path.open("w", encoding="utf-8") as stream:
        for batch in batches:
            for row in python_rows(batch):
                stream.write(json.dumps(row, default=str) + "\n")


def _blocks(path: Path, limit: int | None) -> Iterator[list[dict[str, object]]]:
    """Yield the objects of the lines that are not blank, a few thousand at a time.

    At the end raise a DataError about all lines that are not JSON objects in UTF-8.
    """
    decoder = json.JSONDecoder(parse_float=_float, parse_constant=refuse_constant, object_pairs_hook=_object)
    rows = 0
    broken: list[str] = []
    records: list[dict[str, object]] = []
    with open_input(path) as stream:
        for number, line in enumerate(stream, 1):
            data = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).strip()
            if not data:
                continue
            if number == 1 and data.startswith(b"["):
                raise DataError(f"{path}: holds one JSON array; write one object per line (JSON lines)")
            rows += 1
            try:
                record = decoder.decode(data.decode())
                if not isinstance(record, dict):
                    raise ValueError(f"an object was expected, not {data[:40].decode(errors='replace')!r}")
                records.append(record)
            except (ValueError, RecursionError) as error:
                broken.append(f"line {number:,}: {json_detail(error)}")
            if len(records) == _ROWS:
                yield records
                records = []
            if rows == limit:
                break
    yield records
    if broken:
        raise DataError(f"{path}: {plural(len(broken), 'broken line')}; {'; '.join(broken[:_SHOWN])}")
