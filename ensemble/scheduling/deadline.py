"""Under a time limit: whose turn it is, what still fits, and when it is over.

First the arithmetic, then how it meets the members' states and the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import calibrated
from ensemble.scheduling.state import MemberState

# A chunk counts as fitting where it would still fit if it took this much longer than foreseen: its cost is known in
# bytes of text, and what a byte costs changes with the length of the rows and with what else the machine does.
SAFETY = 1.25
# A batch or two; smaller chunks pay more for going to and fro than they bring in.
MIN_ROWS = 16
# Of the whole limit at most; in a very short run half-done work counts for more than a margin.
RESERVE_MAX_SHARE = 0.2
# Workers that are in the midst of something when it is over get these to end.
SHUTDOWN_SECONDS = 5.0
# In units of the first submission, whose few digits are soon written.  Measured with 20,000 to 500,000 rows of 3 or
# 20 labels: ensemble and submission take 0.6 to 3.2 in the end; a member's shards read, written as a CSV and read
# again take 0.8 to 2.9, or 1.7 to 6.3 where there is no submission to write at the start.
_RESERVE_AT_END = 3.0
_RESERVE_PER_MEMBER = 6.0
# Disks that others use as well.
_RESERVE_FACTOR = 1.5
# A member that has not been measured yet starts with rows that would fit if it were four times slower than guessed.
_TRUST_IN_GUESSES = 0.25


@dataclass(frozen=True)
class Share:
    """A member in the race against the clock; a replica on two GPUs takes two device-seconds in a second.

    ``seconds_per_member`` are the device-seconds of all its work, done or not; None: not even guessed.
    ``startup_seconds`` is until a worker of it computes, 0 where one does already.  ``gpus`` are the devices of a
    replica; 0 is the CPU, which counts as one device.
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
    """The largest fraction of its work that every member can be brought to, or has reached, in the time left.

    All of it together takes at most ``devices * seconds_left`` device-seconds.  Whoever is there already needs
    neither time nor a start.  A member of unknown speed counts as the slowest of the others, so that they leave it
    time until it is measured.

    Args:
        devices: how many workers of one device can run at the same time.

    Returns:
        from 0 to 1; 1 where no speed is known and there is time for all to start.
    """
    slowest = max(
        (one.seconds_per_member for one in shares if one.seconds_per_member is not None), default=0.0
    )
    climbers = sorted(shares, key=lambda one: one.fraction_done)
    levels = [min(max(one.fraction_done, 0.0), 1.0) for one in climbers] + [1.0]
    budget = devices * max(seconds_left, 0.0)
    rate = 0.0  # device-seconds for a whole member's worth of all who climb
    # Water rises from the lowest: at each level another member joins those that have to go on.
    for one, level, following in zip(climbers, levels, levels[1:], strict=False):
        if level == 1.0 or one.startup_device_seconds > budget:
            return level
        budget -= one.startup_device_seconds
        rate += slowest if one.seconds_per_member is None else one.seconds_per_member
        needed = rate * (following - level)
        if needed > budget:
            return min(level + budget / rate, following)
        budget -= needed
    return 1.0


def goals(shares: Sequence[Share], devices: int, seconds_left: float) -> dict[str, float]:
    """The fraction of its work that each member is to go on to, by name; what it has done where it is to stop.

    That is what all can reach.  Members are left behind where they could not compute before the end, and where
    starting them leaves no time for anybody: those first that take longest to start.
    """
    reached = {one.name: one.fraction_done for one in shares}
    unfinished = [one for one in shares if one.fraction_done < 1]
    # Nobody who computes is stopped for one who would use up most of the time to start.
    times = 2.0 if any(one.startup_seconds == 0 for one in unfinished) else 1.0
    able = [one for one in unfinished if times * one.startup_seconds < seconds_left]
    while able:
        fraction = reachable_fraction(able, devices, seconds_left)
        if any(one.fraction_done < fraction for one in able):
            return reached | {one.name: max(fraction, one.fraction_done) for one in able}
        able.remove(max(able, key=lambda one: one.startup_device_seconds))
    return reached


