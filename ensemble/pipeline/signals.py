"""SIGINT, SIGTERM and SIGHUP end a run with its clean-up; a second one ends it at once."""

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
    """The signals that come during a run; ``ignored`` are those that this process was started to ignore."""

    def __init__(self, ignored: list[signal.Signals], owns_process: bool) -> None:
        self.ignored = ignored
        self._owns_process = owns_process
        self._came: int | None = None
        self._is_postponed = False
        self._is_report = False
        self.has_ended_report = False  # a signal came when nothing else was left to do

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: raise ``Interrupted``, or keep the signal for ``check`` while it is postponed."""
        if self._came is not None:
            if self.has_ended_report:
                return
            # A terminal that closes sends SIGHUP twice, by the kernel and by the shell; the second does not count.
            if number == signal.SIGHUP or not self._owns_process:
                return
            os._exit(128 + number)  # workers go with this process: the kernel kills them
        self._came = number
        self.has_ended_report = self._is_report
        if not self._is_postponed:
            raise Interrupted(number)

    @contextlib.contextmanager
    def postponed(self, is_report: bool = False) -> Iterator[None]:
        """Postpone signals while processes are started and ended, as an exception at any line could lose one.

        Args:
            is_report: only the report is left to do; a signal ends the report alone, and further ones do nothing.
        """
        self._is_postponed, self._is_report = True, is_report
        try:
            yield
        finally:
            self._is_postponed = False

    @property
    def came(self) -> bool:
        """Whether a signal has come."""
        return self._came is not None

    def check(self) -> None:
        """Raise ``Interrupted`` for a signal that came while it was postponed."""
        if self._came is not None:
            raise Interrupted(self._came)


@contextlib.contextmanager
def heed_signals(owns_process: bool = True) -> Iterator[Signals]:
    """Handle signals in the block, except those that this process was started to ignore.

    Only the main thread handles signals, as Python gives them to no other.

    Args:
        owns_process: False in another program, such as a notebook; then a second signal does not end the process.
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
            # Users press Ctrl-C more than once, and the summary is still to come.
            is_dropped = signals.has_ended_report and owns_process and number == signal.SIGINT
            signal.signal(number, signal.SIG_IGN if is_dropped else handlers[number])
