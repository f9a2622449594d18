"""Check what a training has left, and seal it."""

from __future__ import annotations

from dataclasses import replace

from ensemble.common.digests import folder_digests
from ensemble.config import MemberConfig, RunConfig
from ensemble.members.base import OutputColumns
from ensemble.members.huggingface.checkpoint.left import lift_checkpoint
from ensemble.members.questions import ask
from ensemble.members.registry import member_kind
from ensemble.pipeline.trained_members import trained_member
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.records import Seal, write_record


def seal_training(
    trainings: TrainingDir,
    model: MemberConfig,
    part: Part,
    columns: OutputColumns,
    seal: Seal,
    discard_old: bool = False,
) -> str:
    """Check what a training has left, write its seal (``seal`` with the files), and put the folder in place.

    Returns:
        what the user should know of it; empty: nothing.

    Raises:
        CheckpointError: it is not exactly one checkpoint or adapter that ``validate`` takes.
        ConfigError: it does not go with another key of the member.
        WriteError: the seal cannot be written.
        OSError: a file cannot be moved.
    """
    unfinished = trainings.unfinished(model.name, part)
    begun = trainings.begun(model.name, part)
    write_record(begun, seal)
    note = lift_checkpoint(unfinished) or seal.note
    if note != seal.note:  # for the next try, should this one be refused
        seal = replace(seal, note=note)
        write_record(begun, seal)
    changes = member_kind(model).trained_settings(unfinished)
    kind = member_kind(trained_member(model, changes, columns.labels))
    question = kind.question()
    if question is not None:
        ask([question])
    kind.inspect(columns)
    write_record(begun, replace(seal, files=folder_digests(unfinished)))
    trainings.put_in_place(model.name, part, discard_old)
    return note


def output_columns(config: RunConfig) -> OutputColumns:
    """Return the columns that predictions of what was trained get."""
    return OutputColumns(config.data.id_column, config.labels, config.data.path.parent)
