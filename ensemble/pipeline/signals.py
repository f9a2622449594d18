"""SIGINT, SIGTERM and SIGHUP end a run through its own clean-up; a second one ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from ensemble.common.errors import Interrupted

# Ignored by whoever started this process, as nohup does, and a script does for what it starts in the background,
# these stay ignored.  SIGTERM never does, or nothing but SIGKILL could end the run.
_MAY_BE_IGNORED = (signal.SIGINT, signal.SIGHUP)
_HEEDED = (*_MAY_BE_IGNORED, signal.SIGTERM)


class Signals:
    """What came while a run goes on; ``ignored`` are not heeded, because this process was started so."""

    def __init__(self, ignored: list[signal.Signals]) -> None:
        self.ignored = ignored
        self._came: int | None = None
        self._is_postponed = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals: raises, or keeps the signal for ``check`` while it is postponed."""
        if self._came is not None:
            # A terminal that goes away sends SIGHUP twice, by the kernel and by the shell: nobody is impatient.
            if number == signal.SIGHUP:
                return
            os._exit(128 + number)  # workers go with this process: the kernel kills them
        self._came = number
        if not self._is_postponed:
            raise Interrupted(number)

    @contextlib.contextmanager
    def postponed(self) -> Iterator[None]:
        """While processes are started and ended, an exception at any line could lose one of them."""
        self._is_postponed = True
        try:
            yield
        finally:
            self._is_postponed = False

    def check(self) -> None:
        """Raise ``Interrupted`` for a signal that came while it was postponed."""
        if self._came is not None:
            raise Interrupted(self._came)


@contextlib.contextmanager
def heed_signals() -> Iterator[Signals]:
    """Handle the signals within, but for those that this process was started to ignore."""
    signals = Signals([one for one in _MAY_BE_IGNORED if signal.getsignal(one) is signal.SIG_IGN])
    heeded = [number for number in _HEEDED if number not in signals.ignored]
    before = [signal.signal(number, signals.handle) for number in heeded]
    try:
        yield signals
    finally:
        for number, handler in zip(heeded, before, strict=True):
            signal.signal(number, handler)
