"""Whether files are still as they were: their size and times, which every way to replace or write a file changes.

Shared by parent and worker.  Does not read what is in the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

# Bytes, and the times at which content and entry last changed, in nanoseconds.  The last one no program can set:
# it shows a file that was replaced and put back, or written to with its old time restored (POSIX, sys/stat.h).
# Not the inode: file systems that live in user space may number a file anew while it is the same.
FileState: TypeAlias = tuple[int, int, int]

_SHOWN = 3


class FilesChanged(Exception):
    """Files from which numbers were to be made are no longer those that the run has begun with."""


def file_state(path: str | Path) -> FileState | None:
    """The state of a file, or of what a link leads to; None: there is none."""
    try:
        found = os.stat(path)  # noqa: PTH116  takes text as it is
    except (OSError, ValueError):
        return None
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def folder_states(folder: str | Path) -> dict[str, FileState]:
    """The states of the files right below a folder, by absolute path; none where there is no such folder."""
    try:
        names = os.listdir(folder)  # noqa: PTH208  takes text as it is
    except OSError:
        return {}
    paths = [os.path.abspath(os.path.join(folder, name)) for name in names]  # noqa: PTH100, PTH118
    states = ((path, file_state(path)) for path in paths if os.path.isfile(path))  # noqa: PTH113
    return {path: state for path, state in states if state is not None}


def changed_files(before: Mapping[str, Sequence[int]]) -> list[str]:
    """Those of the files that are gone or not as they were, by path."""
    return [path for path, state in before.items() if file_state(path) != tuple(state)]


def check_unchanged(before: Mapping[str, Sequence[int]]) -> None:
    """Find all files as they were.

    Raises:
        FilesChanged: one was replaced, written to, touched or removed; the message names it.
    """
    if found := changed_files(before):
        raise FilesChanged(changed_text(found))


def changed_text(paths: Iterable[str]) -> str:
    """The sentence for files that changed while a run was going on."""
    names = sorted(paths)
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return (
        f"{', '.join(names[:_SHOWN])}{more} changed during the run (replaced, written to, touched, removed, or "
        "given other rights or links); nothing is made of old and new files together: run the same command again "
        "when they are complete"
    )
