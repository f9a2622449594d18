"""Sentences about members: how they were loaded, and which rows had to be computed again."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from ensemble.cli.progress import BarDisplay, PlainDisplay
from ensemble.cli.runs import summary
from ensemble.common.protocol import Ready
from ensemble.pipeline.reporting import members_of
from ensemble.pipeline.run_report import MemberReport, ViewReport
from ensemble.scheduling.records import Gap, WorkerRecord
from ensemble.scheduling.state import ModelState
from tests.cli import test_progress
from tests.cli.reports import member, report, worker

READY = Ready(1.0, "Tesla T4", "float16", "eager", 9_000_000_000, 1024, 16384, ("a note",))


def loaded(*ready: Ready) -> ModelState:
    state = test_progress.member()
    for replica, event in enumerate(ready):
        record = WorkerRecord("m0", replica, ("cpu",), str(7 + replica), "log", 0.0, 0.0)
        state.worker_began(record)
        state.worker_ready(record, event)
    return state


def test_each_member_says_once_what_it_computes_with() -> None:
    state = loaded(READY, replace(READY, token_budget=9000))
    bars = Console(file=io.StringIO(), force_terminal=True, width=100)
    plain = io.StringIO()
    for display in (PlainDisplay(plain), BarDisplay(bars.file, bars)):
        display.update(members_of([test_progress.member()]))
        for _ in range(3):
            display.update(members_of([state]))
    assert isinstance(bars.file, io.StringIO)
    for output in (plain.getvalue(), bars.file.getvalue()):
        assert output.count("m0: float16, eager attention, 16,384 tokens a batch\n") == 1
        assert output.count("a batch") == 1
        assert output.count("m0: a note\n") == 1


@pytest.mark.parametrize(
    ("attention", "batch_size", "expected"),
    [
        ("flash_attention_2", None, "float16, flash-attention-2, 16,384 tokens a batch"),
        ("", 8, "float16, 8 rows a batch"),
    ],
)
def test_what_it_computes_with(attention: str, batch_size: int | None, expected: str) -> None:
    ready = replace(READY, attn_implementation=attention, notes=())
    state = loaded(ready)
    request = replace(state.plan.request, batch_size=batch_size)
    state.plan = replace(state.plan, request=request)
    file = io.StringIO()
    PlainDisplay(file).update(members_of([state]))
    assert file.getvalue().splitlines()[0] == f"m0: {expected}"


def sentences(*members: MemberReport, **changes: Any) -> list[str]:
    """What the summary says below its table."""
    return [part for part in summary(report(*members, **changes)) if isinstance(part, str) and part]


def test_time_between_members() -> None:
    gaps = [Gap("GPU-0", "a", "b", 3.21), *(Gap("GPU-0", "b", f"c{index}", 0.5) for index in range(5))]
    assert sentences(member()) == []
    told = sentences(member(), idle_gaps=gaps[:2])
    assert told == ["idle between members: 3.2 s (a to b), 0.5 s (b to c0)"]
    assert sentences(member(), idle_gaps=gaps)[0].endswith("0.5 s (b to c2), 2 more in run.json")


def test_rows_that_were_computed_once_for_several() -> None:
    item = worker(rows=5000, repeated_rows=600)
    told = "m: 1,200 of 10,000 rows repeat another row's text and were not computed again"
    assert sentences(member(workers=(item, item))) == [told]
    assert sentences(member(workers=(item, item), chunks=0)) == [], "they are of an earlier run"
    resumed = told.replace("10,000 rows", "10,000 rows computed now")
    assert sentences(member(workers=(item, item), reused_rows=300)) == [resumed]


def test_rows_that_were_cut() -> None:
    item = worker(rows=5000, truncated_rows=600, cut_tokens=3000, max_length=512)
    told = "m: 600 of 5,000 rows were cut at max_length 512, by 5 tokens on average"
    assert sentences(member(workers=(item,))) == [told]
    resumed = told.replace("5,000 rows", "5,000 rows computed now")
    assert sentences(member(workers=(item,), reused_rows=300)) == [resumed], "of the others nobody knows"
    views = {"plain": ViewReport(1.0, 2500), "swapped": ViewReport(1.0, 2500)}
    assert sentences(member(workers=(item,), views=views)) == [
        told.replace("5,000 rows", "5,000 rows of 2 views")
    ]


def test_rows_that_overflowed() -> None:
    item, many = worker(dtype="float16", recomputed_rows=1), worker(dtype="float16", recomputed_rows=1999)
    assert sentences(member(workers=(item,))) == [
        "m: 1 row overflowed half precision and was computed again in float32"
    ]
    assert sentences(member(workers=(item, many))) == [
        "m: 2,000 rows overflowed half precision and were computed again in float32"
    ]
    most = worker(dtype="float16", recomputed_rows=25, float32_rows=1000)
    assert sentences(member(workers=(most,))) == [
        "m: 25 rows overflowed half precision and were computed again in float32",
        "m: 1,000 rows were computed in float32 at once, as most of a chunk had overflowed half precision",
    ]
