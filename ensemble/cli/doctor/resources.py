"""Memory, CPUs and disk: whether there is enough of each for a run to start."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ensemble.cli.doctor.finding import Finding
from ensemble.common.files import cannot_write, unwritable_reason
from ensemble.common.host import available_memory_bytes, own_groups, total_memory_bytes
from ensemble.common.text import gib

# Importing torch and transformers takes a worker to 0.4 GiB before it has a model.
_MEMORY_NEEDED = 512 << 20
_MEMORY_WANTED = 2 << 30
_DISK_NEEDED = 50 << 20
_DISK_WANTED = 1 << 30
# Docker gives 64 MiB unless it is told otherwise.
_SHARED_WANTED = 64 << 20
_ELSEWHERE = "choose another directory, or make room there"


def memory_findings(available: int | None, total: int | None, shared: int | None) -> Iterator[Finding]:
    """Memory of the host, within the limits of the container.

    Args:
        available: bytes that can be used, None where it is not known; ``total`` alike.
        shared: bytes free in /dev/shm, None where there is none.
    """
    if available is None or total is None:
        yield Finding("note", "the system does not say how much memory is free", "watch it in the first run")
    else:
        text = f"{gib(available)} of {gib(total)} memory free"
        if available < _MEMORY_NEEDED:
            yield Finding(
                "problem", text, "end other programs or raise the container's limit; a worker needs more"
            )
        elif available < _MEMORY_WANTED:
            yield Finding(
                "note", text, "end other programs or raise the container's limit; only small models fit"
            )
        else:
            yield Finding("ok", text)
    if shared is None:
        yield Finding("note", "there is no /dev/shm", "mount it if a library asks for shared memory")
    elif shared < _SHARED_WANTED:
        advice = "if a library asks for more, start the container with --shm-size=1g or --ipc=host"
        yield Finding("note", f"{gib(shared)} of shared memory free in /dev/shm", advice)
    else:
        yield Finding("ok", f"{gib(shared)} of shared memory free in /dev/shm")


def host_findings() -> Iterator[Finding]:
    """Memory and CPUs of this host as it is now."""
    shm = Path("/dev/shm")
    shared = shutil.disk_usage(shm).free if shm.is_dir() else None
    yield from memory_findings(available_memory_bytes(), total_memory_bytes(), shared)
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield cpu_finding(allowed, os.cpu_count() or allowed, own_groups("cpu").cpu_limit())


def cpu_finding(allowed: int, there: int, limit: float | None) -> Finding:
    """CPUs that this process may use.

    Args:
        allowed: those it may run on.
        there: those the machine has.
        limit: how many CPUs' time its container gets, None for no limit.
    """
    text = f"{allowed} of {there} CPUs may be used"
    if limit is None or limit >= allowed:
        return Finding("ok", text)
    text += f", and the container's limit is the time of {limit:g}"
    # torch starts a thread for each CPU it sees; they then wait for one another.
    return Finding("note", text, f"set OMP_NUM_THREADS={max(1, int(limit))}, or raise the limit")


def disk_findings(key: str, place: Path) -> Iterator[Finding]:
    """Whether a directory can be made and written, and how much room there is.

    Args:
        key: what the place is called in messages, such as "output_dir".
        place: need not exist; nothing is left there.
    """
    reason = unwritable_reason(key, place)
    folder = place.absolute()
    while not folder.exists():
        folder = folder.parent
    if reason is None:
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"x")
        except OSError as error:  # such as a quota, which no question about rights shows
            reason = cannot_write(key, place, error)
    if reason is not None:
        yield Finding.of_sentence("problem", reason, _ELSEWHERE)
    else:
        yield room_finding(key, place, shutil.disk_usage(folder).free)


def room_finding(key: str, place: Path, free: int) -> Finding:
    """Whether ``free`` bytes on the disk of ``place`` are enough."""
    text = f"{key}: {gib(free)} free at {place.absolute()}"
    if free < _DISK_NEEDED:
        return Finding("problem", text, _ELSEWHERE)
    if free < _DISK_WANTED:
        return Finding("note", text, "make room: the results and a copy of the table go there")
    return Finding("ok", text)
