"""Cells of Arrow columns: as Python values a block at a time, how long their text is, and what allocates them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.data.input_file import is_text

# Rows that are Python objects at a time.
_PYTHON_ROWS = 8_192


def is_binary(kind: pa.DataType) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(check(kind) for check in checks)


def python_cells(column: pa.ChunkedArray, is_json: bool) -> Iterator[object]:
    """The cells as templates will see them, a few thousand in memory at a time."""
    for chunk in column.chunks:
        for start in range(0, len(chunk), _PYTHON_ROWS):
            for cell in chunk.slice(start, _PYTHON_ROWS).to_pylist():
                yield loaded_cell(cell) if is_json else cell


def cell_lengths(chunk: pa.Array) -> npt.NDArray[np.int64]:
    """UTF-8 bytes of each cell, shape (rows,)."""
    if not (is_text(chunk.type) or is_binary(chunk.type)):
        try:
            chunk = pc.cast(chunk, pa.string())
        except pa.ArrowException:  # nested, or a type that has no text of its own
            return np.fromiter(map(_json_length, python_cells(pa.chunked_array([chunk]), False)), np.int64)
    lengths: npt.NDArray[np.int64] = pc.fill_null(pc.binary_length(chunk), 0).to_numpy().astype(np.int64)
    return lengths


def loaded_cell(cell: object) -> object:
    return json.loads(cell) if isinstance(cell, str) else cell


def _json_length(value: object) -> int:
    return 0 if value is None else len(json.dumps(value, ensure_ascii=False, default=str).encode())


@contextlib.contextmanager
def malloc_for_arrow() -> Iterator[None]:
    """Let pyarrow take memory from malloc: while files are read its own allocator holds on to 60 to 100 MB more."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)
