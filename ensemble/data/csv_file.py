"""CSV files in and out, with every cell kept as the text it is.

Reading: no type is guessed and no text means null, so ids such as ``001``, ``1e5``, ``nan`` or `` x`` stay
byte for byte.  pyarrow reads; where it gives up, Python's csv module goes on, which takes cells of any length and
can say what is wrong with a file.  Row 1 is the first below the header; blank lines are no rows.
Writing: a cell is quoted only where it must be.
"""

from __future__ import annotations

import contextlib
import csv
import io
from collections.abc import Generator, Iterator, Sequence
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.errors import DataError
from ensemble.common.text import plural, quoted
from ensemble.data.input_file import (
    Contents,
    Wanted,
    check_names,
    held_table,
    is_text,
    joined_text,
    missing_column,
    open_input,
    text_bytes,
)

# pyarrow reads up to 32 blocks ahead.
_BLOCK_BYTES = 1 << 19
# Of a cell, whose UTF-8 is then less than the 2 GB that a column of strings holds.
_MAX_CHARACTERS = (1 << 29) - 1
_PYTHON_CELLS = 10_000
_WRITE_ROWS = 65_536
_SHOWN = 3
_UTF8_ADVICE = "convert the file to UTF-8 first, for example with: iconv -f WINDOWS-1252 -t UTF-8"
# Blanks at either end survive in plain CSV too, but some readers strip them unless they are quoted; U+FEFF at the
# start of a file is a byte order mark.
_MUST_QUOTE = r'[",\r\n]|^\s|\s$|^\x{feff}'
# Without any of these bytes no cell must be quoted; \s is a tab, line feed, form feed, return or blank.
_MAY_NEED_QUOTES = (b'"', b",", b"\r", b"\n", b"\t", b"\f", b" ", "\ufeff".encode())
_NUMBER = r"(?i)^[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf|infinity)$"
# A cell that stands in no file: U+10FFFF is no character and never will be.  Put behind the last row, it comes out
# as a row only if no quote is open there.
_END = "\U0010ffffend of file\U0010ffff"


def read_header(path: Path) -> tuple[str, ...]:
    """The column names in the first record of a CSV (or, by its name, tab-separated) file.

    Raises:
        DataError: see :func:`open_input`; also a header that is not UTF-8, or that names a column twice.
    """
    with contextlib.closing(_records(path)) as records:
        header = next(records, None)
    if header is None:
        raise DataError(f"{path}: the file holds only blank lines")
    if any(map(_utf8_error, header)):
        raise DataError(f"{path}: the header is not UTF-8; {_UTF8_ADVICE}")
    check_names(path, header)
    return tuple(header)


def read_csv(path: Path, wanted: Wanted) -> Contents:
    """Reads the input table from a CSV file; its cells are text, and none of them is null.

    Raises:
        DataError: see :func:`text_batches`.
    """
    names = read_header(path)
    present = [name for name in wanted.names() if name in names]
    # With none of the columns there, one is still read, for the number of rows.
    table = read_text_csv(path, present or names[:1], wanted.limit)

    def column(name: str | None) -> pa.ChunkedArray | None:
        return joined_text(table.column(name)) if name in present else None

    return Contents(
        rows=table.num_rows,
        names=names,
        ids=column(wanted.id_column),
        labels=column(wanted.label_column),
        columns=table.select([name for name in wanted.columns if name in present]),
        problems=(),
    )


def read_text_csv(path: Path, columns: Sequence[str] | None = None, limit: int | None = None) -> pa.Table:
    """All that :func:`text_batches` yields, for the same arguments."""
    return held_table(text_batches(path, columns, limit))


