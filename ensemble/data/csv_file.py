"""Read and write CSV files; every cell keeps its text.

Reading guesses no types and no nulls, so ids such as ``001``, ``1e5``, ``nan`` or `` x`` stay byte for byte. Row 1
is the first row below the header; blank lines do not count. Cells are written with quotes only if needed.
"""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv

from ensemble.common.errors import DataError
from ensemble.common.text import error_text, plural, quoted
from ensemble.data.file_rows import FileRows, is_gzipped, open_output
from ensemble.data.input_file import (
    Contents,
    Wanted,
    cell_texts,
    check_names,
    delimiter,
    is_text,
    joined_text,
    missing_column,
    open_input,
    other_separator,
)

# A row must fit into a block; if a row does not fit, the file is read again in larger blocks.
_BLOCK_BYTES = (1 << 19, 1 << 29)
# pyarrow's messages if a row or the header does not fit into a block.
_ROW_TOO_LONG = ("straddles two block boundaries", "cannot infer number of columns")
_WRITE_ROWS = 65_536
_SHOWN = 3
_UTF8_ADVICE = "convert the file to UTF-8 first, for example with: iconv -f WINDOWS-1252 -t UTF-8"
# U+FEFF at the start of a file is a byte order mark.
_MUST_QUOTE = re.compile('[",\r\n]|^\ufeff')
_NUMBER = r"(?i)^[+-]?((\d+\.?\d*|\.\d+)(e[+-]?\d+)?|nan|inf|infinity)$"
# A cell that no file contains, because U+10FFFF is not a character. It is appended as the last row: if pyarrow does
# not return that row, a quote is still open at the end of the file.
_END = "\U0010ffffend of file\U0010ffff"
# Replaces bytes that are not UTF-8 until their row and column are known; U+10FFFE is not a character either.
_NOT_UTF8 = "\U0010fffe"
codecs.register_error("ensemble.csv", lambda error: (_NOT_UTF8, error.end))  # type: ignore[attr-defined]


def read_header(path: Path) -> tuple[str, ...]:
    """Return the column names in the first row; raise DataError if it is not UTF-8, or is Excel's own line."""
    for block_bytes in _BLOCK_BYTES:
        with open_input(path) as file:
            # Read into memory: from a file, Arrow reads ahead in a thread, which may still run when Python ends.
            content = file.read(block_bytes)
        if len(content) < block_bytes:
            content += f"\n{_END}\n".encode()
        content, _ = _checked(content)
        try:
            with pa_csv.open_csv(
                pa.BufferReader(content),
                pa_csv.ReadOptions(block_size=len(content), use_threads=False),
                pa_csv.ParseOptions(
                    delimiter=delimiter(path), newlines_in_values=True, invalid_row_handler=lambda row: "skip"
                ),
                pa_csv.ConvertOptions(check_utf8=False),
            ) as reader:
                names = tuple(reader.schema.names)
        except pa.ArrowInvalid:  # the header does not end in this block
            continue
        if any(_NOT_UTF8 in name for name in names):
            raise DataError(f"{path}: the header is not UTF-8; {_UTF8_ADVICE}")
        if any(_END in name for name in names):
            if names == (_END,):
                raise DataError(f"{path}: the file holds only blank lines")
            continue
        if names[0].lower().startswith("sep=") and not any(names[1:]):
            raise DataError(f"{path}: its first line is Excel's {names[0]!r} and no header; remove that line")
        return names
    raise _open_quote(path, 0)


def read_csv(path: Path, wanted: Wanted) -> Contents:
    """Read the input table from a CSV file; its cells are text, and none of them is null.

    Columns in ``wanted.numbers`` become float64 if all their cells are numbers or empty; empty cells become null.
    """
    names = read_header(path)
    present = [name for name in wanted.names() if name in names]
    # Any column, to count the rows.
    read = present or [next((name for name in names if names.count(name) == 1), names[0])]
    check_names(path, names, read)
    numbers = {*wanted.numbers} - {wanted.id_column}
    try:
        table = _read_columns(path, names, read, wanted.limit, numbers)
    except pa.ArrowInvalid:  # read as text, which raises errors with rows
        table = _read_columns(path, names, read, wanted.limit)

    def column(name: str | None) -> pa.ChunkedArray | None:
        return joined_text(table.column(name)) if name in present else None

    return Contents(
        rows=table.num_rows,
        names=names,
        ids=column(wanted.id_column),
        labels=column(wanted.label_column),
        columns=table.select([name for name in wanted.columns if name in present]),
        problems=(),
        remarks=tuple(_swallowed_lines(path, table)),
    )


def read_text_csv(path: Path, columns: Sequence[str] | None = None, limit: int | None = None) -> pa.Table:
    """Read columns of a CSV file as text without nulls, in this order; None: all columns.

    Raises:
        DataError: see :func:`open_input` and :func:`read_header`; also a column that the file does not have, rows
            with too few or too many cells, cells that are not UTF-8, a quote that never closes.
    """
    header = read_header(path)
    names = list(header if columns is None else columns)
    missing = [name for name in names if name not in header]
    if missing:
        raise DataError([missing_column(path, "column", name, header) for name in missing])
    check_names(path, header, names)
    return _read_columns(path, header, names, limit)


