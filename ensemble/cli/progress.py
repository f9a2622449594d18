"""Show progress while members run: bars on a terminal, plain lines everywhere else, or nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, TYPE_CHECKING, TypeAlias

from ensemble.cli.layout import page_width, wrapped
from ensemble.common.protocol import Ready
from ensemble.common.text import duration, listed, plural, rate
from ensemble.pipeline.run_report import MemberProgress
from ensemble.scheduling.state import Phase

# rich takes a tenth of the parent's start-up, and nothing is drawn before the first worker runs.
if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

    from ensemble.pipeline.run import Display

Clock: TypeAlias = Callable[[], float]
PLAIN_LINE_SECONDS = 5.0
_BAR_WIDTH, _SHORTEST_BAR = 24, 6
_STATUS_WIDTH = len("1,000,000/1,000,000 rows, 100,000 tokens/s, 10:00:00 h left")
_BEFORE = {"waiting": "waiting", "starting": "starting Python", "loading": "loading the model"}
_BUSY = ("starting", "loading", "predicting")
# A notebook's "!command" runs on a pseudo-terminal, where isatty() is true and redrawing prints rubbish.
_NOTEBOOK_VARIABLES = ("JPY_PARENT_PID", "KAGGLE_KERNEL_RUN_TYPE", "COLAB_RELEASE_TAG")


def choose_display(file: IO[str] | None) -> Display:
    """Return the display that suits where the output goes; None: nowhere."""
    if file is None:
        return QuietDisplay()
    if file.isatty() and os.environ.keys().isdisjoint(_NOTEBOOK_VARIABLES):
        return BarDisplay(file)
    return PlainDisplay(file)


@contextlib.contextmanager
def log_shown(display: Display) -> Iterator[None]:
    """Show the lines of the run's log, too."""
    log, handler = logging.getLogger("ensemble"), logging.Handler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    handler.emit = lambda record: display.say(handler.format(record))  # type: ignore[method-assign]
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


class QuietDisplay:
    def say(self, text: str) -> None: ...
    def update(self, members: Sequence[MemberProgress]) -> None: ...
    def stop(self) -> None: ...


class PlainDisplay(QuietDisplay):
    """Print a line when a member comes to another phase, and one every few seconds in between."""

    def __init__(self, file: IO[str], clock: Clock = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        # By member, its phase at the last line, when that was printed, and how far it was then; -1: not said.
        self._shown: dict[str, tuple[Phase, float, float]] = {}
        self._since: dict[str, tuple[str, float]] = {}  # by member, what it is doing, since when
        self._said: set[str] = set()
        self._begun: set[str] = set()  # members whose rows are counted in an earlier line

    def say(self, text: str) -> None:
        for line in wrapped(text, page_width(self._file)):
            self._print(line)

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)

    def update(self, members: Sequence[MemberProgress]) -> None:
        for state in members:
            name, phase, now = state.name, state.phase, self._clock()
            if phase == "waiting" or (phase == "loading" and not state.has_rows):  # which loads nothing
                continue
            if state.has_rows:
                self._say_settings(state)
            last_phase, last, last_fraction = self._shown.get(name, (None, now, -1.0))
            text, fraction = self._phrase(state), state.fraction
            has_news = phase in _BEFORE or fraction != last_fraction
            if phase != last_phase:
                fraction = -1.0
                if phase == "predicting" and not state.has_rows:
                    text = f"training {listed(state.in_hand, show=str)}"
                # The second time, as for its next checkpoint, the member says how far it is.
                elif phase == "predicting" and name not in self._begun:
                    self._begun.add(name)
                    views = f" of {state.jobs} views" if state.jobs > 1 else ""
                    rows = plural(state.rows - state.reused_rows, "row")
                    text = f"predicting {rows}{views}{_nodes_of(state)}"
            elif phase not in _BUSY or now - last < PLAIN_LINE_SECONDS or not has_news:
                continue
            self._shown[name] = (phase, now, fraction)
            self.say(f"{name}: {text}")

    def _phrase(self, state: MemberProgress, short: bool = False) -> str:
        """Return what a member is doing, with the seconds while nothing else shows that it goes on."""
        text, now = describe(state, short), self._clock()
        if state.phase not in ("starting", "loading"):
            self._since.pop(state.name, None)
            return text
        if self._since.get(state.name, ("", now))[0] != text:
            self._since[state.name] = (text, now)
        seconds = round(now - self._since[state.name][1])
        return f"{text}, {duration(seconds)}" if seconds else text

    def _say_settings(self, state: MemberProgress) -> None:
        """Say once what a member computes with, and each note of its workers."""
        readies = [worker.ready for worker in state.workers if worker.ready is not None]
        if not readies:
            return
        # The other workers have the first one's settings, but perhaps less memory.
        texts = [_settings_text(state, readies[0])]
        texts += (note for ready in readies for note in ready.notes)
        for line in dict.fromkeys(f"{state.name}: {text}" for text in texts):
            if line not in self._said:
                self._said.add(line)
                self.say(line)


