"""Columns -> digests of what their cells hold, whatever chunks and buffers Arrow keeps them in."""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.data.input_file import is_json_field, is_text

# Rows at a time: what is copied, because some of its cells are null, stays small.
_ROWS = 65_536
_NULL = -1


def rows_digest(ids: pa.ChunkedArray, columns: pa.Table, names: Sequence[str], known: dict[str, str]) -> str:
    """A digest of the ids and of every cell of some columns, in order.

    Args:
        ids: shape (rows,), strings.
        columns: holds those of ``names`` that are not in ``known``, shape (rows,) each.
        known: digests of columns by name, and of the ids by the empty name; takes those that are computed here.
    """
    if "" not in known:
        known[""] = column_digest(ids, pa.field("", ids.type))
    for name in names:
        if name not in known:
            known[name] = column_digest(columns.column(name), columns.schema.field(name))
    return _of_text(json.dumps([known[""], *((name, known[name]) for name in names)]))


def column_digest(column: pa.ChunkedArray, field: pa.Field) -> str:
    """A digest of every cell: its value, where it ends, and whether it is null, empty or neither.

    The same cells give the same digest in any number of chunks, as strings or large strings, and with anything
    in the buffers below a null.  The type counts, and so does the mark of JSON text.

    Args:
        column: shape (rows,).
        field: the column's.
    """
    # Each buffer of the layout has a hash of its own, which goes on from chunk to chunk.
    hashes: _Hashes = defaultdict(_hash)
    for chunk in column.chunks:
        for start in range(0, len(chunk), _ROWS):
            _add(chunk.slice(start, _ROWS), "", hashes)
    kind = "json" if is_json_field(field) else "text" if is_text(field.type) else str(field.type)
    parts = [(place, found.hexdigest()) for place, found in sorted(hashes.items())]
    return _of_text(json.dumps([kind, len(column), parts]))


_Hashes = defaultdict[str, Any]


def _hash() -> Any:
    # Fast on any processor; SHA-256 is so only on those that have instructions for it.
    return hashlib.blake2b(digest_size=32)


def _of_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=32).hexdigest()


def _add(array: pa.Array, place: str, hashes: _Hashes) -> None:
    """Hash the cells of an array; ``place`` says where it stands within those that are nested."""
    kind = array.type
    if is_text(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        _add_lengths(array, pc.binary_length, place, hashes)
        _add_bytes(array.drop_null() if array.null_count else array, place, hashes)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        _add_lengths(array, pc.list_value_length, place, hashes)
        _add(array.flatten(), f"{place}/items", hashes)
    elif pa.types.is_struct(kind):
        _add_valid(array, place, hashes)
        for number, part in enumerate(array.flatten()):
            _add(part, f"{place}/{number}", hashes)
    elif pa.types.is_primitive(kind):
        _add_valid(array, place, hashes)
        _add_numbers(array.drop_null(), place, hashes)
    else:  # rare: decimals, maps, and what else Parquet may hold
        for value in array.to_pylist():
            hashes[f"{place}/values"].update(json.dumps(value, default=str).encode() + b"\n")


def _add_lengths(
    array: pa.Array, measure: Callable[[pa.Array], pa.Array], place: str, hashes: _Hashes
) -> None:
    lengths: npt.NDArray[np.int64] = pc.fill_null(measure(array), _NULL).to_numpy().astype("<i8")
    hashes[f"{place}/lengths"].update(lengths)


def _add_valid(array: pa.Array, place: str, hashes: _Hashes) -> None:
    hashes[f"{place}/valid"].update(array.is_valid().cast(pa.uint8()).to_numpy())


def _add_bytes(array: pa.Array, place: str, hashes: _Hashes) -> None:
    """The bytes of strings, none of them null, one after the other."""
    is_large = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    _, offsets, data = array.buffers()
    found = hashes[f"{place}/data"]  # even where all are empty, for which Arrow may keep a buffer or not
    if len(array) and data is not None:
        width = 8 if is_large else 4
        ends = np.frombuffer(offsets, f"<i{width}", len(array) + 1, array.offset * width)
        found.update(data.slice(int(ends[0]), int(ends[-1] - ends[0])))


def _add_numbers(array: pa.Array, place: str, hashes: _Hashes) -> None:
    """The bytes of numbers, dates or times, none of them null."""
    if pa.types.is_boolean(array.type):
        array = array.cast(pa.uint8())  # from bits, which need not begin at a byte
    width, found = array.type.bit_width // 8, hashes[f"{place}/data"]
    if len(array):
        found.update(array.buffers()[1].slice(array.offset * width, len(array) * width))
