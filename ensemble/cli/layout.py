"""Tables and sentences as lines of plain text that fit where they are read: a terminal, a notebook, a file.

No line ends inside a word or a number, and nothing is cut to fit: a table that is too wide is turned, so that its
columns stand below each other, and a word that is longer than a line stands on a line of its own.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import IO

from ensemble.common.text import NO_BREAK

# Tables in files, where nothing says how wide the reader's window is.
FILE_WIDTH = 120
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
    def of(cls, stream: IO[str] | None) -> Page:
        """What a stream takes.

        COLUMNS counts as it does for other programs, and before what a terminal says of itself.
        """
        columns = os.environ.get("COLUMNS", "")
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
            if self.width is None or _width(start + line) <= self.width:
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
    """Cells by row, each of which may end early; the first is its name.

    ``totals`` are rows set apart below the others.
    ``texts`` are the headers whose cells are words, which begin at the left; numbers end at the right.
    """

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    totals: Sequence[Sequence[str]] = ()
    texts: Sequence[str] = ()

    def lines(self, page: Page) -> list[str]:
        """The table as it is where it fits, else turned: a column for each row, as many abreast as fit.

        Columns without content are left out.
        """
        width = page.width or FILE_WIDTH
        cells = [self.headers, *self.rows, *self.totals]
        whole = enumerate(zip_longest(*cells, fillvalue=""))
        columns = [column for index, column in whole if not index or any(column[1:])]
        headers, *rows = ([column[index] for column in columns] for index in range(len(cells)))
        left = {0, *(index for index, header in enumerate(headers) if header in self.texts)}
        tops, bottoms = [""] * len(headers), list(headers)
        for index, (header, *under) in enumerate(columns):
            if _width(header) > max(map(_width, under), default=0) + _WORTH_A_LINE:
                tops[index], _, bottoms[index] = header.rpartition(" ")
        head = [tops, bottoms] if any(tops) else [bottoms]
        body = rows[: len(self.rows)]
        if self.totals:
            body += [[""] * len(headers), *rows[len(self.rows) :]]
        upright = list(_grid([*head, *body], len(head), left, page.rule))
        if max(map(_width, upright)) <= width:
            return upright

        groups: list[list[Sequence[str]]] = []
        taken = width + 1
        names = max(map(_width, headers))
        for row in rows:
            room = len(_GAP) + max(map(_width, row))
            if taken + room > width:
                groups.append([])
                taken = names
            groups[-1].append(row)
            taken += room
        turned: list[str] = []
        for group in groups:
            lines = [*zip(headers, *group, strict=True)]
            is_long = names + len(_GAP) + _width(group[0][0]) > width  # then it is alone, above its cells
            turned += ["", group[0][0]] if is_long else [""]
            turned += _grid(lines[is_long:], not is_long, {0}, page.rule)
        return turned[1:]


def _width(text: str) -> int:
    """Columns of a terminal that a text takes; a character of Chinese takes two."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _grid(lines: Sequence[Sequence[str]], head: int, left: Container[int], rule: str) -> Iterator[str]:
    """Straight columns, cells at their left where ``left`` says so, and a rule below ``head`` lines."""
    widths = [max(map(_width, column)) for column in zip(*lines, strict=True)]
    for number, line in enumerate(lines):
        if number == head:
            yield rule * (sum(widths) + len(_GAP) * (len(widths) - 1))
        blanks = [" " * (width - _width(cell)) for width, cell in zip(widths, line, strict=True)]
        pairs = enumerate(zip(line, blanks, strict=True))
        yield _GAP.join(
            cell + blank if index in left else blank + cell for index, (cell, blank) in pairs
        ).rstrip()
