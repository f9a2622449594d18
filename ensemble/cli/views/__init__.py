"""What people are shown of a run: each view is one file here.

Its function ``view`` takes what a command has made, such as a ``RunReport``, and yields sentences and tables; an
empty sentence is left out.  It is imported when it is shown: --help and a typo in a key shall answer at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import IO

from ensemble.cli.layout import Table, page_width, wrapped


def lines(name: str, subject: object, width: int | None = None) -> Iterator[str]:
    """Yield the lines of a view, wrapped to ``width`` columns unless it is None."""
    for part in import_module(f"{__name__}.{name}").view(subject):
        if isinstance(part, Table):
            yield from part.lines(width)
        elif part:
            yield from wrapped(part, width)


def show(name: str, subject: object, file: IO[str]) -> None:
    """Print a view as wide as the file's terminal."""
    for line in lines(name, subject, page_width(file)):
        print(line, file=file, flush=True)