def _read_columns(
    path: Path, header: Sequence[str], names: Sequence[str], limit: int | None, numbers: Collection[str] = ()
) -> pa.Table:
    """Read columns as text, or as float64 if they are among ``numbers``.

    Raises:
        pa.ArrowInvalid: with ``numbers``, a cell is no number, or a row has too few or too many cells.
    """
    separator = delimiter(path)
    ending = "\n" + separator.join(_END if name == names[0] else "" for name in header)
    broken: list[pa_csv.InvalidRow] = []

    def skip(row: pa_csv.InvalidRow) -> str:
        broken.append(row)
        return "skip"

    parse = pa_csv.ParseOptions(delimiter=separator, newlines_in_values=True, invalid_row_handler=skip)
    convert = pa_csv.ConvertOptions(
        include_columns=names,
        column_types={name: pa.float64() if name in numbers else pa.string() for name in names},
        null_values=[""],
        strings_can_be_null=False,
        check_utf8=False,  # the stream checks it
    )
    for block_bytes in _BLOCK_BYTES:
        batches: list[pa.RecordBatch] = []
        broken.clear()
        rows = 0
        # With threads, pyarrow does not number broken rows.
        options = pa_csv.ReadOptions(block_size=block_bytes, use_threads=bool(numbers))
        try:
            with (
                open_input(path) as file,
                _WithEnd(file, ending.encode()) as stream,
                pa_csv.open_csv(stream, options, parse, convert) as reader,
            ):
                schema = reader.schema
                for batch in reader:
                    batches.append(batch)
                    rows += len(batch)
                    if limit is not None and rows > limit:
                        break
        except pa.ArrowInvalid as error:
            if any(words in str(error) for words in _ROW_TOO_LONG):
                continue
            if numbers:
                raise
            raise DataError(f"{path}: cannot be read as CSV ({error_text(error)})") from error
        if numbers and broken:
            raise pa.ArrowInvalid("rows with too few or too many cells")
        table = pa.Table.from_batches(batches, schema)
        _refuse_broken_rows(path, header, [row for row in broken if limit is None or row.number <= limit + 1])
        if stream.has_other_bytes:
            _refuse_other_bytes(path, table if limit is None else table.slice(0, limit))
        pa.default_memory_pool().release_unused()
        if limit is not None and table.num_rows + len(broken) > limit:
            return table.slice(0, limit)
        if table.column(0)[-1].as_py() == _END:
            return table.slice(0, table.num_rows - 1)
        raise _open_quote(path, table.num_rows)
    raise _open_quote(path, rows + len(broken) + 1)


def _refuse_other_bytes(path: Path, table: pa.Table) -> None:
    """Raise DataError if a cell of these columns is not UTF-8."""
    for name, cells in zip(table.column_names, table.columns, strict=True):
        if not is_text(cells.type):
            continue
        row = pc.index(pc.match_substring(cells, _NOT_UTF8), True).as_py()
        if row >= 0:
            where = f"column {quoted(name)}: the cell in row {row + 1:,}"
            raise DataError(f"{path}: {where} is not in UTF-8; {_UTF8_ADVICE}")


def _open_quote(path: Path, row: int) -> DataError:
    where = f"row {row:,}" if row else "the header"
    advice = f"check the quotes in {path.name}, or whether the file was cut short"
    return DataError(f"{path}: a quote opens in {where} and never closes; {advice}")


def _swallowed_lines(path: Path, table: pa.Table) -> Iterator[str]:
    """Yield a remark for each column with cells that hold a line like a row, as a stray quote makes them."""
    # A first cell without spaces, as an id is; in prose a space follows a comma.
    line = rf"\n[^\s{delimiter(path)}]+{delimiter(path)}\S"
    for name, cells in zip(table.column_names, table.columns, strict=True):
        if not is_text(cells.type):
            continue
        has_line = pc.and_(pc.match_substring(cells, "\n"), pc.match_substring_regex(cells, line))
        count = pc.sum(has_line).as_py() or 0
        if count:
            where = f"{path}: column {quoted(name)}: row {pc.index(has_line, True).as_py() + 1:,}"
            yield (
                f"{where} is the first of {plural(count, 'cell')} with line ends followed by the separator; "
                "if these lines are rows of their own, a stray quote joins them: double or remove it"
            )


def _refuse_broken_rows(path: Path, header: Sequence[str], broken: Sequence[pa_csv.InvalidRow]) -> None:
    """Raise DataError if there are rows with too few or too many cells."""
    if not broken:
        return
    shown, advice = [], "rows must be complete"
    separator = other_separator(path, header)
    if separator is not None:
        raise DataError(f"{path}: {separator}")
    for row in broken:
        if _END in row.text:
            raise _open_quote(path, row.number - 1)
    for row in broken[:_SHOWN]:
        cells, text = plural(row.actual_columns, "cell"), row.text.replace(_NOT_UTF8, "\ufffd")
        shown.append(f"row {row.number - 1:,} has {cells} instead of {row.expected_columns}: {quoted(text)}")
        if row.actual_columns > row.expected_columns:
            advice = "put quotes around cells that hold the separator"
    raise DataError(f"{path}: {plural(len(broken), 'broken row')}; {'; '.join(shown)}; {advice}")


