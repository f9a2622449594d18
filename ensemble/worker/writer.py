"""Parts written by a thread while the next chunk is computed: one at a time, so that only one waits in memory."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Writer:
    """Runs one job after another in a thread, and brings their errors back to the thread that hands them over.

    Args:
        failed: called in that thread when a job has raised.

    Attributes:
        failed_chunk: the number of the chunk whose job raised; None while none has.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self.failed_chunk: int | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def hand_over(self, chunk: int, job: Callable[[], None]) -> None:
        """Have a job done, once the one before is.

        Raises:
            Exception: what an earlier job raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(chunk, job), name="writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what a job has raised, without waiting for the one that goes on."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the job that goes on.

        Raises:
            Exception: what it, or an earlier one, raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _do(self, chunk: int, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # whatever it is, the main thread must hear of it
            self.failed_chunk, self._error = chunk, error
            self._failed()
