"""Columns whose cells name files, such as images: where these are, and what they hold, as digests.

What a file holds counts as what its row holds: a row whose image has changed is another row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa

_THREADS = 8
_hash = partial(hashlib.blake2b, digest_size=32)
# Rows that are looked at before a run starts: network drives take a millisecond for each.
_LOOKED_AT = 1_000


@dataclass(frozen=True)
class FileCells:
    """A column of text whose cells name files.

    Attributes:
        column: of the table.
        key: of the member, which names it.
        folder: where relative paths start; None: that of the table.
        suffix: stands behind each cell in the file's name.
        advice: what to do where files are missing.
    """

    column: str
    key: str
    folder: Path | None
    suffix: str = ""
    advice: str = ""

    def path(self, cell: object) -> Path | None:
        """The file that a cell names; None where it names none.

        An absolute path stands for itself; ``folder`` must be known for others.
        """
        if cell is None or not str(cell).strip():
            return None
        return Path(self.folder or "", f"{cell}{self.suffix}").absolute()


def is_file(path: Path) -> bool:
    """Whether there is a regular file: not a pipe, of which nobody knows when it ends."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for the file system, a zero byte in it
        return False


@dataclass(frozen=True)
class LookedAt:
    """Some rows of a table, and which of them have no file.

    Attributes:
        rows: how many were looked at.
        missing: the numbers of those without, and the file that each names, if any.
    """

    rows: int
    missing: tuple[tuple[int, Path | None], ...]


def look_for_files(cells: pa.ChunkedArray, files: FileCells) -> LookedAt:
    """Look whether files are there, of at most 1,000 rows evenly spread over the table.

    Args:
        cells: the column, text [rows].
    """
    rows = np.unique(np.linspace(0, len(cells) - 1, min(len(cells), _LOOKED_AT)).astype(np.int64))
    paths = [files.path(cell) for cell in cells.take(pa.array(rows)).to_pylist()]
    with ThreadPoolExecutor(_THREADS) as pool:
        there = pool.map(lambda path: path is not None and is_file(path), paths)
        looked = zip(rows.tolist(), paths, there, strict=True)
        return LookedAt(len(rows), tuple((row, path) for row, path, is_there in looked if not is_there))


def file_digests(cells: pa.ChunkedArray, files: FileCells) -> pa.Array:
    """A digest of every byte of each row's file, as text [rows]; null where there is none that can be read.

    Args:
        cells: the column, text [rows].
    """
    unique: Sequence[object] = cells.unique().to_pylist()
    with ThreadPoolExecutor(_THREADS) as pool:  # hashlib lets other threads run while it hashes
        known = dict(zip(unique, pool.map(partial(_digest, files), unique), strict=True))
    return pa.array([known[cell] for cell in cells.to_pylist()], pa.string())


def _digest(files: FileCells, cell: object) -> str | None:
    path = files.path(cell)
    if path is None or not is_file(path):
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, _hash).hexdigest()
    except OSError:
        return None
