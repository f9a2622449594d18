"""Say which finished trainings are made again and why, and how long they took."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ensemble.common.text import duration, listed, plural
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.records import Seal, read_record

# Trainings that took longer together are made again only where a user asks for it.
_ASKED_SECONDS = 3600.0


@dataclass(frozen=True)
class Again:
    """Name a finished training that is made again; ``seconds``: how long it took, 0 where that is not known."""

    member: str
    part: Part
    why: str
    seconds: float

    @classmethod
    def of(cls, files: TrainingDir, member: str, part: Part, why: str) -> Again:
        records = [files.ended(member, part)]
        if files.checkpoint(member, part).is_dir():
            records += [files.seal(member, part), files.outdated_seal(member, part)]
        seals = [read_record(path, Seal) for path in records]
        return cls(member, part, why, sum(seal.record.seconds or 0.0 for seal in seals if seal is not None))


def texts_by_reason(trainings: Iterable[Again], outcome: str) -> Iterator[str]:
    """Yield a sentence for those of a member that have the same reason."""
    for (member, why), group in itertools.groupby(trainings, lambda item: (item.member, item.why)):
        yield f"{member}: {outcome}: {listed([item.part.text for item in group], 10, str)}: {why}"


def consent_text(trainings: Sequence[Again]) -> str:
    """Return that ``--retrain`` is needed to begin; empty where the trainings took an hour or less."""
    seconds = sum(item.seconds for item in trainings)
    if seconds <= _ASKED_SECONDS:
        return ""
    count = plural(len(trainings), "finished training")
    return (
        f"{count} that took {duration(seconds)} would be made again: undo the change, or mend what is refused, to "
        "use what is there, or add --retrain to begin"
    )
