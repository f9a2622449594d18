"""PURE: the rows of a member in order, cut into chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

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
# The first chunk of a member whose speed nobody has measured, under a time limit: a batch or two.
FIRST_CHUNK_ROWS = 16
# Of text that tokenizers were made for: 4 to 4.5 in English, 3 to 5 in most other languages and in code.  The
# parent has no tokenizer; what it estimates with this are costs, never what is computed.
BYTES_PER_TOKEN = 4.0
# What a row costs beyond its text, in bytes of text: template, special tokens, bookkeeping.
ROW_OVERHEAD_BYTES = 32
_ROWS_AT_A_TIME = 1 << 20


@dataclass(frozen=True)
class Chunk:
    """Rows ``order[start:stop]`` of a member; ``cost`` is its share of the member's work, relative.

    ``index`` is its number on the channel, so no two chunks of a member ever have the same.  ``view`` is the number
    of the view of the rows that it is of.
    """

    index: int
    start: int
    stop: int
    cost: float
    view: int = 0

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def split(self, numbers: Iterator[int], at: int | None = None) -> tuple[Chunk, Chunk]:
        """Its rows up to ``at``, or to the middle, and those from there on: longer rows first.

        Costs go by rows, which are about equally long within a chunk.

        Args:
            numbers: indices that no chunk of the member has yet.
        """
        at = (self.start + self.stop) // 2 if at is None else at
        first, second = (
            replace(
                self, index=next(numbers), start=start, stop=stop, cost=self.cost * (stop - start) / self.rows
            )
            for start, stop in ((self.start, at), (at, self.stop))
        )
        return first, second


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
    order = _longest_first(ranked)
    cumulative = _costs_before(ranked, order)
    own = cumulative if ranked is lengths else _costs_before(lengths, order)
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


def _longest_first(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The rows by length, those of equal length in their order, [rows]."""
    longest, shortest = int(lengths.max(initial=0)), int(lengths.min(initial=0))
    shorter_by = np.empty(len(lengths), np.uint16 if longest - shortest < 1 << 16 else np.int64)
    # NumPy sorts numbers of 16 bits by their digits, in a fraction of the time.
    np.subtract(longest, lengths, out=shorter_by, casting="unsafe")
    return np.argsort(shorter_by, kind="stable")


def _costs_before(lengths: npt.NDArray[np.int64], order: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """What the rows before each one in the order cost, [rows + 1]; in the memory of the result and little more."""
    costs = np.zeros(len(order) + 1)
    for start in range(0, len(order), _ROWS_AT_A_TIME):
        part = lengths[order[start : start + _ROWS_AT_A_TIME]]
        costs[1 + start : 1 + start + len(part)] = part + ROW_OVERHEAD_BYTES
    return np.cumsum(costs, out=costs)


def in_views(
    order: npt.NDArray[np.int64], chunks: Sequence[Chunk], views: int
) -> tuple[npt.NDArray[np.int64], tuple[Chunk, ...]]:
    """The rows and chunks of a member that gets each row in several views: all rows in the first, then in the next.

    Rows are numbered through the views: row r of a table of n rows is r + v * n in view v.

    Args:
        order: of the table's rows, [n], and their chunks.
    """
    rows = len(order)
    if views == 1:  # of a large table the order is not to be there twice
        return order, tuple(chunks)
    return (
        np.concatenate([order + view * rows for view in range(views)]),
        tuple(
            Chunk(
                index=chunk.index + view * len(chunks),
                start=chunk.start + view * rows,
                stop=chunk.stop + view * rows,
                cost=chunk.cost / views,
                view=view,
            )
            for view in range(views)
            for chunk in chunks
        ),
    )


def common_lengths(lengths: Iterable[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Lengths by which all members are cut where all are to cover the same rows first, [rows].

    It is the sum of the members' lengths, in which a text that several of them read counts once.  Where all
    read the same, the cut is what it would be without.

    Args:
        lengths: of each member, bytes of text per row, [rows]; at least one member.
    """
    distinct: list[npt.NDArray[np.int64]] = []
    for one in lengths:
        if not any(np.array_equal(one, other) for other in distinct):
            distinct.append(one)
    return sum(distinct[1:], distinct[0])


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
        is_done: by row number, [rows].
        numbers: indices that no chunk of the member has yet.
    """
    if not is_done.any():
        return order, tuple(chunks)
    max_cost = max((chunk.cost for chunk in chunks), default=0.0)
    joined: list[
        tuple[Chunk, int]
    ] = []  # slices of the order with their costs that are left, and with their rows
    for chunk in chunks:
        one, rows = chunk, int((~is_done[order[chunk.start : chunk.stop]]).sum())
        if rows < chunk.rows:
            one = replace(chunk, cost=chunk.cost * rows / chunk.rows)
            last, others = joined[-1] if joined else (chunk, chunk.rows)
            cost = last.cost + one.cost
            is_near = last.view == one.view and others < last.rows
            if is_near and cost <= max_cost and others + rows <= CHUNK_MAX_ROWS:
                joined.pop()
                one, rows = replace(last, stop=chunk.stop, cost=cost), others + rows
        joined.append((one, rows))
    order = order.copy()
    left: list[Chunk] = []
    for chunk, rows in joined:
        if rows == chunk.rows:
            left.append(chunk)
        elif rows:
            slice_ = order[chunk.start : chunk.stop]
            slice_[:] = slice_[np.argsort(~is_done[slice_], kind="stable")]
            left.append(replace(chunk, index=next(numbers), start=chunk.stop - rows))
    return order, tuple(left)


def cut_to_rows(
    chunks: Iterable[Chunk], max_rows: Iterator[int], numbers: Iterator[int]
) -> tuple[Chunk, ...]:
    """Cut chunks so that each next one has as many rows as ``max_rows`` says, or up to half as many again.

    ``numbers`` are indices that no chunk of the member has yet.
    """
    cut: list[Chunk] = []
    for chunk in chunks:
        rest, rows = chunk, next(max_rows)
        while 2 * rest.rows >= 3 * rows:  # no crumb at the end
            first, rest = rest.split(numbers, rest.start + rows)
            cut.append(first)
            rows = next(max_rows)
        cut.append(rest)
    return tuple(cut)
