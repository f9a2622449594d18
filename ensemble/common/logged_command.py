"""Run a command beneath a worker: write what it prints to a log, and end all that it started with the worker.

This process stands between the worker and the command, in a session of its own.  It keeps secrets out of the log,
and outlives the worker by the moment that it takes to kill everything that the command has started.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

from ensemble.common.files import open_log
from ensemble.common.python_process import WORKER_MARK, die_with_parent, end_marked
from ensemble.common.redact import Redactor

_READ_BYTES = 1 << 16
# An unfinished line is written when nothing has come for so long: a secret might be cut in two otherwise.
_QUIET_SECONDS = 1.0


def main() -> None:
    """Run ``command`` of the JSON object on standard input, and end as the command has ended.

    The object also has ``worker`` (the worker's process id), ``log`` (a file), ``environment`` (variables by name,
    None: not set) and ``secrets`` (the settings that hold them).
    """
    asked = json.loads(sys.stdin.buffer.read())
    signal.signal(signal.SIGTERM, lambda number, frame: _end_all())
    die_with_parent(asked["worker"], signal.SIGTERM)
    environment = {**os.environ, **asked["environment"]}
    environment = {name: value for name, value in environment.items() if value is not None}
    redact = Redactor(os.environ, asked["secrets"])
    with open_log(Path(asked["log"])) as log:
        try:
            process = subprocess.Popen(
                asked["command"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                # This process has one thread, so that code may run between fork and exec.
                preexec_fn=partial(die_with_parent, os.getpid()),
            )
        except OSError as error:
            _write(log.fileno(), f"{asked['command'][0]}: {error.strerror}\n".encode())
            os._exit(127)  # as shells have it
        _copy(process, log.fileno(), redact)
    code = process.wait()
    if code < 0:  # end by the same signal
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def _copy(process: subprocess.Popen[bytes], log: int, redact: Redactor) -> None:
    """Copy what a process prints to its log, until it has ended, even if others still hold its output."""
    assert process.stdout is not None
    output, rest = process.stdout.fileno(), b""
    while True:
        has_ended = process.poll() is not None
        is_readable = bool(select.select([output], [], [], 0.0 if has_ended else _QUIET_SECONDS)[0])
        data = os.read(output, _READ_BYTES) if is_readable else b""
        rest += data
        # Progress bars end their lines by a carriage return.
        end = 1 + max(rest.rfind(b"\n"), rest.rfind(b"\r")) if data else len(rest)
        if end == 0 and len(rest) > _READ_BYTES:
            end = len(rest)
        _write(log, redact(rest[:end].decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape"))
        rest = rest[end:]
        if not data and (is_readable or has_ended):
            return


def _write(log: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # a full disk: the command decides whether it can go on
        while data:
            data = data[os.write(log, data) :]


def _end_all() -> None:
    """Kill all processes of the worker, which is gone, and this one."""
    mark = os.environ.get(WORKER_MARK)
    if mark is not None:
        end_marked(mark, spared=[os.getpid()])
    os.killpg(0, signal.SIGKILL)
