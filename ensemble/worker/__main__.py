"""Run a worker process: set up its signals, its channel to the parent and its heartbeat; ``session`` does the work.

The log file is this process's standard output and error. It gets what libraries print, and stacks: those of
exceptions, and those of all threads if SIGSEGV or SIGABRT ends the process (the parent sends SIGABRT to a worker
that hangs). Secrets are redacted in log and events.
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

# After SIGTERM the main thread has this long to remove its temporary file and end; a forward pass may take longer.
END_SECONDS = 1.0


def main() -> None:
    began = time.monotonic()
    parser = argparse.ArgumentParser(prog="python -m ensemble.worker")
    parser.add_argument("--events-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    faulthandler.enable()
    # No core dumps: they are as large as the model, and the stacks say more.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    send = event_sender(arguments.events_fd)
    heartbeat = HeartbeatThread(send)
    heartbeat.start()
    commands = CommandReader(heartbeat)
    try:
        end_on_sigterm()
        commands.start()
        code = serve(commands, send, heartbeat, began)
        # Not sys.exit: with a CUDA context and thread pools, the interpreter's teardown takes seconds and can hang,
        # and all files of this process are complete.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        os._exit(code)
    except Terminated:
        with contextlib.suppress(OSError):
            print("ended by SIGTERM", file=sys.stderr, flush=True)  # noqa: T201
        end_by(signal.SIGTERM)


def end_on_sigterm() -> None:
    """Let SIGTERM raise ``Terminated`` in the main thread, which must call this.

    Python runs handlers only between two bytecodes of its main thread, which can be deep in a library. Therefore
    another thread is woken by the signal, too: it ends the process after ``END_SECONDS``, or at once after a
    second SIGTERM.

    SIGINT and SIGHUP are ignored, because the parent handles them even if every process gets them: a worker that
    they ended would look like a failed one.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    read_fd, write_fd = os.pipe()
    os.set_blocking(write_fd, False)
    signal.set_wakeup_fd(write_fd, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _raise_terminated)
    threading.Thread(target=_end_after_sigterm, args=(read_fd,), name="shutdown", daemon=True).start()


def end_by(number: int) -> NoReturn:
    """End this process by an unhandled signal, from any thread, so that the parent sees which signal it was."""
    ctypes.CDLL(None).signal(number, None)  # Python's signal.signal() works in the main thread alone
    os.kill(os.getpid(), number)
    os._exit(128 + number)


def _raise_terminated(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def _end_after_sigterm(read_fd: int) -> None:
    received = b""
    while signal.SIGTERM not in received:
        received += os.read(read_fd, 64)
    if received.count(signal.SIGTERM) == 1:
        select.select([read_fd], [], [], END_SECONDS)
    end_by(signal.SIGTERM)


if __name__ == "__main__":
    main()
