"""The command in a pseudo-terminal of a given width, as a user sees it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tests.faults.forked import client
from tests.project import ROOT, python_path
from tests.waiting import PATIENCE_SECONDS


def in_terminal(
    folder: Path, width: int, *arguments: str, environment: Mapping[str, str] | None = None
) -> str:
    """What ``python -m ensemble ARGUMENTS`` writes to a terminal of ``width`` columns, both streams together."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
    variables = {**inherited, "PYTHONPATH": python_path(ROOT), **(environment or {})}
    ours, theirs = pty.openpty()
    written = bytearray()
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, ours)
        try:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
            process = stack.enter_context(_started(folder, arguments, variables, theirs))
        finally:
            os.close(theirs)
        while data := _read(ours):
            written += data
        process.wait(PATIENCE_SECONDS)
    return written.decode().replace("\r\n", "\n")


@contextlib.contextmanager
def _started(
    folder: Path, arguments: Sequence[str], variables: Mapping[str, str], terminal: int
) -> Iterator[client.Command | subprocess.Popen[bytes]]:
    """The command, from a fork server if there is one; it ends with the block."""
    if client.can_be_forked(variables):
        with client.Command(arguments, folder, variables, (None, terminal, terminal)) as forked:
            forked.go()
            yield forked
        return
    process = subprocess.Popen(
        [sys.executable, "-m", "ensemble", *arguments],
        cwd=folder,
        env=dict(variables),
        stdin=subprocess.DEVNULL,
        stdout=terminal,
        stderr=terminal,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # EIO: the last writer has closed it
        return b""
