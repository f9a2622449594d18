"""Lay rows one behind the other into batches without padding, for attention that tells rows apart."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ensemble.members.huggingface.scoring.batching import MemoryLimit

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Layout:
    """Hold a packed batch.

    Attributes:
        ids: of the tokens, int64 [tokens].
        positions, ends: of the tokens, and of padding behind them: see ``Packing``, int32 [padded].
        starts: the place of each row's first own token, int64 [rows].
    """

    ids: Integers
    positions: npt.NDArray[np.int32]
    ends: npt.NDArray[np.int32]
    starts: Integers


def lay_out(shared: Integers, rows: Sequence[Integers], padded: int) -> Layout:
    """Lay the tokens that all rows begin with, and then the rest of each row; attention has ``padded`` tokens."""
    parts = [shared, *rows]
    borders = np.cumsum([0, *map(len, parts)])
    positions = np.zeros(padded, dtype=np.int32)
    ends = np.arange(1, padded + 1, dtype=np.int32)  # padding is seen by nobody else
    for start, end in pairwise(borders.tolist()):
        positions[start:end] = np.arange(end - start) + (len(shared) if start else 0)
        ends[start:end] = end
    ends[: len(shared)] = borders[-1]
    return Layout(np.concatenate(parts), positions, ends, borders[1:-1])


def pack(widths: Integers, tokens: int, most_rows: int) -> list[Integers]:
    """Fill batches of so many tokens, longest rows first; each row goes into the fullest batch that has room.

    Without the rows of some batches, the other batches are the same.

    Args:
        widths: tokens of each row, at most ``tokens``, int64 [rows].

    Returns:
        Row numbers of each batch.
    """
    batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # the room of each batch that is not full, and its number, ascending
    for row in np.argsort(-widths, kind="stable").tolist():
        width = int(widths[row])
        place = bisect.bisect_left(rooms, (width, 0))
        if place < len(rooms):
            room, number = rooms.pop(place)
        else:
            room, number = tokens, len(batches)
            batches.append([])
        batches[number].append(row)
        if len(batches[number]) < most_rows:
            bisect.insort(rooms, (room - width, number))
    return [np.array(batch, dtype=np.int64) for batch in batches]


def most_rows(tokens: int, memory: MemoryLimit | None) -> int:
    """Return how many rows a packed batch of so many tokens may have."""
    if memory is None or not memory.bytes_per_row:
        return tokens
    left = memory.available_bytes - tokens * memory.bytes_per_token
    return max(1, int(left / memory.bytes_per_row))
