"""A worker process: its signals, its channel to the parent, its heartbeat; what it does is in ``session``.

Everything a library prints goes to the log file that is this process's standard output and error.  Stacks go there
too: an exception's, and all threads' where SIGSEGV or SIGABRT ends the process (the parent sends the latter to one
that hangs).  Neither log nor events tell secrets.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import resource
import signal
import sys
import time

from ensemble.common.python_process import die_with_parent
from ensemble.worker.channel import CommandReader, HeartbeatThread, event_sender
from ensemble.worker.session import serve
from ensemble.worker.shutdown import Terminated, end_by, end_on_sigterm


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


if __name__ == "__main__":
    main()
