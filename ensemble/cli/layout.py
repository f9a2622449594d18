"""Lay out tables and sentences as lines of plain text that fit a terminal, a notebook or a file.

No line ends inside a word or a number, and nothing is cut: in a table that is too wide each row becomes a block.
"""

from __future__ import annotations

import os
import re
import shutil
import textwrap
from collections.abc import Container, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import IO

from ensemble.common.text import NO_BREAK

# Tables in files, where nothing says how wide the reader's window is.
FILE_WIDTH = 120
_UNIT = re.compile(r"(?<=\d) (?=([KMGT]i?)?B\b|[KM]\b|s\b|min\b|h\b)")  # stays with its number


def page_width(stream: IO[str] | None) -> int | None:
    """Return the columns of COLUMNS or the terminal; None for a file, whose lines may be long."""
    if os.environ.get("COLUMNS", "").isdigit() or (stream is not None and stream.isatty()):
        return shutil.get_terminal_size().columns
    return None


def wrapped(text: str, width: int | None, first: str = "", later: str = "  ") -> list[str]:
    """Return a text in lines; the first begins with ``first``, the others with ``later``."""
    lines: list[str] = []
    for line in text.splitlines() or [""]:
        start = later if lines else first
        if width is None or _width(start + line) <= width:
            lines.append(f"{start}{line}".rstrip())
            continue
        lines += textwrap.wrap(
            _UNIT.sub(NO_BREAK, line),
            width,
            initial_indent=start,
            subsequent_indent=later,
            break_long_words=False,  # paths and UUIDs are there to be copied
            break_on_hyphens=False,
        )
    return [line.replace(NO_BREAK, " ") for line in lines]


@dataclass(frozen=True)
class Table:
    """Hold the cells of each row; the first cell is the row's name, and rows may lack cells at the end.

    ``totals`` are rows set apart below the others. ``texts`` names the columns that hold words and are aligned to
    the left; numbers are aligned to the right.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()
    texts: Sequence[str] = ()

    def lines(self, width: int | None) -> list[str]:
        """Return the table, or a block of lines for each row if it is too wide.

        Columns without content are left out.
        """
        columns = [
            list(column)
            for place, column in enumerate(zip_longest(self.headers, *self.rows, *self.totals, fillvalue=""))
            if place == 0 or any(column[1:])
        ]
        left_aligned = {0} | {place for place, column in enumerate(columns) if column[0] in self.texts}
        heads = []
        for header, *cells in columns:
            # A header of several words takes two lines only if that saves some columns.
            is_wide = _width(header) > max(map(_width, cells), default=0) + 2
            heads.append(header.rpartition(" ")[::2] if is_wide else ("", header))
        head = [line for line in zip(*heads, strict=True) if any(line)]
        _, *rows = zip(*columns, strict=True)
        upright = _grid([*head, *rows], left_aligned)
        table_width = max(map(_width, upright))
        if table_width <= (width or FILE_WIDTH):
            upright.insert(len(head), "-" * table_width)
            if self.totals:
                upright.insert(-len(self.totals), "")
            return upright
        blocks: list[str] = []
        for name, *cells in rows:
            pairs = [
                (f"  {column[0]}", cell) for column, cell in zip(columns[1:], cells, strict=True) if cell
            ]
            blocks += ["", name, *_grid(pairs, {0})]
        return blocks[1:]


def _width(text: str) -> int:
    """Return the columns of a terminal that a text takes; a character of Chinese takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _grid(lines: Sequence[Sequence[str]], left_aligned: Container[int]) -> list[str]:
    """Return straight columns; those that are not left-aligned end at the right."""
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    grid = []
    for line in lines:
        cells = []
        for place, cell in enumerate(line):
            blanks = " " * (widths[place] - _width(cell))
            cells.append(cell + blanks if place in left_aligned else blanks + cell)
        grid.append("  ".join(cells).rstrip())
    return grid
