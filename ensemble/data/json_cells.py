"""Parse JSON in a table's cells, and replace characters that no tokenizer accepts.

Parent and worker share this module. It is apart from the templates, so that reading a table does not import Jinja2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import pyarrow as pa

_EXCERPT_CHARACTERS = 60
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def python_rows(batch: pa.RecordBatch | pa.Table) -> list[dict[str, object]]:
    """Return each row as a dict of column to Python value; cells of columns that are marked as JSON are parsed."""
    rows: list[dict[str, object]] = batch.to_pylist()
    for name in (field.name for field in batch.schema if (field.metadata or {}).get(b"ensemble") == b"json"):
        for row in rows:
            cell = row[name]
            row[name] = json.loads(cell) if isinstance(cell, str) else cell
    return rows


class TemplateProblem(ValueError):
    """Report in one sentence a template that cannot be compiled, or a row that cannot be rendered."""


def parse_json_cell(text: object) -> object:
    """Parse a cell of JSON, or a value that is parsed already, as the ``fromjson`` filter does.

    Nulls inside the value become empty text; a null or blank cell and the JSON text ``null`` give an empty list.

    Raises:
        TemplateProblem: broken JSON, NaN or Infinity, or a value of another type.
    """
    if text is None:
        return []
    if isinstance(text, (bool, int, float, list, dict)):
        return without_nulls(text)
    if not isinstance(text, str):
        raise TemplateProblem(f"fromjson reads JSON text, not a value of type {type(text).__name__}")
    if not text or text.isspace():
        return []
    try:
        value = _DECODER.decode(text)
        if value is None:
            return []
        return without_nulls(value) if "null" in text else value
    except (ValueError, RecursionError) as error:
        detail = json_detail(error)
    excerpt = text if len(text) <= _EXCERPT_CHARACTERS else text[:_EXCERPT_CHARACTERS] + "..."
    raise TemplateProblem(f"not valid JSON ({detail}): {excerpt!r}")


def choice_rows(row: Mapping[str, object], column: str) -> Iterator[dict[str, object]]:
    """Yield the row once for each text of its list in a column, with the text in the list's place.

    Raises:
        TemplateProblem: the cell holds no list.
    """
    choices = parse_json_cell(row[column])
    if not isinstance(choices, list):
        raise TemplateProblem(f"{column!r} holds no JSON list")
    for text in choices:
        yield {**row, column: text}


def json_detail(error: ValueError | RecursionError) -> str:
    """Return what is wrong with JSON, from the error of Python's decoder."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos + 1}"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 at byte {error.start + 1:,}"
    if isinstance(error, RecursionError):
        return "nested too deep"
    return str(error).partition(";")[0]  # the rest is advice for programmers


def replace_lone_surrogates(text: str) -> str:
    """Replace halves of surrogate pairs, which UTF-8 and tokenizers refuse, by U+FFFD."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


def without_nulls(value: object, null: str = "") -> object:
    """Return the value with ``null`` for every null inside it."""
    if value is None:
        return null
    if isinstance(value, list):
        return [without_nulls(item, null) for item in value]
    if isinstance(value, dict):
        return {key: without_nulls(item, null) for key, item in value.items()}
    return value


def refuse_constant(name: str) -> NoReturn:
    """Refuse NaN and Infinity, which are not JSON; for ``json.JSONDecoder``."""
    raise ValueError(f"{name} is not a JSON number")


_DECODER = json.JSONDecoder(parse_constant=refuse_constant)
