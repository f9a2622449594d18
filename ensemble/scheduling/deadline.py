"""Decides under a time limit whose turn it is, what still fits, and when to stop."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import calibrated
from ensemble.scheduling.state import MemberState

# A chunk fits if it would still fit when it took this much longer than predicted: its cost is known in bytes of
# text, and the time for a byte changes with the length of the rows and with other load on the machine.
SAFETY = 1.25
# A batch or two; smaller chunks cost more in overhead than they bring in.
MIN_ROWS = 16
# The reserve takes at most this share of the limit: in a very short run rows count for more than a margin.
RESERVE_MAX_SHARE = 0.2
# How long workers that still compute at the deadline have to end.
SHUTDOWN_SECONDS = 5.0
# In units of the time for the first submission.  Measured with 20,000 to 500,000 rows of 3 or 20 labels: ensemble
# and submission take 0.6 to 3.2 at the end; to gather a member's shards into a CSV and read it again takes 0.8 to
# 2.9, or 1.7 to 6.3 where no submission is written at the start.
_RESERVE_AT_END = 3.0
_RESERVE_PER_MEMBER = 6.0
# A margin, as others may use the disk.
_RESERVE_FACTOR = 1.5
# A member whose speed is a guess starts with rows that would fit if it were four times slower.
_TRUST_IN_GUESSES = 0.25


@dataclass(frozen=True)
class Share:
    """A member's share of the time; a replica on two GPUs takes two device-seconds in a second.

    Attributes:
        seconds_per_member: device-seconds of all its work, done or not; None: not even guessed.
        startup_seconds: until a worker of the member computes; 0 if one does already.
        gpus: of a replica; 0 is the CPU, which counts as one device.
    """

    name: str
    fraction_done: float
    seconds_per_member: float | None
    startup_seconds: float
    gpus: int

    @property
    def startup_device_seconds(self) -> float:
        return self.startup_seconds * max(self.gpus, 1)


def reachable_fraction(shares: Sequence[Share], devices: int, seconds_left: float) -> float:
    """Return the largest fraction of its work that each member can reach, or has reached, in time.

    All members together have ``devices * seconds_left`` device-seconds.  A member of unknown speed counts as the
    slowest of the others, so that they leave it time until it is measured.

    Returns:
        From 0 to 1; 1 if no speed is known and there is time for all to start.
    """
    slowest = max(
        (share.seconds_per_member for share in shares if share.seconds_per_member is not None), default=0.0
    )
    by_fraction = sorted(shares, key=lambda share: share.fraction_done)
    fractions = [min(max(share.fraction_done, 0.0), 1.0) for share in by_fraction]
    budget = devices * max(seconds_left, 0.0)
    rate = 0.0  # device-seconds for all the work of the members that go on
    # From the smallest fraction up: at the fraction of each member it joins those that go on.
    for share, fraction, following in zip(by_fraction, fractions, [*fractions[1:], 1.0], strict=False):
        if fraction == 1.0 or share.startup_device_seconds > budget:
            return fraction
        budget -= share.startup_device_seconds
        rate += slowest if share.seconds_per_member is None else share.seconds_per_member
        needed = rate * (following - fraction)
        if needed > budget:
            return min(fraction + budget / rate, following)
        budget -= needed
    return 1.0


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
        startable.remove(max(startable, key=lambda share: share.startup_device_seconds))
    return reached


def fitting_start(
    chunk: Chunk,
    seconds_per_cost: float | None,
    slowest_ratio: float,
    seconds_left: float,
    min_rows: int = MIN_ROWS,
) -> int | None:
    """Return from which row on a chunk can be done in time, with ``SAFETY`` to spare.

    The chunk is halved until its last rows fit: these are the shortest, and next to those that were done before.
    None if fewer than ``min_rows`` would fit and that is not the whole chunk.

    Args:
        seconds_per_cost: on one replica; None if it is unknown: then all rows are tried.
        slowest_ratio: the time of the member's slowest chunk, divided by what ``seconds_per_cost`` predicts for it.
        seconds_left: until work must stop, after the start of a worker.
    """
    if seconds_left <= 0:
        return None
    seconds = (seconds_per_cost or 0.0) * chunk.cost * max(slowest_ratio, 1.0) * SAFETY
    rows = chunk.rows
    while seconds * rows / chunk.rows > seconds_left:
        rows //= 2
        if rows < min_rows:
            return None
    return chunk.stop - rows


def reserve_seconds(first_seconds: float, members: int, limit_seconds: float) -> float:
    """Return how much of the limit to reserve for gathering, merging and writing.

    Args:
        first_seconds: what writing the first ensemble and submission took at the start.
        members: how many members to gather and merge.
    """
    writing = _RESERVE_FACTOR * first_seconds * (_RESERVE_AT_END + _RESERVE_PER_MEMBER * members)
    return min(SHUTDOWN_SECONDS + writing, RESERVE_MAX_SHARE * limit_seconds)


@dataclass(frozen=True)
class Deadline:
    """When all computing must have stopped, and what there is time for until then.

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

    def may_start(
        self, state: MemberState, members: Sequence[MemberState], beyond_goal: bool = False
    ) -> bool:
        """Return whether it is this member's turn, and a worker would get something done in time.

        A run never ends without a try: an earlier run may have measured a slow moment, such as weights that were
        not in the page cache, and a guess may be wrong.  For ``beyond_goal`` see ``first_fitting``.
        """

        def has_time(other: MemberState) -> bool:
            startup = _startup_seconds(other, members)
            return self.first_fitting(other, members, startup, beyond_goal) is not None

        if has_time(state):
            return True
        # If no worker was ready yet and there seems to be time for none, the member that starts fastest may try.
        has_started = any(other.running or other.speed_meter.startup_seconds for other in members)
        if beyond_goal or has_started or self.is_over:
            return False
        pending = [other for other in _counting(members) if other.chunks.pending]
        fastest = min(pending, key=lambda other: _startup_seconds(other, members), default=None)
        return state is fastest and not any(map(has_time, pending))

    def takes_most_to_start(self, state: MemberState, members: Sequence[MemberState]) -> bool:
        """Return whether this member's start would use up most of the time: no worker is stopped for it."""
        return 2 * _startup_seconds(state, members) >= self.seconds_left

    def first_fitting(
        self,
        state: MemberState,
        members: Sequence[MemberState],
        startup_seconds: float = 0.0,
        beyond_goal: bool = False,
    ) -> tuple[Chunk, int] | None:
        """Return the member's first pending chunk of which rows can be done in time, and where these rows begin.

        None if there is none, or if it is not the member's turn: its worker should stop.  Members are kept equally
        far in their first views; those whose first view is done, in all of their work.

        Args:
            startup_seconds: until the member's worker computes.
            beyond_goal: let the member pass its goal, because no member that is behind can use the device.
        """
        left = self.seconds_left - startup_seconds
        if left <= 0 or not state.chunks.pending:
            return None
        goal = self._goal(state, members)
        if goal is None:
            return None
        if not beyond_goal and state.chunks.fraction(state.chunks.has_first_view) >= goal:
            return None
        per_cost, slowest_ratio, trust = state.seconds_per_cost, 1.0, 1.0
        if per_cost is not None:
            slowest_ratio = state.speed_meter.slowest_seconds_per_cost / per_cost
        else:
            per_cost = _seconds_per_member(members)[state.plan.name]
            trust = 1.0 if state.plan.speed.is_measured else _TRUST_IN_GUESSES
        # Before anything is done, a single row of known cost is better than none.
        is_untried = all(other.seconds_per_cost is None for other in members)
        min_rows = 1 if state.plan.speed.is_measured and is_untried else MIN_ROWS
        for chunk in state.chunks.pending:
            if chunk.view != state.chunks.pending[0].view:
                break
            start = fitting_start(chunk, per_cost, slowest_ratio, trust * left, min_rows)
            if start is None and is_untried:
                # Neither a guess nor an earlier run's speed stops a member: a few rows tell more.
                start = max(chunk.start, chunk.stop - min_rows)
            if start is not None:
                return chunk, start
        return None

    def _goal(self, state: MemberState, members: Sequence[MemberState]) -> float | None:
        """Return the fraction of its work, or of its first view, that a member should reach; None if none."""
        counting = _counting(members)
        seconds = _seconds_per_member(counting)
        is_first_view = state.chunks.has_first_view
        shares = []
        for other in counting:
            # Others' first views that are left need devices that this member cannot use; otherwise it would wait.
            if not is_first_view and other.chunks.has_first_view:
                continue
            whole_seconds = seconds[other.plan.name]
            if whole_seconds is not None:
                whole_seconds *= max(other.plan.gpus, 1) / (other.plan.views if is_first_view else 1)
            share = Share(
                name=other.plan.name,
                fraction_done=other.chunks.fraction(is_first_view),
                seconds_per_member=whole_seconds,
                startup_seconds=0.0 if other.is_loaded else _startup_seconds(other, counting),
                gpus=other.plan.gpus,
            )
            shares.append(share)
        return goals(shares, self.workers, self.seconds_left).get(state.plan.name)


