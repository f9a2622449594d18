"""Open input files of any format, report their problems, and hold their contents."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.files import dangling_link, is_parquet, unreadable
from ensemble.common.text import did_you_mean, error_text, listed, quoted, similar_file

# Marks a field whose cells are JSON text, for values that are not text; workers read the mark, too
# (published_table.py).
JSON_MARK = {b"ensemble": b"json"}
# Messages by a file's first bytes. A file with a Parquet name gets the message of the Parquet reader instead.
_OTHER_FORMATS = {
    b"PK\x03\x04": "is a zip archive, as Excel files are, not text; save its content as CSV",
    b"PAR1\x15": "is a Parquet file; give it a name that ends in .parquet",
    b"\x1f\x8b": "is compressed with gzip, which its name does not say; unpack it, or add .gz to its name",
    **dict.fromkeys((b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"BZh"), "is compressed; unpack it first"),
}
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Wanted:
    """Name the columns to read, of the first ``limit`` rows; a column may be id, label and text at the same time.

    Columns in ``numbers`` are read as numbers by formats without types, if all their cells are numbers.
    """

    id_column: str
    label_column: str | None
    columns: tuple[str, ...]
    limit: int | None
    numbers: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """Return all columns, each once."""
        label = [] if self.label_column is None else [self.label_column]
        return list(dict.fromkeys([self.id_column, *label, *self.columns]))


@dataclass(frozen=True)
class Contents:
    """Hold the wanted columns of a file, and every column's name.

    Attributes:
        ids: strings, [rows]; None if the column is missing or cannot be an id. ``labels`` is the same.
        columns: the wanted columns that the file has. A field marked with JSON_MARK has JSON text.
        problems: of single cells or types, a sentence each.
        remarks: what the user should know of the cells, a sentence each.
    """

    rows: int
    names: tuple[str, ...]
    ids: pa.ChunkedArray | None
    labels: pa.ChunkedArray | None
    columns: pa.Table
    problems: tuple[str, ...]
    remarks: tuple[str, ...] = ()


def shown_type(kind: pa.DataType) -> str:
    """Return a type's name, cut if it is long, for example a struct of many fields."""
    name = " ".join(str(kind).split())
    return name if len(name) <= 60 else f"{name[:60]}..."


@contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading, uncompressed if its name ends in ``.gz``.

    Raises:
        DataError: the file does not exist (a similar name is shown), is a directory, a pipe, empty or UTF-16, or
            cannot be read; inside the ``with``, while reading: its gzip stream is broken or cut short.
    """
    refuse_url(path)
    link_problem = dangling_link(path)
    if link_problem:
        raise DataError(link_problem)
    try:
        if path.is_dir():
            raise DataError(f"{path}: is a directory; name the file inside it")
        if path.exists() and not path.is_file():
            raise DataError(f"{path}: is not a regular file; save its content to a file first")
        opened = gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # noqa: SIM115
        with cast(BinaryIO, opened) as stream:
            start = stream.read(5)
            if not start:
                raise DataError(f"{path}: the file is empty")
            if start.startswith(_UTF16_MARKS):
                raise DataError(f"{path}: is UTF-16, not UTF-8; convert it with: iconv -f UTF-16 -t UTF-8")
            if not is_parquet(path):
                for mark, problem in _OTHER_FORMATS.items():
                    if start.startswith(mark):
                        raise DataError(f"{path}: {problem}")
            stream.seek(0)
            yield stream
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: not a whole gzip file ({error_text(error)}); copy or download it again"
        ) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        raise DataError(f"{path}: no such file{similar_file(path)}") from error
    except OSError as error:
        raise DataError(unreadable(path, error)) from error


def refuse_url(path: Path) -> None:
    """Raise DataError if the path is a URL; ``Path`` has removed the second of its slashes."""
    scheme, colon, address = str(path).partition(":/")
    if colon and len(scheme) > 1 and scheme.isalnum() and not path.exists():
        raise DataError(f"{scheme}://{address}: is a URL; download the file first, then name it here")


def without_pandas_index(names: Sequence[str]) -> list[str]:
    """Return the names without the columns that pandas writes for an index without a name."""
    return [name for name in names if not re.fullmatch(r"__index_level_\d+__", name)]


def check_names(path: Path, names: Sequence[str], read: Collection[str]) -> None:
    """Raise DataError if two columns have the same name, of those that are read."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1 and name in read)
    if twice:
        raise DataError(f"{path}: the header names {listed(twice)} more than once; rename the columns")


def delimiter(path: Path) -> str:
    """Return what separates a CSV file's cells, judged by its name: a comma, or a tab."""
    return "\t" if ".tsv" in [suffix.lower() for suffix in path.suffixes[-2:]] else ","


def other_separator(path: Path, names: Sequence[str]) -> str | None:
    """Return what separates the columns of a header that seems to have one, in words; None if nothing does."""
    words = {"\t": "tabs; name it .tsv", ",": "commas; name it .csv"}
    words |= {";": "semicolons; write it with commas", "|": "bars; write it with commas"}
    marks = [mark for mark in words if mark != delimiter(path) and mark in names[0]]
    return f"its columns are separated by {words[marks[0]]}" if len(names) == 1 and marks else None


def missing_column(
    path: Path, role: str, name: str, present: Sequence[str], read_by: str | None = None
) -> str:
    """Return the problem of a missing column, which the key ``read_by`` needs, with the columns that there are."""
    separator = other_separator(path, present)
    hint = f" ({separator})" if separator else did_you_mean(name, present)
    reader = f", which {read_by} reads" if read_by else ""
    return f"{path}: no {role} {quoted(name)}{hint}{reader}; the columns are {listed(present)}"


def first_ids(ids: pa.Array | pa.ChunkedArray) -> str:
    """Return the first few ids, for a message."""
    return ", ".join(map(quoted, ids[:3].to_pylist())) + (", ..." if len(ids) > 3 else "")


def is_json_field(column: pa.Field) -> bool:
    """Return whether a column's text is JSON for values that are not text."""
    return bool(column.metadata) and column.metadata.get(b"ensemble") == b"json"


def joined_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column as strings, or as large strings from 2 GB on, so that its chunks can be combined."""
    if not is_text(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.large_string()) if column.nbytes >= 1 << 31 else column


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_binary(kind: pa.DataType) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(check(kind) for check in checks)


def cell_texts(column: pa.Array) -> pa.Array:
    """Return cells as text or bytes: numbers and times as Arrow writes them, others as JSON, nulls as nulls."""
    if is_text(column.type) or is_binary(column.type):
        return column
    try:
        return pc.cast(column, pa.large_string())
    except pa.ArrowException:  # a nested type, or another type that Arrow cannot write as text
        cells = column.to_pylist()
        texts = [
            None if cell is None else json.dumps(cell, ensure_ascii=False, default=str) for cell in cells
        ]
        return pa.array(texts, pa.large_string())


def column_texts(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column's ``cell_texts`` as large strings."""
    chunks = [pc.cast(cell_texts(chunk), pa.large_string()) for chunk in column.chunks]
    return pa.chunked_array(chunks, pa.large_string())


def text_ends(cells: pa.Array) -> npt.NDArray[np.integer]:
    """Return where the first cell begins and where each ends in the array's third buffer, [rows + 1]."""
    width = 8 if cells.type in (pa.large_string(), pa.large_binary()) else 4
    offsets = cells.buffers()[1]
    if not len(cells):  # Arrow may have a buffer or not
        return np.zeros(1, np.int64)
    return np.frombuffer(offsets, f"<i{width}", len(cells) + 1, cells.offset * width)
