"""PURE: what still fits into the time, and which members continue.

The clock, the scheduler and what is written in the end are elsewhere: here seconds come in and fractions and sizes
come out.  Seconds of work are device-seconds: a replica on two GPUs takes two of them in a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from ensemble.planning.chunks import Chunk

# A chunk counts as fitting where it would still fit if it took this much longer than foreseen: its cost is known in
# bytes of text, and what a byte costs changes with the length of the rows and with what else the machine does.
SAFETY: Final = 1.25
# A batch or two; smaller chunks pay more for going to and fro than they bring in.
MIN_ROWS: Final = 16
# Of the whole limit at most; in a very short run half-done work counts for more than a margin.
RESERVE_MAX_SHARE: Final = 0.2
# Workers that are in the midst of something when it is over get these to end.
SHUTDOWN_SECONDS: Final = 5.0
# In units of the first submission, whose few digits are soon written.  Measured with 20,000 to 500,000 rows of 3 or
# 20 labels: ensemble and submission take 0.6 to 3.2 in the end; a member's shards read, written as a CSV and read
# again take 0.8 to 2.9, or 1.7 to 6.3 where there is no submission to write at the start.
_RESERVE_AT_END: Final = 3.0
_RESERVE_PER_MEMBER: Final = 6.0
# Disks that others use as well.
_RESERVE_FACTOR: Final = 1.5


@dataclass(frozen=True)
class Share:
    """A member in the race against the clock.

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


def calibrated(guessed: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float | None]:
    """Speeds by member: measured ones as they are, guesses scaled by what the guesses of the measured were off.

    The factor is the geometric mean of measured over guessed: guesses are wrong by factors, not by amounts.

    Args:
        guessed: for every member, in any unit that all share, such as seconds per work; 0 where there is no guess.
        measured: in the same unit, for members that have computed something.

    Returns:
        for every name in ``guessed``; None where nothing is known.
    """
    off = [
        math.log(measured[name]) - math.log(guess)
        for name, guess in guessed.items()
        if guess > 0 and measured.get(name, 0.0) > 0
    ]
    factor = math.exp(fmean(off)) if off else 1.0
    return {name: measured.get(name) or guess * factor or None for name, guess in guessed.items()}


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