def fitting_start(
    chunk: Chunk,
    seconds_per_cost: float | None,
    slowest_ratio: float,
    seconds_left: float,
    min_rows: int = MIN_ROWS,
) -> int | None:
    """Where the rows of a chunk begin that are done in time, with ``SAFETY`` to spare: they end at ``chunk.stop``.

    The chunk is halved until its last rows fit: those are the shortest, and next to those that were done before.
    None where fewer than ``min_rows`` would fit and that is not the whole chunk.

    Args:
        seconds_per_cost: on one replica; None where it is unknown, and then trying is the only way to know.
        slowest_ratio: the most that a chunk of the member took, over what ``seconds_per_cost`` says it takes.
        seconds_left: until work must stop; the time to start a worker, where one has to start, is off already.
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
    """What to keep of the limit for gathering, merging and writing.

    Args:
        first_seconds: what writing ensemble and submission took at the start, with values to fill in; it has
            the rows and labels of the table in it, and the speed of the disk.
        members: how many there are to gather and merge.
        limit_seconds: the whole ``time_limit``.
    """
    writing = _RESERVE_FACTOR * first_seconds * (_RESERVE_AT_END + _RESERVE_PER_MEMBER * members)
    return min(SHUTDOWN_SECONDS + writing, RESERVE_MAX_SHARE * limit_seconds)


@dataclass(frozen=True)
class Deadline:
    """When all computing must have stopped, and what that leaves time for.

    ``at`` is in seconds by ``clock``, which the limit goes by; ``workers`` can compute at a time, on a device each.
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
        """Whether it is this member's turn, and a worker of it would get something done in time.

        A run ends in no case without having tried: what an earlier run measured may have been a slow moment, such
        as weights that nobody had read since the machine was started, and a guess is one.  ``beyond_goal`` is that
        of ``first_fitting``.
        """

        def pays(one: MemberState) -> bool:
            startup = _startup_seconds(one, members)
            return self.first_fitting(one, members, startup, beyond_goal) is not None

        if (is_worth_it := pays(state)) or beyond_goal:
            return is_worth_it
        # Nobody was ready yet and there seems to be time for none: then the one that starts fastest.
        if self.is_over or any(one.running or one.startup_seconds for one in members):
            return False
        able = [one for one in _counting(members, self.seconds_left) if one.pending]
        fastest = min(able, key=lambda one: _startup_seconds(one, members), default=None)
        return state is fastest and not any(map(pays, able))

    def takes_most_to_start(self, state: MemberState, members: Sequence[MemberState]) -> bool:
        """Whether a start of this member would use up most of the time: nobody who computes is stopped for it."""
        return 2 * _startup_seconds(state, members) >= self.seconds_left

    def first_fitting(
        self,
        state: MemberState,
        members: Sequence[MemberState],
        startup_seconds: float = 0.0,
        beyond_goal: bool = False,
    ) -> tuple[Chunk, int] | None:
        """The member's first pending chunk of which rows can be done in time, and where those begin.

        None where none can, and where it is not the member's turn: its worker is to stop.  Members are brought
        equally far in their first views; those that have these behind them, in all of their work.

        Args:
            startup_seconds: until the member's worker computes.
            beyond_goal: although others are not as far, where none of them can use the device.
        """
        plan, per_cost, now_left = state.plan, state.seconds_per_cost, self.seconds_left
        counting = _counting(members, self.seconds_left)
        seconds = _seconds_per_member(counting)
        is_first = state.has_first_view_pending
        shares = [
            Share(
                name=one.plan.name,
                fraction_done=one.first_view_fraction if is_first else one.fraction,
                seconds_per_member=(each := seconds[one.plan.name])
                and each * max(one.plan.gpus, 1) / (one.plan.views if is_first else 1),
                startup_seconds=0.0 if one.is_loaded else _startup_seconds(one, counting),
                gpus=one.plan.gpus,
            )
            for one in counting
            # What is left of others' first views is for devices that this member cannot use, or it would wait.
            if is_first or not one.has_first_view_pending
        ]
        fraction = state.first_view_fraction if is_first else state.fraction
        goal = goals(shares, self.workers, now_left).get(plan.name)
        if goal is None or (fraction >= goal and not beyond_goal):
            return None
        left, ratio, trust = now_left - startup_seconds, 1.0, 1.0
        if per_cost is not None:
            ratio = state.slowest_seconds_per_cost / per_cost
        else:
            per_cost = _seconds_per_member(members)[plan.name]
            trust = 1.0 if plan.speed.is_measured else _TRUST_IN_GUESSES
        # Before anything is done: better a single row that surely costs so much than none.
        is_untried = all(one.seconds_per_cost is None for one in members)
        min_rows = 1 if plan.speed.is_measured and is_untried else MIN_ROWS
        for chunk in state.pending.in_first_view() if left > 0 else ():
            start = fitting_start(chunk, per_cost, ratio, trust * left, min_rows)
            # No guess and no measurement of earlier stops anybody: a few rows tell more.
            if start is None and is_untried:
                start = max(chunk.start, chunk.stop - min_rows)
            if start is not None:
                return chunk, start
        return None


