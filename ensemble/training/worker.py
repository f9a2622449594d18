"""Train in a worker process: each job is a training, whose command runs as a process beneath the worker."""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ensemble.common.errors import MemberError
from ensemble.common.files import read_json
from ensemble.common.protocol import CommonSpec, Counters, Ready
from ensemble.members.predictor import Report, Runner
from ensemble.training.ladder import Ladder, Rung
from ensemble.worker.logged_command import CommandFailed, LoggedCommand, OutOfMemory

TRIAL_SECONDS = 60.0  # for all processes that try what fits


def import_libraries() -> Mapping[str, str]:
    return {}


def make_predictor(common: CommonSpec, settings: Mapping[str, Any], table: object) -> Runner:
    return Trainings(common, settings)


class Trainings(Runner):
    """Run the commands of trainings.

    ``settings`` are ``jobs`` by number, with fields of ``LoggedCommand`` and ``rungs`` (the folder of a ladder;
    empty: it is not our trainer); for all of them the ladder's ``device``, the ``environment`` and the ``config``.
    """

    def __init__(self, common: CommonSpec, settings: Mapping[str, Any]) -> None:
        self._common = common
        self._settings = settings

    def load(self) -> Ready:
        return Ready(device="GPU" if self._common.gpus else "cpu")

    def run(self, job: int, report: Report) -> Counters:
        """Run the command of a training; raise ChildProcessError if it was killed, else MemberError."""
        training = self._settings["jobs"][job]
        command = LoggedCommand(
            command=training["command"],
            out=Path(training["out"]),
            log=Path(training["log"]),
            resumes=training["resumes"],
            environment=self._settings["environment"],
            settings=self._settings["config"],
        )
        try:
            if training["rungs"]:
                spec = read_json(Path(command.command[-1]))
                _train(command, Ladder(spec, Path(training["rungs"]), self._settings["device"]), report)
            else:
                command.run(report)
        except CommandFailed as failure:
            raise (ChildProcessError if failure.was_killed else MemberError)(str(failure)) from None
        return command.progress()


def _train(command: LoggedCommand, ladder: Ladder, report: Report) -> None:
    """Run our trainer, and again with less memory each time that it runs out of it."""
    trials_end_at = time.monotonic() + TRIAL_SECONDS

    def run(rung: Rung, sizes: Sequence[int] = (), ends_at: float = math.inf) -> bool:
        fields = json.dumps({**asdict(rung), "rung": rung.text, "sizes": sizes})
        return replace(command, command=[*command.command, fields]).run(report, ends_at)

    def attempt(rungs: Sequence[Rung]) -> tuple[int, bool] | None:
        with contextlib.suppress(OutOfMemory):
            if not run(rungs[0], [rung.micro_batch for rung in rungs], trials_end_at):
                return None
        trial = read_json(command.out / "trial.json")
        return trial.get("begun", 0), trial.get("fits", False)

    rung = ladder.first() or ladder.search(attempt)
    while rung is not None:
        try:
            run(rung)  # from the newest save, or from the start
            return
        except OutOfMemory:
            rung = ladder.below(rung)
    raise MemberError(ladder.advice())
