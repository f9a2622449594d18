"""Check what a training has left, seal it, and tell whether what stands there is still what was sealed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ensemble.common.digests import folder_digests, has_files
from ensemble.common.files import remove_folder, sync_directory
from ensemble.common.text import listed, shown_path
from ensemble.config import MemberConfig
from ensemble.members.base import OutputColumns
from ensemble.members.huggingface.checkpoint.left import lift_checkpoint
from ensemble.members.questions import ask
from ensemble.members.registry import member_kind
from ensemble.pipeline.trained_members import trained_member
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.records import Seal, read_record, write_record


def why_to_train(trainings: TrainingDir, member: str, part: Part, made_of: Mapping[str, str]) -> str | None:
    """Return None if the part is trained, else why it must be trained: a sentence, empty where nothing is there.

    A training that was killed between its seal and its rename is put in place.  What ``made_of`` lacks is gone, and
    is not compared.

    Raises:
        CheckpointError: a file cannot be read.
    """
    seal, folder = read_record(trainings.seal(member, part), Seal), trainings.checkpoint(member, part)
    unfinished = trainings.unfinished(member, part)
    if seal is None:
        return "its seal cannot be read" if trainings.seal(member, part).exists() else ""
    changed = sorted(key for key, digest in made_of.items() if seal.made_of.get(key) != digest)
    if changed:
        return f"{listed(changed, 5, str)} changed since it was trained"
    if unfinished.is_dir() and has_files(unfinished, seal.files):
        _put_in_place(unfinished, folder)
    if has_files(folder, seal.files):
        return None
    return f"the files in {shown_path(folder)} are not those that its training has left"


def seal_training(
    trainings: TrainingDir, model: MemberConfig, part: Part, columns: OutputColumns, seal: Seal
) -> None:
    """Check what a training has left, write its seal (``seal`` with the files), and put the folder in place.

    Raises:
        CheckpointError: it is not exactly one checkpoint or adapter that ``validate`` takes.
        ConfigError: it does not go with another key of the member.
        WriteError: the seal cannot be written.
        OSError: a file cannot be moved.
    """
    unfinished = trainings.unfinished(model.name, part)
    lift_checkpoint(unfinished)
    changes = member_kind(model).trained_settings(unfinished)
    kind = member_kind(trained_member(model, changes, columns.labels))
    question = kind.question()
    if question is not None:
        ask([question])
    kind.inspect(columns)
    write_record(trainings.seal(model.name, part), replace(seal, files=folder_digests(unfinished)))
    _put_in_place(unfinished, trainings.checkpoint(model.name, part))


def _put_in_place(unfinished: Path, folder: Path) -> None:
    """Give a sealed folder its final name, instead of what had that name before."""
    remove_folder(folder)
    unfinished.rename(folder)
    sync_directory(folder.parent)
