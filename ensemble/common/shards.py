"""What stands in a member's folder of shards: rows with their values, and rows that could not be computed."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.common.errors import WriteError
from ensemble.common.files import atomic_path, read_json

# That are made safe at a time: each waits for the disk twice, and filesystems write what several wait for together.
_SEALED_AT_A_TIME = 8


class ShardSealer:
    """Keeps shards that were computed elsewhere, several at a time."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_SEALED_AT_A_TIME, "sealing")

    def seal(self, shards: Mapping[Path, bytes]) -> dict[Path, WriteError]:
        """Have all of them on the disk when this returns; why some could not be written."""
        # One alone needs no thread.
        how = map if len(shards) < 2 else self._threads.map
        found = zip(shards, how(self._write, shards, shards.values()), strict=True)
        return {path: error for path, error in found if error is not None}

    def _write(self, path: Path, content: bytes) -> WriteError | None:
        try:
            with atomic_path(path) as temporary:
                temporary.write_bytes(content)
        except WriteError as error:
            return error
        return None


def shards_in(folder: Path, rows: int) -> Iterator[pa.Table]:
    """The shards that hold what their names say, in the order of their names; ``rows`` are the table's."""
    tables = (shard_table(read_shard(path), rows) for path in sorted(folder.glob("*.csv")))
    yield from (table for table in tables if table is not None)


def shard_table(content: bytes | None, rows: int) -> pa.Table | None:
    """A shard as a table; None where it is none of a table of so many rows."""
    if content is None:
        return None
    # Types are given, because an empty shard or one of whole numbers would be taken for something else.
    names = content.partition(b"\n")[0].decode("utf-8", "replace").replace('"', "").split(",")
    types = {name: pa.int64() if name == "row" else pa.float64() for name in names}
    try:
        options = pa_csv.ConvertOptions(column_types=types)
        table = pa_csv.read_csv(io.BytesIO(content), convert_options=options)
    except pa.ArrowInvalid:
        return None
    if table.column_names != ["row", *(f"p{label}" for label in range(len(names) - 1))]:
        return None
    numbers = table.column("row").to_numpy()
    return table if not len(numbers) or (numbers.min() >= 0 and numbers.max() < rows) else None


def gather_shards(shards: Iterable[pa.Table], rows: int, labels: int) -> npt.NDArray[np.float64]:
    """Put every shard of a member where it belongs.

    Args:
        shards: tables with a ``row`` column and one column per label, ``p0`` and so on.  A row may stand in
            several, where runs cut their chunks differently.
        rows: rows of the input table.
        labels: how many columns of probabilities there are.

    Returns:
        float64 [rows, labels], in the table's order; NaN where no shard has the row.
    """
    # Columns are written, not rows.
    values = np.full((rows, labels), np.nan, order="F")
    for shard in shards:
        numbers = shard.column("row").to_numpy()
        for label in range(labels):
            values[numbers, label] = shard.column(f"p{label}").to_numpy()
    return values


def bad_rows_in(folder: Path, rows: int) -> dict[int, str]:
    """The rows that could not be computed, with the reasons."""
    return rows_with_reasons(read_json(bad_rows_path(folder)), rows)


def rows_with_reasons(found: object, rows: int) -> dict[int, str]:
    """Rows of a table and why they could not be computed, out of what a JSON file holds."""
    named = found.items() if isinstance(found, dict) else ()
    return {
        int(row): str(why) for row, why in named if re.fullmatch("[0-9]{1,18}", str(row)) and int(row) < rows
    }


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def order_path(shards_dir: Path) -> Path:
    """Where the row numbers of a member stand in the order of its chunks."""
    return shards_dir / "order.npy"


def cpu_choice_path(shards_dir: Path) -> Path:
    """Where it stands with how many threads a member's rows are computed on a CPU, and by how many workers."""
    return shards_dir / "cpu.json"


def rows_path(shards_dir: Path) -> Path:
    """Where it stands which rows a member's shards are of."""
    return shards_dir / "rows.bin"


def bad_rows_path(shards_dir: Path) -> Path:
    """Where the rows that a member cannot compute stand, with the reasons."""
    return shards_dir / "bad_rows.json"


def shard_name(start: int, stop: int, content: bytes) -> str:
    """What a shard is called: the rows it was made for, by their places in the order, and what it must hold."""
    return f"{start:09d}-{stop:09d}.{hashlib.sha256(content).hexdigest()[:32]}.csv"


def read_shard(path: Path) -> bytes | None:
    """A shard's content; None where that is not what its name says, or cannot be read."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    has_digest = path.name.partition(".")[2] == shard_name(0, 0, content).partition(".")[2]
    return content if has_digest else None


def shard_rows(shards_dir: Path) -> int:
    """How many rows the shards in a folder were made for, by their names alone."""
    paths = [*shards_dir.glob("*.csv"), *shards_dir.glob("*/*.csv")]  # those of views are in folders
    done = [re.match(r"(\d+)-(\d+)\.", path.name) for path in paths]
    return sum(int(found[2]) - int(found[1]) for found in done if found)
