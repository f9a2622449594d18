"""The formats of tables and predictions, by the extensions of their files; each is read into the same ``Contents``.

A format owns what depends on it: how ids and labels become text, what a cell becomes for a template, how far to
read when the rows are limited.  The checks that hold for every format are in ``table.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from ensemble.common.errors import DataError
from ensemble.common.text import plural
from ensemble.data.csv_file import is_comma_separated, read_csv, read_header, text_batches
from ensemble.data.input_file import Contents, Wanted, missing_column, refuse_url
from ensemble.data.jsonl import read_jsonl
from ensemble.data.parquet import read_parquet


@dataclass(frozen=True)
class Format:
    """How to read files with these extensions, in lower case; ``gzipped``: with .gz behind them as well.

    ``header`` gives the columns' names alone, and ``batches`` some columns block by block; without them ``read``
    does, which holds all of the columns at once.
    """

    read: Callable[[Path, Wanted], Contents]
    extensions: tuple[str, ...]
    gzipped: bool = False
    header: Callable[[Path], tuple[str, ...]] | None = None
    batches: Callable[[Path, Sequence[str]], Iterator[pa.RecordBatch]] | None = None

    def __str__(self) -> str:
        return ", ".join(self.extensions) + (" (each also with .gz)" if self.gzipped else "")


_CSV = Format(read_csv, (".csv", ".tsv"), gzipped=True, header=read_header, batches=text_batches)
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
        (one for one in FORMATS if plain in one.extensions and one.gzipped >= (plain != extension)), None
    )


def is_plain_csv(path: Path) -> bool:
    """Whether predictions stand there with commas between them, as those do that a run writes."""
    return (known_format(path) or _CSV) is _CSV and is_comma_separated(path)


def column_names(path: Path) -> tuple[str, ...]:
    """The columns of predictions: of JSON lines the keys of the first; a file of no known type is a CSV.

    Raises:
        DataError: as ``read_contents`` does.
    """
    known = known_format(path) or _CSV
    if known.header is not None:
        return known.header(path)
    return known.read(path, Wanted("", None, (), 1)).names


def prediction_batches(path: Path, id_column: str, columns: Sequence[str] = ()) -> Iterator[pa.RecordBatch]:
    """Reads predictions: a batch or more of the ids as text without nulls, and of ``columns`` in this order.

    Raises:
        DataError: as ``read_contents`` does; also columns that are missing, or rows without an id.
    """
    known = known_format(path) or _CSV
    if known.batches is not None:
        yield from known.batches(path, [id_column, *columns])
        return
    contents = known.read(path, Wanted(id_column, None, tuple(columns), None))
    roles = dict.fromkeys(columns, "column of the label") | {id_column: "id column"}
    missing = [
        missing_column(path, roles[name], name, contents.names)
        for name in roles
        if name not in contents.names
    ]
    if problems := [*contents.problems, *missing]:
        raise DataError(problems)
    assert contents.ids is not None
    if nulls := contents.ids.null_count:
        raise DataError(f"{path}: {plural(nulls, 'row')} without an id; give every row an id")
    fields = [
        pa.field(id_column, contents.ids.type),
        *(contents.columns.schema.field(one) for one in columns),
    ]
    table = pa.Table.from_arrays(
        [contents.ids, *(contents.columns.column(one) for one in columns)], schema=pa.schema(fields)
    )
    yield from table.to_batches() or [pa.RecordBatch.from_pylist([], schema=table.schema)]


def _extension(path: Path) -> str:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    return "".join(suffixes[-2:] if suffixes[-1:] == [".gz"] else suffixes[-1:])
