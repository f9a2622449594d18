"""Decide after a fault which chunks run again, which rows are set aside, and when a member has failed.

The worker itself halves a pass that runs out of GPU memory: ``members/huggingface/scoring/forward.py``.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ensemble.common.text import plural
from ensemble.planning.chunks import Chunk
from ensemble.scheduling.records import Failure, Fault, FaultRecord
from ensemble.scheduling.state import ModelState, RunHooks
from ensemble.scheduling.worker import RunningWorker

OnBadRow: TypeAlias = Literal["fail", "uniform", "drop_member"]
# If a model fails on more rows than this, the rows are not the cause.
MAX_BAD_ROWS = 100
_MAX_BAD_ROWS_BEFORE_ANY_GOOD = 2
# So many errors before any row is computed are probably every row's: rows alone tell sooner than halves.
_ERRORS_BEFORE_ANY_GOOD = 2
# Each death costs a start of a worker.  Each of two bad rows in a full chunk is found after 14 deaths; the rest is
# for accidents.
MAX_DEATHS = 40
_SHOWN_ROWS = 3
# Messages to the user for remedies in run.json.
_NEXT_STEPS = {
    "again": "{they_are} tried again",
    "in halves": "{they_are} tried in halves",
    "some alone": "some of them are tried alone",
    "another worker": "another worker is started",
    "without it": "its other workers continue",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Rules:
    """Hold the config's keys about faults, devices and standby workers."""

    retries: int
    on_bad_row: OnBadRow
    hang_timeout: float
    standby: bool = True
    workers_per_gpu: int = 1
    release_timeout: float = 60.0
    devices: Sequence[int | str] | None = None  # chosen by the user; None: all


@dataclass
class _History:
    """Count a member's faults so far; ``attempts`` counts, by chunk number, how often a chunk ended its worker."""

    attempts: Counter[int] = field(default_factory=Counter)
    deaths: int = 0
    errors: int = 0
    failed_starts: int = 0


