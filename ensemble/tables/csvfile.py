"""CSV files in and out, with every cell kept as the text it is.

Reading: no type is guessed and no text means null, so ids such as ``001``, ``1e5``, ``nan`` or `` x`` stay
byte for byte.  Writing: a cell is quoted only where it must be.

Does not know what a table, a label or an id is.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ensemble.errors import DataError
from ensemble.tables.inputfile import check_names, missing_column, open_input, plural

# pyarrow reads up to 32 blocks ahead.
_FIRST_BLOCK_BYTES = 1 << 19
# pyarrow keeps block sizes in a signed 32-bit integer.
_LARGEST_BLOCK_BYTES = (1 << 31) - 1
# Between the columns' many small buffers the allocator keeps what the parser has freed, at worst as much again
# as the table; giving it back this often costs next to nothing.
_SWEEP_BYTES = 1 << 23
_WRITE_ROWS = 65_536
_SHOWN = 3
# Blanks at either end survive in plain CSV too, but some readers strip them unless they are quoted.
_MUST_QUOTE = r'[",\r\n]|^\s|\s$'
CONVERT_ADVICE = "convert the file to UTF-8 first, for example with: iconv -f WINDOWS-1252 -t UTF-8"


def read_header(path: Path) -> tuple[str, ...]:
    """The column names in the first record of a CSV (or, by its name, tab-separated) file.

    Raises:
        DataError: see :func:`open_input`; also a header that is not UTF-8, or that names a column twice.
    """
    with open_input(path) as stream:
        # Bytes that are not UTF-8 further down must not be blamed on the header, so they are let through.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        try:
            header = next(filter(None, csv.reader(text, delimiter=_delimiter(path))), [])
        except csv.Error as error:
            raise DataError(f"{path}: the header cannot be read as CSV ({error})") from error
        finally:
            text.detach()
    if not header:
        raise DataError(f"{path}: the file holds only blank lines")
    for name in header:
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            raise DataError(f"{path}: the header is not UTF-8; {CONVERT_ADVICE}")
    check_names(path, header)
    return tuple(header)


@dataclass
class CsvText:
    """What :func:`scan_csv` found.

    Attributes:
        table: the asked-for columns, as ``pa.string()``.
        problems: cells that are not UTF-8 (they stand in the table with U+FFFD in place of the bad bytes).
    """

    table: pa.Table
    problems: list[str] = field(default_factory=list)


def read_text_csv(path: Path, columns: Sequence[str] | None = None, limit: int | None = None) -> pa.Table:
    """Reads a CSV file as a ``pa.Table`` of ``pa.string()`` columns, without nulls.

    Args:
        path: ``.csv`` or ``.tsv``, each with an optional ``.gz``.
        columns: the columns to read, in this order; all of them by default.
        limit: read no more than this many rows.

    Raises:
        DataError: see :func:`open_input`, :func:`read_header` and :func:`scan_csv`; also a column that the
            file does not have, and cells that are not UTF-8.
    """
    header = read_header(path)
    wanted = header if columns is None else tuple(columns)
    missing = [name for name in wanted if name not in header]
    if missing:
        raise DataError([missing_column(path, "column", name, header) for name in missing])
    text = scan_csv(path, wanted, limit)
    if text.problems:
        raise DataError(text.problems)
    return text.table


def scan_csv(path: Path, columns: Sequence[str], limit: int | None = None) -> CsvText:
    """Reads ``columns`` (all of them in the header) block by block, stopping after ``limit`` rows.

    Raises:
        DataError: see :func:`open_input`; also rows with too few or too many cells, a quote that never
            closes, and a cell above 2 GB.
    """
    block_bytes = _FIRST_BLOCK_BYTES
    while True:
        try:
            return _scan(path, columns, limit, block_bytes)
        except pa.ArrowInvalid as error:
            # A cell longer than a block; rare enough to start again with bigger blocks.
            if "straddling" not in str(error):
                raise DataError(f"{path}: cannot be read as CSV ({error})") from error
            if block_bytes == _LARGEST_BLOCK_BYTES:
                raise DataError(f"{path}: a cell is longer than 2 GB; {_quote_advice(path)}") from error
            block_bytes = min(block_bytes * 16, _LARGEST_BLOCK_BYTES)


def _scan(path: Path, columns: Sequence[str], limit: int | None, block_bytes: int) -> CsvText:
    ragged = _RaggedRows(limit)
    invalid = {name: _InvalidCells() for name in columns}
    names, batches, unswept_bytes = list(columns), [], 0
    rows, complete = 0, True
    with open_input(path) as stream:
        counting = _QuoteCounter(stream)
        for batch in _binary_batches(counting, path, columns, block_bytes, ragged):
            kept = batch if limit is None else batch.slice(0, limit - rows)
            arrays = [invalid[name].decode(kept.column(name), rows) for name in columns]
            batches.append(pa.RecordBatch.from_arrays(arrays, names=names))
            unswept_bytes += batches[-1].nbytes
            if unswept_bytes > _SWEEP_BYTES:
                unswept_bytes = 0
                pa.default_memory_pool().release_unused()
            rows += kept.num_rows
            if limit is not None and rows >= limit:
                complete = False
                break
    if complete and counting.quotes % 2:
        _refuse_open_quote(path)
    if ragged.count:
        raise DataError(ragged.describe(path))
    table = pa.Table.from_batches(batches, schema=pa.schema([(name, pa.string()) for name in names]))
    problems = [cells.describe(path, name) for name, cells in invalid.items() if cells.count]
    return CsvText(table, problems)


def _binary_batches(
    stream: _QuoteCounter, path: Path, columns: Sequence[str], block_bytes: int, ragged: _RaggedRows
) -> Iterator[pa.RecordBatch]:
    """Record batches of ``pa.binary()`` columns: pyarrow would stop at the first cell that is not UTF-8."""
    from pyarrow import csv as arrow_csv

    try:
        reader = arrow_csv.open_csv(
            stream,
            # Rows are numbered in the messages only when a single thread parses them.
            read_options=arrow_csv.ReadOptions(block_size=block_bytes, use_threads=False),
            parse_options=arrow_csv.ParseOptions(
                delimiter=_delimiter(path), newlines_in_values=True, invalid_row_handler=ragged
            ),
            convert_options=arrow_csv.ConvertOptions(
                include_columns=list(columns),
                column_types=dict.fromkeys(columns, pa.binary()),
                strings_can_be_null=False,
            ),
        )
    except pa.ArrowInvalid as error:
        if "Empty CSV file" in str(error):  # a header and nothing after it
            return
        raise
    with reader:
        yield from reader


class _QuoteCounter(io.RawIOBase):
    """A stream that counts the quotes that pass: an odd number means that one may never close."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.quotes = 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._stream.read(size)
        self.quotes += data.count(b'"')
        return data


