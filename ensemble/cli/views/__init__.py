"""What people are shown of a run: each view is one file here, and one line in ``VIEWS``.

A view is a function of what it shows that gives sentences and tables; where they go, and how wide that is, is not
its business.  It is imported when it is shown: --help and a typo in a key shall answer at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import IO, Any, Final, TypeAlias

from ensemble.cli.layout import Page, Table

# Of what a command has made, such as a ``RunReport``; an empty sentence is left out.
View: TypeAlias = Callable[[Any], Iterator[str | Table]]

# By name: the module here whose function ``view`` it is.
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


def lines(name: str, subject: object, page: Page) -> Iterator[str]:
    """A view as lines that fit on a page."""
    view: View = import_module(VIEWS[name]).view
    for part in view(subject):
        if isinstance(part, Table):
            yield from part.lines(page)
        elif part:
            yield from page.wrapped(part, later="  ")


def show(name: str, subject: object, file: IO[str]) -> None:
    """Print a view as it fits where it goes."""
    for line in lines(name, subject, Page.of(file)):
        print(line, file=file, flush=True)
