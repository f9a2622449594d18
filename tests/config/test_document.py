"""How places and problems are written."""

from __future__ import annotations

import pytest

from ensemble.config.document import place


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
