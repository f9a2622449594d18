"""The formats of tables and predictions, by the extensions of their files; each is read into the same ``Contents``.

A format owns what depends on it: how ids and labels become text, what a cell becomes for a template, how far to
read when the rows are limited.  The checks that hold for every format are in ``table.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ensemble.common.errors import DataError
from ensemble.data.csv_file import is_comma_separated, read_csv, read_header
from ensemble.data.input_file import Contents, Wanted, refuse_url
from ensemble.data.jsonl import read_jsonl
from ensemble.data.parquet import read_parquet


@dataclass(frozen=True)
class Format:
    """How to read files with these extensions, in lower case; ``gzipped``: with .gz behind them as well.

    ``header`` gives the columns' names alone; without it ``read`` does, which reads a row.
    """

    read: Callable[[Path, Wanted], Contents]
    extensions: tuple[str, ...]
    gzipped: bool = False
    header: Callable[[Path], tuple[str, ...]] | None = None

    def __str__(self) -> str:
        return ", ".join(self.extensions) + (" (each also with .gz)" if self.gzipped else "")


_CSV = Format(read_csv, (".csv", ".tsv"), gzipped=True, header=read_header)
FORMATS = (
    _CSV,
    Format(read_parquet, (".parquet", ".pq")),
    Format(read_jsonl, (".jsonl", ".ndjson", ".json"), gzipped=True),
)


def read_contents(path: Path, wanted: Wanted) -> Contents:
    """Reads the file by its extension.

    Raises:
        DataError: an unknown extension, a missing or unreadable file, or a broken structure (ragged CSV
            rows, lines that are not JSON objects, two columns with one name), after which no row number
            can be counted on.
    """
    if (known := known_format(path)) is not None:
        return known.read(path, wanted)
    refuse_url(path)
    extension = _extension(path)
    kind = f"of type {extension}" if extension else "without extension"
    raise DataError(f"{path}: cannot read files {kind}; use {', '.join(map(str, FORMATS))}")


def known_format(path: Path) -> Format | None:
    """The format of a file by its extension; None where that is not known."""
    extension = _extension(path)
    plain = extension.removesuffix(".gz")
    return next(
        (form for form in FORMATS if plain in form.extensions and (form.gzipped or plain == extension)), None
    )


def is_plain_csv(path: Path) -> bool:
    """Whether predictions stand there with commas between them, as those do that a run writes."""
    return format_of_predictions(path) is _CSV and is_comma_separated(path)


def format_of_predictions(path: Path) -> Format:
    """Return the format of a file of predictions: one of no known type is a CSV."""
    return known_format(path) or _CSV


def column_names(path: Path) -> tuple[str, ...]:
    """Return the columns of predictions: of JSON lines the keys of the first.

    Raises:
        DataError: as ``read_contents`` does.
    """
    known = format_of_predictions(path)
    if known.header is not None:
        return known.header(path)
    return known.read(path, Wanted("", None, (), 1)).names


def _extension(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])
