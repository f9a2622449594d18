"""SIGTERM: a worker drops what is in its hands, and is gone in a second whatever it is doing."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import threading
from types import FrameType
from typing import NoReturn

# For the main thread's way out, which removes its temporary file; a forward pass may keep it longer than that.
END_SECONDS = 1.0


class Terminated(BaseException):
    """SIGTERM has come; raised in the main thread, wherever it is."""


def end_on_sigterm() -> None:
    """From now on SIGTERM raises ``Terminated`` in the main thread; to be called from there.

    Python runs handlers between two bytecodes of its main thread only, which can be deep in a library.  So
    another thread hears of the signal as well: it ends the process after ``END_SECONDS``, at a second SIGTERM at
    once.

    SIGINT and SIGHUP are the parent's to handle, also where they are sent to every process there is: a worker that
    ended by one would look as if it had failed.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _drop)
    threading.Thread(target=_watch, args=(read_fd,), name="shutdown", daemon=True).start()


def end_by(number: int) -> NoReturn:
    """End this process by the signal as if nothing handled it, from any thread, so that the parent sees which."""
    ctypes.CDLL(None).signal(number, None)  # Python's own signal.signal() is for the main thread
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _drop(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def _watch(read_fd: int) -> None:
    received = b""
    while signal.SIGTERM not in received:
        received += os.read(read_fd, 64)
    if received.count(signal.SIGTERM) == 1:
        select.select([read_fd], [], [], END_SECONDS)
    end_by(signal.SIGTERM)
