"""Read JSON lines: one object per line.

A column of strings stays text; other columns become JSON text with a mark, so that templates get lists, numbers and
objects back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from ensemble.common.errors import DataError
from ensemble.common.text import plural, quoted
from ensemble.data.input_file import JSON_MARK, Contents, Wanted, joined_text, open_input
from ensemble.data.json_cells import (
    MAX_JSON_LEVELS,
    is_too_deep,
    json_detail,
    refuse_constant,
    replace_lone_surrogates,
)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# How many records, and bytes of them, are Python objects at a time.
_ROWS = 8_192
_BYTES = 1 << 24
_MAX_NAMES = 10_000
_SHOWN = 3


class _Float(float):
    """A number with the text that the file has for it: the id ``1.50`` is not ``1.5``."""

    text: str


def _float(text: str) -> _Float:
    number = _Float(text)
    number.text = text
    return number


@dataclass
class _Column:
    """A growing column: plain text as long as all values are text, then JSON text."""

    is_json: bool = False
    chunks: list[pa.Array] = field(default_factory=list)

    def add(self, values: Sequence[object]) -> None:
        if not self.is_json and not all(value is None or isinstance(value, str) for value in values):
            self.is_json = True
            self.chunks = [pa.array(map(_json_text, chunk.to_pylist()), pa.string()) for chunk in self.chunks]
        self.chunks.append(pa.array(map(_json_text if self.is_json else _clean, values), pa.string()))


@dataclass
class _Keys:
    """A growing column of ids or labels: text, or numbers as the file spells them."""

    role: str
    name: str | None
    chunks: list[pa.Array] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)

    def add(self, values: Sequence[Any], first_row: int) -> None:
        texts = []
        for row, value in enumerate(values, first_row):
            is_text = isinstance(value, str)
            text: str | None
            if type(value) is int:
                text = str(value)
            elif isinstance(value, _Float):
                text = value.text
            else:
                text = value if is_text else _json_text(value)
            texts.append(_clean(text))
            if texts[-1] != text or isinstance(value, list | dict):
                reason = "half of a character" if is_text else "neither text nor a number"
                self.refused.append(f"row {row:,}: {json.dumps(value)[:60]} ({reason})")
        self.chunks.append(pa.array(texts, pa.string()))


def _json_text(value: object) -> str | None:
    if value is None:
        return None
    text = json.dumps(_clean(value) if isinstance(value, str) else value, ensure_ascii=False)
    # A lone surrogate inside a list or an object has no UTF-8; its escape does.
    return text if replace_lone_surrogates(text) == text else json.dumps(value)


def _clean(text: Any) -> str | None:
    return None if text is None else replace_lone_surrogates(text)


def read_jsonl(path: Path, wanted: Wanted) -> Contents:
    """Read a file of JSON lines; a key that a line lacks is a null.

    Raises:
        DataError: see ``input_file.open_input``; also lines that are not JSON objects in UTF-8.
    """
    keys = _Keys("id", wanted.id_column), _Keys("label", wanted.label_column)
    columns = {name: _Column() for name in wanted.columns}
    names: dict[str, None] = {}
    wanted_names = set(wanted.names())
    rows = 0
    for records in _blocks(path, wanted.limit):
        for record in records:
            new_names = record.keys() if len(names) < _MAX_NAMES else wanted_names & record.keys()
            names.update(dict.fromkeys(new_names))
        for key in keys:
            key.add([record.get(key.name) for record in records], rows + 1)
        for name, column in columns.items():
            column.add([record.get(name) for record in records])
        rows += len(records)
    present = {name: column for name, column in columns.items() if name in names}
    fields = [
        pa.field(name, pa.string(), metadata=JSON_MARK if column.is_json else None)
        for name, column in present.items()
    ]
    texts = [
        joined_text(pa.chunked_array(key.chunks, pa.string())) if key.name in names else None for key in keys
    ]
    problems = [
        f"{path}: {key.role} column {quoted(str(key.name))}: {plural(len(key.refused), 'value')} no {key.role} can "
        f"have, the first in {key.refused[0]}"
        for key in keys
        if key.refused
    ]
    return Contents(
        rows=rows,
        names=tuple(names),
        ids=texts[0],
        labels=texts[1],
        columns=pa.Table.from_arrays(
            [pa.chunked_array(column.chunks, pa.string()) for column in present.values()],
            schema=pa.schema(fields),
        ),
        problems=tuple(problems),
    )


def _blocks(path: Path, limit: int | None) -> Iterator[list[dict[Any, object]]]:
    """Yield the objects of the lines that are not blank, a few thousand at a time.

    Raises:
        DataError: at the end, with every line that is not a JSON object in UTF-8.
    """
    decoder = json.JSONDecoder(parse_float=_float, parse_constant=refuse_constant)
    broken, rows, pending_bytes = 0, 0, 0
    shown: list[str] = []
    records: list[dict[Any, object]] = []
    is_json = path.name.lower().removesuffix(".gz").endswith(".json")
    with open_input(path) as stream:
        for number, line in enumerate(stream, 1):
            data = (line.removeprefix(_BYTE_ORDER_MARK) if number == 1 else line).strip()
            if not data:
                continue
            if number == 1 and data.startswith(b"[") and is_json:
                raise DataError(f"{path}: holds one JSON array; write one object per line (JSON lines)")
            rows += 1
            try:
                record = decoder.decode(data.decode())
                if not isinstance(record, dict):
                    raise ValueError(f"an object was expected, not {data[:40].decode(errors='replace')!r}")
                brackets = data.count(b"[") + data.count(b"{")  # counted, because most lines hold few
                if brackets > MAX_JSON_LEVELS and is_too_deep(record, MAX_JSON_LEVELS + 1):
                    raise RecursionError
                records.append(record)
            except (ValueError, RecursionError) as error:
                broken += 1
                if len(shown) < _SHOWN:
                    shown.append(f"line {number:,}: {json_detail(error)}")
            pending_bytes += len(data)
            if len(records) == _ROWS or pending_bytes > _BYTES:
                yield records
                records, pending_bytes = [], 0
            if rows == limit:
                break
    yield records
    if broken:
        raise DataError(f"{path}: {plural(broken, 'broken line')}; {'; '.join(shown)}")