def _settings_text(state: MemberProgress, ready: Ready) -> str:
    """Return what a worker computes with, such as "float16, sdpa attention, 2,048 tokens a batch"."""
    attention, batch = ready.attn_implementation.replace("_", "-"), ""
    if attention and "attention" not in attention:
        attention += " attention"
    if ready.token_budget is not None:
        size = state.batch_size
        batch = f"{plural(ready.token_budget, 'token') if size is None else plural(size, 'row')} a batch"
    return ", ".join(filter(None, (ready.dtype, attention, batch))) or f"on {ready.device}"


class BarDisplay(PlainDisplay):
    """Redraw a bar for each member in place, on ``console`` or by default on the file."""

    def __init__(self, file: IO[str], console: Console | None = None, clock: Clock = time.monotonic) -> None:
        super().__init__(file, clock)
        self._tasks: dict[str, TaskID] = {}
        self._console = console
        self._bars: Progress | None = None

    def update(self, members: Sequence[MemberProgress]) -> None:
        if self._bars is None:
            self._bars = self._new_bars(max(len(state.name) for state in members))
            self._bars.start()
        for state in members:
            name = state.name
            if state.has_rows:
                self._say_settings(state)
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=1.0, status="")
            status = self._phrase(state, short=True)
            self._bars.update(self._tasks[name], completed=state.fraction, status=status)

    def _new_bars(self, name_width: int) -> Progress:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        console = self._console or Console(file=self._file, highlight=False, soft_wrap=True)
        room = console.width - name_width - _STATUS_WIDTH - 2  # and a blank on either side of the bar
        name, status = "{task.description}", "{task.fields[status]}"
        if room < _SHORTEST_BAR:  # the numbers matter more
            column = TextColumn(f"{name}\n  {status}", table_column=Column(overflow="fold"))
            return Progress(column, console=console)
        bar = BarColumn(bar_width=min(_BAR_WIDTH, room))
        return Progress(TextColumn(name), bar, TextColumn(status), console=console)

    def stop(self) -> None:
        if self._bars is not None:
            self._bars.stop()

    def _print(self, line: str) -> None:
        if self._bars is None:
            super()._print(line)
        else:
            self._bars.console.print(line, markup=False, highlight=False)


def describe(state: MemberProgress, short: bool = False) -> str:
    """Return in a phrase what a member is doing."""
    phase, rows, seconds = state.phase, state.rows, state.seconds or 0.0
    if phase in _BEFORE:
        is_light = phase == "loading" and not state.has_rows
        return _BEFORE["starting" if is_light else phase]
    if state.failure is not None:
        return state.failure.outcome if short else f"{state.failure.outcome}: {state.failure.message}"
    if phase == "done" and not state.workers:
        if state.has_when and not rows:
            return "no row of which the members before it are unsure"
        how = "done by an earlier run" if state.replicas else "made elsewhere"
        return f"{plural(rows, 'row')}, {how}"
    time_left = "" if not state.seconds_left else f"{duration(state.seconds_left)} left"
    if not state.has_rows:
        reached = f"{state.rows_done:,}/{rows:,} trained"
        if phase == "done":
            return f"{reached}, done in {duration(seconds)}"
        # A training whose steps are done is still to be stored and checked.
        in_hand = "" if short else listed(state.in_hand, show=str)
        return ", ".join(filter(None, (reached, in_hand, time_left)))
    speed = f"{rate(state.rows_per_second or 0.0)} rows/s"
    if state.tokens_per_second is not None:
        speed = f"{state.tokens_per_second:,.0f} tokens/s"
    if phase == "done":
        return f"{rows:,}/{rows:,} rows, {speed}, done in {duration(seconds)}"
    reached = f"{state.rows_done:,}/{rows:,} rows"
    if phase == "paused":
        return f"{reached}, waiting for its turn"
    if not state.computed_share:
        return reached
    share = "" if short else f" ({state.fraction:.0%} of the work)"
    return f"{reached}{share}, {speed}, {time_left or '0.0 s left'}{'' if short else _nodes_of(state)}"


def _nodes_of(state: MemberProgress) -> str:
    """Return the nodes of a cluster on which a member's workers run; empty if there is no cluster."""
    running = [worker.node for worker in state.workers if worker.node and worker.is_running]
    return f", {plural(len(running), 'worker')} on {plural(len(set(running)), 'node')}" if running else ""
