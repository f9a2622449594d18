"""Decide under a time limit whose turn it is, what still fits, and when to stop."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ensemble.jobs.job import AS_TIME_ALLOWS, LATER
from ensemble.jobs.job import FIRST as FIRST_JOBS
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import calibrated
from ensemble.scheduling.state import ModelState

# A chunk fits if it would still fit when it took this much longer than predicted: its cost is known in bytes of
# text, and the time for a byte changes with the length of the rows and with other load on the machine.
SAFETY = 1.25
# A batch or two; smaller chunks cost more in overhead than they bring in.
MIN_ROWS = 16
# The reserve takes at most this share of the limit: in a very short run rows count for more than a margin.
RESERVE_MAX_SHARE = 0.2
# How long workers that still compute at the deadline have to end.
SHUTDOWN_SECONDS = 5.0
# In units of the time for the first submission, with a margin.  Measured with 20,000 to 500,000 rows of 3 or 20
# labels: ensemble and submission take 0.6 to 3.2 at the end; to gather a member's shards into a CSV and read it
# again takes 0.8 to 2.9, or 1.7 to 6.3 where no submission is written at the start.
_RESERVE_AT_END = 4.5
_RESERVE_PER_MEMBER = 9.0
_STEPS = 1 << 40  # of a fraction


class Rank(NamedTuple):
    """Order models' chunks under a time limit: those of the smallest rank come first."""

    phase: int = 0  # of the job whose chunk is next
    is_beyond_goal: bool = False  # the model has reached the goal of all models


FIRST = Rank()


@dataclass(frozen=True)
class Share:
    """Hold a member's share of the time.

    Attributes:
        seconds: of one replica for all of its work, done or not; 0 if not known: it counts as the slowest of the
            others, so that they leave it time.
        startup_seconds: until a worker of the member computes; 0 if one does already.
        devices: of a replica; the CPU is one.
    """

    name: str
    fraction_done: float
    seconds: float
    startup_seconds: float
    devices: int


def reachable_fraction(shares: Sequence[Share], devices: int, seconds_left: float) -> float:
    """Return the largest fraction of its work that each member can reach, or has reached, in time.

    All members together have ``devices * seconds_left`` device-seconds.
    """
    slowest = max((share.seconds for share in shares), default=0.0)

    def is_reachable(fraction: float) -> bool:
        needed = 0.0
        for share in shares:
            if share.fraction_done < fraction:
                seconds = (fraction - share.fraction_done) * (share.seconds or slowest)
                needed += share.devices * (share.startup_seconds + seconds)
        return needed <= devices * max(seconds_left, 0.0)

    if is_reachable(1.0):
        return 1.0
    steps = bisect_left(range(_STEPS + 1), True, key=lambda step: not is_reachable(step / _STEPS))
    return max(0, steps - 1) / _STEPS


def goals(shares: Sequence[Share], devices: int, seconds_left: float) -> dict[str, float]:
    """Return the fraction of its work that each member should reach, by name; what it has done if it should stop.

    Members are left out that could not start before the end, or whose start leaves no time for others: first those
    that take longest to start.
    """
    reached = {share.name: share.fraction_done for share in shares}
    unfinished = [share for share in shares if share.fraction_done < 1]
    # No worker that computes is stopped for a member that would use up most of the time to start.
    factor = 2.0 if any(share.startup_seconds == 0 for share in unfinished) else 1.0
    startable = [share for share in unfinished if factor * share.startup_seconds < seconds_left]
    while startable:
        fraction = reachable_fraction(startable, devices, seconds_left)
        if any(share.fraction_done < fraction for share in startable):
            return reached | {share.name: max(fraction, share.fraction_done) for share in startable}
        startable.remove(max(startable, key=lambda share: share.startup_seconds * share.devices))
    return reached


