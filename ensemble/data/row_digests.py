"""Columns -> a digest of each row, by which it is known again in a table that grew, shrank or was put in order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.data.cells import is_binary
from ensemble.data.input_file import is_json_field, is_text

DIGEST_BYTES = 16
RowDigests = npt.NDArray[np.uint64]
# Rows at a time: their cells are copied.
_ROWS = 65_536


def row_digests(columns: pa.Table, names: Sequence[str]) -> RowDigests:
    """A digest of each row's cells in some columns: uint64 [rows, 2].

    Rows are alike where all of these cells are: their values, and which of them are null.  Types count, ids do not.

    Args:
        columns: holds ``names``, shape (rows,) each.
    """
    rows = columns.num_rows
    found = np.zeros((rows, 2), dtype="<u8")
    if not names:
        return found
    table = columns.select(list(names))
    kinds = [
        "json" if is_json_field(one) else "text" if is_text(one.type) else str(one.type)
        for one in table.schema
    ]
    mark = blake2b(json.dumps([*zip(names, kinds, strict=True)]).encode(), digest_size=DIGEST_BYTES).digest()
    start = 0
    for batch in table.to_batches(max_chunksize=_ROWS):
        found[start : start + len(batch)] = _digests(batch, mark)
        start += len(batch)
    return found


def find_rows(wanted: RowDigests, there: RowDigests) -> npt.NDArray[np.int64]:
    """For each of the wanted rows the place of one that is like it, -1 where there is none: [wanted]."""
    if not len(there):
        return np.full(len(wanted), -1, dtype=np.int64)
    order = np.argsort(there[:, 0], kind="stable")
    keys = there[order, 0]
    places = order[np.minimum(np.searchsorted(keys, wanted[:, 0]), len(keys) - 1)]
    return np.where((there[places] == wanted).all(axis=1), places, -1)


def _digests(batch: pa.RecordBatch, mark: bytes) -> RowDigests:
    """Of a few rows.  ``mark`` sets apart rows of other columns."""
    pieces: list[pa.Array] = []
    for column in batch.columns:
        if not (is_text(column.type) or is_binary(column.type)):
            try:
                column = pc.cast(column, pa.large_string())
            except pa.ArrowException:  # nested, or a type that has no text of its own
                texts = [
                    None if cell is None else json.dumps(cell, default=str) for cell in column.to_pylist()
                ]
                column = pa.array(texts, pa.large_string())
        cells = pc.cast(column, pa.large_binary())
        # A length in front of each cell: no two rows have the same bytes then.  A null has none.
        lengths = pc.cast(pc.cast(pc.binary_length(cells), pa.large_string()), pa.large_binary())
        pieces += [pc.fill_null(lengths, b"-"), pc.fill_null(cells, b"")]
    joined = pc.binary_join_element_wise(*pieces, pa.scalar(b":", pa.large_binary()))
    _, offsets, data = joined.buffers()
    ends = np.frombuffer(offsets, "<i8", len(joined) + 1, 8 * joined.offset).tolist()
    view = memoryview(data)
    digests = [
        blake2b(view[start:stop], digest_size=DIGEST_BYTES, person=mark).digest()
        for start, stop in pairwise(ends)
    ]
    return np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
