"""Provide clocks for deadlines and limits; neither is the wall clock, which can be set during a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Watch:
    """Count seconds, except those in which its own process does not run.

    A process may be stopped (SIGSTOP, Ctrl-Z), frozen with its container, or paused with its virtual machine. The
    monotonic clock counts that time. This clock must be read in every turn of a loop, and no turn counts for more
    than ``longest_seconds``.
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
    """Return the seconds since the machine was started, including suspended time (clock_gettime(2)).

    Time limits use this clock, because a cluster that ends sessions after some hours counts suspended time, too.
    """
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
