"""An input file, whatever its format: opening it, naming what is wrong with it, and what was read from it.

Does not know any format.
"""

from __future__ import annotations

import gzip
import json
import mmap
import re
import stat
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError, WriteError
from ensemble.common.files import dangling_link, unreadable
from ensemble.common.text import did_you_mean, error_text, listed, quoted, similar_file

# The worker knows this mark as well (published_table.py): the field's text is JSON for a value that is not text.
JSON_MARK = {b"ensemble": b"json"}
# By their first bytes; under a name of Parquet's it is for its reader to say what is wrong.
_OTHER_FORMATS = {
    b"PK\x03\x04": "is a zip archive, as Excel's files are, not text; save what is in it as CSV",
    b"PAR1\x15": "is a Parquet file; give it a name that ends in .parquet",
}
# Of a table's columns, in memory; and of a batch that is mapped: a column of strings holds less than 2 GB.
HELD_BYTES = 256 << 20
_MAPPED_ROWS, _MAPPED_BYTES = 65_536, 32 << 20
# Between the columns' many small buffers the allocator keeps what a parser has freed, at worst as much again as the
# table; giving it back every so many blocks costs next to nothing.
_SWEPT_BATCHES = 16
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class Wanted:
    """What to read: a column may be the id, the label and a text all at once."""

    id_column: str
    label_column: str | None
    columns: tuple[str, ...]
    limit: int | None

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
    """A column as strings that stay usable as a whole: large strings once its text passes 2 GB."""
    is_long = column.nbytes >= 1 << 31 and pa.types.is_string(column.type)
    kind = pa.large_string() if is_long else column.type if is_text(column.type) else pa.string()
    if column.type == kind:
        return column
    schema = pa.schema([pa.field("", kind)])
    parts = (pa.record_batch([pc.cast(chunk, kind)], schema=schema) for chunk in column.chunks)
    return joined_text(held_table(parts, schema).column(0))


def held_table(batches: Iterable[pa.RecordBatch], schema: pa.Schema | None = None) -> pa.Table:
    """Batches as a table; what is more than ``HELD_BYTES`` stands in files without a name, which are mapped.

    The kernel may then take its pages back where memory is short.  A column has a file of its own, so that none of
    it stays once nobody holds the column any more.

    Args:
        schema: of all batches; None: there is at least one.

    Raises:
        WriteError: there is no room for the files.
    """
    held: list[pa.RecordBatch] = []
    size = 0
    following = iter(batches)
    for batch in following:
        held.append(batch)
        size += batch.nbytes
        if len(held) % _SWEPT_BATCHES == 0:
            pa.default_memory_pool().release_unused()
        if size >= HELD_BYTES:
            return _mapped_table(chain(held, following), schema or batch.schema)
    return pa.Table.from_batches(held, schema)


def _mapped_table(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.Table:
    schemas = [pa.schema([field]) for field in schema]
    with ExitStack() as opened:
        try:
            files = [opened.enter_context(tempfile.TemporaryFile()) for _ in schema]
        except OSError as error:
            raise _not_kept(error) from error
        writers = [
            pa.ipc.new_file(pa.PythonFile(file, "w"), one) for file, one in zip(files, schemas, strict=True)
        ]
        gathered, rows, size = list[pa.RecordBatch](), 0, 0
        for batch in chain(batches, [None]):
            if batch is not None:
                gathered.append(batch)
                rows += len(batch)
                size += batch.nbytes
                if rows < _MAPPED_ROWS and size < _MAPPED_BYTES:
                    continue
            whole = pa.Table.from_batches(gathered, schema)
            gathered, rows, size = [], 0, 0
            try:
                for column, writer, one in zip(whole.columns, writers, schemas, strict=True):
                    writer.write_table(pa.table([column.combine_chunks()], schema=one))
                    if batch is None:
                        writer.close()
                for file in files:
                    file.flush()
            except OSError as error:
                for file in files:
                    with suppress(OSError):  # what is in its buffer does not fit either
                        file.close()
                raise _not_kept(error) from error
        columns = []
        for file in files:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            columns.append(pa.ipc.open_file(pa.BufferReader(pa.py_buffer(mapped))).read_all().column(0))
        return pa.table(columns, schema=schema)


def _not_kept(error: OSError) -> WriteError:
    where = tempfile.tempdir or "any folder for temporary files"
    return WriteError(
        f"cannot write to {where} ({error.strerror or error}), where a large table is kept while it is read; make "
        "room there, or set TMPDIR to another folder"
    )


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


@contextmanager
def malloc_for_arrow() -> Iterator[None]:
    """Let pyarrow take memory from malloc: while files are read its own allocator holds on to 60 to 100 MB more."""
    before = pa.default_memory_pool()
    pa.set_memory_pool(pa.system_memory_pool())
    try:
        yield
    finally:
        pa.set_memory_pool(before)
