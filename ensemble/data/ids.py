"""Whether ids are there more than once, of any number of rows in little memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.data.input_file import text_bytes, text_ends

# Arrow's own way keeps each id, and a table of them of several times their size.
_ARROW_ROWS = 1 << 22
# Hashed at a time, which takes some 40 bytes for each byte of text.
_ROWS, _BYTES = 65_536, 4 << 20
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = np.uint64(0xBF58476D1CE4E5B9)


def repeated_ids(ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """The ids that are there more than once, as often as they are there; perhaps others among them, or null.

    Args:
        ids: text, [rows]; at least one.
    """
    if len(ids) < _ARROW_ROWS:
        is_unique = pc.count_distinct(ids, mode="all").as_py() == len(ids)
        return ids.slice(0, 0) if is_unique else ids
    # Equal ids have equal hashes, whatever else has: only those with another one's hash are compared.
    hashes = np.concatenate([*_hashes(ids)])
    hashes.sort()
    twice = np.unique(hashes[1:][hashes[1:] == hashes[:-1]])
    del hashes
    if not len(twice):
        return ids.slice(0, 0)
    found = []
    for chunk, own in zip(_pieces(ids), _hashes(ids), strict=True):
        places = np.minimum(np.searchsorted(twice, own), len(twice) - 1)
        found.append(chunk.filter(pa.array(twice[places] == own)))
    return pa.chunked_array(found, ids.type)


def _pieces(ids: pa.ChunkedArray) -> Iterator[pa.Array]:
    for chunk in ids.chunks:
        rows = min(_ROWS, 1 + _BYTES * len(chunk) // max(1, chunk.nbytes))
        for start in range(0, len(chunk), rows):
            yield chunk.slice(start, rows)


def _hashes(ids: pa.ChunkedArray) -> Iterator[npt.NDArray[np.uint64]]:
    """A polynomial of each id's bytes, modulo 2^64, mixed with its length; piece by piece."""
    powers = np.full(1, _FACTOR)
    for piece in _pieces(ids):
        texts = pc.fill_null(piece, "") if piece.null_count else piece
        ends = text_ends(texts).astype(np.int64)
        ends -= ends[0]
        lengths = np.diff(ends)
        content = np.frombuffer(text_bytes(texts), np.uint8)
        if (longest := int(lengths.max(initial=0))) > len(powers):
            with np.errstate(over="ignore"):
                powers = np.cumprod(np.full(longest, _FACTOR, np.uint64), dtype=np.uint64)
        places = np.arange(len(content)) - np.repeat(ends[:-1], lengths)
        with np.errstate(over="ignore"):
            terms = (content.astype(np.uint64) + np.uint64(1)) * powers[places]
            # Sums between two ends of a running one, since some ids may be empty.
            sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])
            own = sums[ends[1:]] - sums[ends[:-1]] + lengths.astype(np.uint64) * _MIX
            own ^= own >> np.uint64(31)
        yield own * _MIX
