"""Find and digest the files that the cells of a column name, such as images.

A file's content counts as content of its row: a row whose image has changed is another row.
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


@dataclass(frozen=True)
class FileCells:
    """Hold a column whose cells name files; ``suffix`` is added to each cell.

    Attributes:
        key: the member's key that names the column.
        folder: where relative paths start; None: the table's folder.
        advice: what to do if files are missing.
    """

    column: str
    key: str
    folder: Path | None
    suffix: str = ""
    advice: str = ""

    def path(self, cell: object) -> Path | None:
        """Return the file that a cell names; None for an empty cell. Relative paths need ``folder``."""
        if cell is None or not str(cell).strip():
            return None
        return Path(self.folder or "", f"{cell}{self.suffix}").absolute()


def is_file(path: Path) -> bool:
    """Return whether there is a regular file; a pipe, which may never end, is none."""
    try:
        return path.is_file()
    except (OSError, ValueError):  # too long for the file system, or with a zero byte
        return False


def look_for_files(cells: pa.ChunkedArray, files: FileCells) -> tuple[int, list[tuple[int, Path | None]]]:
    """Check whether files exist, for at most 1,000 rows spread evenly over the table.

    Returns:
        how many rows were checked; the numbers of rows without a file, and the file that each names, if any.
    """
    # Network drives take a millisecond for each file.
    rows = np.unique(np.linspace(0, len(cells) - 1, min(len(cells), 1_000)).astype(np.int64))
    paths = [files.path(cell) for cell in cells.take(pa.array(rows)).to_pylist()]
    with ThreadPoolExecutor(_THREADS) as pool:
        exist = list(pool.map(lambda path: path is not None and is_file(path), paths))
    checked = zip(rows.tolist(), paths, exist, strict=True)
    return len(rows), [(row, path) for row, path, exists in checked if not exists]


def file_digests(cells: pa.ChunkedArray, files: FileCells) -> pa.Array:
    """Return a digest of each row's whole file, as text [rows]; null if there is none that can be read."""
    unique: Sequence[object] = cells.unique().to_pylist()
    with ThreadPoolExecutor(_THREADS) as pool:  # hashlib lets other threads run while it hashes
        by_cell = dict(zip(unique, pool.map(partial(_digest, files), unique), strict=True))
    return pa.array([by_cell[cell] for cell in cells.to_pylist()], pa.string())


def _digest(files: FileCells, cell: object) -> str | None:
    path = files.path(cell)
    if path is None or not is_file(path):
        return None
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, hashlib.blake2b).hexdigest()
    except OSError:
        return None
