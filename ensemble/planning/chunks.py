"""PURE: the rows of a member in order, cut into chunks."""

from __future__ import annotations

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
# What a row costs beyond its text, in bytes of text: template, special tokens, bookkeeping.
ROW_OVERHEAD_BYTES = 32


@dataclass(frozen=True)
class Chunk:
    """Rows ``order[start:stop]`` of a member; ``cost`` is its share of the member's work, relative."""

    index: int
    start: int
    stop: int
    cost: float


def cut_chunks(lengths: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], tuple[Chunk, ...]]:
    """Row order, longest first, and its slices.

    The cut depends on the table alone, not on devices or replicas, so that any number of them computes the
    same batches.

    Args:
        lengths: bytes of text per row, [rows].
    """
    order = np.argsort(-lengths, kind="stable")
    costs = (lengths[order] + ROW_OVERHEAD_BYTES).astype(np.float64)
    cumulative = np.concatenate([[0.0], np.cumsum(costs)])
    total, rows = float(cumulative[-1]), len(order)
    target = min(float(CHUNK_BYTES), max(float(CHUNK_MIN_BYTES), total / CHUNKS_WANTED))
    chunks: list[Chunk] = []
    start = 0
    while start < rows:
        within = int(np.searchsorted(cumulative, cumulative[start] + target, side="right")) - 1
        stop = min(max(within, start + 1), start + CHUNK_MAX_ROWS, rows)
        if total - cumulative[stop] < target / 4 and rows - start <= CHUNK_MAX_ROWS:
            stop = rows  # no crumb at the end
        chunks.append(Chunk(len(chunks), start, stop, float(cumulative[stop] - cumulative[start]) / total))
        start = stop
    return order, tuple(chunks)


def work_of(lengths: npt.NDArray[np.int64]) -> float:
    """All of a member's work, in bytes of text with what each row costs beyond it."""
    return float(lengths.sum()) + ROW_OVERHEAD_BYTES * len(lengths)
