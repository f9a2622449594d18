"""JSON lines: one object per line, each value kept as what it is.

A column of strings stays text; any other column is stored as JSON text under a mark, so that templates get
lists, numbers and objects back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import pyarrow as pa

from ensemble.common.errors import DataError
from ensemble.common.text import plural, quoted
from ensemble.data.input_file import JSON_MARK, Contents, Wanted, joined_text, open_input
from ensemble.data.json_cells import MAX_JSON_LEVELS, is_too_deep, json_detail, replace_lone_surrogates

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_ROWS = 8_192
_BYTES = 1 << 24
_MAX_NAMES = 10_000
_SHOWN = 3


class _Integer(int):
    """An integer that remembers how the file spells it, for ids and labels."""

    text: str


class _Float(float):
    """The same for other numbers: ``1.50`` is not the id ``1.5``."""

    text: str


def _number(kind: type[_Integer] | type[_Float], text: str) -> _Integer | _Float:
    number = kind(text)
    number.text = text
    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; write null or a string")


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
            reason = "half of a character" if isinstance(value, str) else "neither text nor a number"
            self.first_refused = self.first_refused or f"row {row:,}: {json.dumps(value)[:60]} ({reason})"
        self.values.append(clean)

    def flush(self) -> None:
        self.chunks.append(pa.array(self.values, pa.string()))
        self.values = []

    def column(self) -> pa.ChunkedArray:
        return joined_text(pa.chunked_array(self.chunks, pa.string()))

    def problems(self, path: Path) -> list[str]:
        if not self.refused:
            return []
        count = plural(self.refused, "value")
        where = f"{path}: {self.role} column {quoted(self.name)}"
        return [f"{where}: {count} no {self.role} can have, the first in {self.first_refused}"]


def _json_text(value: object) -> str | None:
    if value is None:
        return None
    text = json.dumps(_clean(value) if isinstance(value, str) else value, ensure_ascii=False)
    # A lone surrogate inside a list or an object has no UTF-8; its escape does.
    return text if replace_lone_surrogates(text) == text else json.dumps(value)


def _clean(value: object) -> str | None:
    return replace_lone_surrogates(value) if isinstance(value, str) else None


def read_jsonl(path: Path, wanted: Wanted) -> Contents:
    """Reads a file of JSON lines; a key that a line lacks is a null.

    Raises:
        DataError: see ``inputfile.open_input``; also lines that are not JSON objects in UTF-8.
    """
    ids = _TextCells("id", wanted.id_column)
    labels = None if wanted.label_column is None else _TextCells("label", wanted.label_column)
    columns = {name: _Column() for name in wanted.columns}
    names: dict[str, None] = {}
    wanted_names = set(wanted.names())
    rows, pending_bytes = 0, 0
    growing: list[_TextCells | _Column] = [ids, *columns.values()]
    if labels is not None:
        growing.append(labels)
    for record, size in _records(path, wanted.limit):
        rows += 1
        names.update(dict.fromkeys(record if len(names) < _MAX_NAMES else wanted_names & record.keys()))
        ids.add(record.get(wanted.id_column), rows)
        if labels is not None:
            labels.add(record.get(labels.name), rows)
        for name, column in columns.items():
            column.values.append(record.get(name))
        pending_bytes += size
        if rows % _ROWS == 0 or pending_bytes > _BYTES:
            pending_bytes = 0
            for part in growing:
                part.flush()
    for part in growing:
        part.flush()
    present = {name: column for name, column in columns.items() if name in names}
    return Contents(
        rows=rows,
        names=tuple(names),
        ids=ids.column() if ids.name in names else None,
        labels=labels.column() if labels is not None and labels.name in names else None,
        columns=pa.Table.from_arrays(
            [pa.chunked_array(column.chunks, pa.string()) for column in present.values()],
            schema=pa.schema(
                pa.field(name, pa.string(), metadata=JSON_MARK if column.is_json else None)
                for name, column in present.items()
            ),
        ),
        problems=tuple(ids.problems(path) + ([] if labels is None else labels.problems(path))),
    )


def _records(path: Path, limit: int | None) -> Iterator[tuple[dict[str, object], int]]:
    """Yields (record, bytes in its line) for every line that is not blank.

    Raises:
        DataError: once at the end, for every line that is not a JSON object in UTF-8.
    """
    decoder = json.JSONDecoder(
        parse_int=partial(_number, _Integer),
        parse_float=partial(_number, _Float),
        parse_constant=_refuse_constant,
    )
    broken, found = 0, 0
    shown: list[str] = []
    is_json = path.name.lower().removesuffix(".gz").endswith(".json")
    with open_input(path) as stream:
        for number, line in enumerate(stream, 1):
            data = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).strip()
            if not data:
                continue
            if number == 1 and data.startswith(b"[") and is_json:
                raise DataError(f"{path}: holds one JSON array; write one object per line (JSON lines)")
            found += 1
            try:
                record = decoder.decode(data.decode())
                if not isinstance(record, dict):
                    raise ValueError(f"an object was expected, not {data[:40].decode(errors='replace')!r}")
                brackets = data.count(b"[") + data.count(b"{")  # counted, because most lines hold few
                if brackets > MAX_JSON_LEVELS and is_too_deep([*record.values()], MAX_JSON_LEVELS + 1):
                    raise RecursionError
            except (ValueError, RecursionError) as error:
                broken += 1
                detail = json_detail(error)
                if isinstance(error, UnicodeDecodeError):
                    detail = f"not UTF-8 at byte {error.start + 1:,}"
                shown += [f"line {number:,}: {detail}"][: _SHOWN - len(shown)]
            else:
                yield record, len(data)
            if found == limit:
                break
    if broken:
        raise DataError(f"{path}: {plural(broken, 'broken line')}; {'; '.join(shown)}")
