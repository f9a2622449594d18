"""An input file, whatever its format: opening it, naming what is wrong with it, and what was read from it.

Does not know any format.
"""

from __future__ import annotations

import gzip
import json
import re
import stat
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.files import dangling_link, unreadable
from ensemble.common.text import did_you_mean, error_text, listed, quoted, similar_file

# The worker knows this mark as well (published_table.py): the field's text is JSON for a value that is not text.
JSON_MARK = {b"ensemble": b"json"}
# By their first bytes; under a name of Parquet's it is for its reader to say what is wrong.
_OTHER_FORMATS = {
    b"PK\x03\x04": "is a zip archive, as Excel's files are, not text; save what is in it as CSV",
    b"PAR1\x15": "is a Parquet file; give it a name that ends in .parquet",
}
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Wanted:
    """What to read: a column may be the id, the label and a text all at once.

    Attributes:
        limit: read only the first so many rows.
        numbers: those of ``columns`` that a format without types reads as numbers, if they hold nothing else.
    """

    id_column: str
    label_column: str | None
    columns: tuple[str, ...]
    limit: int | None
    numbers: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """All of them, each once."""
        label = [] if self.label_column is None else [self.label_column]
        return list(dict.fromkeys([self.id_column, *label, *self.columns]))


@dataclass(frozen=True)
class Contents:
    """What a file holds of the wanted columns.

    Attributes:
        rows: rows read.
        names: every column in the file.
        ids: shape (rows,), strings; None if the column is missing or cannot serve as an id.
        labels: the same for the label column.
        columns: those of the wanted columns that are there.  A field marked with JSON_MARK holds JSON text.
        problems: what is wrong with single cells or types.
    """

    rows: int
    names: tuple[str, ...]
    ids: pa.ChunkedArray | None
    labels: pa.ChunkedArray | None
    columns: pa.Table
    problems: tuple[str, ...]


def shown_type(kind: pa.DataType, most: int = 60) -> str:
    """A type's name; that of a struct of many fields is cut."""
    name = " ".join(str(kind).split())
    return name if len(name) <= most else f"{name[:most]}..."


@contextmanager
def open_input(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for reading, uncompressed if its name ends in ``.gz``.

    Raises:
        DataError: there is no such file (names one that is close), it is a directory, a pipe, empty or UTF-16, it
            cannot be read, or (while reading, inside the ``with``) its gzip stream is broken or cut short.
    """
    refuse_url(path)
    if link := dangling_link(path):
        raise DataError(link)
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise DataError(f"{path}: is a directory; name the file inside it")
        if not stat.S_ISREG(mode):
            what = "is not a regular file, and it must be read more than once"
            raise DataError(f"{path}: {what}; save its content to a file first")
        opened = gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb")  # noqa: SIM115
        with cast(BinaryIO, opened) as stream:
            start = stream.read(5)
            if not start:
                raise DataError(f"{path}: the file is empty")
            if start.startswith(_UTF16_MARKS):
                raise DataError(f"{path}: is UTF-16, not UTF-8; convert it with: iconv -f UTF-16 -t UTF-8")
            if path.suffix.lower() not in (".parquet", ".pq"):
                for mark, other in _OTHER_FORMATS.items():
                    if start.startswith(mark):
                        raise DataError(f"{path}: {other}")
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
    """Raises DataError where a URL was given; as a path it has lost one of its two slashes."""
    scheme, colon, rest = str(path).partition(":/")
    if colon and len(scheme) > 1 and scheme.isalnum() and not path.exists():
        raise DataError(f"{scheme}://{rest}: is a URL; download the file first, then name it here")


def without_pandas_index(names: Sequence[str]) -> list[str]:
    """The columns, but for those in which pandas keeps an index that has no name."""
    return [name for name in names if not re.fullmatch(r"__index_level_\d+__", name)]


def check_names(path: Path, names: Sequence[str]) -> None:
    """Raises DataError where two columns share a name."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise DataError(f"{path}: the header names {listed(twice)} more than once; rename the columns")


def missing_column(
    path: Path, role: str, name: str, present: Sequence[str], read_by: str | None = None
) -> str:
    """The problem of a column that is not there: the nearest name and the list of columns that are.

    Args:
        read_by: the key that asks for it.
    """
    hint = did_you_mean(name, present)
    if len(present) == 1 and any(mark in present[0] for mark in ";\t|"):
        hint = " (the header has a single column: are the columns separated by commas?)"
    reader = f", which {read_by} reads" if read_by else ""
    return f"{path}: no {role} {quoted(name)}{hint}{reader}; the columns are {listed(present)}"


def first_ids(ids: pa.Array | pa.ChunkedArray, most: int = 3) -> str:
    """The first few of some ids, for a message."""
    return ", ".join(map(quoted, ids[:most].to_pylist())) + (", ..." if len(ids) > most else "")


def is_json_field(column: pa.Field) -> bool:
    """Whether a column's text is JSON for values that are not text."""
    return bool(column.metadata) and column.metadata.get(b"ensemble") == b"json"


def joined_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column as strings that stay usable as a whole: large strings once its text passes 2 GB."""
    if not is_text(column.type):
        column = column.cast(pa.string())
    return column.cast(pa.large_string()) if column.nbytes >= 1 << 31 else column


def is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_binary(kind: pa.DataType) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    return any(check(kind) for check in checks)


def cell_texts(column: pa.Array) -> pa.Array:
    """The cells as text or bytes: as they are, as Arrow spells numbers and times, or as JSON; nulls stay nulls."""
    if is_text(column.type) or is_binary(column.type):
        return column
    try:
        return pc.cast(column, pa.large_string())
    except pa.ArrowException:  # nested, or a type that has no text of its own
        return pa.array(
            [
                None if cell is None else json.dumps(cell, ensure_ascii=False, default=str)
                for cell in column.to_pylist()
            ],
            pa.large_string(),
        )


def text_ends(cells: pa.Array) -> npt.NDArray[np.integer]:
    """Where each cell's text ends in the array's third buffer, [rows + 1]; before that, where the first begins."""
    width = 8 if cells.type in (pa.large_string(), pa.large_binary()) else 4
    offsets = cells.buffers()[1]
    if not len(cells):  # for which Arrow may keep a buffer or not
        return np.zeros(1, np.int64)
    return np.frombuffer(offsets, f"<i{width}", len(cells) + 1, cells.offset * width)


def text_bytes(cells: pa.Array) -> pa.Buffer:
    """The bytes of all cells in one piece, without a copy; none of them is null."""
    data, ends = cells.buffers()[2], text_ends(cells)
    return pa.py_buffer(b"") if data is None else data.slice(int(ends[0]), int(ends[-1] - ends[0]))
