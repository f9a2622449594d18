"""Train in a worker process: each row is a training, whose command runs as a process beneath the worker."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
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

if TYPE_CHECKING:
    import numpy.typing as npt

    from ensemble.data.published_table import PublishedTable

POLL_SECONDS = 0.25
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
    """

    command: tuple[str, ...]
    out: str
    log: str
    resumes: bool


def import_libraries() -> Mapping[str, str]:
    return {}


def make_predictor(
    common: CommonSpec, settings: Mapping[str, Any], table: PublishedTable | None
) -> Predictor:
    return Runner(common, settings)


class Runner(Predictor):
    """Run commands; ``settings`` are ``jobs`` by row, ``environment`` and ``secrets`` (see ``logged_command``)."""

    def __init__(self, common: CommonSpec, settings: Mapping[str, Any]) -> None:
        self._common = common
        self._settings = settings

    def load(self) -> Ready:
        return Ready(device="GPU" if self._common.gpus else "cpu")

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        """Run the command of a row.

        Raises:
            MemberError: it has ended with an exit code other than 0.
            ChildProcessError: it was killed.
        """
        (row,) = rows.tolist()
        job = Job(**self._settings["jobs"][row])
        out, log = Path(job.out), Path(job.log)
        if not job.resumes and out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True, exist_ok=True)
        log.parent.mkdir(parents=True, exist_ok=True)
        for name in ("problem.json", "progress.json"):  # of an earlier try
            (out / name).unlink(missing_ok=True)
        before, kills_before = _size(log), oom_kills()
        code = self._run(job, report)
        if code:
            text = read_json(out / "problem.json").get("text")
            if isinstance(text, str):
                raise MemberError(text)
            self._raise_failed(code, job, before, oom_kills() > kills_before)
        progress = read_json(out / "progress.json")
        counters = Counters(
            tokens=_count(progress, "tokens"),
            padded_tokens=_count(progress, "padded_tokens"),
            batches=_count(progress, "step"),
        )
        return Prediction(np.zeros((1, len(self._common.labels))), counters=counters)

    def _run(self, job: Job, report: Report) -> int:
        """Run a command to its end, report its signs of life, and return its exit code (a signal's: negative)."""
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
        while process.poll() is None:
            signs = _size(log), _states(out)
            if signs != seen:
                seen = signs
                progress = read_json(out / "progress.json")
                report(0, _count(progress, "tokens"), _count(progress, "padded_tokens"))
            time.sleep(POLL_SECONDS)
        mark = os.environ.get(WORKER_MARK)
        if mark is not None:  # what the command has left running
            end_marked(mark, spared=[os.getpid()])
        return process.returncode

    def _raise_failed(self, code: int, job: Job, before: int, is_out_of_memory: bool) -> None:
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
