"""CSV files in and out, with every cell kept as the text it is.

Reading: no type is guessed and no text means null, so ids such as ``001``, ``1e5``, ``nan`` or `` x`` stay
byte for byte.  Writing: a cell is quoted only where it must be.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.data.csv_problems import (
    CONVERT_ADVICE,
    OPEN,
    InvalidCells,
    RaggedRows,
    csv_records,
    delimiter_of,
    open_quote_problem,
    quote_advice,
)
from ensemble.data.input_file import Contents, Wanted, check_names, joined_text, missing_column, open_input

# pyarrow reads up to 32 blocks ahead.
_FIRST_BLOCK_BYTES = 1 << 19
# pyarrow keeps block sizes in a signed 32-bit integer.
_MAX_BLOCK_BYTES = (1 << 31) - 1
# Between the columns' many small buffers the allocator keeps what the parser has freed, at worst as much again
# as the table; giving it back this often costs next to nothing.
_SWEEP_BYTES = 1 << 23
# What pyarrow says where a line does not end within a block.
_TOO_LONG = ("straddling", "cannot infer number of columns")
_WRITE_ROWS = 65_536
# Blanks at either end survive in plain CSV too, but some readers strip them unless they are quoted; U+FEFF at the
# start of a file is a byte order mark.
_MUST_QUOTE = r'[",\r\n]|^\s|\s$|^\x{feff}'
# Without any of these bytes no cell must be quoted; \s is a tab, line feed, form feed, return or blank.
_MAY_NEED_QUOTES = (b'"', b",", b"\r", b"\n", b"\t", b"\f", b" ", "\ufeff".encode())
# A cell that stands in no file: U+10FFFF is no character and never will be.
_END = "\U0010ffffend of file\U0010ffff"


def read_header(path: Path) -> tuple[str, ...]:
    """The column names in the first record of a CSV (or, by its name, tab-separated) file.

    Raises:
        DataError: see :func:`open_input`; also a header that is not UTF-8, or that names a column twice.
    """
    with open_input(path) as stream:
        # Bytes that are not UTF-8 further down must not be blamed on the header, so they are let through.
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
        try:
            header = next(csv_records(text, delimiter_of(path)))
        except csv.Error as error:
            what = f"holds a name of more than {csv.field_size_limit():,} characters"
            reason = what if "field limit" in str(error) else f"cannot be read as CSV ({error})"
            raise DataError(f"{path}: the header {reason}; {quote_advice(path)}") from error
        finally:
            text.detach()
    if header == [OPEN]:
        raise DataError(f"{path}: the file holds only blank lines")
    if header[-1].endswith(OPEN):
        raise DataError(open_quote_problem(path))
    for name in header:
        if not name.isascii() and any("\ud800" <= character <= "\udfff" for character in name):
            raise DataError(f"{path}: the header is not UTF-8; {CONVERT_ADVICE}")
    check_names(path, header)
    return tuple(header)


def read_csv(path: Path, wanted: Wanted) -> Contents:
    """Reads the input table from a CSV file; its cells are text, and none of them is null.

    Raises:
        DataError: see :func:`open_input`, :func:`read_header` and :func:`scan_csv`.
    """
    names = read_header(path)
    present = [name for name in wanted.names() if name in names]
    # With none of the columns there, one is still read, for the number of rows.
    text = scan_csv(path, names, present or names[:1], wanted.limit)

    def column(name: str | None) -> pa.ChunkedArray | None:
        return joined_text(text.table.column(name)) if name in present else None

    return Contents(
        rows=text.table.num_rows,
        names=names,
        ids=column(wanted.id_column),
        labels=column(wanted.label_column),
        columns=text.table.select([name for name in wanted.columns if name in present]),
        problems=tuple(text.problems),
    )


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
    text = scan_csv(path, header, wanted, limit)
    if text.problems:
        raise DataError(text.problems)
    return text.table


def scan_csv(path: Path, header: Sequence[str], columns: Sequence[str], limit: int | None = None) -> CsvText:
    """Reads ``columns`` (all of them in the header) block by block, stopping after ``limit`` rows.

    Raises:
        DataError: see :func:`open_input`; also rows with too few or too many cells, a quote that never
            closes, and a cell above 2 GB.
    """
    block_bytes = _FIRST_BLOCK_BYTES
    while True:
        ragged = RaggedRows(path, limit)
        try:
            with ragged.without_noise():
                return _scan(path, header, columns, limit, block_bytes, ragged)
        except pa.ArrowInvalid as error:
            if _END in str(error):
                raise DataError(open_quote_problem(path)) from error
            # A cell or a header longer than a block; rare enough to start again with bigger blocks.
            if not any(words in str(error) for words in _TOO_LONG):
                raise DataError(ragged.problem(error)) from error
            if block_bytes == _MAX_BLOCK_BYTES:
                raise DataError(f"{path}: a cell is longer than 2 GB; {quote_advice(path)}") from error
            block_bytes = min(block_bytes * 16, _MAX_BLOCK_BYTES)


def _scan(
    path: Path,
    header: Sequence[str],
    columns: Sequence[str],
    limit: int | None,
    block_bytes: int,
    ragged: RaggedRows,
) -> CsvText:
    from pyarrow import csv as arrow_csv

    invalid = {name: InvalidCells() for name in columns}
    names, batches, unswept_bytes = list(columns), [], 0
    rows, is_whole = 0, False
    with open_input(path) as stream:
        ending = "\n" + delimiter_of(path).join(_END if name == names[0] else "" for name in header)
        reader = arrow_csv.open_csv(
            _EndingStream(stream, ending.encode()),
            # Rows are numbered in the messages only when a single thread parses them.
            read_options=arrow_csv.ReadOptions(block_size=block_bytes, use_threads=False),
            parse_options=arrow_csv.ParseOptions(
                delimiter=delimiter_of(path), newlines_in_values=True, invalid_row_handler=ragged
            ),
            # Binary: pyarrow would stop at the first cell that is not UTF-8.
            convert_options=arrow_csv.ConvertOptions(
                include_columns=names,
                column_types=dict.fromkeys(names, pa.binary()),
                strings_can_be_null=False,
            ),
        )
        with reader:
            for batch in reader:
                if batch.num_rows and batch.column(0)[-1].as_py() == _END.encode():
                    batch, is_whole = batch.slice(0, batch.num_rows - 1), True
                kept = batch if limit is None else batch.slice(0, limit - rows)
                arrays = [invalid[name].decode(kept.column(name), rows) for name in columns]
                batches.append(pa.RecordBatch.from_arrays(arrays, names=names))
                unswept_bytes += batches[-1].nbytes
                if unswept_bytes > _SWEEP_BYTES:
                    unswept_bytes = 0
                    pa.default_memory_pool().release_unused()
                rows += kept.num_rows
                if kept.num_rows < batch.num_rows:  # a row after the last one: no quote is open there
                    is_whole = True
                    break
    if not is_whole:
        raise DataError(open_quote_problem(path))
    if ragged.count:
        raise DataError(ragged.problem())
    table = pa.Table.from_batches(batches, schema=pa.schema([(name, pa.string()) for name in names]))
    return CsvText(table, [cells.problem(path, name) for name, cells in invalid.items() if cells.count])


class _EndingStream(io.RawIOBase):
    """A stream with one row more at its end, which comes out as a row only if no quote is open there.

    pyarrow takes whatever one call gives for a block.  Where a block ends with ``\\r`` it drops a ``\\n`` at the
    start of the next, within quotes too; so no block ends with one here.
    """

    def __init__(self, stream: BinaryIO, ending: bytes) -> None:
        self._stream = stream
        self._ending = ending
        self._held = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = _FIRST_BLOCK_BYTES) -> bytes:
        wanted = size - len(self._held)
        data = self._held + self._stream.read(wanted)
        if len(data) < size:
            room = size - len(data)
            data, self._ending = data + self._ending[:room], self._ending[room:]
        self._held = b"\r" if data.endswith(b"\r") else b""
        return data.removesuffix(b"\r")


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
    with path.open("wb") as stream:
        stream.write(header_line(header))
        for batch in table.to_batches(max_chunksize=_WRITE_ROWS):
            stream.write(csv_lines([csv_cells(column) for column in batch.columns]))


def header_line(names: Sequence[str]) -> pa.Buffer:
    """The first line of a CSV file."""
    return csv_lines([csv_cells(pa.array([name], pa.large_string())) for name in names])


def csv_cells(column: pa.Array) -> pa.Array:
    """A column's values as they stand in a CSV file, quoted where they must be: large strings.

    Large, so that the joined lines of a batch may pass 2 GB; nulls become empty.
    """
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    cells = pc.cast(column, pa.large_string())
    if cells.null_count:
        cells = pc.fill_null(cells, "")
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return cells
    text = _text_of(cells).to_pybytes()
    if not any(mark in text for mark in _MAY_NEED_QUOTES):  # a search for bytes takes next to nothing
        return cells
    must = pc.match_substring_regex(cells, _MUST_QUOTE)
    if not pc.any(must).as_py():
        return cells
    doubled = pc.replace_substring(cells, '"', '""')
    return pc.if_else(must, pc.binary_join_element_wise(_large('"'), doubled, _large('"'), _large("")), cells)


def csv_lines(cells: Sequence[pa.Array]) -> pa.Buffer:
    """The text of lines, each ended by ``\\n``.

    Args:
        cells: what :func:`csv_cells` gave, one per column, of the same length.
    """
    if not len(cells[0]):
        return pa.py_buffer(b"")
    if len(cells) == 1:  # an empty cell would be a blank line, which readers skip
        cells = [pc.if_else(pc.equal(cells[0], ""), _large('""'), cells[0])]
    lines = pc.binary_join_element_wise(*cells, _large(","))
    # Joined as one list, with an empty line at its end, because joining row by row takes three times as long.
    lines = pa.concat_arrays([lines, pa.array([""], pa.large_string())])
    return _text_of(pc.binary_join(pa.LargeListArray.from_arrays([0, len(lines)], lines), _large("\n")))


def _large(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())


def _text_of(cells: pa.Array) -> pa.Buffer:
    """The text of a large-string array, all in one piece and without a copy."""
    _, offsets, text = cells.buffers()
    if text is None:
        return pa.py_buffer(b"")
    first, last = (
        int.from_bytes(offsets[8 * row : 8 * row + 8], "little")
        for row in (cells.offset, cells.offset + len(cells))
    )
    return text.slice(first, last - first)
