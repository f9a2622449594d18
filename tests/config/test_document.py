"""How places and problems are written."""

from __future__ import annotations

import pytest

from ensemble.config.document import place
from tests.config.examples import BASE, overridden


@pytest.mark.parametrize(
    ("loc", "text"),
    [
        (("models", 1, "weight"), "models[1].weight"),
        (("label_map", "a b", "c.d"), "label_map['a b']['c.d']"),
        (("x\n",), "['x\\n']"),
        ((), "top level"),
    ],
)
def test_places_are_written_as_people_write_them(loc: tuple[str | int, ...], text: str) -> None:
    assert place(loc) == text


def test_problems_name_the_line_or_the_override() -> None:
    document = overridden(BASE, "models.0.weight=x", "new.key=1")
    document.report(("models", 0, "weight"), "must be a number")
    document.report(("models", 1, "label_map", "x.y"), "odd")
    document.report(("new",), "unknown")
    document.report(("elsewhere",), "missing")
    assert document.problems == (
        "models[1].label_map['x.y'] (line 7): odd",
        "--set models.0.weight=x: must be a number, not 'x'",
        "--set new.key=1: new: unknown",
        "elsewhere: missing",
    )