def reserve_seconds(first_seconds: float, members: int, limit_seconds: float) -> float:
    """Return how much of the limit to reserve for gathering, merging and writing.

    Args:
        first_seconds: what writing the first ensemble and submission took at the start.
        members: how many members to gather and merge.
    """
    writing = first_seconds * (_RESERVE_AT_END + _RESERVE_PER_MEMBER * members)
    return min(SHUTDOWN_SECONDS + writing, RESERVE_MAX_SHARE * limit_seconds)


@dataclass(frozen=True)
class Deadline:
    """Tell when all computing must have stopped, and what there is time for until then.

    Attributes:
        at: in seconds by ``clock``.
        workers: how many workers can compute at a time, on a device each.
    """

    at: float
    workers: int
    clock: Callable[[], float]

    @property
    def seconds_left(self) -> float:
        return self.at - self.clock()

    @property
    def is_over(self) -> bool:
        return self.seconds_left <= 0

    def ranks(self, models: Sequence[ModelState]) -> dict[str, Rank]:
        """Return the ranks of the models that may have a chunk, by name.

        Models are kept equally far in the first jobs of members; those whose first job is done, in all of their
        work. Rows that are computed only if time is left come last, and members with weight 0 only once all others
        have ended.
        """
        active = [state for state in models if state.failure is None and not state.plan.is_undecided]
        weighted = [state for state in active if state.plan.model.has_weight]
        if any(not state.finished for state in weighted):
            active = weighted
        guessed = {state.plan.name: state.plan.whole_seconds for state in active}
        measured = {state.plan.name: state.speed_meter.seconds_per_cost or 0.0 for state in active}
        seconds = calibrated(guessed, measured)
        ranks = {}
        for phase in (FIRST_JOBS, LATER, AS_TIME_ALLOWS):
            # Others' first jobs that are left need devices that a later job cannot use.
            group = [state for state in active if state.phase_due >= phase]
            shares = []
            for state in group:
                # All rows come in a member's first job before any comes in the next.
                jobs, fraction = 1, state.fraction
                if phase == FIRST_JOBS:
                    jobs = len(state.plan.jobs)
                    has_first = any(job.phase == FIRST_JOBS for job in state.plan.jobs)
                    fraction = fraction * jobs if has_first else 1.0
                share = Share(
                    name=state.plan.name,
                    fraction_done=min(1.0, round(fraction, 6)),
                    seconds=(seconds[state.plan.name] or 0.0) * (1.0 - state.plan.left_out) / jobs,
                    startup_seconds=0.0 if state.is_loaded else state.startup_seconds,
                    devices=max(state.plan.gpus, 1),
                )
                shares.append(share)
            goal = goals(shares, self.workers, self.seconds_left)
            for state, share in zip(group, shares, strict=True):
                if state.chunks.pending and state.phase_due == phase:
                    ranks[share.name] = Rank(phase, share.fraction_done >= goal[share.name])
        return ranks

    def may_start(self, state: ModelState, models: Sequence[ModelState]) -> bool:
        """Return whether a new worker of this model would get something done in time.

        A run never ends without a try: an earlier run may have measured a slow moment, such as weights that were
        not in the page cache, and a guess may be wrong.  So the model that starts fastest may always start first.
        """
        if self.first_fitting(state, models, state.startup_seconds) is not None:
            return True
        if self.is_over or any(other.running or other.speed_meter.startup_seconds for other in models):
            return False
        pending = [other for other in models if other.chunks.pending]
        return state is min(pending, key=lambda other: other.startup_seconds)

    def first_fitting(
        self, state: ModelState, models: Sequence[ModelState], startup_seconds: float = 0.0
    ) -> tuple[Chunk, int] | None:
        """Return the model's first pending chunk of which rows can be done in time, and where these rows begin.

        A chunk's last rows are taken: these are the shortest, and next to those that were done before.

        Args:
            startup_seconds: until the worker that computes them can begin.
        """
        left = self.seconds_left - startup_seconds
        if left <= 0:
            return None
        per_cost = state.speed_meter.seconds_per_cost
        if per_cost is not None:
            per_cost = max(per_cost, state.speed_meter.last_seconds_per_cost)
        elif state.plan.speed.is_measured:
            per_cost = state.plan.whole_seconds
        # Before anything is done, a single row is better than none.
        is_untried = all(other.speed_meter.seconds_per_cost is None for other in models)
        job: int | None = None
        for chunk in state.chunks.pending:
            job = chunk.job if job is None else job
            if chunk.job != job:
                break
            rows = chunk.rows
            if not state.plan.speed.is_measured:  # a few rows tell how fast the member is
                rows = min(rows, max(MIN_ROWS, state.plan.request.batch_size or 0, 2 * state.counters.rows))
            if per_cost and chunk.cost:
                rows = min(rows, int(rows * left / (SAFETY * per_cost * chunk.cost)))
            if is_untried:
                rows = max(rows, 1)
            if is_untried or rows >= min(chunk.rows, MIN_ROWS):
                return chunk, chunk.stop - rows
        return None


