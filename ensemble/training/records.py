"""Define the content of training.json: how far trainings are, and how they ended."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from ensemble.common.errors import DataError
from ensemble.common.files import write_text
from ensemble.scheduling.records import FaultRecord, WorkerRecord

# ``time_limit``: some trainings could not end in time; ``waiting`` parts are those.
Status = Literal["running", "complete", "failed", "interrupted", "time_limit"]


@dataclass(frozen=True)
class PartTraining:
    """Report the training of a member on a part.

    Attributes:
        name: "fold-0", or "all".
        status: "kept" if it was trained before this command began.
        seconds: of the try that succeeded; None: it is not done.
        attempts: how often this command has begun it.
        step, steps: how far it is; None: it does not tell.
        folder: of the checkpoint or adapter, once it is done.
        log: of what its command prints.
    """

    name: str
    status: Literal["kept", "done", "training", "waiting"]
    seconds: float | None
    attempts: int
    step: int | None
    steps: int | None
    folder: str
    log: str


@dataclass(frozen=True)
class MemberTrainings:
    """Report the trainings of a member; ``failure`` says why it has failed, empty: it has not."""

    name: str
    parts: tuple[PartTraining, ...]
    faults: tuple[FaultRecord, ...] = ()
    workers: tuple[WorkerRecord, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class TrainingReport:
    """Hold the content of training.json; ``written_at`` is in UTC, as ISO 8601, ``seconds`` are of this command."""

    status: Status
    pid: int
    written_at: str
    seconds: float
    members: tuple[MemberTrainings, ...]

    @classmethod
    def now(cls, status: Status, seconds: float, members: Sequence[MemberTrainings]) -> TrainingReport:
        written_at = datetime.now(UTC).isoformat(timespec="seconds")
        return cls(status, os.getpid(), written_at, round(seconds, 3), tuple(members))

    @property
    def failures(self) -> tuple[str, ...]:
        return tuple(
            f"member {member.name} failed: {member.failure}" for member in self.members if member.failure
        )

    def write(self, path: Path) -> None:
        write_text(path, to_json(self, indent=2).decode() + "\n")

    @classmethod
    def read(cls, path: Path) -> TrainingReport:
        """Read training.json, or raise a DataError if there is none that this version can read."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            raise DataError(f"{path} cannot be read; train again (ensemble train)") from error
