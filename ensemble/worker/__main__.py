"""A worker process: its signals, its channel to the parent, its heartbeat; what it does is in ``session``.

Everything a library prints goes to the log file that is this process's standard output and error.  Stacks go there
too: an exception's, and all threads' where SIGSEGV or SIGABRT ends the process (the parent sends the latter to one
that hangs).  Neither log nor events tell secrets.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import resource
import select
import signal
import sys
import threading
import time
from types import FrameType
from typing import NoReturn

from ensemble.common.python_process import die_with_parent
from ensemble.worker.channel import CommandReader, HeartbeatThread, event_sender
from ensemble.worker.session import Terminated, serve

# After SIGTERM, for the main thread's way out, which removes its temporary file; a forward pass may keep it longer.
END_SECONDS = 1.0


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m ensemble.worker")
    parser.add_argument("--events-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    faulthandler.enable()
    # No core: the memory of a process that holds a model, written where the user's run stands; the stacks say more.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    send = event_sender(arguments.events_fd)
    heartbeat = HeartbeatThread(send)
    heartbeat.start()
    commands = CommandReader(heartbeat)
    try:
        end_on_sigterm()
        commands.start()
        code = serve(commands, send, heartbeat, began)
        # Not sys.exit: interpreter teardown with a CUDA context and thread pools alive takes seconds and can hang,
        # and everything this process owns on disk is already complete.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    except Terminated:
        with contextlib.suppress(OSError):
            print("ended by SIGTERM", file=sys.stderr, flush=True)  # noqa: T201
        end_by(signal.SIGTERM)


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


if __name__ == "__main__":
    main()
