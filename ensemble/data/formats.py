"""Choose the format of a table or of predictions by the file extension; each is read into ``Contents``.

A format decides how ids and labels become text, what a template gets for a cell, and where reading stops if rows
are limited. The checks of all formats are in ``table.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ensemble.common.errors import DataError
from ensemble.common.files import PARQUET_EXTENSIONS
from ensemble.data.csv_file import copy_csv_rows, read_csv, read_header, write_csv
from ensemble.data.file_rows import FileRows
from ensemble.data.input_file import Contents, Wanted, delimiter, refuse_url
from ensemble.data.jsonl import copy_jsonl_rows, read_jsonl, write_jsonl
from ensemble.data.parquet import copy_parquet_rows, read_parquet, write_parquet


@dataclass(frozen=True)
class Format:
    """Define how files with some extensions are read.

    Attributes:
        extensions: in lower case.
        gzipped: whether each extension may have .gz behind it.
        header: reads the columns' names alone; without it, ``read`` reads one row for them.
        copy_rows: writes rows of a file with all of its cells, for programs of the user; without it, there is no
            training by a command from such a file.
        write: writes the columns of batches of a published table, for programs of the user.
    """

    read: Callable[[Path, Wanted], Contents]
    extensions: tuple[str, ...]
    gzipped: bool = False
    header: Callable[[Path], tuple[str, ...]] | None = None
    copy_rows: Callable[[Path, FileRows, Path], None] | None = None
    write: Callable[[Path, Sequence[str], Iterable[pa.RecordBatch]], None] | None = None

    def __str__(self) -> str:
        return ", ".join(self.extensions) + (" (each also with .gz)" if self.gzipped else "")


_CSV = Format(read_csv, (".csv", ".tsv"), True, read_header, copy_csv_rows, write_csv)
FORMATS = (
    _CSV,
    Format(read_parquet, PARQUET_EXTENSIONS, copy_rows=copy_parquet_rows, write=write_parquet),
    Format(read_jsonl, (".jsonl", ".ndjson", ".json"), True, None, copy_jsonl_rows, write_jsonl),
)


def read_contents(path: Path, wanted: Wanted) -> Contents:
    """Read a file in the format of its extension.

    Raises:
        DataError: an unknown extension, a missing or unreadable file, or a broken structure (ragged CSV rows, lines
            that are not JSON objects, two columns with one name), after which row numbers are not reliable.
    """
    file_format = known_format(path)
    if file_format is not None:
        return file_format.read(path, wanted)
    refuse_url(path)
    extension = file_extension(path)
    kind = f"of type {extension}" if extension else "without extension"
    raise DataError(f"{path}: cannot read files {kind}; use {', '.join(map(str, FORMATS))}")


def copy_rows(source: Path, rows: FileRows, path: Path) -> None:
    """Write rows of a table's file in its own format, with all of its cells; see ``FileRows``.

    Raises:
        DataError: the format cannot be written, or a cell of ``rows.others`` does not fit.
    """
    file_format = known_format(source)
    if file_format is None or file_format.copy_rows is None:
        formats = ", ".join(str(other) for other in FORMATS if other.copy_rows is not None)
        raise DataError(f"{source}: no rows can be copied from this format; use {formats}")
    file_format.copy_rows(source, rows, path)


def known_format(path: Path) -> Format | None:
    """Return the format of a file by its extension; None if that is unknown."""
    extension = file_extension(path)
    plain = extension.removesuffix(".gz")
    for file_format in FORMATS:
        if plain in file_format.extensions and (file_format.gzipped or plain == extension):
            return file_format
    return None


def is_plain_csv(path: Path) -> bool:
    """Return whether predictions are a CSV file with commas, like those that a run writes."""
    return format_of_predictions(path) is _CSV and delimiter(path) == ","


def format_of_predictions(path: Path) -> Format:
    """Return the format of a file of predictions: CSV if the extension is unknown."""
    return known_format(path) or _CSV


def column_names(path: Path, rows: int | None = 1) -> tuple[str, ...]:
    """Return the columns of predictions; in JSON lines these are the keys of the first lines, None: of all."""
    file_format = format_of_predictions(path)
    if file_format.header is not None:
        return file_format.header(path)
    return file_format.read(path, Wanted("", None, (), rows)).names


def file_extension(path: Path) -> str:
    """Return a file's extension in lower case, with .gz and the one before it together."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])
