"""SIGINT, SIGTERM and SIGHUP end a run through its own clean-up; a second one ends it at once."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType

from ensemble.errors import Interrupted

_HEEDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Signals:
    """What came while a run goes on; made by :func:`heed_signals`."""

    def __init__(self) -> None:
        self._came: int | None = None
        self._is_postponed = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The handler of the signals: raises, or keeps the signal for ``check`` while it is postponed."""
        if self._came is not None:
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
        """Raise for a signal that came while it was postponed.

        Raises:
            Interrupted: one came.
        """
        if self._came is not None:
            raise Interrupted(self._came)


@contextlib.contextmanager
def heed_signals() -> Iterator[Signals]:
    """Handle the signals within; one that was ignored stays so, as under nohup."""
    signals = Signals()
    before = {number: signal.getsignal(number) for number in _HEEDED}
    heeded = [number for number in _HEEDED if before[number] is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number in heeded:
            signal.signal(number, before[number])
