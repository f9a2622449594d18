"""PURE: what becomes of a chunk that was not computed: again, in halves, its row set aside, or the member given up.

What a worker can name, such as a row that is too long, it names itself.  This is for the rest: processes that
die or hang, and errors that do not say which row they come from.  Halving finds it in about as many attempts as
its chunk's size has binary digits; everything is bounded: a member that can compute nothing fails soon.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ensemble.planning.chunks import Chunk, halves
from ensemble.sizes import plural

# A model that cannot compute these many rows has another fault than its rows.
MAX_BAD_ROWS = 100
_BAD_ROWS_BEFORE_ANY_GOOD = 3
# Each costs a start: two bad rows of a full chunk, each found in 14, and some accidents beside them.
MAX_DEATHS = 40

Kind: TypeAlias = Literal["error", "death", "hang", "memory", "lasting"]


@dataclass(frozen=True)
class Fault:
    """Why a worker did not deliver.

    ``error``: an exception that left the process sound.  ``death``: the process ended.  ``hang``: it was ended.
    ``memory``: the kernel ended it because the host ran out of memory.  ``lasting``: what no further attempt mends.
    """

    kind: Kind
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class Again:
    """The same rows, in a fresh process."""


@dataclass(frozen=True)
class Halves:
    """The chunk's halves, each by itself."""

    first: Chunk
    second: Chunk


@dataclass(frozen=True)
class BadRow:
    """The one row of the chunk is to blame."""


@dataclass(frozen=True)
class GiveUp:
    """The member fails."""

    message: str


class Recovery:
    """Judges the faults of one member.

    Args:
        retries: how often the same rows are tried again after a process died over them.
        numbers: indices that no chunk of the member has yet, for chunks made of larger ones.
    """

    def __init__(self, retries: int, numbers: Iterator[int]) -> None:
        self._retries = retries
        self._numbers = numbers
        self._failures: Counter[int] = Counter()
        self._cut: set[int] = set()
        self._deaths = 0
        self._failed_starts = 0
        self._bad_rows = 0

    def started(self) -> None:
        """A worker has loaded the member: what kept others from it was not lasting."""
        self._failed_starts = 0

    def judge_start(self, fault: Fault) -> Again | GiveUp:
        """What becomes of a member whose worker ended before it could compute."""
        self._failed_starts += 1
        if fault.kind == "lasting" or self._failed_starts > self._allowed(fault):
            return GiveUp(fault.message)
        return Again()

    def judge(self, chunk: Chunk, fault: Fault, any_row_done: bool) -> Again | Halves | BadRow | GiveUp:
        """What becomes of a chunk that was not computed."""
        if fault.kind == "lasting":
            return GiveUp(fault.message)
        if fault.kind != "error":
            self._deaths += 1
            if self._deaths > MAX_DEATHS:
                return GiveUp(
                    f"its workers ended {self._deaths} times while computing, the last time: {fault.message}"
                )
            self._failures[chunk.index] += 1
            if self._failures[chunk.index] <= self._allowance(chunk, fault):
                return Again()
        if chunk.stop - chunk.start > 1:
            first, second = halves(chunk, self._numbers)
            self._cut |= {first.index, second.index}
            return Halves(first, second)
        return self.bad_rows(1, fault.message, any_row_done) or BadRow()

    def bad_rows(self, count: int, reason: str, any_row_done: bool) -> GiveUp | None:
        """So many rows more cannot be computed: whether that is still the rows' fault."""
        self._bad_rows += count
        if self._bad_rows > MAX_BAD_ROWS:
            return GiveUp(
                f"{plural(self._bad_rows, 'row')} could not be computed, which is too many to continue; {reason}"
            )
        if not any_row_done and self._bad_rows >= _BAD_ROWS_BEFORE_ANY_GOOD:
            return GiveUp(
                f"the first {self._bad_rows} rows could not be computed, and no other row was; {reason}"
            )
        return None

    def _allowance(self, chunk: Chunk, fault: Fault) -> int:
        if chunk.index not in self._cut:
            return self._allowed(fault)
        # Its larger half had its attempts.  But no row is blamed for what may have been an accident.
        return int(chunk.stop - chunk.start == 1)

    def _allowed(self, fault: Fault) -> int:
        # A hang costs its time-out each time, and memory that was short a moment ago is seldom there now.
        return min(self._retries, 1) if fault.kind in ("hang", "memory") else self._retries
