"""Progress while members run: bars on a terminal, plain lines everywhere else, or nothing."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO, TYPE_CHECKING

from ensemble.cli.layout import Page
from ensemble.common.text import duration, plural
from ensemble.scheduling.state import MemberState, Phase

# rich takes a tenth of the parent's start-up, and nothing is drawn before the first worker runs.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ensemble.pipeline.run import Display

PLAIN_LINE_SECONDS = 5.0
_BAR_WIDTH, _SHORTEST_BAR = 24, 6
_STATUS_WIDTH = len("1,000,000/1,000,000 rows, 100,000 tokens/s, 10:00:00 h left")
# A notebook's "!command" runs on a pseudo-terminal, where isatty() is true and redrawing prints rubbish.
_NOTEBOOK_VARIABLES = ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")


def choose_display(file: IO[str], quiet: bool, environ: Mapping[str, str] | None = None) -> Display:
    """The display that suits where the output goes."""
    variables = os.environ if environ is None else environ
    if quiet:
        return QuietDisplay()
    if file.isatty() and not any(name in variables for name in _NOTEBOOK_VARIABLES):
        return BarDisplay(file)
    return PlainDisplay(file)


class QuietDisplay:
    def say(self, text: str) -> None: ...

    def update(self, members: Sequence[MemberState]) -> None: ...

    def stop(self) -> None: ...


class PlainDisplay:
    """A line when a member's phase changes, and one every few seconds in between."""

    def __init__(self, file: IO[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._last: dict[str, float] = {}
        self._phases: dict[str, Phase] = {}
        self._noted: set[str] = set()

    def say(self, text: str) -> None:
        for line in Page.of(self._file).wrapped(text, later="  "):
            self._print(line)

    def update(self, members: Sequence[MemberState]) -> None:
        now = self._clock()
        for state in members:
            name, phase = state.plan.name, state.phase
            if phase == "waiting":
                continue
            self._note(state)
            changed = self._phases.get(name) != phase
            is_busy = phase in ("starting", "loading", "predicting")
            due = is_busy and now - self._last.get(name, now) >= PLAIN_LINE_SECONDS
            if changed or due:
                self._phases[name], self._last[name] = phase, now
                first = phase == "predicting" and changed
                rows = f"predicting {plural(state.plan.order.shape[0] - state.reused_rows, 'row')}"
                self.say(f"{name}: {rows if first else describe(state)}")

    def stop(self) -> None: ...

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)

    def _note(self, state: MemberState) -> None:
        """Say once what a member computes with, and what its workers have to tell of it."""
        name = state.plan.name
        for ready in (record.ready for record in state.workers if record.ready is not None):
            texts = [f"{name}: {note}" for note in ready.notes]
            if name not in self._noted:  # its other workers have the same, but perhaps less memory
                attention = ready.attn_implementation.replace("_", "-")
                if attention and "attention" not in attention:
                    attention += " attention"
                size = state.plan.request.batch_size
                batch = ""
                if ready.token_budget is not None:
                    amount = plural(ready.token_budget, "token") if size is None else plural(size, "row")
                    batch = f"{amount} a batch"
                facts = ", ".join(filter(None, (ready.dtype, attention, batch))) or f"on {ready.device}"
                texts = [f"{name}: {facts}", *texts]
                self._noted.add(name)
            for text in texts:
                if text not in self._noted:
                    self._noted.add(text)
                    self.say(text)


class BarDisplay(PlainDisplay):
    """A bar per member, redrawn in place.

    Args:
        console: where the bars are drawn; made of the file, the first time that they are, where it is None.
    """

    def __init__(self, file: IO[str], console: Console | None = None) -> None:
        super().__init__(file)
        self._tasks: dict[str, TaskID] = {}
        self._console = console
        self._bars: Progress | None = None

    def update(self, members: Sequence[MemberState]) -> None:
        if self._bars is None:
            self._bars = self._drawn(max(len(state.plan.name) for state in members))
            self._bars.start()
        for state in members:
            name = state.plan.name
            self._note(state)
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=1.0, status="")
            status = describe(state, short=True)
            self._bars.update(self._tasks[name], completed=state.fraction, status=status)

    def stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _print(self, line: str) -> None:
        if self._bars is None:
            super()._print(line)
        else:
            self._bars.console.print(line, markup=False, highlight=False)

    def _drawn(self, name_width: int) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
        from rich.table import Column

        console = self._console or Console(file=self._file, highlight=False, soft_wrap=True)
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


def describe(state: MemberState, short: bool = False) -> str:
    """What a member is doing, in a phrase."""
    phase = state.phase
    if phase == "failed":
        return "failed" if short or state.failure is None else f"failed: {state.failure.message}"
    if phase in ("waiting", "starting"):
        return phase if phase == "waiting" else "starting Python"
    if phase == "loading":
        return "loading the model"
    rows = int(state.plan.order.shape[0])
    elapsed = state.predicting_seconds
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