class _ArrowRow(Protocol):
    """``pyarrow.csv.InvalidRow``; ``number`` counts from 1 and includes the header."""

    number: int | None
    text: str
    expected_columns: int
    actual_columns: int


@dataclass
class _RaggedRows:
    """pyarrow's handler of rows with the wrong number of cells: notes them all, so that all are reported."""

    limit: int | None
    count: int = 0
    shown: list[str] = field(default_factory=list)

    def __call__(self, row: _ArrowRow) -> str:
        if self.limit is not None and row.number is not None and row.number - 1 > self.limit:
            return "skip"
        if self.count < _SHOWN:
            place = "" if row.number is None else f"row {row.number - 1:,} "
            text = row.text if len(row.text) <= 60 else row.text[:60] + "..."
            self.shown.append(
                f"{place}has {plural(row.actual_columns, 'cell')} instead of {row.expected_columns}: {text!r}"
            )
        self.count += 1
        return "skip"

    def describe(self, path: Path) -> str:
        count, shown = plural(self.count, "broken row"), "; ".join(self.shown)
        return f"{path}: {count}; {shown}; put quotes around cells that hold commas"


@dataclass
class _InvalidCells:
    """The cells of one column that are not UTF-8."""

    count: int = 0
    first: str = ""

    def decode(self, array: pa.Array, first_row: int) -> pa.Array:
        """``pa.binary()`` to ``pa.string()``, both of shape (rows,); shares the bytes if they are UTF-8."""
        try:
            return pc.cast(array, pa.string())
        except pa.ArrowInvalid:
            return pa.array(
                [self._text(cell, row) for row, cell in enumerate(array.to_pylist(), first_row + 1)]
            )

    def _text(self, cell: bytes, row: int) -> str:
        try:
            return cell.decode()
        except UnicodeDecodeError as error:
            if not self.count:
                self.first = f"the first in row {row:,}, byte {error.start + 1:,} of the cell"
            self.count += 1
            return cell.decode(errors="replace")

    def describe(self, path: Path, column: str) -> str:
        count = plural(self.count, "cell")
        return f"{path}: column {column!r}: {count} not in UTF-8, {self.first}; {CONVERT_ADVICE}"


