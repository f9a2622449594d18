"""The formats of the input table, by the extensions of their files; each is read into the same ``Contents``.

A format owns what depends on it: how ids and labels become text, what a cell becomes for a template, how far to
read when the rows are limited.  The checks that hold for every format are in ``table.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ensemble.common.errors import DataError
from ensemble.data.csv_file import read_csv
from ensemble.data.input_file import Contents, Wanted
from ensemble.data.jsonl import read_jsonl
from ensemble.data.parquet import read_parquet


@dataclass(frozen=True)
class Format:
    """How to read files with these extensions, in lower case; ``gzipped``: with .gz behind them as well."""

    read: Callable[[Path, Wanted], Contents]
    extensions: tuple[str, ...]
    gzipped: bool = False

    def __str__(self) -> str:
        return ", ".join(self.extensions) + (" (each also with .gz)" if self.gzipped else "")


FORMATS = (
    Format(read_csv, (".csv", ".tsv"), gzipped=True),
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
    suffixes = [suffix.lower() for suffix in path.suffixes]
    gzipped = suffixes[-1:] == [".gz"]
    extension = "".join(suffixes[-2:] if gzipped else suffixes[-1:])
    for known in FORMATS:
        if extension.removesuffix(".gz") in known.extensions and known.gzipped >= gzipped:
            return known.read(path, wanted)
    kind = f"of type {extension}" if extension else "without extension"
    raise DataError(f"{path}: cannot read files {kind}; use {', '.join(map(str, FORMATS))}")
