"""What people are shown of a run: each view is one file here, and one line in ``VIEWS``.

A view is a function of what it shows that yields sentences and tables.  It is imported when it is shown: --help and
a typo in a key shall answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import IO, Any, Final, TypeAlias

from ensemble.cli.layout import Table, page_width, wrapped

# Takes what a command has made, such as a ``RunReport``; an empty sentence is left out.
View: TypeAlias = Callable[[Any], Iterator[str | Table]]

# By name: the module whose function ``view`` it is.
VIEWS: Final[dict[str, str]] = {
    "validate": "ensemble.cli.views.validate",
    "plan": "ensemble.cli.views.plan",
    "summary": "ensemble.cli.views.summary",
    "status": "ensemble.cli.views.status",
    "rehearse": "ensemble.cli.views.rehearse",
    "tune": "ensemble.cli.views.tune",
    "merge": "ensemble.cli.views.merge",
    "compare": "ensemble.cli.views.compare",
    "fit": "ensemble.cli.views.fit",
}


def lines(name: str, subject: object, width: int | None = None) -> Iterator[str]:
    """Yield the lines of a view, wrapped to ``width`` columns unless it is None."""
    view: View = import_module(VIEWS[name]).view
    for part in view(subject):
        if isinstance(part, Table):
            yield from part.lines(width)
        elif part:
            yield from wrapped(part, width)


def show(name: str, subject: object, file: IO[str]) -> None:
    """Print a view as wide as the file's terminal."""
    for line in lines(name, subject, page_width(file)):
        print(line, file=file, flush=True)
