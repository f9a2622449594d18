"""Faults become consequences: what is tried again, which rows are set aside, when a member has failed.

Holds each member's ``Recovery`` and puts its verdicts into the member's state.  Does not talk to workers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ensemble.common.text import plural
from ensemble.planning.chunks import Chunk, halves
from ensemble.scheduling.running_worker import Slot
from ensemble.scheduling.state import Failure, Fault, FaultRecord, MemberState

Policy: TypeAlias = Literal["fail", "uniform", "drop_member"]
_SHOWN_ROWS = 3
log = logging.getLogger(__name__)


class Judge:
    """Decides for all members of a run.

    Args:
        retries: how often a chunk is tried again after its process died.
        on_bad_row: what a row that cannot be computed means for its member.
        say: takes a sentence for the user.
        keep_bad_rows: called with a member's state when it has more bad rows.
    """

    def __init__(
        self,
        retries: int,
        on_bad_row: Policy,
        say: Callable[[str], None],
        keep_bad_rows: Callable[[MemberState], None],
    ) -> None:
        self._retries = retries
        self._on_bad_row = on_bad_row
        self._say = say
        self._keep_bad_rows = keep_bad_rows
        self._recoveries: dict[str, Recovery] = {}
        self._began = time.monotonic()

    def started(self, state: MemberState) -> None:
        """A worker of this member can compute."""
        self._recovery(state).started()

    def worker_ended(self, slot: Slot, fault: Fault, others_compute: bool) -> None:
        """A worker has ended badly, with chunks in its hands or without.

        Args:
            others_compute: other workers of its member do.
        """
        state, replica = slot.state, slot.record.replica
        if slot.has_work:
            blamed, *others = slot.held
            for chunk in others:  # nothing is known against them
                slot.drop(chunk)
                state.waiting.appendleft(chunk)
            slot.drop(blamed)
            self.chunk_failed(state, replica, blamed, fault)
        elif state.finished:  # others did its part: nothing is missing
            log.warning("%s-%d had no part in the end: %s", state.plan.name, replica, fault.message)
        elif others_compute:
            # What kept this one from starting, such as a broken GPU, does not keep the others from going on.
            state.most_replicas = max(1, state.running)
            self._note(state, replica, fault, None, "without it")
        else:
            self._worker_failed(state, replica, fault)

    def _worker_failed(self, state: MemberState, replica: int, fault: Fault) -> None:
        verdict = self._recovery(state).judge_start(fault)
        remedy = "given up" if isinstance(verdict, GiveUp) else "another worker"
        self._note(state, replica, fault, None, remedy)
        if isinstance(verdict, GiveUp):
            self.give_up(state, verdict.message, fault.traceback)

    def chunk_failed(self, state: MemberState, replica: int, chunk: Chunk, fault: Fault) -> None:
        """A chunk was not computed: it goes back in front, whole or in halves, or its row is set aside."""
        verdict = self._recovery(state).judge(chunk, fault, state.good_rows > 0)
        if isinstance(verdict, Again):
            state.waiting.appendleft(chunk)
            remedy = "again"
        elif isinstance(verdict, Halves):
            state.waiting.extendleft((verdict.second, verdict.first))
            remedy = "in halves"
        else:
            remedy = "row set aside" if isinstance(verdict, BadRow) else "given up"
        self._note(state, replica, fault, chunk, remedy)
        if isinstance(verdict, BadRow):
            state.done_cost += chunk.cost
            self._set_aside(state, {int(state.plan.order[chunk.start]): fault.message})
        elif isinstance(verdict, GiveUp):
            self.give_up(state, verdict.message, fault.traceback)

    def bad_rows(self, state: MemberState, replica: int, reasons: Mapping[int, str]) -> None:
        """A worker named rows that it cannot compute.

        Args:
            reasons: by row of the table.
        """
        first = next(iter(reasons.values()))
        self._set_aside(state, reasons)
        too_many = self._recovery(state).bad_rows(len(reasons), first, state.good_rows > 0)
        if too_many is not None:
            self._note(state, replica, Fault("error", too_many.message), None, "given up")
            self.give_up(state, too_many.message)

    def finished(self, state: MemberState) -> None:
        """All that can be computed is: the policy says what the rows mean that cannot."""
        if not state.bad_rows or self._on_bad_row == "uniform":
            return
        rows = sorted(state.bad_rows)
        count = plural(len(rows), "row")
        shown = "; ".join(f"row {row + 1:,}: {state.bad_rows[row]}" for row in rows[:_SHOWN_ROWS])
        more = f"; {len(rows) - _SHOWN_ROWS:,} more in run.json" if len(rows) > _SHOWN_ROWS else ""
        advice = (
            "left out of the merge (on_bad_row: drop_member)"
            if self._on_bad_row == "drop_member"
            else "all others are kept: on_bad_row: uniform gives such rows equal probabilities, drop_member merges "
            "without this member"
        )
        self.give_up(state, f"{count} of the table could not be computed: {shown}{more}; {advice}")

    def give_up(self, state: MemberState, message: str, traceback: str = "") -> None:
        """The member has failed."""
        if state.failure is not None:
            return
        log.error("%s failed: %s", state.plan.name, message)
        is_dropped = bool(state.bad_rows) and self._on_bad_row == "drop_member"
        log_path = state.workers[-1].log_path if state.workers else ""
        state.failure = Failure(state.plan.name, message, traceback, log_path, is_dropped)

    def _set_aside(self, state: MemberState, reasons: Mapping[int, str]) -> None:
        state.bad_rows.update(reasons)
        self._keep_bad_rows(state)
        name = state.plan.name
        self._say(
            f"{name}: {_rows_text(sorted(reasons))} could not be computed; {next(iter(reasons.values()))}"
        )

    def _recovery(self, state: MemberState) -> Recovery:
        name = state.plan.name
        if name not in self._recoveries:
            self._recoveries[name] = Recovery(self._retries, state.numbers)
        return self._recoveries[name]

    def _note(self, state: MemberState, replica: int, fault: Fault, chunk: Chunk | None, remedy: str) -> None:
        name = state.plan.name
        record = FaultRecord(
            member=name,
            replica=replica,
            kind=fault.kind,
            message=fault.message,
            traceback=fault.traceback,
            rows=None if chunk is None else (chunk.start, chunk.stop),
            remedy=remedy,
            after_seconds=round(time.monotonic() - self._began, 3),
        )
        state.faults.append(record)
        log.warning("%s-%d: %s; %s", name, replica, fault.message, remedy)
        if remedy not in ("given up", "row set aside"):
            what = "" if chunk is None else f" with {plural(chunk.stop - chunk.start, 'row')} in hand"
            next_step = {
                "again": "they are tried again",
                "in halves": "they are tried in halves",
                "another worker": "another one is started",
                "without it": "its other workers continue",
            }[remedy]
            self._say(f"{name}: {fault.message}{what}; {next_step}")


def _rows_text(rows: Sequence[int]) -> str:
    shown = ", ".join(f"{row + 1:,}" for row in rows[:_SHOWN_ROWS])
    more = ", ..." if len(rows) > _SHOWN_ROWS else ""
    return f"row {shown}" if len(rows) == 1 else f"{plural(len(rows), 'row')} ({shown}{more})"


# A model that cannot compute these many rows has another fault than its rows.
MAX_BAD_ROWS = 100
_BAD_ROWS_BEFORE_ANY_GOOD = 3
# Each costs a start: two bad rows of a full chunk, each found in 14, and some accidents beside them.
MAX_DEATHS = 40


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
