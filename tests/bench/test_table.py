"""What the benchmark prints: ratios by rounds, what misses, what failed, and its place in the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.contests import OURS, Sample, Target, Work
from bench.document import BEGIN, END, page_of, text_of, write
from bench.processes import Measured
from bench.rounds import MIB, Found
from bench.table import targets_table

WORK = Work("two", "single", ("m",), 100, 1, ("loop", "floor"))
LOOP = Target("the loop", "two", "loop", 0.30)
FLOOR = Target("the floor", "two", "floor", 1.10, phase=True)


def worker(**changes: Any) -> dict[str, Any]:
    known = {"started_after_seconds": 0.4, "leased_after_seconds": 0.4,
             "start_seconds": 3.0, "load_seconds": 0.5, "life_seconds": 24.0,
             "counters": {"predict_seconds": 20.0, "forward_seconds": 18.0}}  # fmt: skip
    return {**known, **changes}


def found_of(ours: list[float], loop: list[float]) -> Found:
    result = Found()
    gap = {"device": "cpu", "after": "l", "before": "m", "seconds": 0.25}
    members = [{"name": "m", "counters": {"tokens": 97, "padded_tokens": 100}, "workers": [worker()]}]
    report: dict[str, Any] = {"members": members, "idle_gaps": [gap]}
    for number, seconds in enumerate(ours):
        sample = Sample(Measured(seconds, 500 * MIB), seconds - 5, report)
        result.samples.setdefault(("two", OURS), {})[number] = sample
    for number, seconds in enumerate(loop):
        result.samples.setdefault(("two", "loop"), {})[number] = Sample(
            Measured(seconds, 700 * MIB), None, {}
        )
        floor = Sample(Measured(1.0, MIB), 20.0, {})
        result.samples.setdefault(("two", "floor"), {})[number] = floor
    return result


def lines_of(result: Found, judged: bool = True) -> list[str]:
    return targets_table([LOOP, FLOOR], {"two": 100}, result, judged).splitlines()[2:]


def test_the_ratio_is_the_median_of_the_rounds_ratios() -> None:
    loop, floor = lines_of(found_of([20, 30, 40], [100, 100, 200]))
    assert loop == (
        "| the loop | 100 | 30.0 (20.0 to 40.0) | 500 | 100.0 (100.0 to 200.0) | 700 "
        "| 0.200 (0.200 to 0.300) | 0.30 | ok |"
    )
    assert "| 25.0 (15.0 to 35.0) | 500 | 20.0 (20.0 to 20.0) |" in floor, "the phase, not the command"
    assert floor.endswith("| 1.250 (0.750 to 1.750) | 1.10 | MISSED, on 25 s of work only |")


def test_who_failed_has_no_ratio() -> None:
    result = found_of([20], [100])
    result.problems["two", "loop"] = "it printed | this\nand that"
    loop, floor = lines_of(result)
    assert loop.endswith("| 0.30 | FAILED: it printed / this and that |")
    assert "0.200" not in loop
    assert "FAILED" not in floor
    result.problems["two", OURS] = "no disk"
    assert all("FAILED" in line for line in lines_of(result))


def test_the_page_has_the_table_the_profile_and_the_sections() -> None:
    rows = {"two": 100}
    sections: dict[str, Any] = {"Start-up": [{"what": "parent", "s": 0.4321}], "Merge": "FAILED: no disk"}
    text = text_of([LOOP], [WORK], rows, found_of([40.0], [100.0]), sections, "as asked", judged=True)
    assert "Missed: the loop" in text
    assert "| two | 40.0 | m | 0.400 | 3.000 | 0.500 | 20.0 | 18.0 | 24.0 | 0.750 | 0.970 |" in text
    assert "- two: 15.60 s before the first worker and after the last one; " in text
    assert "between two members: 0.25" in text
    assert "### Start-up\n\n| what | s |\n|---|---|\n| parent | 0.432 |" in text
    assert "### Merge\n\nFAILED: no disk" in text


def test_the_page_says_how_many_times_as_fast_and_leaves_out_goals_and_profiles() -> None:
    result = found_of([20, 30, 40], [100, 120, 200])
    result.apart["two"] = 6e-7
    sections: dict[str, Any] = {"Start-up": [{"what": "parent", "s": 0.4321}]}
    text = page_of([LOOP, FLOOR], {"two": 100}, result, sections, "as asked")
    assert "| the loop | 100 | 30.0 | 500 | 120.0 | 700 | 5.00 (4.00 to 5.00) |" in text
    assert "within 6e-07" in text
    assert text.endswith("### Start-up\n\n| what | s |\n|---|---|\n| parent | 0.432 |")
    assert "floor" not in text, "the time in the models alone says nothing to users"
    result.problems["two", "loop"] = "no disk"
    assert "| the loop | 100 |  |  |  |  | FAILED: no disk |" in page_of(
        [LOOP], {"two": 100}, result, {}, "as asked"
    )


def test_the_figures_take_their_place_in_the_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nmore\n")
    write(page, "new")
    write(page, "newer")
    assert page.read_text() == f"# Title\n\n{BEGIN}\n\nnewer\n\n{END}\n\nmore\n"
    page.write_text("# Title\n")
    with pytest.raises(ValueError, match="no place for the figures"):
        write(page, "new")
    assert page.read_text() == "# Title\n"
