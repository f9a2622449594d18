"""Runs commands one after the other: the seconds until the last has ended, and the most memory they held."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# Looking through a hundred processes takes two milliseconds of one core.
_SAMPLE_SECONDS = 0.25
_GIVE_UP_SECONDS = 1800.0
_END_SECONDS = 20.0
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Failed(Exception):
    """A command has failed; the message says which, and the end of what it printed."""


@dataclass(frozen=True)
class Measured:
    """What some commands took together.

    Attributes:
        seconds: of wall time, from the first one's start to the last one's end.
        peak_bytes: resident memory of all processes of the tree at the same moment, sampled four times a second.
            What processes share, such as libraries, counts for each of them.
    """

    seconds: float
    peak_bytes: int


def measure(
    commands: Sequence[Sequence[str]], folder: Path, environment: Mapping[str, str], log: Path
) -> Measured:
    """Run commands one after the other in ``folder``.

    Args:
        log: gets what they print.

    Raises:
        Failed: one ended with an error, or took half an hour.
    """
    peak = 0
    began = time.monotonic()
    with log.open("wb") as output:
        for command in commands:
            process = subprocess.Popen(
                command, cwd=folder, env=dict(environment), stdout=output, stderr=subprocess.STDOUT
            )
            with _Watch(process.pid) as watch:
                _wait(process, command)
            peak = max(peak, watch.peak_bytes)
            if process.returncode:
                said = log.read_text(encoding="utf-8", errors="replace")[-2000:]
                raise Failed(f"{' '.join(command)} ended with exit code {process.returncode}:\n{said}")
    return Measured(time.monotonic() - began, peak)


def cpu_seconds() -> float:
    """Of all processes that this one has waited for, with those that they have waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _wait(process: subprocess.Popen[bytes], command: Sequence[str]) -> None:
    try:
        process.wait(_GIVE_UP_SECONDS)
    except subprocess.TimeoutExpired:
        raise Failed(f"{' '.join(command)} took more than {_GIVE_UP_SECONDS:.0f} s") from None
    finally:
        if process.poll() is None:  # it was given up, or the user was: its workers end with it
            process.terminate()
            try:
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class _Watch:
    """Samples the memory of a process and all its descendants while the block runs."""

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while True:
            self.peak_bytes = max(self.peak_bytes, sum(map(_resident_bytes, _tree(self._pid))))
            if self._over.wait(_SAMPLE_SECONDS):
                return


def _tree(pid: int) -> list[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            # The program's name stands in brackets and may hold anything; behind it: state, parent.
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        found.append(waiting.pop())
        waiting += children.get(found[-1], ())
    return found


def _resident_bytes(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except OSError:
        return 0  # it has ended
