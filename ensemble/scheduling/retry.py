"""Decide after a fault what is tried again, which rows are set aside, and when a member has failed.

A pass that runs out of a GPU's memory is halved within the worker: ``members/huggingface/scoring/forward.py``.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ensemble.common.text import plural
from ensemble.planning.chunks import Chunk
from ensemble.scheduling.records import Failure, Fault, FaultRecord
from ensemble.scheduling.state import MemberState, RunHooks
from ensemble.scheduling.worker import RunningWorker

OnBadRow: TypeAlias = Literal["fail", "uniform", "drop_member"]
# If a model cannot compute more rows than this, the rows are not to blame.
MAX_BAD_ROWS = 100
_MAX_BAD_ROWS_BEFORE_ANY_GOOD = 2
# Each costs a start.  To find two bad rows in a full chunk takes 14 each; the rest is for accidents.
MAX_DEATHS = 40
_SHOWN_ROWS = 3
# What users are told about each remedy in run.json.
_NEXT_STEPS = {
    "again": "they are tried again",
    "in halves": "they are tried in halves",
    "another worker": "another one is started",
    "without it": "its other workers continue",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    """Hold the config's keys about faults and standby workers."""

    retries: int
    on_bad_row: OnBadRow
    hang_timeout: float
    standby: bool = True
    workers_per_gpu: int = 1
    devices: Sequence[int | str] | None = None  # those that the user has chosen; None: all


@dataclass
class _History:
    """Count a member's faults so far; ``attempts`` says how often each chunk ended its worker, by its number."""

    attempts: Counter[int] = field(default_factory=Counter)
    deaths: int = 0
    failed_starts: int = 0


