"""Run a worker process: set up its signals, its channel to the parent and its heartbeat; ``session`` does the work.

The log file is this process's standard output and error. It gets what libraries print, and stacks: those of
exceptions, and those of all threads if SIGSEGV or SIGABRT ends the process (the parent sends SIGABRT to a worker
that hangs). Secrets are redacted in log and events. SIGTERM ends the process at once.
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
from ensemble.worker.channel import HeartbeatThread, commands_from_stdin, event_sender
from ensemble.worker.session import serve


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
    # The parent handles these: a worker that they ended would look like a failed one.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    send = event_sender(arguments.events_fd)
    heartbeat = HeartbeatThread(send)
    heartbeat.start()
    code = serve(commands_from_stdin(heartbeat), send, heartbeat, began)
    # Not sys.exit: with a CUDA context and thread pools, the interpreter's teardown takes seconds and can hang,
    # and all files of this process are complete.
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
