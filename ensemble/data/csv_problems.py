"""What can be wrong with the rows and cells of a CSV file, and the words for it.

Row 1 is the first below the header; blank lines are no rows.  Does not read any cell for its own sake.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from ensemble.common.text import error_text, plural, quoted
from ensemble.data.input_file import open_input

CONVERT_ADVICE = "convert the file to UTF-8 first, for example with: iconv -f WINDOWS-1252 -t UTF-8"
# Longer than any cell that pyarrow reads.
_MAX_CELL_BYTES = (1 << 31) - 1
_SHOWN = 3
# Half of a character: no text that was decoded holds it.
OPEN = "\ud800"


def delimiter_of(path: Path) -> str:
    return "\t" if ".tsv" in [suffix.lower() for suffix in path.suffixes[-2:]] else ","


def quote_advice(path: Path) -> str:
    return f"check the quotes in {path.name}, or whether the file was cut short"


def csv_records(lines: Iterable[str], delimiter: str) -> Iterator[list[str]]:
    """The csv module's records without the blank ones, then ``[OPEN]``; if a quote is open, its cell ends so."""
    return filter(None, csv.reader(chain(lines, [OPEN]), delimiter=delimiter))


def open_quote_problem(path: Path) -> str:
    """The sentence about a quote that never closes and has swallowed every row after it; names its row."""
    row = -1  # of the header, which comes first
    old_limit = csv.field_size_limit(_MAX_CELL_BYTES)
    try:
        with open_input(path) as stream:
            text = io.TextIOWrapper(stream, encoding="utf-8-sig", errors="replace", newline="")
            # Before Python 3.11 the csv module refuses NUL, which means nothing to it.
            lines = (line.replace("\0", "?") for line in text)
            for _ in csv_records(lines, delimiter_of(path)):
                row += 1
    except csv.Error:  # a cell above 2 GB
        row += 1
    finally:
        csv.field_size_limit(old_limit)
    place = f"row {row:,}" if row else "the header"
    return f"{path}: a quote opens in {place} and never closes; {quote_advice(path)}"


class _ArrowRow(Protocol):
    """``pyarrow.csv.InvalidRow``; ``number`` counts from 1 and includes the header."""

    number: int | None
    text: str
    expected_columns: int
    actual_columns: int


@dataclass
class RaggedRows:
    """pyarrow's handler of rows with the wrong number of cells: notes them all, so that all are reported."""

    path: Path
    limit: int | None
    count: int = 0
    is_any_long: bool = False
    shown: list[str] = field(default_factory=list)

    def __call__(self, row: _ArrowRow) -> str:
        number = None if row.number is None else row.number - 1
        if self.limit is None or number is None or number <= self.limit:
            self._note(number, row.actual_columns, row.expected_columns, row.text)
        return "skip"

    def _note(self, number: int | None, found: int, expected: int, text: str) -> None:
        if self.count < _SHOWN:
            place = "" if number is None else f"row {number:,} "
            self.is_any_long |= found > expected
            self.shown.append(f"{place}has {plural(found, 'cell')} instead of {expected}: {quoted(text)}")
        self.count += 1

    @contextmanager
    def without_noise(self) -> Iterator[None]:
        """Keeps quiet what pyarrow prints where the text of a row is not UTF-8, before it gives up."""

        def hook(unraisable: sys.UnraisableHookArgs) -> None:
            if unraisable.object is not self:
                before(unraisable)

        before = sys.unraisablehook
        sys.unraisablehook = hook
        try:
            yield
        finally:
            sys.unraisablehook = before

    def problem(self, gave_up: pa.ArrowInvalid | None = None) -> str:
        """The sentence about all of them, or about that one whose text is not UTF-8."""
        found = re.match(r".*Row #(\d+): Expected (\d+) columns, got (\d+): (.*)", str(gave_up), re.DOTALL)
        if found is not None:
            self._note(int(found[1]) - 1, int(found[3]), int(found[2]), found[4])
        elif gave_up is not None:
            return f"{self.path}: cannot be read as CSV ({error_text(gave_up)})"
        count, shown = plural(self.count, "broken row"), "; ".join(self.shown)
        between = "tabs" if delimiter_of(self.path) == "\t" else "commas"
        advice = (
            f"put quotes around cells that hold {between}" if self.is_any_long else "rows must be complete"
        )
        return f"{self.path}: {count}; {shown}; {advice}"


@dataclass
class InvalidCells:
    """The cells of one column that are not UTF-8."""

    count: int = 0
    first: str = ""

    def decode(self, array: pa.Array, first_row: int) -> pa.Array:
        """``pa.binary()`` to ``pa.string()``, both of shape (rows,); shares the bytes if they are UTF-8."""
        try:
            return pc.cast(array, pa.string())
        except pa.ArrowInvalid:
            cells: list[Any] = array.to_pylist()
            return pa.array([self._text(cell, row) for row, cell in enumerate(cells, first_row + 1)])

    def _text(self, cell: bytes, row: int) -> str:
        try:
            return cell.decode()
        except UnicodeDecodeError as error:
            if not self.count:
                self.first = f"the first in row {row:,}, byte {error.start + 1:,} of the cell"
            self.count += 1
            return cell.decode(errors="replace")

    def problem(self, path: Path, column: str) -> str:
        count = plural(self.count, "cell")
        return f"{path}: column {quoted(column)}: {count} not in UTF-8, {self.first}; {CONVERT_ADVICE}"
