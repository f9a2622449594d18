"""Compute digests of columns and rows, the same however Arrow splits the cells into chunks and buffers.

A digest identifies a row even after the table grew, shrank or was sorted.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from hashlib import blake2b, sha256
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.data.input_file import cell_texts, is_json_field, is_text, text_ends

DIGEST_BYTES = 16
RowDigests = npt.NDArray[np.uint64]
# Rows hashed at a time, so that copies of cells stay small.
_ROWS = 65_536


def rows_digest(ids: pa.ChunkedArray, names: Sequence[str], digests: RowDigests) -> str:
    """Return a digest of the ids and of every cell of some columns, in order, from their ``row_digests``."""
    hashed = blake2b(json.dumps(list(names)).encode(), digest_size=32)
    hashed.update(row_digests(pa.table([ids], ["id"]), ["id"]).tobytes())
    hashed.update(digests.tobytes())
    return hashed.hexdigest()


def truth_sha256(
    ids: pa.ChunkedArray, labels: Sequence[str], truth: npt.NDArray[np.int64] | npt.NDArray[np.float64]
) -> str:
    """Return the SHA-256 of rows' ids and truth, by which a table is recognized; see ``FittingConfig``."""
    if truth.ndim == 1:
        texts = [labels[number] for number in truth.tolist()]
    else:
        by_name = sorted(range(len(labels)), key=lambda label: labels[label])
        texts = []
        for row in truth.tolist():
            likely = [(labels[label], row[label]) for label in by_name if row[label]]
            texts.append("\t".join(name if value == 1 else f"{name}={value:.9g}" for name, value in likely))
    lines = sorted(zip(ids.to_pylist(), texts, strict=True))
    return sha256("".join(f"{name}\t{text}\n" for name, text in lines).encode()).hexdigest()


def row_digests(columns: pa.Table, names: Sequence[str]) -> RowDigests:
    """Return a digest of each row's cells in some columns, by their values and types: uint64 [rows, 2]."""
    table = columns.select(list(names))
    kinds = []
    for field in table.schema:
        kind = "text" if is_text(field.type) else str(field.type)
        kinds.append((field.name, "json" if is_json_field(field) else kind))
    # Makes rows of other columns differ.
    mark = blake2b(json.dumps(kinds).encode(), digest_size=DIGEST_BYTES).digest()
    all_digests: RowDigests = np.empty((columns.num_rows, 2), "<u8")
    start = 0
    for batch in table.to_batches(max_chunksize=_ROWS):
        pieces: list[pa.Array] = []
        for column in batch.columns:
            column = pc.cast(cell_texts(column), pa.large_binary())
            # With a length in front of each cell, no two rows have the same bytes. A null has no length.
            lengths = pc.cast(pc.cast(pc.binary_length(column), pa.large_string()), pa.large_binary())
            pieces += [pc.fill_null(lengths, b"-"), pc.fill_null(column, b"")]
        joined = pc.binary_join_element_wise(*pieces, pa.scalar(b":", pa.large_binary()))
        view = memoryview(joined.buffers()[2])
        digests = [
            blake2b(view[begin:end], digest_size=DIGEST_BYTES, person=mark).digest()
            for begin, end in pairwise(text_ends(joined).tolist())
        ]
        all_digests[start : start + len(batch)] = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
        start += len(batch)
    return all_digests


def find_rows(rows: RowDigests, stored: RowDigests) -> npt.NDArray[np.int64]:
    """Return for each row the number of a stored row with the same digest, -1 if there is none: [rows]."""
    if not len(stored):
        return np.full(len(rows), -1, dtype=np.int64)
    order = np.argsort(stored[:, 0], kind="stable")
    keys = stored[order, 0]
    numbers = order[np.minimum(np.searchsorted(keys, rows[:, 0]), len(keys) - 1)]
    return np.where((stored[numbers] == rows).all(axis=1), numbers, -1)


def with_another(rows: RowDigests, values: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """Return which rows have the digest of a row with another value, [rows]."""
    _, numbers = np.unique(rows, axis=0, return_inverse=True)
    numbers = numbers.reshape(-1)  # numpy 2.0 alone gives [rows, 1]
    pairs = np.unique(np.stack([numbers, values]), axis=1)
    return np.asarray((np.bincount(pairs[0]) > 1)[numbers])