class RetryRules:
    """Decide what follows from faults; ``elapsed`` returns the seconds since workers could begin."""

    def __init__(
        self, rules: Rules, run: RunHooks, elapsed: Callable[[], float], models: Sequence[ModelState]
    ) -> None:
        self._models = models
        self._rules = rules
        self._run = run
        self._elapsed = elapsed
        self._histories: defaultdict[str, _History] = defaultdict(_History)

    def worker_ready(self, state: ModelState) -> None:
        """Note that a worker has loaded the member: earlier failures to start were not lasting."""
        self._histories[state.plan.name].failed_starts = 0

    def worker_failed(self, worker: RunningWorker, fault: Fault, others_compute: bool) -> None:
        """Decide what follows when a worker has failed, with or without a chunk."""
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
        elif state.finished:  # other workers have computed all chunks
            log.warning("%s failed after all chunks were done: %s", worker.name, fault.message)
        elif others_compute:
            # The cause, for example a broken GPU, does not affect the other workers.
            state.limit_replicas(state.running)
            self._record(worker, fault, "without it")
        else:
            history.failed_starts += 1
            if fault.kind == "lasting" or history.failed_starts > self._max_retries(fault):
                self._record(worker, fault, "given up")
                self.fail(state, fault.message, fault.traceback)
            else:
                self._record(worker, fault, "another worker")

    def chunk_failed(self, worker: RunningWorker, chunk: Chunk, fault: Fault) -> None:
        """Queue a failed chunk again, whole or in parts, or set aside its only row."""
        state = worker.state
        history, max_retries = self._histories[state.plan.name], self._max_retries(fault)
        worker.drop(chunk)
        job = state.plan.jobs[chunk.job]
        if not job.has_rows:
            fault = replace(fault, message=f"{job.title}: {fault.message}")
        may_repeat = False
        why_failed = fault.message if fault.kind == "lasting" else ""
        history.errors += fault.kind == "error"
        if fault.kind not in ("lasting", "error"):
            history.deaths += 1
            history.attempts[chunk.index] += 1
            may_repeat = history.attempts[chunk.index] <= max_retries
            if history.deaths > MAX_DEATHS:
                times = f"{history.deaths} times while computing"
                why_failed = f"its workers ended {times}, the last time: {fault.message}"
        # Others cannot do without a job that has no rows, as they can without a row.
        if (not job.has_rows or state.plan.request.repeats_whole_chunks) and not may_repeat:
            why_failed = fault.message
        if why_failed:
            self._record(worker, fault, "given up", chunk)
            self.fail(state, why_failed, fault.traceback)
        elif may_repeat:
            state.chunks.put_back(chunk)
            self._record(worker, fault, "again", chunk)
        elif chunk.rows > 1:
            parts, remedy = [*chunk.split(state.chunks.numbers)], "in halves"
            if history.errors >= _ERRORS_BEFORE_ANY_GOOD and not _computed_rows(state):
                parts, remedy = [chunk], "some alone"
                while len(parts) <= _MAX_BAD_ROWS_BEFORE_ANY_GOOD + 1 and parts[-1].rows > 1:
                    rest = parts.pop()
                    parts += rest.split(state.chunks.numbers, rest.start + 1)
            for part in parts:
                # The larger chunk has used up the retries.  But a single row gets another retry, so that an
                # accident does not make it a bad row.
                history.attempts[part.index] = max_retries - (part.rows == 1)
            state.chunks.put_back(*parts)
            self._record(worker, fault, remedy, chunk)
        else:
            self._record(worker, fault, "row set aside", chunk)
            self.bad_rows(worker, chunk.job, {int(state.plan.order[chunk.start]): fault.message}, chunk)

    def bad_rows(
        self, worker: RunningWorker, job: int, reasons: Mapping[int, str], chunk: Chunk | None = None
    ) -> None:
        """Set aside rows that cannot be computed in a job, with the reasons.

        A member fails if it has too many bad rows; fewer are enough if it has computed no other row.

        Args:
            chunk: the chunk that consists of the bad row, if there is such a chunk.
        """
        state, reason = worker.state, next(iter(reasons.values()))
        state.set_aside(job, reasons, chunk)
        self._run.on_bad_rows(state)
        rows = ", ".join(state.row_text(job, row) for row in sorted(reasons)[:_SHOWN_ROWS])
        if len(reasons) > 1:
            rows = f"{plural(len(reasons), 'row')} ({rows}{', ...' if len(reasons) > _SHOWN_ROWS else ''})"
        else:
            rows = f"row {rows}"
        self._run.say(f"{state.plan.name}: {rows} could not be computed; {reason}")
        computed = _computed_rows(state)
        if len(state.bad_rows) > (MAX_BAD_ROWS if computed else _MAX_BAD_ROWS_BEFORE_ANY_GOOD):
            bad = plural(len(state.bad_rows), "row")
            others = f"{computed:,} others were" if computed else "no other row was"
            too_many = f"{bad} could not be computed, and {others}: too many to continue; {reason}"
            self._record(worker, Fault("error", too_many), "given up")
            self.fail(state, too_many)

    def refuses(self, state: ModelState) -> bool:
        """Return whether a model has bad rows that ``on_bad_row`` does not allow."""
        return bool(state.bad_rows) and self._rules.on_bad_row != "uniform"

    def member_finished(self, state: ModelState) -> None:
        """Fail a member that is done if one of its models has bad rows that ``on_bad_row`` does not allow."""
        if not self.refuses(state):
            return
        rows = sorted(state.bad_rows)
        shown = "; ".join(f"row {state.row_text(*row)}: {state.bad_rows[row]}" for row in rows[:_SHOWN_ROWS])
        more = f"; {len(rows) - _SHOWN_ROWS:,} more in run.json" if len(rows) > _SHOWN_ROWS else ""
        advice = "left out of the merge (on_bad_row: drop_member)"
        if self._rules.on_bad_row == "fail":
            advice = (
                "all other rows are kept: on_bad_row: uniform gives such rows equal probabilities, drop_member "
                "merges without this member"
            )
        text = f"{plural(len(rows), 'row')} of the table could not be computed: {shown}{more}; {advice}"
        self.fail(state, text)

    def fail(self, state: ModelState, message: str, traceback: str = "") -> None:
        """Fail a member, unless it has failed already."""
        if state.failure is not None:
            return
        log.error("%s failed: %s", state.plan.name, message)
        # Models of a member fail together, whichever of them has the bad rows.
        has_bad_rows = any(of.bad_rows for of in self._models if of.plan.member == state.plan.member)
        is_dropped = has_bad_rows and self._rules.on_bad_row == "drop_member"
        log_path = state.workers[-1].log_path if state.workers else ""
        state.fail(Failure(state.plan.member, message, traceback, log_path, is_dropped))

    def _max_retries(self, fault: Fault) -> int:
        # Each hang costs its time-out, and memory that has just run out is rarely free soon after.
        if fault.kind in ("hang", "memory"):
            return min(self._rules.retries, 1)
        return self._rules.retries

    def _record(self, worker: RunningWorker, fault: Fault, remedy: str, chunk: Chunk | None = None) -> None:
        name = worker.state.plan.name
        record = FaultRecord(
            member=worker.state.plan.member,
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
            in_hand, has_rows = "", worker.state.plan.has_rows
            next_step = _NEXT_STEPS[remedy].format(they_are="they are" if has_rows else "it is")
            if chunk is not None and has_rows:
                in_hand = f" with {plural(chunk.rows, 'row')} in hand"
            self._run.say(f"{name}: {fault.message}{in_hand}; {next_step}")


def _computed_rows(state: ModelState) -> int:
    """Return how many rows have values, in earlier runs, too."""
    return max(0, state.reused_rows + state.counters.rows - state.counters.bad_rows)
