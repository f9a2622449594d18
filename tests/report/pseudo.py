"""The command in a pseudo-terminal of a given width, as a user sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping
from pathlib import Path

from tests.project import ROOT, python_path
from tests.waiting import PATIENCE_SECONDS


def in_terminal(
    folder: Path, width: int, *arguments: str, environment: Mapping[str, str] | None = None
) -> str:
    """What ``python -m ensemble ARGUMENTS`` writes to a terminal of ``width`` columns, both streams together."""
    ours, theirs = pty.openpty()
    try:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR")}
        process = subprocess.Popen(
            [sys.executable, "-m", "ensemble", *arguments],
            cwd=folder,
            env={**inherited, "PYTHONPATH": python_path(ROOT), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
        )
    finally:
        os.close(theirs)
    written = bytearray()
    try:
        while data := _read(ours):
            written += data
        process.wait(timeout=PATIENCE_SECONDS)
    finally:
        os.close(ours)
        if process.poll() is None:
            process.kill()
            process.wait()
    return written.decode().replace("\r\n", "\n")


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # EIO: the last writer has closed it
        return b""
