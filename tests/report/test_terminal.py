"""Sentences about members: how they were loaded, and which rows had to be computed again."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from ensemble.cli.progress import BarDisplay, PlainDisplay
from ensemble.cli.summary import float32_text, gaps_text, repeated_text
from ensemble.common.protocol import Counters, Ready
from ensemble.scheduling.state import Gap, MemberState, WorkerRecord
from tests.report.test_progress import member

READY = Ready(1.0, "Tesla T4", "float16", "eager", 9_000_000_000, 1024, 16384, ("a note",))


def loaded(*ready: Ready) -> MemberState:
    state = member()
    for replica, event in enumerate(ready):
        state.workers.append(WorkerRecord("m0", replica, ("cpu",), 7 + replica, "log", 0.0, 0.0, ready=event))
    return state


def test_each_member_says_once_what_it_computes_with() -> None:
    state = loaded(READY, replace(READY, token_budget=9000))
    bars = Console(file=io.StringIO(), force_terminal=True, width=100)
    plain = io.StringIO()
    for display in (PlainDisplay(plain), BarDisplay(bars.file, lambda: bars)):
        display.update([member()])
        for _ in range(3):
            display.update([state])
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
    PlainDisplay(file).update([state])
    assert file.getvalue().splitlines()[0] == f"m0: {expected}"


def test_time_between_members() -> None:
    gaps = [Gap("GPU-0", "a", "b", 3.21), *(Gap("GPU-0", "b", f"c{index}", 0.5) for index in range(5))]
    assert gaps_text([]) == ""
    assert gaps_text(gaps[:2]) == "idle between members: 3.2 s (a to b), 0.5 s (b to c0)"
    assert gaps_text(gaps).endswith("0.5 s (b to c2), 2 more in run.json")


def test_rows_that_were_computed_once_for_several() -> None:
    state = loaded(READY, READY)
    assert repeated_text(state) == ""
    for record in state.workers:
        record.counters = Counters(rows=5000, repeated_rows=600)
    assert repeated_text(state) == (
        "m0: 1,200 of 10,000 rows repeat another row's text and were not computed again"
    )


def test_rows_that_overflowed() -> None:
    state = loaded(READY, READY)
    assert float32_text(state) == ""
    state.workers[0].counters = Counters(recomputed_rows=1)
    assert float32_text(state) == "m0: 1 row overflowed float16 and was computed again in float32"
    state.workers[1].counters = Counters(recomputed_rows=1999)
    assert float32_text(state) == "m0: 2,000 rows overflowed float16 and were computed again in float32"
    quantized = loaded(replace(READY, dtype="float32"))
    quantized.workers[0].counters = Counters(recomputed_rows=3)
    assert "3 rows overflowed half precision and were" in float32_text(quantized)
