"""The views of a run: a new one is one file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from ensemble.cli.status import RunStatus
from ensemble.common.errors import TimeLimitReached
from ensemble.merging.scoring import Gain, Score
from ensemble.pipeline.ending import raise_unless_complete
from ensemble.pipeline.run_report import CascadeReport, RunReport, ViewReport
from ensemble.scheduling.records import Failure
from tests.cli.reports import member, report, shown

SPEEDS = """
from ensemble.cli.layout import table


def speeds(report):
    members = sorted(report.members, key=lambda member: -(member.tokens_per_second or 0.0))
    columns = {
        "member": lambda member: member.name,
        "tokens/s": lambda member: f"{member.tokens_per_second:,.0f}",
    }
    yield table(members, columns)
"""


def test_a_view_of_another_file_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("speeds")
    exec(SPEEDS, vars(module))
    monkeypatch.setitem(sys.modules, "ensemble.cli.speeds", module)
    slow, fast = member("slow", tokens_done=4, seconds=1.0), member("fast", tokens_done=4000, seconds=2.0)
    assert shown("speeds.speeds", report(slow, fast)) == [
        "member  tokens/s",
        "----------------",
        "fast       2,000",
        "slow           4",
    ]


LOST = "worse than its best member b (95 % interval 0.0010 to 0.0046)"


@pytest.mark.parametrize(
    ("gain", "weights", "sentence"),
    [
        (
            (0.0166, 0.012, 0.0212),
            (1.0, 1.0),
            "0.0166 better than its best member b (95 % interval 0.0120 to 0.0212)",
        ),
        (
            (0.0016, -0.001, 0.0042),
            (1.0, 1.0),
            "0.0016 better than its best member b (95 % interval -0.0010 to 0.0042, which may be chance)",
        ),
        (
            (-0.0028, -0.0046, -0.001),
            (1.0, 1.0),
            f"0.0028 {LOST}; `ensemble fit CONFIG` finds better weights",
        ),
        (
            (-0.0016, -0.0042, 0.001),
            (1.0, 1.0),
            "0.0016 worse than its best member b (95 % interval -0.0010 to 0.0042, which may be chance)",
        ),
        (
            (0.00001, -0.00001, 0.001),
            (1.0, 1.0),
            "0.0000 better than its best member b (95 % interval 0.0000 to 0.0010, which may be chance)",
        ),
        ((0.5, None, None), (1.0, 1.0), "0.5000 better than its best member b"),
    ],
)
def test_whether_the_ensemble_is_better_than_its_best_member(
    gain: tuple[float, float | None, float | None], weights: tuple[float, float], sentence: str
) -> None:
    made = report(
        *(member(name, weight=weight) for name, weight in zip("ab", weights, strict=True)),
        merged_rows={"a": 1000, "b": 1000},
        scores={"ensemble": Score(0.481, 0.9, 1000, 1.0, False)},
        gain=Gain("b", *gain, 1000),
    )
    message = f"ensemble: log loss 0.4810, {sentence}"
    assert [line for line in shown("runs.summary", made) if line.startswith("ensemble:")] == [message]
    status = RunStatus(Path("run"), None, made, 60.0)
    assert shown("status.status", status)[-1] == message
    for silent in (replace(made, gain=None), replace(made, scores={})):
        assert not any("best member" in line for line in shown("runs.summary", silent))


@pytest.mark.parametrize(
    ("method", "advice"),
    [
        ("geometric_mean", " fit CONFIG` finds better weights"),
        (
            "median",
            "; `ensemble fit CONFIG --set ensemble.method=mean` finds better weights",
        ),
        ("stacking", "; `ensemble fit CONFIG --method stacking` finds better weights"),
        ("of a package that is gone", "(95 % interval 0.0500 to 0.2000)"),
    ],
)
def test_what_is_said_of_a_loss_is_what_the_merge_method_bears(method: str, advice: str) -> None:
    made = report(
        *(member(name) for name in "ab"),
        merged_rows={"a": 1000, "b": 1000},
        scores={"ensemble": Score(0.481, 0.9, 1000, 1.0, False)},
        gain=Gain("b", -0.1, -0.2, -0.05, 1000),
        ensemble={"method": method},
    )
    messages = [line for line in shown("runs.summary", made) if line.startswith("ensemble:")]
    assert [line.endswith(advice) for line in messages] == [True]
    # Of labels that do not exclude each other there is no accuracy, of regression neither that nor a log loss.
    raw = replace(
        made,
        scores={"ensemble": Score(None, None, 1000, None, False, 12.25)},
        gain=Gain("b", -150.0, -200.0, -100.0, 1000, "squared error"),
    )
    if method == "geometric_mean":
        (line,) = [line for line in shown("runs.summary", raw) if line.startswith("ensemble:")]
        assert line == (
            "ensemble: RMSE 12.25, 150 worse in squared error than its best member b (95 % interval 100 to 200); "
            "`ensemble fit CONFIG --method greedy --calibration none --metric rmse` finds better weights"
        )


def test_a_gain_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = report(member(), gain=Gain("m", 0.1, None, None, 1))
    made.write(tmp_path / "run.json")
    assert RunReport.read(tmp_path / "run.json") == made
    older = json.loads((tmp_path / "run.json").read_text())
    del older["gain"], older["config_files"]
    (tmp_path / "run.json").write_text(json.dumps(older))
    assert RunReport.read(tmp_path / "run.json").gain is None


def test_rows_of_members_with_views_and_of_those_that_lack_some() -> None:
    views = {"one": ViewReport(1.0, 1000), "two": ViewReport(1.0, 600)}
    reused = member("a", chunks=0, rows=2000, views={name: ViewReport(1.0, 1000) for name in views})
    stopped = member("b", phase="paused", status="unfinished", views=views)
    given = member("c", phase="done", replicas=0, rows=7)
    rows = {"a": 1000, "b": 1000, "c": 5}
    made = report(reused, stopped, given, status="time_limit", merged_rows=rows, partial_rows={"b": 400})
    messages = [line.split() for line in shown("runs.summary", made)]
    assert ["a", "2,000", "reused"] in messages, "each view counts, as where it has been computed"
    assert ["c", "5", "given"] in messages, "those that `when` selected, of all that its file has"
    with pytest.raises(TimeLimitReached, match=r"b 1,000 of 1,000 rows \(400 of them in some of its views"):
        raise_unless_complete(made)


def test_members_left_out_are_listed_in_the_order_of_the_config() -> None:
    failures = {name: Failure(name, "no memory") for name in "cb"}
    made = report(*(member(name, failure=failures.get(name)) for name in "dcba"), left_out=("c", "b"))
    (messages,) = [line for line in shown("runs.summary", made) if "merged without" in line]
    assert messages.startswith("merged without c, b: member c failed: ")


def test_a_member_for_which_there_was_no_time_has_not_failed() -> None:
    failure = Failure("b", "there was no time to train fold 1", is_out_of_time=True)
    late = member("b", phase="failed", status="left out", failure=failure)
    made = report(member("a"), late, status="time_limit", left_out=("b",))
    lines = [*shown("runs.summary", made), repr(made)]
    assert ["b", "left", "out"] in [line.split() for line in lines]
    assert any("to train fold 1" in line for line in lines)
    assert not any("failed" in line for line in lines)


def test_rows_that_a_time_limit_lost() -> None:
    slow = member("a", phase="paused", status="unfinished", lost_rows=33)
    both = member("b", phase="paused", status="unfinished", lost_rows=1)
    merged = {"a": 48, "b": 5, "c": 1000}
    made = report(slow, both, member("c"), status="time_limit", merged_rows=merged, partial_rows={"b": 2})
    with pytest.raises(TimeLimitReached) as caught:
        raise_unless_complete(made)
    lost = "computed, but lost: the limit ended their chunk)"
    assert f"a 48 of 1,000 rows (at least 33 more rows were {lost}, b 5 of 1,000 rows (2 of" in str(
        caught.value
    )
    assert f"; at least 1 more row was {lost}, c 1,000 of 1,000 rows; " in str(caught.value)


def test_a_member_whose_rows_a_time_limit_left_unselected() -> None:
    waiting = CascadeReport({"share": 0.5}, 0, False)
    waits = member("b", phase="waiting", status="unfinished", cascade=waiting)
    made = report(member("a"), waits, status="time_limit", merged_rows={"a": 1000})
    with pytest.raises(TimeLimitReached, match="b none, as `when` has not selected its rows; 0 rows that"):
        raise_unless_complete(made)
    text = " ".join(" ".join(shown("runs.summary", made)).split())
    assert "b: `when` has not selected its rows yet: the members before it have not ended" in text
