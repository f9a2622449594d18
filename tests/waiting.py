"""Waiting for what another process or thread will do; how long that takes on a busy machine, no test asks."""

from __future__ import annotations

import time
from collections.abc import Callable

# Only what is broken takes this long.  Less than pytest's own time-out, so that the test says what did not come.
PATIENCE_SECONDS = 300.0


def wait_until(holds: Callable[[], object], what: str) -> None:
    """Return once ``holds`` does.

    Raises:
        AssertionError: ``what`` did not come.
    """
    give_up = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < give_up, f"{what} did not come"
        time.sleep(0.02)