def _counting(members: Sequence[MemberState], seconds_left: float) -> list[MemberState]:
    """Those who have not failed, without those of weight 0 as long as any other has something to do.

    Members with ``when`` get the time that the others leave, and nothing before they know their rows.
    """
    unfailed = [one for one in members if one.failure is None and not one.unknown_rows]
    counting = [one for one in unfailed if one.plan.model.has_weight]
    counting = counting if any(not one.finished for one in counting) else unfailed
    first = [one for one in counting if not one.plan.waits_for]
    is_at_it = any(
        one.in_hand or (one.pending and (one.is_loaded or _startup_seconds(one, members) < seconds_left))
        for one in first
    )
    return first if is_at_it else counting


def _seconds_per_member(members: Sequence[MemberState]) -> dict[str, float | None]:
    """What all of a member's work takes one replica, by name; None where it is not even guessed."""
    return calibrated(
        {one.plan.name: one.plan.whole_seconds for one in members},
        {one.plan.name: one.seconds_per_cost for one in members if one.seconds_per_cost is not None},
    )


def _startup_seconds(state: MemberState, members: Sequence[MemberState]) -> float:
    """What a worker of it takes to start: measured now or by an earlier run, as the others took, or guessed."""
    measured = state.speed
    if measured.is_startup_measured:
        return measured.startup_seconds
    return max((one.startup_seconds for one in members), default=0.0) or state.plan.speed.startup_seconds


def time_limit_text(
    members: Sequence[MemberState], limit_seconds: float, before_seconds: float, kept_seconds: float
) -> str:
    """Why a limit left no time to compute a single row, and what would.

    Args:
        before_seconds: until workers could start.
        kept_seconds: for the last submission, see :func:`reserve_seconds`.
    """
    was_tried = any(one.workers for one in members)
    what = "new row was kept" if any(one.lost_rows for one in members) else "row was computed"
    text = (
        f"no {what}: {before_seconds:.1f} s of time_limit ({limit_seconds:g} s) were over before a "
        f"worker could start, {kept_seconds:.1f} s are kept for the last submission, and the "
        f"{max(limit_seconds - before_seconds - kept_seconds, 0.0):.1f} s between were too short to start one"
        f"{' and compute its first chunk' if was_tried else ''}"
    )
    speeds = [one.speed for one in members if not one.finished]
    known = [speed.startup_seconds for speed in speeds if speed.is_startup_measured]
    if not known:
        return (
            f"{text}; set a longer time_limit (a run with --limit 20 and without one measures what it takes)"
        )
    needed = before_seconds + min(known)
    at_least = min(needed / (1 - RESERVE_MAX_SHARE), needed + max(kept_seconds, SHUTDOWN_SECONDS))
    if at_least < limit_seconds:
        return f"{text}; the same command again may get further"
    return (
        f"{text}; a start takes {min(known):.1f} s, so time_limit must be more than {math.ceil(at_least)} s"
    )
