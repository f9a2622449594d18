"""The views of a run: a new one is one file and one line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from ensemble.cli import views
from ensemble.cli.layout import Table
from ensemble.pipeline.run_report import RunReport
from tests.report.reports import member, report, shown, worker


def test_a_view_of_ones_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def view(subject: RunReport) -> Iterator[views.Part]:
        yield ""
        yield f"a run of {subject.rows} rows"
        yield Table(["member", "tokens"], [[one.name, str(one.counters.tokens)] for one in subject.members])

    module = ModuleType("my_view")
    module.view = view  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "my_view", module)
    monkeypatch.setitem(views.VIEWS, "mine", "my_view")
    assert shown("mine", report(member(workers=(worker(tokens=7), worker(tokens=5))))) == [
        "a run of 1000 rows",
        "member  tokens",
        "──────────────",
        "m           12",
    ]


def test_every_view_that_is_named_is_there() -> None:
    assert all(callable(import_module(place).view) for place in views.VIEWS.values())
