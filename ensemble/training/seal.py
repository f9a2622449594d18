"""Decide which trainings are done, say which finished ones are made again and why, and seal what one has left."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ensemble.common.digests import folder_digests, has_files
from ensemble.common.text import duration, listed, plural, shown_path
from ensemble.config import MemberConfig, RunConfig
from ensemble.members.base import OutputColumns
from ensemble.members.huggingface.training_from_base import TrainingFromBase
from ensemble.members.questions import ask
from ensemble.members.registry import member_kind
from ensemble.pipeline.trained_members import trained_member
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.records import Seal, read_record, write_record

# Trainings that took longer together are made again only where a user asks for it.
_ASKED_SECONDS = 3600.0


@dataclass(frozen=True, kw_only=True)
class Training:
    """Describe the training of a member on a part, and say how it stands.

    Attributes:
        made_of: see ``Seal``.
        command: a program and its arguments.
        from_base: the training, if the command is our own, which goes on with what an earlier try has left.
        is_done: whether it has ended well, is made of what it would be made of now, and is untouched.
        goes_on: whether a command has begun it, and was stopped.
        is_taken: whether what a stopped command has left was put in its place just now.
        why: why what has ended well is made again; empty: there is none, or it was said when its replacement began.
        seconds: what has ended well took.
    """

    model: MemberConfig
    part: Part
    made_of: Mapping[str, str]
    command: tuple[str, ...] = ()
    from_base: TrainingFromBase | None = None
    is_done: bool = False
    goes_on: bool = False
    is_taken: bool = False
    why: str = ""
    seconds: float = 0.0


def as_it_stands(files: TrainingDir, training: Training) -> Training:
    """Return a training as it stands. Nothing is written.

    What its ``made_of`` lacks is gone, and is not compared.

    Raises:
        CheckpointError: a file cannot be read.
    """
    member, part, made_of = training.model.name, training.part, training.made_of
    place, unfinished = files.checkpoint(member, part), files.unfinished(member, part)
    seal, begun = (read_record(path(member, part), Seal) for path in (files.seal, files.begun))
    if begun is not None and begun.files:  # a kill came before it was in its place
        seal, begun, place = begun, None, unfinished if unfinished.is_dir() else place
    is_there = seal if place.is_dir() else None
    seconds = sum(item.record.seconds or 0.0 for item in (is_there, begun) if item is not None)
    status = "waiting" if begun is None else begun.record.status
    if begun is not None and status != "waiting" and not begun.changed(made_of):
        return replace(training, goes_on=status == "training", seconds=seconds)
    why = ""
    if seal is not None and seal.changed(made_of):
        why = f"{seal.changed(made_of)} changed since it was trained"
    elif seal is not None and has_files(place, seal.files):
        return replace(training, is_done=True)
    elif seal is not None:
        why = f"the files in {shown_path(place)} are not those that its training has left"
    elif files.seal(member, part).exists():
        why = "its seal cannot be read"
    elif begun is not None and status == "done" and unfinished.is_dir():
        why = f"{begun.changed(made_of)} changed since it ended, and it was not sealed"
    return replace(training, why=why, seconds=seconds)


def texts_by_reason(trainings: Iterable[Training], outcome: str) -> Iterator[str]:
    """Yield a sentence for those of a member that are made again for the same reason."""
    again = [item for item in trainings if item.why]
    for (member, why), group in itertools.groupby(again, lambda item: (item.model.name, item.why)):
        yield f"{member}: {outcome}: {listed([item.part.text for item in group], 10, str)}: {why}"


def consent_text(trainings: Sequence[Training]) -> str:
    """Return that ``--retrain`` is needed to begin; empty where what is made again took an hour or less."""
    again = [item for item in trainings if item.why]
    seconds = sum(item.seconds for item in again)
    if seconds <= _ASKED_SECONDS:
        return ""
    return (
        f"{plural(len(again), 'finished training')} that took {duration(seconds)} would be made again: undo the "
        "change, or mend what is refused, to use what is there, or add --retrain to begin"
    )


def seal_training(files: TrainingDir, config: RunConfig, model: MemberConfig, part: Part, seal: Seal) -> str:
    """Check what a training has left, write its seal (``seal`` with the files), and put the folder in place.

    Returns:
        what the user should know of it; empty: nothing.

    Raises:
        CheckpointError: it is not what the kind of member takes.
        ConfigError: it does not go with another key of the member.
        WriteError: the seal cannot be written.
        OSError: a file cannot be moved.
    """
    unfinished, begun = files.unfinished(model.name, part), files.begun(model.name, part)
    write_record(begun, seal)
    kind = member_kind(model)
    note = kind.arrange_training(unfinished) or seal.note
    if note != seal.note:  # for the next try, should this one be refused
        seal = replace(seal, note=note)
        write_record(begun, seal)
    kind = member_kind(trained_member(model, kind.trained_settings(unfinished), config.labels))
    question = kind.question()
    if question is not None:
        ask([question])
    kind.inspect(OutputColumns.of(config.data, config.labels))
    write_record(begun, replace(seal, files=folder_digests(unfinished)))
    files.put_in_place(model.name, part)
    return note
