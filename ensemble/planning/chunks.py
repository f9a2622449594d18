"""Order the rows of a model, and cut them into chunks. PURE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

import numpy as np
import numpy.typing as npt

# A chunk is lost when a worker dies, and two devices can differ by one at the end.  One MiB of text is about
# 250,000 tokens: three to five minutes of a 9B model on a T4, under a minute of a small one on two cores.
CHUNK_BYTES = 1 << 20
CHUNK_MAX_ROWS = 4096
# Small tables are cut into about 16 chunks, but none is so small that it holds only a batch or two: rows are in
# order of their bytes, and within some batches they can be put in order of their tokens, to avoid padding.
TARGET_CHUNKS = 16
CHUNK_MIN_BYTES = 1 << 16
# Of text that tokenizers were made for: 4 to 4.5 in English, 3 to 5 in most other languages and in code.  The
# parent has no tokenizer, and uses this to estimate costs only.
BYTES_PER_TOKEN = 4.0
# What a row costs beyond its text, in bytes of text: template and special tokens.
ROW_OVERHEAD_BYTES = 32


@dataclass(frozen=True)
class Chunk:
    """Name rows ``order[start:stop]`` of a model.

    Attributes:
        index: the chunk's number in messages to workers; no other chunk of the model has it.
        cost: the rows' share of the model's work.
        job: the number of the model's job whose rows they are.
    """

    index: int
    start: int
    stop: int
    cost: float
    job: int = 0

    @property
    def rows(self) -> int:
        return self.stop - self.start

    def split(self, numbers: Iterator[int], at: int | None = None) -> tuple[Chunk, Chunk]:
        """Return the rows before ``at``, or before the middle, and the rows from there on, with new ``numbers``.

        Costs are shared by rows, which are about equally long within a chunk.
        """
        at = (self.start + self.stop) // 2 if at is None else at
        cost = self.cost * (at - self.start) / self.rows
        first = replace(self, index=next(numbers), stop=at, cost=cost)
        second = replace(self, index=next(numbers), start=at, cost=self.cost - cost)
        return first, second

    def behind(self, chunks: int, rows: int, share: float, job: int) -> Chunk:
        """Return the chunk of a job, whose work is a ``share`` of all, behind chunks and rows of other jobs."""
        return Chunk(self.index + chunks, self.start + rows, self.stop + rows, self.cost * share, job)


def cut_chunks(
    lengths: npt.NDArray[np.int64], common: npt.NDArray[np.int64] | None = None, chunk_rows: int | None = None
) -> tuple[npt.NDArray[np.int64], tuple[Chunk, ...]]:
    """Return the row order, longest first, and its slices.

    The cut depends on the rows alone, not on devices or replicas, so any number of replicas computes the same
    batches.

    Args:
        lengths: bytes of text per row, [rows].
        common: lengths to order and cut by instead, so that members with different texts have the same chunks.
        chunk_rows: rows of a chunk; None: as many as their lengths say.
    """
    ranked = lengths if common is None else common
    order = np.argsort(-ranked, kind="stable")
    return order, _slices(ranked[order], lengths[order], chunk_rows)


def cut_closest_first(
    lengths: npt.NDArray[np.int64],
    common: npt.NDArray[np.int64],
    doubt: npt.NDArray[np.float64],
    chunk_rows: int | None = None,
) -> tuple[npt.NDArray[np.int64], tuple[Chunk, ...]]:
    """Return the row order, the closest calls first, and its slices; each slice has its longest rows first.

    Arguments are as for ``cut_chunks``; ``doubt`` is how unsure each row is, [rows].
    """
    order = np.argsort(-doubt, kind="stable")
    chunks = _slices(common[order], lengths[order], chunk_rows)
    for chunk in chunks:
        rows = order[chunk.start : chunk.stop]
        order[chunk.start : chunk.stop] = rows[np.argsort(-common[rows], kind="stable")]
    return order, chunks


def _slices(
    ranked: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], chunk_rows: int | None
) -> tuple[Chunk, ...]:
    """Cut rows into slices of ``chunk_rows``, or of about equal lengths by ``ranked``; costs are by ``lengths``."""
    ranks_before, costs_before = _costs_before(ranked), _costs_before(lengths)
    total, rows = float(ranks_before[-1]), len(ranked)
    target = min(float(CHUNK_BYTES), max(float(CHUNK_MIN_BYTES), total / TARGET_CHUNKS))
    chunks: list[Chunk] = []
    start = 0
    while start < rows:
        if chunk_rows is not None:
            stop = min(start + chunk_rows, rows)
        else:
            within = int(np.searchsorted(ranks_before, ranks_before[start] + target, side="right")) - 1
            stop = min(max(within, start + 1), start + CHUNK_MAX_ROWS, rows)
            if total - ranks_before[stop] < target / 4 and rows - start <= CHUNK_MAX_ROWS:
                stop = rows  # a small rest joins the last chunk
        cost = float(costs_before[stop] - costs_before[start]) / float(costs_before[-1])
        chunks.append(Chunk(len(chunks), start, stop, cost))
        start = stop
    return tuple(chunks)


def _costs_before(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return what the rows before each row cost, [rows + 1]."""
    return np.concatenate([[0.0], np.cumsum(lengths + float(ROW_OVERHEAD_BYTES))])


def join_jobs(
    parts: Sequence[tuple[npt.NDArray[np.int64], Sequence[Chunk], float]],
) -> tuple[npt.NDArray[np.int64], tuple[Chunk, ...], float]:
    """Return the rows, the chunks and the work of several jobs: all of the first job, then all of the next.

    ``parts`` has the rows of each job in their order, their chunks and their work.
    """
    order: list[npt.NDArray[np.int64]] = []
    chunks: list[Chunk] = []
    rows_before = 0
    total = sum(work for _, _, work in parts)
    for job, (rows, chunks_of_job, work) in enumerate(parts):
        chunks += [chunk.behind(len(chunks), rows_before, work / total, job) for chunk in chunks_of_job]
        order.append(rows)
        rows_before += len(rows)
    return np.concatenate(order), tuple(chunks), total


def what_is_left(
    chunks: Sequence[Chunk], order: npt.NDArray[np.int64], is_done: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], tuple[Chunk, ...]]:
    """Return the chunks' order with the rows that are done at its end, and the chunks of the others.

    A chunk of which nothing is done keeps its rows and its index. ``is_done`` is of the table's rows for each job,
    bool [jobs, rows].
    """
    numbers = count(1 + max((chunk.index for chunk in chunks), default=-1))  # that no chunk has yet
    rows_left: list[npt.NDArray[np.int64]] = [order[:0]]
    rows_done: list[npt.NDArray[np.int64]] = []
    chunks_left: list[Chunk] = []
    start = 0
    for chunk in chunks:
        rows = order[chunk.start : chunk.stop]
        is_row_done = is_done[chunk.job, rows]
        rows_done.append(rows[is_row_done])
        rows = rows[~is_row_done]
        if len(rows):
            stop = start + len(rows)
            if len(rows) < chunk.rows:
                cost = chunk.cost * len(rows) / chunk.rows
                chunk = replace(chunk, index=next(numbers), cost=cost)
            chunks_left.append(replace(chunk, start=start, stop=stop))
            rows_left.append(rows)
            start = stop
    return np.concatenate([*rows_left, *rows_done]), tuple(chunks_left)