class RetryRules:
    """Decide what follows from faults; ``elapsed`` returns the seconds since workers could begin."""

    def __init__(self, rules: Rules, run: RunHooks, elapsed: Callable[[], float]) -> None:
        self._rules = rules
        self._run = run
        self._elapsed = elapsed
        self._histories: defaultdict[str, _History] = defaultdict(_History)

    def worker_ready(self, state: MemberState) -> None:
        """Note that a worker has loaded the member: earlier failures to start were not lasting."""
        self._histories[state.plan.name].failed_starts = 0

    def worker_failed(self, worker: RunningWorker, fault: Fault, others_compute: bool) -> None:
        """Decide what follows when a worker has failed, with a chunk in hand or without."""
        state = worker.state
        history = self._histories[state.plan.name]
        chunk = worker.chunk
        if chunk is not None and fault.kind == "lost":
            self._record(worker, fault, "again", chunk)
            worker.drop(chunk)
            state.chunks.put_back(chunk)
        elif chunk is not None:
            self.chunk_failed(worker, chunk, fault)
        elif fault.kind == "lost":
            log.warning("%s: %s", worker.name, fault.message)
        elif state.finished:  # others did its work: nothing is missing
            log.warning("%s did nothing in the end: %s", worker.name, fault.message)
        elif others_compute:
            # The other workers do not have what kept this one from starting, such as a broken GPU.
            state.limit_replicas()
            self._record(worker, fault, "without it")
        else:
            history.failed_starts += 1
            if fault.kind == "lasting" or history.failed_starts > self._max_retries(fault):
                self._record(worker, fault, "given up")
                self.fail(state, fault.message, fault.traceback)
            else:
                self._record(worker, fault, "another worker")

    def chunk_failed(self, worker: RunningWorker, chunk: Chunk, fault: Fault) -> None:
        """Queue a chunk that was not computed again, whole or in halves, or set its row aside."""
        state = worker.state
        history, max_retries = self._histories[state.plan.name], self._max_retries(fault)
        worker.drop(chunk)
        may_repeat = False
        why_failed = fault.message if fault.kind == "lasting" else ""
        if fault.kind not in ("lasting", "error"):
            history.deaths += 1
            history.attempts[chunk.index] += 1
            may_repeat = history.attempts[chunk.index] <= max_retries
            if history.deaths > MAX_DEATHS:
                times = f"{history.deaths} times while computing"
                why_failed = f"its workers ended {times}, the last time: {fault.message}"
        if why_failed:
            self._record(worker, fault, "given up", chunk)
            self.fail(state, why_failed, fault.traceback)
        elif may_repeat:
            state.chunks.put_back(chunk)
            self._record(worker, fault, "again", chunk)
        elif chunk.rows > 1:
            halves = chunk.split(state.chunks.numbers)
            for half in halves:
                # It had its retries while it was part of a larger chunk.  But a single row gets another one, so
                # that it is not blamed for an accident.
                history.attempts[half.index] = max_retries - (half.rows == 1)
            state.chunks.put_back(*halves)
            self._record(worker, fault, "in halves", chunk)
        else:
            self._record(worker, fault, "row set aside", chunk)
            self.bad_rows(worker, {int(state.plan.order[chunk.start]): fault.message}, chunk)

    def bad_rows(self, worker: RunningWorker, reasons: Mapping[int, str], chunk: Chunk | None = None) -> None:
        """Set aside rows that cannot be computed, numbered through the views, with the reasons.

        A member fails if these are too many, or if it could not compute any other row.

        Args:
            chunk: it consists of such a row.
        """
        state, reason = worker.state, next(iter(reasons.values()))
        state.set_aside(reasons, chunk)
        self._run.on_bad_rows(state)
        rows = ", ".join(map(state.row_text, sorted(reasons)[:_SHOWN_ROWS]))
        if len(reasons) > 1:
            rows = f"{plural(len(reasons), 'row')} ({rows}{', ...' if len(reasons) > _SHOWN_ROWS else ''})"
        else:
            rows = f"row {rows}"
        self._run.say(f"{state.plan.name}: {rows} could not be computed; {reason}")
        computed = max(0, state.reused_rows + state.counters.rows - state.counters.bad_rows)
        if len(state.bad_rows) > (MAX_BAD_ROWS if computed else _MAX_BAD_ROWS_BEFORE_ANY_GOOD):
            bad = plural(len(state.bad_rows), "row")
            others = f"{computed:,} others were" if computed else "no other row was"
            too_many = f"{bad} could not be computed, and {others}: too many to continue; {reason}"
            self._record(worker, Fault("error", too_many), "given up")
            self.fail(state, too_many)

    def member_finished(self, state: MemberState) -> None:
        """Fail a member that has computed all other rows if ``on_bad_row`` does not allow its bad rows."""
        if not state.bad_rows or self._rules.on_bad_row == "uniform":
            return
        rows = sorted(state.bad_rows)
        shown = "; ".join(f"row {state.row_text(row)}: {state.bad_rows[row]}" for row in rows[:_SHOWN_ROWS])
        more = f"; {len(rows) - _SHOWN_ROWS:,} more in run.json" if len(rows) > _SHOWN_ROWS else ""
        advice = "left out of the merge (on_bad_row: drop_member)"
        if self._rules.on_bad_row == "fail":
            advice = (
                "all others are kept: on_bad_row: uniform gives such rows equal probabilities, drop_member merges "
                "without this member"
            )
        text = f"{plural(len(rows), 'row')} of the table could not be computed: {shown}{more}; {advice}"
        self.fail(state, text)

    def fail(self, state: MemberState, message: str, traceback: str = "") -> None:
        """Fail a member, unless it has failed already."""
        if state.failure is not None:
            return
        log.error("%s failed: %s", state.plan.name, message)
        is_dropped = bool(state.bad_rows) and self._rules.on_bad_row == "drop_member"
        log_path = state.workers[-1].log_path if state.workers else ""
        state.fail(Failure(state.plan.name, message, traceback, log_path, is_dropped))

    def _max_retries(self, fault: Fault) -> int:
        # A hang costs its time-out each time, and memory that was short a moment ago is seldom free now.
        if fault.kind in ("hang", "memory"):
            return min(self._rules.retries, 1)
        return self._rules.retries

    def _record(self, worker: RunningWorker, fault: Fault, remedy: str, chunk: Chunk | None = None) -> None:
        name = worker.state.plan.name
        record = FaultRecord(
            member=name,
            replica=worker.record.replica,
            kind=fault.kind,
            message=fault.message,
            traceback=fault.traceback,
            rows=None if chunk is None else (chunk.start, chunk.stop),
            remedy=remedy,
            after_seconds=round(self._elapsed(), 3),
        )
        worker.state.faults.append(record)
        log.warning("%s: %s; %s", worker.name, fault.message, remedy)
        if remedy in _NEXT_STEPS:
            in_hand = "" if chunk is None else f" with {plural(chunk.rows, 'row')} in hand"
            self._run.say(f"{name}: {fault.message}{in_hand}; {_NEXT_STEPS[remedy]}")
