"""Python runs this at start-up where this folder is on PYTHONPATH: the wall clock jumps whenever it is read."""

import itertools
import time

_YEAR_SECONDS = 365 * 86400
_JUMPS = itertools.cycle([0, _YEAR_SECONDS, -_YEAR_SECONDS])
_seconds, _nanoseconds = time.time, time.time_ns


def jumping_seconds() -> float:
    return _seconds() + next(_JUMPS)


def jumping_nanoseconds() -> int:
    return _nanoseconds() + next(_JUMPS) * 1_000_000_000


time.time, time.time_ns = jumping_seconds, jumping_nanoseconds
