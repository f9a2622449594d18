"""Read and write a job's folder of shards: rows with their values, and rows that could not be computed."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.common.errors import WriteError
from ensemble.common.files import atomic_path, read_json

# What a folder of shards holds beside them: the row numbers in the order of the chunks, other members' predictions
# that the job reads, digests of these rows, the rows that cannot be computed, what a run chose for the job's model,
# and a folder that a python member's workers share.
ORDER_FILE: Final = "order.npy"
INPUTS_FILE: Final = "inputs.arrow"
ROWS_FILE: Final = "rows.bin"
BAD_ROWS_FILE: Final = "bad_rows.json"
CHOICES_FILE: Final = "choices.json"
CACHE_FOLDER: Final = "cache"


def write_shards(shards: Mapping[Path, bytes]) -> dict[Path, WriteError]:
    """Write shards that other machines computed, safely on the disk; return the errors of those that failed."""

    def write(path: Path, content: bytes) -> WriteError | None:
        try:
            with atomic_path(path) as temporary:
                temporary.write_bytes(content)
        except WriteError as error:
            return error
        return None

    # Each shard waits for the disk twice, and file systems serve several such waits together.
    with ThreadPoolExecutor(8, "shards") as pool:
        errors = pool.map(write, shards, shards.values())
        return {path: error for path, error in zip(shards, errors, strict=True) if error is not None}


def shards_in(folder: Path, rows: int) -> Iterator[pa.Table]:
    """Yield the intact shards of a table of so many rows, in the order of their names."""
    for path in sorted(folder.glob("*.csv")):
        table = shard_table(read_shard(path), rows)
        if table is not None:
            yield table


def shard_table(content: bytes | None, rows: int) -> pa.Table | None:
    """Return a shard as a table; None if it is not a shard of a table of so many rows."""
    if content is None:
        return None
    # Types are set, because empty columns and whole numbers would get other types.
    names = content.partition(b"\n")[0].decode("utf-8", "replace").replace('"', "").split(",")
    types = {name: pa.int64() if name == "row" else pa.float64() for name in names}
    try:
        options = pa_csv.ConvertOptions(column_types=types)
        table = pa_csv.read_csv(io.BytesIO(content), convert_options=options)
    except pa.ArrowInvalid:
        return None
    if table.column_names != ["row"] + [f"p{label}" for label in range(len(names) - 1)]:
        return None
    numbers = table.column("row").to_numpy()
    return table if not len(numbers) or (numbers.min() >= 0 and numbers.max() < rows) else None


def gather_shards(shards: Iterable[pa.Table], rows: int, labels: int) -> npt.NDArray[np.float64]:
    """Join the shards of a job: float64 [rows, labels], in the table's order; NaN if no shard has the row.

    Several shards may have the same row, if runs cut their chunks differently.
    """
    # In columns, because these are written.
    values = np.full((rows, labels), np.nan, order="F")
    for shard in shards:
        numbers = shard.column("row").to_numpy()
        for label in range(labels):
            values[numbers, label] = shard.column(f"p{label}").to_numpy()
    return values


def bad_rows_in(folder: Path, rows: int) -> dict[int, str]:
    """Return the rows that could not be computed, with the reasons."""
    return rows_with_reasons(read_json(folder / BAD_ROWS_FILE), rows)


def rows_with_reasons(document: object, rows: int) -> dict[int, str]:
    """Return the valid rows of a JSON document {row: why it could not be computed}."""
    if not isinstance(document, dict):
        return {}
    return {
        int(row): str(reason)
        for row, reason in document.items()
        if re.fullmatch("[0-9]{1,18}", str(row)) and int(row) < rows
    }


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file's content, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def shard_name(start: int, stop: int, content: bytes, in_float32: bool = False) -> str:
    """Return a shard's name: where its rows begin and end in the order, and a digest of its content.

    Args:
        in_float32: whether chunks after this one start in float32.  The name says it, so that it is on record as
            soon as the shard is there.
    """
    ending = "float32.csv" if in_float32 else "csv"
    return f"{start:09d}-{stop:09d}.{hashlib.sha256(content).hexdigest()[:32]}.{ending}"


def starts_in_float32(shards_dir: Path) -> bool:
    """Return whether a job's next chunks start in float32, by the names of its shards."""
    return any(shards_dir.glob("*.float32.csv"))


def read_shard(path: Path) -> bytes | None:
    """Return a shard's content; None if it cannot be read or has another digest than its name."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    names = [shard_name(0, 0, content, in_float32) for in_float32 in (False, True)]
    has_digest = path.name.partition(".")[2] in [name.partition(".")[2] for name in names]
    return content if has_digest else None


def shard_rows(shards_dir: Path) -> int:
    """Return how many rows the shards in a folder are for, by their names alone."""
    matches = [re.match(r"(\d+)-(\d+)\.", path.name) for path in shards_dir.glob("*.csv")]
    return sum(int(match[2]) - int(match[1]) for match in matches if match)


def write_bits(path: Path, flags: npt.NDArray[np.bool_] | None) -> None:
    """Write a bit for each flag, each row of flags from a new byte on; None: remove the file."""
    if flags is None:
        path.unlink(missing_ok=True)
        return
    with atomic_path(path) as temporary:
        temporary.write_bytes(np.packbits(flags, axis=-1).tobytes())


def read_bits(path: Path, count: int, rows: int) -> npt.NDArray[np.bool_] | None:
    """Return flags, bool [count, rows]; None if there are none, or others."""
    bits = np.frombuffer(path.read_bytes() if path.exists() else b"", np.uint8)
    if not len(bits) or len(bits) != count * -(-rows // 8):
        return None
    return np.unpackbits(bits.reshape(count, -1), axis=1, count=rows).astype(np.bool_)
