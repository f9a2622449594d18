"""Show people the result of a command: each view is one file here.

The function ``view`` of such a file takes the result, such as a ``RunReport``, and yields sentences and tables;
empty sentences are left out. ``document`` returns what ``--json`` prints (docs/running.md). A view is imported only
when it is shown, so that --help and a typo in a key answer at once.
"""

from __future__ import annotations

import json
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


def show(name: str, subject: object, file: IO[str] | None) -> None:
    """Print a view as wide as the file's terminal, unless there is no file."""
    if file is not None:
        for line in lines(name, subject, page_width(file)):
            print(line, file=file, flush=True)


def show_json(name: str, subject: object) -> None:
    """Print the document of a view as JSON; a number that JSON lacks becomes null."""
    from pydantic_core import to_json

    document = import_module(f"{__name__}.{name}").document(subject)
    print(json.dumps(json.loads(to_json(document, inf_nan_mode="null")), indent=2))  # noqa: T201