def _counting(members: Sequence[MemberState]) -> list[MemberState]:
    """Return the members that share the time: those with weight 0 only once all others have ended."""
    active = [state for state in members if state.failure is None and not state.is_undecided]
    weighted = [state for state in active if state.plan.model.has_weight]
    return weighted if any(not state.finished for state in weighted) else active


def _seconds_per_member(members: Sequence[MemberState]) -> dict[str, float | None]:
    """Return how long one replica takes for all of a member's work, by name; None if it is not even guessed."""
    planned = {state.plan.name: state.plan.whole_seconds for state in members}
    measured = {
        state.plan.name: state.seconds_per_cost for state in members if state.seconds_per_cost is not None
    }
    return calibrated(planned, measured)


def _startup_seconds(state: MemberState, members: Sequence[MemberState]) -> float:
    """Return how long a worker takes to start: measured, as the slowest of the other members, or guessed."""
    measured = state.speed
    if measured.is_startup_measured:
        return measured.startup_seconds
    slowest = max((other.speed_meter.startup_seconds for other in members), default=0.0)
    return slowest or state.plan.speed.startup_seconds


def time_limit_text(
    members: Sequence[MemberState], limit_seconds: float, before_seconds: float, kept_seconds: float
) -> str:
    """Return why a limit left no time to compute a single row, and which limit would.

    Args:
        before_seconds: until workers could start.
        kept_seconds: for the last submission, see :func:`reserve_seconds`.
    """
    was_tried = any(state.workers for state in members)
    was_lost = any(state.speed_meter.lost_rows for state in members)
    between = max(limit_seconds - before_seconds - kept_seconds, 0.0)
    text = (
        f"no {'new row was kept' if was_lost else 'row was computed'}: {before_seconds:.1f} s of time_limit "
        f"({limit_seconds:g} s) were over before a worker could start, {kept_seconds:.1f} s are kept for the last "
        f"submission, and the {between:.1f} s between were too short to start one"
        f"{' and compute its first chunk' if was_tried else ''}"
    )
    speeds = [state.speed for state in members if not state.finished]
    startups = [speed.startup_seconds for speed in speeds if speed.is_startup_measured]
    if not startups:
        return (
            f"{text}; set a longer time_limit (a run with --limit 20 and without one measures what it takes)"
        )
    needed = before_seconds + min(startups)
    at_least = min(needed / (1 - RESERVE_MAX_SHARE), needed + max(kept_seconds, SHUTDOWN_SECONDS))
    if at_least < limit_seconds:
        return f"{text}; the same command again may get further"
    return f"{text}; a start takes {min(startups):.1f} s, so time_limit must be more than {math.ceil(at_least)} s"