def time_limit_text(
    members: Sequence[ModelState], limit_seconds: float, before_seconds: float, kept_seconds: float
) -> str:
    """Return why a limit left no time to compute a single row, and which limit would.

    Args:
        before_seconds: until workers could start.
        kept_seconds: for the last submission, see :func:`reserve_seconds`.
    """
    between = max(limit_seconds - before_seconds - kept_seconds, 0.0)
    text = (
        f"no new row was kept: {before_seconds:.1f} s of time_limit ({limit_seconds:g} s) were over before a "
        f"worker could start, {kept_seconds:.1f} s are kept for the last submission, and the {between:.1f} s "
        "between were too short to start one and compute its first chunk"
    )
    speeds = [state.speed for state in members if not state.finished]
    startups = [speed.startup_seconds for speed in speeds if speed.is_startup_measured]
    if not startups:
        return (
            f"{text}; set a longer time_limit (a run with --limit 20 and without one measures what it takes)"
        )
    enough = (before_seconds + min(startups)) / (1 - RESERVE_MAX_SHARE)
    if enough < limit_seconds:
        return f"{text}; the same command again may get further"
    return (
        f"{text}; a start takes {min(startups):.1f} s, so time_limit must be more than {math.ceil(enough)} s"
    )


@dataclass(frozen=True)
class TrainingDeadline(Deadline):
    """Give the time to members in their order, as a member predicts only after all of its trainings.

    If the finished trainings show that a member's other trainings cannot all end in time, none of these begins.
    """

    def ranks(self, models: Sequence[ModelState]) -> dict[str, Rank]:
        """Return the ranks of the members that may begin a training, by name."""
        ranks: dict[str, Rank] = {}
        needed_seconds = 0.0
        for state in models:
            chunks = [] if state.failure is not None else state.chunks.left
            seconds = sum(_seconds_of(state, chunk) for chunk in chunks)
            if not chunks or needed_seconds + seconds > self.workers * self.seconds_left:
                continue
            needed_seconds += seconds
            if state.chunks.pending:
                ranks[state.plan.name] = Rank(phase=len(ranks))
        return ranks

    def may_start(self, state: ModelState, models: Sequence[ModelState]) -> bool:
        return self.first_fitting(state, models) is not None

    def first_fitting(
        self, state: ModelState, models: Sequence[ModelState], startup_seconds: float = 0.0
    ) -> tuple[Chunk, int] | None:
        """Return the member's next training if it can end in time, and where its row begins."""
        if not state.chunks.pending or self.is_over:
            return None
        chunk = state.chunks.pending[0]
        fits = SAFETY * _seconds_of(state, chunk) <= self.seconds_left
        return (chunk, chunk.start) if fits else None


def _seconds_of(state: ModelState, chunk: Chunk) -> float:
    """Return how long a training takes by those of the member that have ended; 0 before the first has."""
    return (state.speed_meter.seconds_per_cost or 0.0) * chunk.cost
