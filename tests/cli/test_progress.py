"""What people read while a run goes on."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console

from ensemble.cli.progress import BarDisplay, PlainDisplay, QuietDisplay, choose_display, describe
from ensemble.common.protocol import Progress
from ensemble.common.text import duration
from ensemble.pipeline.reporting import members_of, progress_of
from ensemble.scheduling.records import WorkerRecord
from ensemble.scheduling.state import ModelState
from tests.planning.test_plan import config, facts, make_plan
from tests.planning.test_view_rows import TEMPLATES


def member(rows: int = 1000) -> ModelState:
    (plan,) = make_plan(config({}), {"m0": facts(np.full(rows, 100, dtype=np.int64))}, []).models
    return ModelState(plan)


def test_plain_lines_come_with_each_phase_and_every_few_seconds() -> None:
    clock = [100.0]
    file = io.StringIO()
    display = PlainDisplay(file, clock=lambda: clock[0])
    state = member()
    state.clock = lambda: clock[0]
    display.update(members_of([state]))
    assert file.getvalue() == "", "a member that waits is not worth a line"
    state.workers.append(WorkerRecord("m0", 0, ("cpu",), "7", "log", 0.0, 0.0))
    for clock[0] in (101.0, 103.0, 107.0):
        display.update(members_of([state]))
    assert file.getvalue().splitlines() == ["m0: starting Python", "m0: starting Python, 6.0 s"]
    state.predicting_since = 108.0
    chunk = state.chunks.pending[0]
    state.take(chunk)
    state.advance(Progress(chunk=chunk.index, rows=125, tokens=5000, padded_tokens=5100))
    for clock[0] in (108.0, 110.0, 113.5, 114.0, 118.6):
        display.update(members_of([state]))
    assert len(file.getvalue().splitlines()[2:]) == 2, "no row has come since the last line"
    state.advance(Progress(chunk=chunk.index, rows=250, tokens=9000, padded_tokens=9100))
    display.update(members_of([state]))
    lines = file.getvalue().splitlines()[2:]
    assert lines[0] == "m0: predicting 1,000 rows"
    assert len(lines) == 3
    assert lines[1].startswith("m0: 125/1,000 rows (12% of the work), 909 tokens/s, ")
    assert lines[1].endswith("left")


def test_a_terminal_shows_the_seconds_while_python_starts() -> None:
    clock = [100.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    display = BarDisplay(console.file, console, clock=lambda: clock[0])
    state = member()
    state.workers.append(WorkerRecord("m0", 0, ("cpu",), "7", "log", 0.0, 0.0))
    for clock[0] in (101.0, 108.0):
        display.update(members_of([state]))
    display.stop()
    assert isinstance(console.file, io.StringIO)
    assert "starting Python, 7.0 s" in console.file.getvalue()


def test_rows_of_several_views_are_called_that() -> None:
    models, lengths = config({"views": TEMPLATES}), np.full(100, 100, dtype=np.int64)
    (plan,) = make_plan(models, {"m0": facts(lengths, views=TEMPLATES)}, []).models
    state, file = ModelState(plan, clock=lambda: 2.0), io.StringIO()
    state.predicting_since = 1.0
    display, count = PlainDisplay(file), len(TEMPLATES)
    for paused_at in (None, 1.5, None):  # as when the next of its checkpoints is loaded
        state.paused_at = paused_at
        display.update(members_of([state]))
    first, _, again = file.getvalue().splitlines()
    assert first == f"m0: predicting {count * 100} rows of {count} views"
    assert again == f"m0: 0/{count * 100} rows"


def test_time_left_follows_the_work_and_not_the_rows() -> None:
    state = member()
    state.clock = lambda: 10.0
    state.predicting_since = 0.0
    chunk = state.chunks.pending[0]
    state.take(chunk)
    state.advance(Progress(chunk=chunk.index, rows=chunk.rows, tokens=1, padded_tokens=1))
    share = chunk.cost
    assert state.fraction == pytest.approx(share)
    assert f"{duration(10 * (1 - share) / share)} left" in describe(progress_of([state]))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_display_suits_where_the_output_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(choose_display(None)) is QuietDisplay
    assert isinstance(choose_display(Terminal()), BarDisplay)
    for name in ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG"):
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            assert type(choose_display(Terminal())) is PlainDisplay
    assert type(choose_display(io.StringIO())) is PlainDisplay


def test_bars_are_drawn_from_the_first_update_on() -> None:
    file = Terminal()
    display = BarDisplay(file, Console(file=file, width=100))
    display.say("two models")
    assert file.getvalue() == "two models\n"
    display.update(members_of([member()]))
    display.say("a note")
    display.stop()
    assert "m0" in file.getvalue()
    assert "a note" in file.getvalue()
    BarDisplay(file).stop()  # nothing was drawn, so nothing is to be ended


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.9, "59.9 s"), (65, "1:05 min"), (7390, "2:03:10 h")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
