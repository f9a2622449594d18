"""Define the files that trainings leave beside their checkpoints: a seal for each, and training.json for all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from ensemble.common.digests import FileDigest
from ensemble.common.files import write_text
from ensemble.pipeline.training_dir import Part
from ensemble.scheduling.records import FaultRecord

# ``time_limit``: some trainings could not end in time.
Status: TypeAlias = Literal["running", "complete", "time_limit", "failed", "interrupted"]
Document = TypeVar("Document")


@dataclass(frozen=True)
class Seal:
    """Say what a checkpoint or adapter was made of, and what its files hold.

    Attributes:
        made_of: digests of what the training depends on, by its name, such as "train.command".
        seconds: of the try that succeeded.
        attempts: how often the command began the training.
        devices: UUIDs, or "cpu".
        progress: the last content of ``progress.json``; empty if the command keeps none.
        files: by the path within the folder.
    """

    made_of: dict[str, str]
    seconds: float
    attempts: int
    devices: tuple[str, ...]
    progress: dict[str, Any]
    files: dict[str, FileDigest] = field(default_factory=dict)


@dataclass(frozen=True)
class PartRecord:
    """Report a training; ``name`` is "fold-0" or "all", ``folder`` that of its result, and empty before that.

    The other attributes are those of its seal; ``seconds`` is None before it has ended well.
    """

    name: str
    status: Literal["done", "training", "waiting"]
    folder: str = ""
    seconds: float | None = None
    attempts: int = 0
    devices: tuple[str, ...] = ()
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """Return the words for it, such as "fold 0"."""
        return Part.named(self.name).text


@dataclass(frozen=True)
class MemberRecord:
    """Report the trainings of a member; ``failure`` says why it has failed, empty: it has not."""

    name: str
    parts: tuple[PartRecord, ...]
    faults: tuple[FaultRecord, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class TrainingReport:
    """Hold the content of training.json; ``seconds`` are of this command, ``written_at`` is in UTC, as ISO 8601."""

    status: Status
    seconds: float
    members: tuple[MemberRecord, ...]
    pid: int = field(default_factory=os.getpid)
    written_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def steps_done(progress: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return how many steps of how many a training has done; None if its ``progress.json`` does not tell."""
    step, steps = progress.get("step"), progress.get("steps")
    if isinstance(step, int) and isinstance(steps, int) and 0 <= step <= steps and steps:
        return step, steps
    return None


def write_record(path: Path, record: Seal | TrainingReport) -> None:
    write_text(path, to_json(record, indent=2).decode() + "\n")


def read_record(path: Path, kind: type[Document]) -> Document | None:
    """Return a seal or report; None if there is none that this version can read."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
