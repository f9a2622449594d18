"""Under a time limit: whose turn it is, what still fits, and when it is over.

The arithmetic is in ``planning.time_limit``; here it meets the members' states and the clock.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from ensemble.planning.chunks import Chunk
from ensemble.planning.time_limit import (
    SMALLEST_ROWS,
    Share,
    calibrated,
    fitting_start,
    goals,
    too_short_text,
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
        if self._pays(state, members):
            return True
        # Nobody was ready yet and there seems to be time for none: then the one that starts fastest.
        if self.is_over or any(one.running or one.startup_seconds for one in members):
            return False
        able = [one for one in _counting(members) if one.pending]
        if any(self._pays(one, members) for one in able):
            return False
        return state is min(able, key=lambda one: _startup_seconds(one, members), default=None)

    def _pays(self, state: MemberState, members: Sequence[MemberState]) -> bool:
        if not self._is_its_turn(state, members):
            return False
        left = self.seconds_left - _startup_seconds(state, members)
        fitting = self._fitting(state, members, left)
        return left > 0 and any(fitting(chunk) is not None for chunk in state.pending)

    def next_chunk(
        self, state: MemberState, members: Sequence[MemberState], hinted: Collection[Chunk]
    ) -> tuple[Chunk, int] | None:
        """The next chunk for a worker of this member, and where its part begins that fits; None: it is to stop.

        Args:
            hinted: what other workers were told would be theirs; taken last.
        """
        if not self._is_its_turn(state, members):
            return None
        fitting = self._fitting(state, members, self.seconds_left)
        for chunk in sorted(state.pending, key=hinted.__contains__):
            if (start := fitting(chunk)) is not None:
                return chunk, start
        return None

    def _fitting(
        self, state: MemberState, members: Sequence[MemberState], seconds_left: float
    ) -> Callable[[Chunk], int | None]:
        """Where the part of a chunk begins that can be done in so many seconds."""
        per_cost = state.seconds_per_cost
        if per_cost is not None:
            ratio = state.slowest_seconds_per_cost / per_cost
            return lambda chunk: fitting_start(chunk, per_cost, ratio, seconds_left)
        device_seconds = next(
            one.seconds_per_member for one in _shares(members) if one.name == state.plan.name
        )
        guess = None if device_seconds is None else device_seconds / max(state.plan.gpus, 1)
        is_measured = state.plan.speed.is_measured  # by an earlier run
        trusted_seconds = seconds_left * (1.0 if is_measured else _TRUST_IN_GUESSES)
        # Before anything is done: better a single row that surely costs so much than none.
        is_first = all(one.seconds_per_cost is None for one in members)
        min_rows = 1 if is_measured and is_first else SMALLEST_ROWS

        def fitting(chunk: Chunk) -> int | None:
            start = fitting_start(chunk, guess, 1.0, trusted_seconds, min_rows)
            # No guess and no measurement of earlier stops anybody: a few rows tell more.
            if start is None and is_first and seconds_left > 0:
                return max(chunk.start, chunk.stop - min_rows)
            return start

        return fitting

    def _is_its_turn(self, state: MemberState, members: Sequence[MemberState]) -> bool:
        wanted = goals(_shares(_counting(members)), self._workers, self.seconds_left)
        return state.fraction < wanted.get(state.plan.name, 0.0)


def _counting(members: Sequence[MemberState]) -> list[MemberState]:
    """Those who have not failed, without those of weight 0 as long as any other has something to do."""
    unfailed = [one for one in members if one.failure is None]
    counting = [one for one in unfailed if one.plan.model.weight > 0]
    return counting if any(not one.finished for one in counting) else unfailed


def _shares(members: Sequence[MemberState]) -> list[Share]:
    devices = {one.plan.name: max(one.plan.gpus, 1) for one in members}
    guessed = {
        one.plan.name: one.plan.speed.seconds_per_work * one.plan.work * devices[one.plan.name]
        for one in members
    }
    measured = {
        one.plan.name: one.seconds_per_cost * devices[one.plan.name]
        for one in members
        if one.seconds_per_cost is not None
    }
    seconds = calibrated(guessed, measured)
    shares = []
    for one in members:
        is_loaded = any(record.ready is not None and record.exit_code is None for record in one.workers)
        share = Share(
            name=one.plan.name,
            fraction_done=one.fraction,
            seconds_per_member=seconds[one.plan.name],
            startup_seconds=0.0 if is_loaded else _startup_seconds(one, members),
            gpus=one.plan.gpus,
        )
        shares.append(share)
    return shares


def _startup_seconds(state: MemberState, members: Sequence[MemberState]) -> float:
    """What a worker of it takes to start: measured now or by an earlier run, as the others took, or guessed."""
    measured = state.speed
    if measured.is_startup_measured:
        return measured.startup_seconds
    others = max((one.startup_seconds for one in members), default=0.0)
    return others or state.plan.speed.startup_seconds


def time_limit_text(
    members: Sequence[MemberState], limit_seconds: float, before_seconds: float, kept_seconds: float
) -> str:
    """Why a limit left no time to compute a single row.

    Args:
        before_seconds: until workers could start.
        kept_seconds: for the last submission.
    """
    tries = []
    for name, known, record in (
        (one.plan.name, one.plan.speed, rec) for one in members for rec in one.workers
    ):
        if record.load_seconds is not None:
            took = (record.start_seconds or 0.0) + record.load_seconds
            tries.append(
                f"{name}'s worker took {took:.1f} s to start, the rest was too short for its first rows"
            )
        else:
            earlier = f" (it took {known.startup_seconds:.1f} s in an earlier run)"
            tries.append(f"{name}'s worker needed all to start{earlier if known.is_startup_measured else ''}")
    speeds = [one.speed for one in members if not one.finished]
    known_seconds = [speed.startup_seconds for speed in speeds if speed.is_startup_measured]
    return too_short_text(
        limit_seconds, before_seconds, kept_seconds, tries, min(known_seconds, default=None)
    )
