"""Tables and sentences as lines of plain text that fit where they are read: a terminal, a notebook, a file.

No line ends inside a word or a number, and nothing is cut to fit: a table that is too wide is turned, so that its
columns stand below each other, and a word that is longer than a line stands on a line of its own.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO

# Tables in files, where nothing says how wide the reader's window is.
FILE_WIDTH = 120
NO_BREAK = "\xa0"  # a space at which no line ends
_TERMINAL_WIDTH = 80  # of one that does not say
_GAP = "  "
_WORTH_A_LINE = 2  # columns of room that a header of several words must save to take two lines
_UNIT = re.compile(r"(?<=\d) (?=([KMGT]i?)?B\b|[KM]\b|s\b|min\b|h\b)")  # stays with its number
_RULES = "─-"  # the second for streams that take ASCII only


@dataclass(frozen=True)
class Page:
    """Where lines go: ``width`` in columns, None for a file, whose lines may be long; ``rule`` fills a rule."""

    width: int | None = None
    rule: str = _RULES[0]

    @classmethod
    def of(cls, stream: IO[str] | None, environ: Mapping[str, str] | None = None) -> Page:
        """What a stream takes.

        COLUMNS counts as it does for other programs, and before what a terminal says of itself.
        """
        columns = (os.environ if environ is None else environ).get("COLUMNS", "")
        width = int(columns) if columns.isascii() and columns.isdigit() else 0
        if not width and stream is not None and stream.isatty():
            try:
                width = os.get_terminal_size(stream.fileno()).columns or _TERMINAL_WIDTH
            except (OSError, ValueError):  # one without a descriptor, or without a size
                width = _TERMINAL_WIDTH
        try:
            _RULES[0].encode(getattr(stream, "encoding", None) or "utf-8")
        except (UnicodeEncodeError, LookupError):
            return cls(width or None, _RULES[1])
        return cls(width or None)

    def wrapped(self, text: str, first: str = "", later: str | None = None) -> list[str]:
        """A sentence in lines.

        Args:
            first: what its first line begins with.
            later: what the others begin with; left out, ``first`` as blanks.
        """
        indent = " " * len(first) if later is None else later
        lines: list[str] = []
        for line in text.splitlines() or [""]:
            start = indent if lines else first
            if self.width is None or _cells(start + line) <= self.width:
                lines.append(f"{start}{line}".rstrip())
                continue
            lines += textwrap.wrap(
                _UNIT.sub(NO_BREAK, line),
                self.width,
                initial_indent=start,
                subsequent_indent=indent,
                break_long_words=False,  # paths and UUIDs are there to be copied
                break_on_hyphens=False,
            )
        return [line.replace(NO_BREAK, " ") for line in lines]


@dataclass(frozen=True)
class Table:
    """Cells by row, the first of each is its name; ``totals`` are rows set apart below the others.

    ``texts`` are the headers whose cells are words, which begin at the left; numbers end at the right.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()
    texts: Sequence[str] = ()

    def lines(self, page: Page) -> list[str]:
        """The table as it is where it fits, else turned: a column for each row, as many abreast as fit."""
        width = page.width or FILE_WIDTH
        every = (*self.rows, *self.totals)
        kept = [place for place in range(len(self.headers)) if not place or any(row[place] for row in every)]
        headers = [self.headers[place] for place in kept]
        rows = [[row[place] for place in kept] for row in self.rows]
        totals = [[row[place] for place in kept] for row in self.totals]
        left = [0, *(place for place, header in enumerate(headers) if header in self.texts)]
        upright = list(_drawn(headers, rows, totals, left, page.rule))
        if max(map(_cells, upright)) <= width:
            return upright
        return list(_turned(headers, [*rows, *totals], width, page.rule))


def _cells(text: str) -> int:
    """Columns of a terminal that a text takes; a character of Chinese takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _padded(text: str, width: int, is_left: bool) -> str:
    blanks = " " * (width - _cells(text))
    return text + blanks if is_left else blanks + text


def _drawn(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    totals: Sequence[Sequence[str]],
    left: Sequence[int],
    rule: str,
) -> Iterator[str]:
    tops, bottoms = [""] * len(headers), list(headers)
    for place, header in enumerate(headers):
        widest = max((_cells(row[place]) for row in (*rows, *totals)), default=0)
        if _cells(header) > widest + _WORTH_A_LINE:
            tops[place], _, bottoms[place] = header.rpartition(" ")
    every = [tops, bottoms, *rows, *totals]
    widths = [max(_cells(row[place]) for row in every) for place in range(len(headers))]

    def line(cells: Sequence[str]) -> str:
        padded = (
            _padded(cell, width, place in left)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        )
        return _GAP.join(padded).rstrip()

    if any(tops):
        yield line(tops)
    yield line(bottoms)
    yield rule * (sum(widths) + len(_GAP) * (len(widths) - 1))
    yield from map(line, rows)
    if totals:
        yield ""
    yield from map(line, totals)


def _turned(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int, rule: str) -> Iterator[str]:
    names = max(map(_cells, headers))
    groups: list[list[Sequence[str]]] = []
    taken = width + 1
    for row in rows:
        room = len(_GAP) + max(map(_cells, row))
        if taken + room > width:
            groups.append([])
            taken = names
        groups[-1].append(row)
        taken += room
    for number, group in enumerate(groups):
        if number:
            yield ""
        yield from _column_each(headers, group, names, width, rule)


def _column_each(
    headers: Sequence[str], rows: Sequence[Sequence[str]], names: int, width: int, rule: str
) -> Iterator[str]:
    first = 0
    if names + len(_GAP) + _cells(rows[0][0]) > width:  # alone, its name too long to stand beside its header
        yield rows[0][0]
        first = 1
    columns = [max(map(_cells, row[first:])) for row in rows]
    whole = names + sum(columns) + len(_GAP) * len(columns)
    if first:
        yield rule * whole
    for place in range(first, len(headers)):
        cells = [_padded(row[place], room, False) for row, room in zip(rows, columns, strict=True)]
        yield _GAP.join([_padded(headers[place], names, True), *cells]).rstrip()
        if not place:
            yield rule * whole
