"""Clocks for deadlines and limits; neither is the wall clock, which can be set while a run goes on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watch:
    """A clock, in seconds, that stands still while its own process does not run.

    Stopped (SIGSTOP, Ctrl-Z), frozen by a container's freezer, or in a virtual machine that is paused: the
    monotonic clock counts that time, but nobody can be blamed for what was not done in it.  So this one has to be
    read in every turn of a loop, and no turn counts for more than ``longest_seconds``.

    Args:
        longest_seconds: what may pass between two readings; of anything longer only this counts.
        clock: the monotonic clock, in seconds.
    """

    def __init__(self, longest_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._longest_seconds = longest_seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = self._reading = clock()

    def __call__(self) -> float:
        with self._lock:
            now = self._clock()
            self._reading += min(now - self._read_at, self._longest_seconds)
            self._read_at = now
            return self._reading


def boot_seconds() -> float:
    """Seconds since the machine was started, those included in which it was suspended (clock_gettime(2)).

    A time limit goes by it: whoever ends a session after so many hours, such as a cluster, counts them on.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
