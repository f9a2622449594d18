"""Under a time limit: whose turn it is, what still fits, and when it is over.

The arithmetic is in ``planning.time_limit``; here it meets the members' states and the clock.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence

from ensemble.planning.chunks import Chunk
from ensemble.planning.time_limit import (
    MIN_ROWS,
    RESERVE_MAX_SHARE,
    SHUTDOWN_SECONDS,
    Share,
    calibrated,
    fitting_start,
    goals,
)
from ensemble.scheduling.state import MemberState

# A member that has not been measured yet starts with rows that would fit if it were four times slower than guessed.
_TRUST_IN_GUESSES = 0.25


class Deadline:
    """When all computing must have stopped, and what that leaves time for.

    Args:
        at: by ``clock``.
        workers: how many can compute at the same time, on one device each.
        clock: the one that the limit goes by, in seconds.
    """

    def __init__(self, at: float, workers: int, clock: Callable[[], float]) -> None:
        self._at = at
        self._workers = workers
        self._clock = clock

    @property
    def seconds_left(self) -> float:
        return self._at - self._clock()

    @property
    def is_over(self) -> bool:
        return self.seconds_left <= 0

    def may_start(self, state: MemberState, members: Sequence[MemberState]) -> bool:
        """Whether it is this member's turn, and a worker of it would get something done in time.

        A run ends in no case without having tried: what an earlier run measured may have been a slow moment, such
        as weights that nobody had read since the machine was started, and a guess is one.
        """

        def pays(one: MemberState) -> bool:
            return self._first_fitting(one, members, one.pending, _startup_seconds(one, members)) is not None

        if pays(state):
            return True
        # Nobody was ready yet and there seems to be time for none: then the one that starts fastest.
        if self.is_over or any(one.running or one.startup_seconds for one in members):
            return False
        able = [one for one in _counting(members) if one.pending]
        fastest = min(able, key=lambda one: _startup_seconds(one, members), default=None)
        return state is fastest and not any(map(pays, able))

    def next_chunk(
        self, state: MemberState, members: Sequence[MemberState], hinted: Collection[Chunk]
    ) -> tuple[Chunk, int] | None:
        """The next chunk for a worker of this member, and where its rows begin that fit; None: it is to stop.

        Args:
            hinted: what other workers were told would be theirs; taken last.
        """
        return self._first_fitting(state, members, sorted(state.pending, key=hinted.__contains__), 0.0)

    def _first_fitting(
        self,
        state: MemberState,
        members: Sequence[MemberState],
        chunks: Iterable[Chunk],
        startup_seconds: float,
    ) -> tuple[Chunk, int] | None:
        """The first of its chunks of which rows can be done in time, if it is the member's turn."""
        plan, per_cost, now_left = state.plan, state.seconds_per_cost, self.seconds_left
        counting = _counting(members)
        seconds = _seconds_per_member(counting)
        shares = [
            Share(
                name=one.plan.name,
                fraction_done=one.fraction,
                seconds_per_member=(each := seconds[one.plan.name]) and each * max(one.plan.gpus, 1),
                startup_seconds=0.0 if one.is_loaded else _startup_seconds(one, counting),
                gpus=one.plan.gpus,
            )
            for one in counting
        ]
        if state.fraction >= goals(shares, self._workers, now_left).get(plan.name, 0.0):
            return None
        left, ratio, trust = now_left - startup_seconds, 1.0, 1.0
        if per_cost is not None:
            ratio = state.slowest_seconds_per_cost / per_cost
        else:
            per_cost = _seconds_per_member(members)[plan.name]
            trust = 1.0 if plan.speed.is_measured else _TRUST_IN_GUESSES
        # Before anything is done: better a single row that surely costs so much than none.
        is_first = all(one.seconds_per_cost is None for one in members)
        min_rows = 1 if plan.speed.is_measured and is_first else MIN_ROWS
        for chunk in chunks:
            start = fitting_start(chunk, per_cost, ratio, trust * left, min_rows)
            # No guess and no measurement of earlier stops anybody: a few rows tell more.
            if start is None and is_first and left > 0:
                start = max(chunk.start, chunk.stop - min_rows)
            if start is not None:
                return chunk, start
        return None


def _counting(members: Sequence[MemberState]) -> list[MemberState]:
    """Those who have not failed, without those of weight 0 as long as any other has something to do."""
    unfailed = [one for one in members if one.failure is None]
    counting = [one for one in unfailed if one.plan.model.weight > 0]
    return counting if any(not one.finished for one in counting) else unfailed


def _seconds_per_member(members: Sequence[MemberState]) -> dict[str, float | None]:
    """What all of a member's work takes one replica, by name; None where it is not even guessed."""
    return calibrated(
        {one.plan.name: one.plan.job.compute_seconds for one in members},
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
        kept_seconds: for the last submission, see ``planning.time_limit.reserve_seconds``.
    """
    was_tried = any(one.workers for one in members)
    text = (
        f"no row was computed: {before_seconds:.1f} s of time_limit ({limit_seconds:g} s) were over before a "
        f"worker could start, {kept_seconds:.1f} s are kept for the last submission, and the "
        f"{max(limit_seconds - before_seconds - kept_seconds, 0.0):.1f} s between were too short to start one"
        f"{' and compute its first rows' if was_tried else ''}"
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
