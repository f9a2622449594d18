"""Whether a directory is one that runs have made: told by what is in it, so that a copy of it is one, too.

What counts is written by runs alone, and cannot be lost on the way as a hidden file can: the beginning of
``run.json``, seals, parts that hold what their names say, row digests, the first line of ``logs/run.log``.  A copy
may lack some of it, or have it cut short.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from ensemble.rundir import RunDir, read_part
from ensemble.runlog import FIRST_LINE

_RUN_JSON = re.compile(rb'\{\s*"status": "\w+",\s*"pid": \d+,\s*"versions": \{\s*"ensemble": "')
_MADE_OF = rb'"fingerprint": \{\s*"scheme": \d+,\s*"settings": "[0-9a-f]{64}"'
_SEAL = re.compile(rb"\{\s*" + _MADE_OF)
_HEAD_BYTES = 4_096


def is_made_by_runs(rundir: RunDir) -> bool:
    """Whether something in the directory proves that a run has made it."""
    return any(_proofs(rundir))


def strangers(rundir: RunDir) -> list[str]:
    """The names that a run would use and that stand for something to lose; none in a directory of runs.

    Empty files and folders are none, nor are links that lead nowhere.
    """
    named = [path for path in rundir.own_places() if _holds_something(path)]
    return [] if not named or is_made_by_runs(rundir) else [path.name for path in named]


def _proofs(rundir: RunDir) -> Iterator[bool]:
    yield bool(_RUN_JSON.match(_head(rundir.run_json)))
    yield bool(re.match(FIRST_LINE, _head(rundir.run_log)))
    yield from (bool(_SEAL.match(_head(path))) for path in _files(rundir.predictions_dir, "*.json"))
    yield from (bool(_SEAL.match(_head(path))) for path in _files(rundir.predictions_dir, "*.rows"))
    yield from (bool(_SEAL.match(_head(path))) for path in _files(rundir.work_dir, "*/rows.bin"))
    yield from (read_part(path) is not None for path in _files(rundir.work_dir, "*/*.csv"))


def _files(folder: Path, pattern: str) -> Iterator[Path]:
    return iter(()) if folder.is_symlink() else folder.glob(pattern)


def _head(path: Path) -> bytes:
    """The first bytes of a file; nothing of a link, or where there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return b""
    with os.fdopen(descriptor, "rb") as file:
        try:
            return file.read(_HEAD_BYTES) or b""
        except OSError:  # a folder
            return b""


def _holds_something(path: Path) -> bool:
    if path.is_dir() and not path.is_symlink():
        return any(map(_holds_something, path.iterdir()))
    return path.exists() and (path.is_dir() or not path.is_file() or path.stat().st_size > 0)
