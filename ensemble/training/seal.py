"""Check what a training has left, seal it, and tell whether what stands there is still what was sealed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ensemble.common.digests import folder_digests, has_files
from ensemble.common.text import listed, shown_path
from ensemble.config import MemberConfig, RunConfig
from ensemble.members.base import OutputColumns
from ensemble.members.huggingface.checkpoint.left import lift_checkpoint
from ensemble.members.questions import ask
from ensemble.members.registry import member_kind
from ensemble.pipeline.trained_members import trained_member
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.records import Seal, read_record, write_record

# Of ``made_of``: all that is learned of the tables. The digests in ``Seal.tables`` tell what of it has changed.
TABLES = "the training table"


def why_to_train(
    trainings: TrainingDir,
    member: str,
    part: Part,
    made_of: Mapping[str, str],
    tables: Mapping[str, str] | None = None,
) -> str | None:
    """Return None if the part is trained, else why it must be trained: a sentence, empty where nothing is there.

    What ``made_of`` lacks is gone, and is not compared. Nothing is written.

    Raises:
        CheckpointError: a file cannot be read.
    """
    seal, folder = read_record(trainings.seal(member, part), Seal), trainings.checkpoint(member, part)
    if seal is None:
        if trainings.seal(member, part).exists():
            return "its seal cannot be read"
        if _may_return(trainings, member, part, made_of):
            return None
        has_begun = trainings.unfinished(member, part).is_dir()
        ended = read_record(trainings.ended(member, part), Seal) if has_begun else None
        if ended is not None and _changed(ended, made_of):
            return f"{listed(_changed(ended, made_of), 5, str)} changed since it ended, and it was not sealed"
        # Of a finished training that is out of use, until another one in its place has begun.
        seal = None if has_begun else read_record(trainings.outdated_seal(member, part), Seal)
        if seal is None or seal.is_replaced or not folder.is_dir() or not _changed(seal, made_of):
            return ""
    changed = _changed(seal, made_of)
    if TABLES in changed:
        changed.remove(TABLES)
        of_tables = [name for name, digest in (tables or {}).items() if seal.tables.get(name) != digest]
        # What follows in that order may follow from the first: other rows are divided otherwise.
        causes = [name for name in of_tables[1:] if name == "training.extra" and of_tables[0] != "labels"]
        changed += [of_tables[0], *causes] if of_tables else ["training.extra"]
    if changed:
        return f"{listed(changed, 5, str)} changed since it was trained"
    if any(has_files(path, seal.files) for path in (folder, trainings.unfinished(member, part))):
        return None
    return f"the files in {shown_path(folder)} are not those that its training has left"


def settle(trainings: TrainingDir, member: str, part: Part, discard_old: bool) -> None:
    """Put in place what was sealed before a kill."""
    seal, unfinished = read_record(trainings.seal(member, part), Seal), trainings.unfinished(member, part)
    if seal is not None and unfinished.is_dir() and has_files(unfinished, seal.files):
        trainings.replace(member, part, discard_old)


def use_again(trainings: TrainingDir, member: str, part: Part, made_of: Mapping[str, str]) -> bool:
    """Use a finished training again whose change was undone; return whether there is such a one."""
    if trainings.seal(member, part).exists() or not _may_return(trainings, member, part, made_of):
        return False
    trainings.clear(member, part)
    trainings.trained_rows(member).unlink(missing_ok=True)  # those of the change
    trainings.outdated_seal(member, part).rename(trainings.seal(member, part))
    return True


def ended_training(
    trainings: TrainingDir, member: str, part: Part, made_of: Mapping[str, str]
) -> Seal | None:
    """Return the seal, still without files, of a training that has ended well and was not sealed, or None."""
    seal = read_record(trainings.ended(member, part), Seal)
    is_there = seal is not None and trainings.unfinished(member, part).is_dir()
    return seal if is_there and seal is not None and not _changed(seal, made_of) else None


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
    write_record(trainings.ended(model.name, part), seal)
    note = lift_checkpoint(unfinished) or seal.note
    if note != seal.note:  # for the next try, should this one be refused
        seal = replace(seal, note=note)
        write_record(trainings.ended(model.name, part), seal)
    changes = member_kind(model).trained_settings(unfinished)
    kind = member_kind(trained_member(model, changes, columns.labels))
    question = kind.question()
    if question is not None:
        ask([question])
    kind.inspect(columns)
    write_record(trainings.seal(model.name, part), replace(seal, files=folder_digests(unfinished)))
    trainings.replace(model.name, part, discard_old)
    return note


def output_columns(config: RunConfig) -> OutputColumns:
    """Return the columns that predictions of what was trained get."""
    return OutputColumns(config.data.id_column, config.labels, config.data.path.parent)


def _changed(seal: Seal, made_of: Mapping[str, str]) -> list[str]:
    return sorted(key for key, digest in made_of.items() if seal.made_of.get(key) != digest)


def _may_return(trainings: TrainingDir, member: str, part: Part, made_of: Mapping[str, str]) -> bool:
    """Return whether a training that is out of use is of these settings, and untouched."""
    seal = read_record(trainings.outdated_seal(member, part), Seal)
    if seal is None or seal.is_replaced or _changed(seal, made_of):
        return False
    return has_files(trainings.checkpoint(member, part), seal.files)