def text_batches(
    path: Path, columns: Sequence[str] | None = None, limit: int | None = None
) -> Iterator[pa.RecordBatch]:
    """Reads a CSV file block by block: one batch or more of ``pa.string()`` columns, without nulls.

    Args:
        path: ``.csv`` or ``.tsv``, each with an optional ``.gz``.
        columns: the columns to read, in this order; all of them by default.
        limit: read no more than this many rows; what is wrong behind them is not seen.

    Raises:
        DataError: see :func:`open_input` and :func:`read_header`; also a column that the file does not have, rows
            with too few or too many cells, cells that are not UTF-8, a quote that never closes.
    """
    from pyarrow import csv as arrow_csv

    header, delimiter = read_header(path), _delimiter(path)
    names = list(header if columns is None else columns)
    if missing := [name for name in names if name not in header]:
        raise DataError([missing_column(path, "column", name, header) for name in missing])
    ending = "\n" + delimiter.join(_END if name == names[0] else "" for name in header)
    text = dict.fromkeys(names, pa.string())
    found, rows = 0, 0
    with contextlib.suppress(pa.ArrowInvalid), open_input(path) as stream:
        reader = arrow_csv.open_csv(
            _WholeLineEnds(stream, ending.encode()),
            arrow_csv.ReadOptions(block_size=_BLOCK_BYTES, use_threads=False),
            arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(include_columns=names, column_types=text, strings_can_be_null=False),
        )
        with reader:
            for batch, following in pairwise(chain(reader, [None])):
                is_last = bool(len(batch)) and batch.column(0)[-1].as_py() == _END
                if following is None and not is_last:
                    break
                found += len(batch) - is_last
                kept = batch.slice(0, (found if limit is None else min(found, limit)) - rows)
                rows += len(kept)
                yield kept
                if is_last or rows < found:  # no quote is open where another row follows
                    return
    yield from _python_batches(path, header, names, rows, limit)


