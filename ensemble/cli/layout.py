"""Lay out tables and sentences as lines of plain text that fit a terminal, a notebook or a file.

No line ends inside a word or a number, and nothing is cut: in a table that is too wide each row becomes a block.

A view is a function ``MODULE.NAME`` of this folder that takes the result of a command, such as a ``RunReport``, and
yields sentences and tables; empty sentences are left out. It is imported only when it is shown, so that --help and
a typo in a key answer at once.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import zip_longest
from typing import IO, TypeAlias, TypeVar

from ensemble.common.text import NO_BREAK

T = TypeVar("T")
Cell: TypeAlias = str | int | None  # None: nothing is known
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
    rows: Sequence[Sequence[Cell]]
    totals: Sequence[Sequence[Cell]] = ()
    texts: Sequence[str] = ()

    def lines(self, width: int | None) -> list[str]:
        """Return the table, or a block of lines for each row if it is too wide.

        Columns without content are left out.
        """
        places = zip_longest(self.headers, *self.rows, *self.totals)
        filled = [[*map(_text, column)] for column in places]
        columns = [column for place, column in enumerate(filled) if place == 0 or any(column[1:])]
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


def table(items: Iterable[T], columns: Mapping[str, Callable[[T], Cell]], texts: Sequence[str] = ()) -> Table:
    """Return a table with a row for each item; ``columns`` have each cell by its header."""
    return Table([*columns], [[cell(item) for cell in columns.values()] for item in items], texts=texts)


def lines(view: str, subject: object, width: int | None = None) -> Iterator[str]:
    """Yield the lines of a view, wrapped to ``width`` columns unless it is None."""
    module, _, name = view.partition(".")
    for part in getattr(import_module(f"ensemble.cli.{module}"), name)(subject):
        if isinstance(part, Table):
            yield from part.lines(width)
        elif part:
            yield from wrapped(part, width)


def show(view: str, subject: object, file: IO[str] | None) -> None:
    """Print a view as wide as the file's terminal, unless there is no file."""
    if file is not None:
        for line in lines(view, subject, page_width(file)):
            print(line, file=file, flush=True)


def show_json(document: object) -> None:
    """Print a result as JSON for programs (docs/reference/exit-codes.md); a number that JSON lacks becomes null."""
    from pydantic_core import to_json

    print(json.dumps(json.loads(to_json(document, inf_nan_mode="null")), indent=2))  # noqa: T201


def _text(cell: Cell) -> str:
    if cell is None:
        return ""
    return cell if isinstance(cell, str) else f"{cell:,}"


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
