"""SIGINT, SIGTERM and SIGHUP end a run through its own clean-up; a second one ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from ensemble.common.errors import Interrupted

# Ignored by whoever started this process, as nohup does, and a script does for what it starts in the background,
# these stay ignored.  SIGTERM never does, or nothing but SIGKILL could end the run.
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
_HEEDED = (*_MAY_BE_IGNORED, signal.SIGTERM)


class Signals:
    """What came while a run goes on; ``ignored`` are not heeded, because this process was started so."""

    def __init__(self, ignored: list[signal.Signals], owns_process: bool) -> None:
        self.ignored = ignored
        self._owns_process = owns_process
        self._came: int | None = None
        self._is_postponed = False
        self._is_report = False
        self.has_ended_report = False  # a signal came when nothing else was left to do

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals: raises, or keeps the signal for ``check`` while it is postponed."""
        if self._came is not None:
            if self.has_ended_report:
                return
            # A terminal that goes away sends SIGHUP twice, by the kernel and by the shell: nobody is impatient.
            if number == signal.SIGHUP or not self._owns_process:
                return
            os._exit(128 + number)  # workers go with this process: the kernel kills them
        self._came = number
        self.has_ended_report = self._is_report
        if not self._is_postponed:
            raise Interrupted(number)

    @contextlib.contextmanager
    def postponed(self, is_report: bool = False) -> Iterator[None]:
        """While processes are started and ended, an exception at any line could lose one of them.

        Args:
            is_report: the run is complete but for its report; a signal ends that alone, and further ones nothing.
        """
        self._is_postponed, self._is_report = True, is_report
        try:
            yield
        finally:
            self._is_postponed = False

    @property
    def came(self) -> bool:
        """Whether one has."""
        return self._came is not None

    def check(self) -> None:
        """Raise ``Interrupted`` for a signal that came while it was postponed."""
        if self._came is not None:
            raise Interrupted(self._came)


@contextlib.contextmanager
def heed_signals(owns_process: bool = True) -> Iterator[Signals]:
    """Handle the signals within, but for those that this process was started to ignore.

    In a thread none is handled: Python hands signals to the main thread alone.

    Args:
        owns_process: False in somebody else's program, such as a notebook: then a second signal does not end it.
    """
    handlers = {number: signal.getsignal(number) for number in _HEEDED}
    ignored = [number for number in _MAY_BE_IGNORED if handlers[number] is signal.SIG_IGN]
    signals = Signals(ignored, owns_process)
    # None is a handler that was not set by Python, which could not be put back.
    heeded = [number for number in _HEEDED if number not in ignored and handlers[number] is not None]
    if threading.current_thread() is not threading.main_thread():
        heeded = []
    for number in heeded:
        signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number in heeded:
            # The summary is still to come, and somebody presses Ctrl-C more than once.
            is_dropped = signals.has_ended_report and owns_process and number == signal.SIGINT
            signal.signal(number, signal.SIG_IGN if is_dropped else handlers[number])
