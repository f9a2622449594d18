"""A worker's sign of life: how long ago its main thread took a step, said every few seconds by another thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ensemble.common.clock import Watch
from ensemble.common.protocol import Event, Heartbeat

INTERVAL_SECONDS = 2.0


class HeartbeatThread:
    """Sends a heartbeat at once when it is started, and then every ``INTERVAL_SECONDS``.

    Args:
        send: takes an event from any thread; must not come back where nobody listens any more.

    Attributes:
        clock: in seconds; leaves out the time in which this process was stopped.
    """

    def __init__(self, send: Callable[[Event], None]) -> None:
        self._send = send
        self.clock: Callable[[], float] = Watch(1.5 * INTERVAL_SECONDS)  # read at every heartbeat
        self._last_step: float | None = self.clock()
        self._writing_since: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def step(self) -> None:
        """The main thread got somewhere: a command has come, a batch is done."""
        self._last_step = self.clock()

    def wait(self) -> None:
        """The main thread waits for a command; however long that takes, it does not hang."""
        self._last_step = None

    def begin_write(self) -> None:
        """Another thread begins to write a part: until it is done, this process can hang in that."""
        self._writing_since = self.clock()

    def end_write(self) -> None:
        """It is done."""
        self._writing_since = None

    def idle_seconds(self) -> float:
        """Seconds since the last step; 0 while there is nothing to do."""
        now = self.clock()  # in any case, so that it is read at every heartbeat
        last = self._last_step if self._last_step is not None else self._writing_since
        return 0.0 if last is None else round(now - last, 3)

    def _run(self) -> None:
        while True:
            self._send(Heartbeat(self.idle_seconds()))
            time.sleep(INTERVAL_SECONDS)
