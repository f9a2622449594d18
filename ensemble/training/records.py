"""Define the files that trainings leave beside their checkpoints: a seal for each, and training.json for all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from pydantic import TypeAdapter, ValidationError

from ensemble.common.digests import FileDigest, changed
from ensemble.common.files import write_text
from ensemble.common.text import listed
from ensemble.pipeline.training_dir import OF_TABLES, Part
from ensemble.scheduling.records import FaultRecord

# ``time_limit``: some trainings could not end in time.
Status: TypeAlias = Literal["running", "complete", "time_limit", "failed", "interrupted"]
Document = TypeVar("Document")


@dataclass(frozen=True)
class PartRecord(Part):
    """Report the training of a part.

    Attributes:
        attempts: how often its command was begun.
        seconds: of the try that succeeded; None before it has ended well.
        devices: UUIDs, or "cpu"; empty before it has ended well.
        progress: the last content of ``progress.json``; empty if the command keeps none.
    """

    status: Literal["done", "training", "waiting"]
    attempts: int = 0
    seconds: float | None = None
    devices: tuple[str, ...] = ()
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def steps_done(self) -> tuple[int, int] | None:
        """Return how many steps of how many are done; None if ``progress`` does not tell."""
        step, steps = self.progress.get("step"), self.progress.get("steps")
        if isinstance(step, int) and isinstance(steps, int) and 0 <= step <= steps and steps:
            return step, steps
        return None


@dataclass(frozen=True)
class Seal:
    """Say what a checkpoint or adapter is made of, how it was trained, and what its files hold.

    Attributes:
        made_of: digests of what the training depends on, by its name, such as "train.command".
        record: "waiting" until a user asks for the training, "training" until it has ended well.
        files: by the path within the folder; empty until they were checked.
        note: what the user should know of what was left; empty: nothing.
    """

    made_of: dict[str, str]
    record: PartRecord
    files: dict[str, FileDigest] = field(default_factory=dict)
    note: str = ""

    def changed(self, made_of: Mapping[str, str]) -> str:
        """Return what differs in ``made_of``, by name, but not what it lacks; empty: nothing."""
        names = changed(made_of, self.made_of)
        of_tables = [name for name in OF_TABLES if name in names]
        return listed([name for name in names if name not in of_tables[1:]], 5, str)

    def has_ended_as(self, made_of: Mapping[str, str]) -> bool:
        return self.record.status == "done" and not self.changed(made_of)


@dataclass(frozen=True)
class MemberRecord:
    """Report the trainings of a member.

    Attributes:
        folder: of its checkpoints and adapters, each in a folder of the name of its part.
        failure: why it has failed; empty: it has not.
    """

    name: str
    folder: str
    parts: tuple[PartRecord, ...]
    faults: tuple[FaultRecord, ...] = ()
    failure: str = ""


@dataclass(frozen=True)
class TrainingReport:
    """Hold the content of training.json; ``seconds`` are those of the command that has written it."""

    status: Status
    seconds: float
    members: tuple[MemberRecord, ...]

    def with_failure(self, name: str, folder: Path, failure: str) -> TrainingReport:
        """Return the report with a member that cannot be trained."""
        member = MemberRecord(name, str(folder.absolute()), (), (), failure)
        return replace(self, status="failed", members=(*self.members, member))


def write_record(path: Path, record: Seal | TrainingReport) -> None:
    text = json.dumps(asdict(record), indent=2, ensure_ascii=False)
    # What a user's command tells may have halves of characters, which no file of text can hold.
    write_text(path, text.encode("utf-8", "replace").decode() + "\n")


def read_record(path: Path, kind: type[Document]) -> Document | None:
    """Return a seal or report; None if there is none that this version can read."""
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except (OSError, ValidationError):
        return None
