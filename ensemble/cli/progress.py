"""Progress while members run: bars on a terminal, plain lines everywhere else, or nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from ensemble.cli.layout import Page
from ensemble.common.protocol import Ready
from ensemble.common.text import duration, plural
from ensemble.scheduling.state import MemberState

# rich takes a tenth of the parent's start-up, and nothing is drawn before the first worker runs.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID
from ensemble.pipeline.run import Display
from ensemble.scheduling.state import phase_of

PLAIN_LINE_SECONDS = 5.0
_BAR_WIDTH, _SHORTEST_BAR = 24, 6
_STATUS_WIDTH = len("1,000,000/1,000,000 rows, 100,000 tokens/s, 10:00:00 h left")
# A notebook's "!command" runs on a pseudo-terminal, where isatty() is true and redrawing prints rubbish.
_NOTEBOOK_VARIABLES = ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")


def choose_display(
    file: IO[str],
    quiet: bool,
    console: Callable[[], Console],
    environ: Mapping[str, str] | None = None,
) -> Display:
    """The display that suits where the output goes.

    Args:
        console: makes the console for the bars, the first time that they are drawn.
    """
    variables = os.environ if environ is None else environ
    if quiet:
        return QuietDisplay()
    if file.isatty() and not any(name in variables for name in _NOTEBOOK_VARIABLES):
        return BarDisplay(file, console)
    return PlainDisplay(file)


class QuietDisplay:
    def start(self) -> None: ...

    def say(self, text: str) -> None: ...

    def update(self, members: Sequence[MemberState]) -> None: ...

    def stop(self) -> None: ...


class _Notes:
    """Says once how each member was loaded, and what its workers had to tell of it."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._said: set[str] = set()
        self._loaded: set[str] = set()

    def __call__(self, state: MemberState) -> None:
        name = state.plan.name
        for record in state.workers:
            if record.ready is None:
                continue
            if name not in self._loaded:  # its other workers have the same, but perhaps less memory
                self._loaded.add(name)
                self._say(f"{name}: {loaded_text(state, record.ready)}")
            for note in record.ready.notes:
                text = f"{name}: {note}"
                if text not in self._said:
                    self._said.add(text)
                    self._say(text)


def loaded_text(state: MemberState, ready: Ready) -> str:
    """What a worker computes with, in a phrase: its type, its attention, how much it takes at a time."""
    attention = ready.attn_implementation.replace("_", "-")
    if attention and "attention" not in attention:
        attention += " attention"
    size = state.plan.request.batch_size
    batch = ""
    if ready.token_budget is not None:
        amount = plural(ready.token_budget, "token") if size is None else plural(size, "row")
        batch = f"{amount} a batch"
    return ", ".join(filter(None, (ready.dtype, attention, batch))) or f"on {ready.device}"


class PlainDisplay:
    """A line when a member's phase changes, and one every few seconds in between."""

    def __init__(self, file: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._notes = _Notes(self.say)
        self._file = file
        self._clock = clock
        self._last: dict[str, float] = {}
        self._phases: dict[str, str] = {}

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def say(self, text: str) -> None:
        for line in Page.of(self._file).wrapped(text, later="  "):
            print(line, file=self._file, flush=True)

    def update(self, members: Sequence[MemberState]) -> None:
        now = self._clock()
        for state in members:
            name, phase = state.plan.name, phase_of(state)
            if phase == "waiting":
                continue
            self._notes(state)
            changed = self._phases.get(name) != phase
            is_busy = phase in ("starting", "loading", "predicting")
            due = is_busy and now - self._last.get(name, now) >= PLAIN_LINE_SECONDS
            if changed or due:
                self._phases[name], self._last[name] = phase, now
                first = phase == "predicting" and changed
                rows = f"predicting {plural(state.plan.order.shape[0] - state.reused_rows, 'row')}"
                self.say(f"{name}: {rows if first else describe(state, now)}")


class BarDisplay:
    """A bar per member, redrawn in place."""

    def __init__(self, file: IO[str], console: Callable[[], Console]) -> None:
        self._notes = _Notes(self.say)
        self._tasks: dict[str, TaskID] = {}
        self._file = file
        self._console = console
        self._progress: Progress | None = None

    def start(self) -> None: ...

    def stop(self) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, text: str) -> None:
        for line in Page.of(self._file).wrapped(text, later="  "):
            if self._progress is None:
                print(line, file=self._file, flush=True)
            else:
                self._progress.console.print(line, markup=False, highlight=False)

    def update(self, members: Sequence[MemberState]) -> None:
        if self._progress is None:
            self._progress = self._bars(max(len(state.plan.name) for state in members))
            self._progress.start()
        now = time.monotonic()
        for state in members:
            name = state.plan.name
            self._notes(state)
            if name not in self._tasks:
                self._tasks[name] = self._progress.add_task(name, total=1.0, status="")
            self._progress.update(
                self._tasks[name], completed=state.fraction, status=describe(state, now, short=True)
            )

    def _bars(self, name_width: int) -> Progress:
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.table import Column

        console = self._console()
        room = console.width - name_width - _STATUS_WIDTH - 2  # and a blank on either side of the bar
        columns: list[ProgressColumn] = [
            TextColumn("{task.description}"),
            BarColumn(bar_width=min(_BAR_WIDTH, room)),
            TextColumn("{task.fields[status]}"),
        ]
        if room < _SHORTEST_BAR:  # then the numbers count for more
            text = "{task.description}\n  {task.fields[status]}"
            columns = [TextColumn(text, table_column=Column(overflow="fold"))]
        return Progress(*columns, console=console)


def describe(state: MemberState, now: float, short: bool = False) -> str:
    """What a member is doing, in a phrase; ``now`` is a reading of the monotonic clock, in seconds."""
    phase = phase_of(state)
    if phase == "failed":
        return "failed" if short or state.failure is None else f"failed: {state.failure.message}"
    if phase in ("waiting", "starting"):
        return phase if phase == "waiting" else "starting Python"
    if phase == "loading":
        return "loading the model"
    rows = int(state.plan.order.shape[0])
    elapsed = state.predicting_seconds(now)
    speed = f"{state.tokens_done / elapsed:,.0f} tokens/s"
    if phase == "done":
        if not state.workers:
            how = "done by an earlier run" if state.plan.needs_worker else "made elsewhere"
            return f"{plural(rows, 'row')}, {how}"
        return f"{rows:,}/{rows:,} rows, {speed}, done in {duration(elapsed)}"
    if phase == "paused":
        return f"{state.rows_done:,}/{rows:,} rows, waiting for its turn"
    computed = state.computed_cost
    if not computed:
        return f"{state.rows_done:,}/{rows:,} rows"
    left = duration(elapsed * (1 - state.fraction) / computed)
    share = "" if short else f" ({state.fraction:.0%} of the work)"
    return f"{state.rows_done:,}/{rows:,} rows{share}, {speed}, {left} left"
