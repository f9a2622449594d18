"""The views of a run: a new one is one file and one line."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

import pytest

from ensemble.cli import views
from tests.cli.reports import member, report, shown, worker
from tests.page import blocks


def test_the_view_of_the_page_on_extending(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("speeds")
    exec(blocks()["ensemble/cli/views/speeds.py"], vars(module))
    monkeypatch.setitem(sys.modules, "speeds", module)
    monkeypatch.setitem(views.VIEWS, "speeds", "speeds")
    slow, fast = (
        member(name, chunks=1, workers=(worker(tokens=tokens), worker(tokens=1)))
        for name, tokens in (("slow", 3), ("fast", 1999))
    )
    assert shown("speeds", report(slow, fast)) == [
        "member  tokens/s",
        "────────────────",
        "fast       2,000",
        "slow           4",
    ]


def test_every_view_that_is_named_is_there() -> None:
    assert all(callable(import_module(place).view) for place in views.VIEWS.values())