def _checked(data: bytes, is_last: bool = True) -> tuple[bytes, bytes]:
    """Return ``data`` as UTF-8, ``_NOT_UTF8`` for other bytes; and the bytes of an incomplete last character."""
    try:
        _, length = codecs.utf_8_decode(data, "strict", is_last)
        return data[:length], data[length:]
    except UnicodeDecodeError:
        text, length = codecs.utf_8_decode(data, "ensemble.csv", is_last)
        return text.encode(), data[length:]


class _WithEnd(io.RawIOBase):
    """Pass a stream and an ending to pyarrow's CSV reader.

    pyarrow treats the result of each ``read`` as a block. If a block ends with ``\\r``, pyarrow drops a ``\\n`` at
    the start of the next block, even within quotes; so no block of this stream ends with ``\\r``. pyarrow cannot
    show a broken row that is not UTF-8, so the stream is always UTF-8, with ``_NOT_UTF8`` for other bytes.
    """

    def __init__(self, stream: BinaryIO, ending: bytes) -> None:
        self._stream = stream
        self._ending = ending
        self._pending = b""
        self.has_other_bytes = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = _BLOCK_BYTES[0]) -> bytes:
        data = self._pending + self._stream.read(size - len(self._pending))
        is_last = len(data) < size
        if is_last:
            data, self._ending = data + self._ending, b""
        text, pending = _checked(data, is_last)
        self.has_other_bytes |= len(text) + len(pending) != len(data)
        self._pending = (b"\r" if text.endswith(b"\r") else b"") + pending
        return text.removesuffix(b"\r")


def text_as_numbers(
    cells: pa.Array | pa.ChunkedArray,
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Return cells as float64 [rows], NaN for text that is no number; and which cells are no numbers, [rows]."""
    cells = pc.utf8_trim_whitespace(cells)
    is_number = pc.match_substring_regex(cells, _NUMBER)
    numbers = pc.cast(pc.if_else(is_number, cells, "nan"), pa.float64())
    return np.asarray(numbers.to_numpy()), ~np.asarray(is_number)


def write_csv(
    path: Path, header: Sequence[str], blocks: Iterable[Iterable[pa.Array | pa.ChunkedArray]]
) -> None:
    """Write a CSV file in place, of columns in blocks: UTF-8, commas, ``\\n`` line ends, quotes only where needed.

    Text is written as it is, numbers in the shortest form that reads back as the same number, nulls as nothing.
    """
    with path.open("wb") as stream:
        stream.write(header_line(header))
        for columns in blocks:
            _write_lines(stream, pa.Table.from_arrays(list(columns), names=list(header)), ",")


def copy_csv_rows(source: Path, rows: FileRows, path: Path) -> None:
    """Write rows of a CSV file with all of its cells, separated and gzipped as it is; see ``FileRows``."""
    with open_output(path, gzipped=is_gzipped(source)) as stream:
        table, separator = rows.joined_to(read_text_csv(source)), delimiter(source)
        stream.write(header_line(table.column_names, separator))
        _write_lines(stream, table, separator)


def _write_lines(stream: BinaryIO, table: pa.Table, separator: str) -> None:
    for batch in table.to_batches(max_chunksize=_WRITE_ROWS):
        stream.write(csv_lines([csv_cells(column) for column in batch.columns], separator))


def header_line(names: Sequence[str], separator: str = ",") -> bytes:
    """Return the first line of a CSV file."""
    return f"{separator.join(_quoted(name, separator) for name in names)}\n".encode()


def csv_cells(column: pa.Array) -> pa.Array:
    """Return a column's values as text for a CSV file; nulls become empty."""
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    return pc.fill_null(cell_texts(column), "")


def csv_lines(cells: Sequence[pa.Array], separator: str = ",") -> bytes | pa.Buffer:
    """Return the text of lines, each ended by ``\\n``, from the results of :func:`csv_cells` by column."""
    if len(cells) > 1:
        batch = pa.record_batch(cells, [str(number) for number in range(len(cells))])
        sink = pa.BufferOutputStream()
        options = pa_csv.WriteOptions(
            include_header=False,
            batch_size=max(1, len(batch)),
            delimiter=separator,
            quoting_style="none",
        )
        try:
            pa_csv.write_csv(batch, sink, options)
            return sink.getvalue()
        except pa.ArrowInvalid:  # some cells need quotes, and pyarrow can only quote all cells or none
            pass
    lines = []
    for row in zip(*(column.to_pylist() for column in cells), strict=True):
        line = separator.join(_quoted(cell, separator) for cell in row)
        lines.append(line or '""')  # a blank line would not count as a row
    return "".join(f"{line}\n" for line in lines).encode()


def _quoted(cell: str, separator: str) -> str:
    must_quote = separator in cell or _MUST_QUOTE.search(cell)
    return '"' + cell.replace('"', '""') + '"' if must_quote else cell
