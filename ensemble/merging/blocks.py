"""Members' rows -> their weighted mean, block by block: what is in memory does not grow with the table.

Reading is done by the threads of a pool, one block ahead of the mean; pyarrow and NumPy let go of the interpreter
for all that takes time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ensemble.merging.methods.weighted_mean import weighted_mean
from ensemble.merging.metrics import Scoring
from ensemble.merging.row_checks import RowCheck

# Of a block: enough that a thread is not busy with Python, few enough for a core's cache.
_MOST_ROWS = 32_768
_LEAST_ROWS = 256
_CELLS = 131_072


class RowSource(Protocol):
    """Gives a member's rows in the table's order."""

    def read(self, rows: int) -> npt.NDArray[np.float64]:
        """The next rows: float64 [rows, labels]; the caller may change them."""

    def close(self) -> None: ...


@dataclass
class MergedMember:
    """A member on its way into the mean; ``scoring`` where the truth is known, for members that have all rows."""

    name: str
    weight: float
    source: RowSource
    check: RowCheck
    scoring: Scoring | None

    def read(self, start: int, stop: int) -> npt.NDArray[np.float64]:
        values = self.source.read(stop - start)
        self.check.look(start, values)
        if self.scoring is not None and self.check.reached == stop and not self.check.has_found_any:
            self.scoring.add(start, values)
        return values


def block_spans(rows: int, labels: int) -> list[tuple[int, int]]:
    """Where the blocks of a table start and stop."""
    step = max(_LEAST_ROWS, min(_MOST_ROWS, _CELLS // labels))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def mean_blocks(
    members: Sequence[MergedMember], rows: int, labels: int, pool: ThreadPoolExecutor
) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """The weighted mean of the members, from the first row to the last.

    A row of NaN is one that no member with a weight above 0 reached.  Once something is wrong with a member's rows
    no more blocks are made, but all rows are still looked at, so that the error can say how many.

    Args:
        members: some with a weight above 0; or none at all, and every row is NaN.
        pool: its threads read.

    Yields:
        the block's first row, and float64 [rows of the block, labels], column after column in memory.

    Raises:
        MergeError: a member's file does not fit the table, or its rows are no probabilities; in the members' order.
    """
    spans = block_spans(rows, labels)
    if not members:
        for start, stop in spans:
            yield start, np.full((stop - start, labels), np.nan, order="F")
        return
    weights = [member.weight for member in members]
    pending = [pool.submit(member.read, *spans[0]) for member in members]
    for (start, _), following in zip_longest(spans, spans[1:]):
        blocks = []
        for number, member in enumerate(members):
            blocks.append(pending[number].result())
            if following is not None:
                pending[number] = pool.submit(member.read, *following)
        if not any(member.check.has_found_any for member in members):
            yield start, weighted_mean(weights, blocks)
    for member in members:
        member.check.refuse()
