"""A table of any number of rows out of those there are, repeated, and each copy made different.

Equal rows are computed once, so plain copies would say nothing of a larger table's time.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from string import ascii_lowercase

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.data.input_file import is_json_field, is_text
from ensemble.data.table import InputTable


def repeated(
    table: InputTable,
    rows: int,
    json_columns: Collection[str] = (),
    seed: int = 0,
    kept_columns: Collection[str] = (),
) -> tuple[InputTable, npt.NDArray[np.int64]]:
    """A table of ``rows`` rows: all of the table's as often as they go in, and of the rest a random choice.

    Args:
        json_columns: those whose text is JSON for a template.
        seed: of that choice.
        kept_columns: whose cells stay as they are, such as names of files.

    Returns:
        the table, without labels; and for each of its rows how many copies of the same row stand before it, [rows].
    """
    whole, rest = divmod(rows, table.rows)
    chosen = np.sort(np.random.default_rng(seed).choice(table.rows, rest, replace=False))
    numbers = np.concatenate([np.tile(np.arange(table.rows), whole), chosen]).astype(np.int64)
    copies = np.concatenate([np.repeat(np.arange(whole), table.rows), np.full(rest, whole)]).astype(np.int64)

    def change(field: pa.Field, column: pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
        if (
            field.name in kept_columns
            or not copies.any()
            or not (is_text(field.type) or pa.types.is_nested(field.type))
        ):
            return column  # a number has no words
        is_json = field.name in json_columns or is_json_field(field)
        cells = []
        for cell, copy in zip(column.to_pylist(), copies.tolist(), strict=True):
            if not copy or not cell:
                cells.append(cell)
            elif is_json and isinstance(cell, str) and not cell.isspace():
                cells.append(json.dumps(_varied_value(json.loads(cell), copy)[0], ensure_ascii=False))
            else:
                cells.append(_varied_value(cell, copy)[0])
        return pa.array(cells, field.type)

    return table.derived(numbers, numbered_ids(rows, table), change), copies


def numbered_ids(rows: int, like: InputTable) -> pa.ChunkedArray:
    """Ids of about the length that a table's have."""
    width = max(len(str(rows)), round(like.ids.nbytes / like.rows) - 4)  # 4 bytes of an id are its offset
    return pa.chunked_array([pa.array([f"{number:0{width}}" for number in range(rows)], pa.string())])


def varied(text: str, copy: int) -> str:
    """A text of the same words and about the same length that no other copy of it has; copy 0 is the text itself.

    Its words are rotated, so that the copies differ from their first token on, whatever is cut off.  Once all
    rotations are used up, a short word stands before them, of a text of some length at the cost of its end.
    """
    words, cycle = text.split(" "), f"{text} "
    # Rotations until the words stand as they did.
    period = cycle[: (cycle + cycle).find(cycle, 1)].count(" ")
    turns, first = divmod(copy, period)
    rotated = " ".join([*words[first:], *words[:first]])
    if not turns:
        return rotated
    word = ""
    while turns:
        turns, letter = divmod(turns, len(ascii_lowercase))
        word += ascii_lowercase[letter]
    longer = f"{word} {rotated}"
    return longer[: len(text)] if len(text) > 8 * len(word) else longer


def _varied_value(value: object, copy: int) -> tuple[object, bool]:
    """A value with its first text varied, and whether it has one."""
    if isinstance(value, str):
        return (varied(value, copy), True) if value else (value, False)
    if not isinstance(value, list | dict):
        return value, False
    items = list(value.values()) if isinstance(value, dict) else value[:]
    for place in range(len(items)):
        items[place], is_varied = _varied_value(items[place], copy)
        if is_varied:
            break
    else:
        return value, False
    return (dict(zip(value, items, strict=True)) if isinstance(value, dict) else items), True
