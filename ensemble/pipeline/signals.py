"""End a run after SIGINT, SIGTERM or SIGHUP with its clean-up; a second signal ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ensemble.common.errors import Interrupted

# These stay ignored if the process was started so, as nohup does, or a script for processes in the background.
# SIGTERM is never ignored, or only SIGKILL could end the run.
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
_HANDLED = (*_MAY_BE_IGNORED, signal.SIGTERM)


class Signals:
    """Handle signals during a run; ``ignored`` are the signals that this process was started to ignore."""

    def __init__(self, ignored: list[signal.Signals], owns_process: bool) -> None:
        self.ignored = ignored
        self._owns_process = owns_process
        self._is_postponed = False
        self._is_report = False
        self.came: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raise ``Interrupted``, or keep the signal for ``check`` while it is postponed."""
        if self.came is not None:
            # A terminal that closes sends SIGHUP twice, by the kernel and by the shell; the second does not count.
            if self._is_report or number == signal.SIGHUP or not self._owns_process:
                return
            os._exit(128 + number)  # workers go with this process: the kernel kills them
        self.came = number
        if not self._is_postponed:
            raise Interrupted(number)

    @contextlib.contextmanager
    def postponed(self, is_report: bool = False) -> Iterator[None]:
        """Postpone signals, as an exception could lose a process; the writing of a report ends all the same."""
        self._is_postponed, self._is_report = True, is_report
        try:
            yield
        finally:
            self._is_postponed = False

    def check(self) -> None:
        """Raise ``Interrupted`` for a signal that came while it was postponed."""
        if self.came is not None:
            raise Interrupted(self.came)


@contextlib.contextmanager
def heed_signals(owns_process: bool = True) -> Iterator[Signals]:
    """Handle signals in the block, except those that this process was started to ignore.

    Unless this program ``owns_process``, as in a notebook, a second signal does not end the process.
    """
    handlers = {number: signal.getsignal(number) for number in _HANDLED}
    ignored = [number for number in _MAY_BE_IGNORED if handlers[number] is signal.SIG_IGN]
    signals = Signals(ignored, owns_process)
    # None is a handler that Python has not set and could not restore.
    handled = [number for number in _HANDLED if number not in ignored and handlers[number] is not None]
    if threading.current_thread() is not threading.main_thread():
        handled = []
    for number in handled:
        signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number in handled:
            signal.signal(number, handlers[number])
