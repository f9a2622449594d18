"""Train in a worker process: each row is a training, whose command runs as a process beneath the worker."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ensemble.common.errors import MemberError
from ensemble.common.files import FileState, file_state, free_bytes, read_json
from ensemble.common.host import oom_kills
from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.common.python_process import WORKER_MARK, end_marked, python_command
from ensemble.common.text import gib, shown_path
from ensemble.members.predictor import Prediction, Predictor, Report
from ensemble.training.child.ladder import Ladder, Rung

if TYPE_CHECKING:
    import numpy.typing as npt

    from ensemble.data.published_table import PublishedTable

POLL_SECONDS = 0.25
# For all processes that try what fits.
TRIAL_SECONDS = 60.0
# Less free space than this is a full disk.
_FULL_BYTES = 1 << 20
# Of the end of a command's log in messages.
_LAST_LINES, _LAST_CHARACTERS = 3, 240


@dataclass(frozen=True)
class Job:
    """Describe a training for a worker.

    Attributes:
        command: a program and its arguments.
        out: the folder that it writes to.
        log: the file for what it prints.
        resumes: whether the command goes on with what an earlier try has left in ``out``; else that is removed.
        rungs: the folder that ``Ladder`` keeps its files in; empty: the command is not our trainer.
    """

    command: tuple[str, ...]
    out: str
    log: str
    resumes: bool
    rungs: str = ""


class _OutOfMemory(Exception): ...


def import_libraries() -> Mapping[str, str]:
    return {}


def make_predictor(
    common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable | None
) -> Predictor:
    return Runner(common, settings)


class Runner(Predictor):
    """Run commands.

    ``settings`` are ``jobs`` by row, ``device`` (see ``Ladder``), and ``environment`` and ``secrets`` (see
    ``logged_command``).
    """

    def __init__(self, common: CommonSpec, settings: Mapping[str, Any]) -> None:
        self._common = common
        self._settings = settings

    def load(self) -> Ready:
        return Ready(device="GPU" if self._common.gpus else "cpu")

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        """Run the command of a row; our trainer again, with less memory, each time that it runs out of it.

        Raises:
            MemberError: it has ended with an exit code other than 0, or nothing fits.
            ChildProcessError: it was killed.
        """
        (row,) = rows.tolist()
        job = Job(**self._settings["jobs"][row])
        out, log = Path(job.out), Path(job.log)
        if not job.resumes and out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        if job.rungs:
            self._train(job, report)
        else:
            self._run(job, report)
        progress = read_json(out / "progress.json")
        counters = Counters(
            tokens=_count(progress, "tokens"),
            padded_tokens=_count(progress, "padded_tokens"),
            batches=_count(progress, "step"),
        )
        return Prediction(np.zeros((1, len(self._common.labels))), counters=counters)

    def _train(self, job: Job, report: Report) -> None:
        """Train on the rung that is known to fit or found by a trial, and on a lower one when it does not fit."""
        ladder = Ladder(read_json(Path(job.command[-1])), Path(job.rungs), self._settings["device"])
        chosen = ladder.known()
        if chosen is None and ladder.is_tried:
            chosen = self._try_out(job, ladder, report)
            ladder.keep(*chosen)
        rung, why = chosen or (ladder.top, "")
        while True:  # each from the newest save, or from the start
            try:
                self._run(_with_fields(job, {**asdict(rung), "why": why}), report)
                return
            except _OutOfMemory:
                lower = ladder.below(rung)
            if lower is None:
                ladder.forget()
                raise MemberError(ladder.advice())
            rung, why = lower, f"it ran out of memory with {rung.text}"
            ladder.keep(rung, why)

    def _try_out(self, job: Job, ladder: Ladder, report: Report) -> tuple[Rung, str]:
        """Return the first rung that fits by trials, and why it was taken."""
        ends_at = time.monotonic() + TRIAL_SECONDS

        def attempt(rungs: Sequence[Rung]) -> tuple[int, bool] | None:
            fields = {**asdict(rungs[0]), "sizes": [rung.micro_batch for rung in rungs]}
            with contextlib.suppress(_OutOfMemory):
                if not self._run(_with_fields(job, fields), report, ends_at):
                    return None
            trial = read_json(Path(job.out) / "trial.json")
            return _count(trial, "begun"), trial.get("fits") is True

        found = ladder.search(attempt)
        if found is None:
            raise MemberError(ladder.advice())
        return found

    def _run(self, job: Job, report: Report, ends_at: float = math.inf) -> bool:
        """Run a command, report its signs of life, and return whether it has ended by ``ends_at`` (monotonic)."""
        for path in Path(job.out).iterdir():  # of an earlier one, which may have been killed while it wrote
            if not path.is_dir():
                path.unlink()
        before, kills_before = _size(Path(job.log)), oom_kills()
        asked = {
            "command": job.command,
            "worker": os.getpid(),
            "log": job.log,
            "environment": self._settings["environment"],
            "secrets": self._settings["secrets"],
        }
        process = subprocess.Popen(
            python_command("ensemble.common.logged_command"), stdin=subprocess.PIPE, start_new_session=True
        )
        assert process.stdin is not None
        with process.stdin, contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(asked).encode())  # no argument, which anybody could read
        out, log, seen = Path(job.out), Path(job.log), None
        while process.poll() is None and time.monotonic() < ends_at:
            signs = _size(log), _states(out)
            if signs != seen:
                seen = signs
                progress = read_json(out / "progress.json")
                report(0, _count(progress, "tokens"), _count(progress, "padded_tokens"))
            time.sleep(POLL_SECONDS)
        code = process.poll()
        if code is None:
            process.kill()  # and with it the command
            process.wait()
        mark = os.environ.get(WORKER_MARK)
        if mark is not None:  # what the command has left running
            end_marked(mark, spared=[os.getpid()])
        if code:
            self._raise_failed(code, job, before, oom_kills() > kills_before)
        return code is not None

    def _raise_failed(self, code: int, job: Job, before: int, is_out_of_memory: bool) -> None:
        problem = read_json(Path(job.out) / "problem.json")
        if job.rungs and (problem.get("kind") == "memory" or (is_out_of_memory and not problem)):
            raise _OutOfMemory
        if isinstance(problem.get("text"), str):
            raise MemberError(problem["text"])
        how = f"its command ended with exit code {code}"
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            how = f"its command was killed by signal {-code} ({names.get(-code, 'unknown')})"
        if is_out_of_memory:
            how += ", probably by the kernel because the host ran out of memory (RAM, not the GPU's)"
        text = f"{how}; its log is {job.log}"
        last = _last_lines(Path(job.log), before)
        if last:
            text += f", with the last words: {last}"
        free = free_bytes(Path(job.out))
        if free is not None and free < _FULL_BYTES:
            text += f"; the disk is full: {gib(free)} are free for {shown_path(Path(job.out))}"
        raise ChildProcessError(text) if code < 0 else MemberError(text)


def _with_fields(job: Job, fields: Mapping[str, Any]) -> Job:
    """Return a job of our trainer with other fields of its spec."""
    return replace(job, command=(*job.command, json.dumps(fields)))


def _count(progress: Mapping[str, object], key: str) -> int:
    value = progress.get(key)
    return value if isinstance(value, int) else 0


def _size(file: Path) -> int:
    state = file_state(file)
    return 0 if state is None else state[0]


def _states(folder: Path) -> dict[str, FileState | None]:
    """Return the states of all files below a folder, by path."""
    names = [os.path.join(parent, name) for parent, _, names in os.walk(folder) for name in names]  # noqa: PTH118
    return {name: file_state(name) for name in names}


def _last_lines(log: Path, start: int) -> str:
    """Return the last lines of a log, from a byte on, for a message."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(max(start, _size(log) - 4096))
        text = file.read().decode("utf-8", "replace").replace("\r", "\n")
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return " | ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:]
    return ""
