"""PURE: the rows of a member in order, cut into chunks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# A chunk is what is lost when a worker dies and what two devices can differ by at the end.  One MiB of text is
# about 250,000 tokens: three to five minutes of a 9B model on a T4, under a minute of a small one on two cores.
CHUNK_BYTES = 1 << 20
CHUNK_MAX_ROWS = 4096
# Small tables are cut into about 16 chunks, but none so small that it holds only a batch or two: rows are in
# order of their bytes, and it takes some batches to put them into order of their tokens without padding.
CHUNKS_WANTED = 16
CHUNK_MIN_BYTES = 1 << 16
# Of text that tokenizers were made for: 4 to 4.5 in English, 3 to 5 in most other languages and in code.  The
# parent has no tokenizer; what it estimates with this are costs, never what is computed.
BYTES_PER_TOKEN = 4.0
# What a row costs beyond its text, in bytes of text: template, special tokens, bookkeeping.
ROW_OVERHEAD_BYTES = 32


@dataclass(frozen=True)
class Chunk:
    """Rows ``order[start:stop]`` of a member; ``cost`` is its share of the member's work, relative.

    ``index`` is its number on the process line, so no two chunks of a member ever have the same.
    """

    index: int
    start: int
    stop: int
    cost: float


def counted_lengths(lengths: npt.NDArray[np.int64], max_length: int) -> npt.NDArray[np.int64]:
    """Bytes of each row that count as work: those that ``max_length`` tokens let through, by estimate, [rows]."""
    return np.minimum(lengths, int(max_length * BYTES_PER_TOKEN))


def cut_chunks(
    lengths: npt.NDArray[np.int64], common: npt.NDArray[np.int64] | None = None
) -> tuple[npt.NDArray[np.int64], tuple[Chunk, ...]]:
    """Row order, longest first, and its slices.

    The cut depends on the table alone, not on devices or replicas, so that any number of them computes the
    same batches.

    Args:
        lengths: bytes of text per row, [rows].
        common: lengths to order and cut by instead, so that members with different texts have the same
            chunks, [rows]; the costs are still those of ``lengths``.
    """
    ranked = lengths if common is None else common
    order = np.argsort(-ranked, kind="stable")
    cumulative = _running_costs(ranked[order])
    own = cumulative if common is None else _running_costs(lengths[order])
    total, rows = float(cumulative[-1]), len(order)
    target = min(float(CHUNK_BYTES), max(float(CHUNK_MIN_BYTES), total / CHUNKS_WANTED))
    chunks: list[Chunk] = []
    start = 0
    while start < rows:
        within = int(np.searchsorted(cumulative, cumulative[start] + target, side="right")) - 1
        stop = min(max(within, start + 1), start + CHUNK_MAX_ROWS, rows)
        if total - cumulative[stop] < target / 4 and rows - start <= CHUNK_MAX_ROWS:
            stop = rows  # no crumb at the end
        chunks.append(Chunk(len(chunks), start, stop, float(own[stop] - own[start]) / float(own[-1])))
        start = stop
    return order, tuple(chunks)


def _running_costs(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """What the rows before each place cost, [rows + 1]."""
    costs = (lengths + ROW_OVERHEAD_BYTES).astype(np.float64)
    return np.concatenate([[0.0], np.cumsum(costs)])


def common_lengths(lengths_by_member: Mapping[str, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Lengths by which all members are cut where all are to cover the same rows first, [rows].

    It is the sum of the members' lengths, in which a text that several of them read counts once.  Where all
    read the same, the cut is what it would be without.

    Args:
        lengths_by_member: bytes of text per row, [rows] each; at least one member.
    """
    distinct: list[npt.NDArray[np.int64]] = []
    for lengths in lengths_by_member.values():
        if not any(lengths is other or np.array_equal(lengths, other) for other in distinct):
            distinct.append(lengths)
    first, *others = distinct
    for lengths in others:
        first = first + lengths  # not in place: the array is the member's own
    return first


def what_is_left(
    chunks: Sequence[Chunk],
    order: npt.NDArray[np.int64],
    is_done: npt.NDArray[np.bool_],
    numbers: Iterator[int],
) -> tuple[npt.NDArray[np.int64], tuple[Chunk, ...]]:
    """The chunks that are still to be computed, and the order of which they are slices.

    A chunk of which nothing is done stays as it was cut.  Of others the rows that are left move together, behind
    those that are done, and with what is left of their neighbours as far as that makes no more than a chunk: rows
    that are done can lie anywhere in a table that has changed.

    Args:
        chunks: all of a member's, in order.
        order: the member's row numbers, in order, [rows].
        is_done: by row of the table, [rows].
        numbers: indices that no chunk of the member has yet.
    """
    order = order.copy()
    left: list[Chunk] = []
    most = max((chunk.cost for chunk in chunks), default=0.0)
    group: list[tuple[Chunk, int, float]] = []  # each with the rows and the cost that are left of it

    def close() -> None:
        if not group:
            return
        start, stop = group[0][0].start, group[-1][0].stop
        rows, done = order[start:stop], is_done[order[start:stop]]
        order[start:stop] = np.concatenate([rows[done], rows[~done]])
        if count := sum(one[1] for one in group):
            left.append(Chunk(next(numbers), stop - count, stop, sum(one[2] for one in group)))
        group.clear()

    for chunk in chunks:
        size = chunk.stop - chunk.start
        count = size - int(is_done[order[chunk.start : chunk.stop]].sum())
        if count == size:
            close()
            left.append(chunk)
            continue
        cost = chunk.cost * count / size
        is_full = sum(one[2] for one in group) + cost > most
        if is_full or sum(one[1] for one in group) + count > CHUNK_MAX_ROWS:
            close()
        group.append((chunk, count, cost))
    close()
    return order, tuple(left)


def halves(chunk: Chunk, numbers: Iterator[int]) -> tuple[Chunk, Chunk]:
    """The chunk in two, longer rows first; see :func:`cut_at`."""
    return cut_at(chunk, (chunk.start + chunk.stop) // 2, numbers)


def cut_at(chunk: Chunk, place: int, numbers: Iterator[int]) -> tuple[Chunk, Chunk]:
    """The chunk's places up to ``place`` and from there on, each with a new index.

    Costs go by rows: within a chunk the rows are about equally long.

    Args:
        numbers: indices that no chunk of the member has yet.

    Raises:
        ValueError: nothing would be on one side, as where a chunk has a single row.
    """
    if not chunk.start < place < chunk.stop:
        raise ValueError(f"a chunk of rows {chunk.start} to {chunk.stop} cannot be cut at {place}")
    return _part(chunk, chunk.start, place, numbers), _part(chunk, place, chunk.stop, numbers)


def _part(chunk: Chunk, start: int, stop: int, numbers: Iterator[int]) -> Chunk:
    return Chunk(next(numbers), start, stop, chunk.cost * (stop - start) / (chunk.stop - chunk.start))


def work_of(lengths: npt.NDArray[np.int64]) -> float:
    """All of a member's work, in the bytes of text that count, with what each row costs beyond them."""
    return float(lengths.sum()) + ROW_OVERHEAD_BYTES * len(lengths)