def _python_batches(
    path: Path, header: Sequence[str], names: Sequence[str], start: int, limit: int | None
) -> Iterator[pa.RecordBatch]:
    """The rows behind the first ``start``; a DataError tells all that is wrong with them."""
    ragged: list[str] = []
    invalid: dict[str, list[str]] = {}
    advice = "rows must be complete"
    with contextlib.closing(_records(path)) as records:
        # The header is number 0.
        rows = islice(enumerate(records), start + 1, None if limit is None else limit + 1)
        while part := list(islice(rows, 1 + _PYTHON_CELLS // len(header))):
            for row, record in part:
                if len(record) != len(header):
                    text = quoted(_delimiter(path).join(record))
                    ragged.append(
                        f"row {row:,} has {plural(len(record), 'cell')} instead of {len(header)}: {text}"
                    )
                    if len(record) > len(header) and len(ragged) <= _SHOWN:
                        between = "tabs" if _delimiter(path) == "\t" else "commas"
                        advice = f"put quotes around cells that hold {between}"
            if ragged:
                continue
            cells = [[record[place] for _, record in part] for place in map(header.index, names)]
            for name, column in zip(names, cells, strict=True):
                for (row, _), cell in zip(part, column, strict=True):
                    if error := _utf8_error(cell):
                        where = f"the first in row {row:,}, byte {error.start + 1:,} of the cell"
                        invalid.setdefault(name, []).append(where)
            if not invalid:
                yield from pa.table([pa.array(column, pa.string()) for column in cells], names).to_batches()
    if ragged:
        shown = "; ".join(ragged[:_SHOWN])
        raise DataError(f"{path}: {plural(len(ragged), 'broken row')}; {shown}; {advice}")
    if invalid:
        problems = []
        for name, found in invalid.items():
            count = plural(len(found), "cell")
            problems.append(
                f"{path}: column {quoted(name)}: {count} not in UTF-8, {found[0]}; {_UTF8_ADVICE}"
            )
        raise DataError(problems)
    yield pa.record_batch([pa.array([], pa.string()) for _ in names], names)


def _records(path: Path) -> Generator[list[str], None, None]:
    """The csv module's records without the blank ones, the header first; bytes that are not UTF-8 are surrogates.

    Raises:
        DataError: see :func:`open_input`; also a quote that never closes and has swallowed all rows behind it.
    """
    number, advice = 0, f"check the quotes in {path.name}, or whether the file was cut short"
    before = csv.field_size_limit(_MAX_CHARACTERS)
    try:
        with open_input(path) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
            for record in filter(None, csv.reader(chain(text, ["\n", _END]), delimiter=_delimiter(path))):
                if record == [_END]:
                    return
                if record[-1].endswith(_END):
                    where = f"row {number:,}" if number else "the header"
                    raise DataError(f"{path}: a quote opens in {where} and never closes; {advice}")
                yield record
                number += 1
    except csv.Error as error:  # a cell that is too long
        raise DataError(f"{path}: row {number:,} cannot be read as CSV ({error}); {advice}") from error
    finally:
        csv.field_size_limit(before)


def _utf8_error(cell: str) -> UnicodeDecodeError | None:
    if not cell.isascii():
        try:
            cell.encode("utf-8", "surrogateescape").decode()
        except UnicodeDecodeError as error:
            return error
    return None


def is_comma_separated(path: Path) -> bool:
    """By its name; else there are tabs between its cells."""
    return _delimiter(path) == ","


def _delimiter(path: Path) -> str:
    return "\t" if ".tsv" in [suffix.lower() for suffix in path.suffixes[-2:]] else ","


class _WholeLineEnds(io.RawIOBase):
    """A stream for pyarrow's reader of CSV, with something put behind it.

    pyarrow takes whatever one call gives for a block.  Where a block ends with ``\\r`` it drops a ``\\n`` at the
    start of the next, within quotes too; so no block ends with one here.
    """

    def __init__(self, stream: BinaryIO, ending: bytes) -> None:
        self._stream = stream
        self._ending = ending
        self._kept = b""

    def readable(self) -> bool:
        return True

    def read(self, size: int = _BLOCK_BYTES) -> bytes:
        data = self._kept + self._stream.read(size - len(self._kept))
        if room := size - len(data):
            data, self._ending = data + self._ending[:room], self._ending[room:]
        self._kept = b"\r" if data.endswith(b"\r") else b""
        return data.removesuffix(b"\r")


def text_as_numbers(
    cells: pa.Array | pa.ChunkedArray,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Text as float64 [rows], NaN where it is no number; and which of the cells are no number, [rows]."""
    try:
        found, is_text = pc.cast(cells, pa.float64()), np.zeros(len(cells), dtype=np.bool_)
    except pa.ArrowInvalid:  # one cell is enough for that
        cells = pc.utf8_trim_whitespace(cells)
        is_number = pc.match_substring_regex(cells, _NUMBER)
        found = pc.cast(pc.if_else(is_number, cells, "nan"), pa.float64())
        is_text = ~np.asarray(is_number)
    return np.asarray(found.to_numpy()), is_text


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
    """A column's values as they stand in a CSV file, quoted where they must be: strings; nulls become empty."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    cells = column if is_text(column.type) else pc.cast(column, pa.string())
    if cells.null_count:
        cells = pc.fill_null(cells, "")
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return cells
    text = text_bytes(cells).to_pybytes()
    if not any(mark in text for mark in _MAY_NEED_QUOTES):  # a search for bytes takes next to nothing
        return cells
    must = pc.match_substring_regex(cells, _MUST_QUOTE)
    if not pc.any(must).as_py():
        return cells
    cells = pc.cast(cells, pa.large_string())  # with the quotes it may pass 2 GB
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
        cells = [pc.if_else(pc.equal(cells[0], ""), pa.scalar('""', cells[0].type), cells[0])]
    with contextlib.suppress(pa.ArrowInvalid):  # a cell is quoted
        return _plain_lines(cells)
    # Large, so that the joined lines may pass 2 GB.
    lines = pc.binary_join_element_wise(*(pc.cast(one, pa.large_string()) for one in cells), _large(","))
    # Joined as one list, with an empty line at its end, because joining row by row takes three times as long.
    lines = pa.concat_arrays([lines, pa.array([""], pa.large_string())])
    return text_bytes(pc.binary_join(pa.LargeListArray.from_arrays([0, len(lines)], lines), _large("\n")))


def _plain_lines(cells: Sequence[pa.Array]) -> pa.Buffer:
    """As :func:`csv_lines`, by Arrow's writer, which is quicker; raises ArrowInvalid where a cell is quoted."""
    from pyarrow import csv as arrow_csv

    batch, sink = pa.record_batch(cells, [str(place) for place in range(len(cells))]), pa.BufferOutputStream()
    options = arrow_csv.WriteOptions(include_header=False, batch_size=len(batch), quoting_style="none")
    arrow_csv.write_csv(batch, sink, options)
    return sink.getvalue()


def _large(text: str) -> pa.Scalar:
    return pa.scalar(text, pa.large_string())