def _refuse_open_quote(path: Path) -> None:
    """Looks for a quote that never closes; it would have swallowed every row after it.

    An odd number of quotes proves nothing (``5" pipe`` in a cell without quotes is fine), so the csv module,
    which is slower but notices, has the last word.

    Raises:
        DataError: there is one; names the row it opens in.
    """
    row = -1
    old_limit = csv.field_size_limit(_LARGEST_BLOCK_BYTES)
    try:
        with open_input(path) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
            for record in csv.reader(text, delimiter=_delimiter(path), strict=True):
                row += bool(record)
    except csv.Error as error:
        if "unexpected end of data" in str(error):
            message = f"{path}: a quote opens in row {row + 1:,} and never closes"
            raise DataError(f"{message}; {_quote_advice(path)}") from error
    finally:
        csv.field_size_limit(old_limit)


def _quote_advice(path: Path) -> str:
    return f"check the quotes in {path.name}, or whether the file was cut short"


def _delimiter(path: Path) -> str:
    return "\t" if ".tsv" in [suffix.lower() for suffix in path.suffixes[-2:]] else ","


def write_csv(path: Path, header: Sequence[str], columns: Sequence[pa.Array | pa.ChunkedArray]) -> None:
    """Writes a CSV file: UTF-8, commas, ``\\n`` line ends, quotes only where they are needed.

    Args:
        path: written in place; making that atomic is the caller's business.
        header: one name per column.
        columns: each of shape (rows,).  Text is written as it is, numbers in the shortest form that reads
            back as the same number, nulls as nothing.

    Raises:
        ValueError: the lengths do not agree.
        OSError: the file cannot be written.
    """
    if len(header) != len(columns) or not columns:
        raise ValueError(f"{len(header)} names for {len(columns)} columns")
    table = pa.Table.from_arrays(list(columns), names=list(header))
    quote: Callable[[pa.Array], pa.Array] = _quoted if len(header) > 1 else _quoted_or_empty
    with path.open("wb") as stream:
        stream.write(
            (
                ",".join(quote(pa.array([name], pa.large_string()))[0].as_py() for name in header) + "\n"
            ).encode()
        )
        for batch in table.to_batches(max_chunksize=_WRITE_ROWS):
            cells = [quote(_as_text(column)) for column in batch.columns]
            lines = pc.binary_join_element_wise(*cells, _large(","))
            stream.write(_bytes_of(pc.binary_join_element_wise(lines, _large("\n"), _large(""))))


def _as_text(column: pa.Array) -> pa.Array:
    """Large strings, so that the joined lines of a batch may pass 2 GB; nulls become empty."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return pc.fill_null(pc.cast(column, pa.large_string()), "")


def _quoted(cells: pa.Array) -> pa.Array:
    must = pc.match_substring_regex(cells, _MUST_QUOTE)
    if not pc.any(must).as_py():
        return cells
    doubled = pc.replace_substring(cells, '"', '""')
    return pc.if_else(must, pc.binary_join_element_wise(_large('"'), doubled, _large('"'), _large("")), cells)


def _quoted_or_empty(cells: pa.Array) -> pa.Array:
    """As above, for a single column, where an empty cell would be a blank line, which readers skip."""
    return pc.if_else(pc.equal(cells, ""), _large('""'), _quoted(cells))


def _large(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _bytes_of(lines: pa.Array) -> pa.Buffer:
    """The text of a large-string array, all in one piece and without a copy."""
    _, offsets, text = lines.buffers()
    first, last = (int.from_bytes(offsets[8 * row : 8 * row + 8], "little") for row in (0, len(lines)))
    return text.slice(first, last - first)
