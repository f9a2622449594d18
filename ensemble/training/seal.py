"""Check what a training has left, seal it, and tell whether what stands there is still what was sealed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from ensemble.common.digests import FileDigests
from ensemble.common.errors import CheckpointError
from ensemble.common.files import file_state, sync_directory
from ensemble.common.text import listed, shown_path
from ensemble.config import MemberConfig
from ensemble.members.base import OutputColumns
from ensemble.members.huggingface.spec import HEAD_FILE
from ensemble.members.questions import ask
from ensemble.members.registry import member_kind
from ensemble.pipeline.trained_members import trained_member
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.records import Seal, read_record, write_record

ADAPTER = "adapter_config.json"
_CONFIG = "config.json"
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")


def fits(folder: Path, seal: Seal) -> bool:
    """Return whether a folder has exactly the sealed files; those that were not touched are not read again."""
    if {*seal.files} != {*_files(folder)}:
        return False
    for name, sealed in seal.files.items():
        path = folder / name
        if file_state(path) != sealed.state and FileDigests(whole=True).digest(path) != sealed.digest:
            return False
    return True


def why_to_train(trainings: TrainingDir, member: str, part: Part, made_of: Mapping[str, str]) -> str | None:
    """Return None if the part is trained, else why it must be trained: a sentence, empty where nothing is there.

    A training that was killed between its seal and its rename is put in place.

    Raises:
        CheckpointError: a file cannot be read.
    """
    seal, folder = read_record(trainings.seal(member, part), Seal), trainings.checkpoint(member, part)
    unfinished = trainings.unfinished(member, part)
    if seal is None:
        return ""
    changed = sorted(key for key, digest in made_of.items() if seal.made_of.get(key) != digest)
    if changed:
        return f"{listed(changed, 5, str)} changed since it was trained"
    if unfinished.is_dir() and fits(unfinished, seal):
        _put_in_place(unfinished, folder)
    if fits(folder, seal):
        return None
    return f"the files in {shown_path(folder)} are not those that its training has left"


def seal_training(
    trainings: TrainingDir, model: MemberConfig, part: Part, columns: OutputColumns, seal: Seal
) -> None:
    """Check what a training has left, write its seal (``seal`` with the files), and put the folder in place.

    Raises:
        CheckpointError: it is not exactly one checkpoint or adapter that ``validate`` takes.
        WriteError: the seal cannot be written.
        OSError: a file cannot be moved.
    """
    unfinished = trainings.unfinished(model.name, part)
    if not (unfinished / HEAD_FILE).is_file():
        _move_up(unfinished, _left_in(unfinished))
    changes = member_kind(model).trained_settings(unfinished)
    kind = member_kind(trained_member(model, changes, columns.labels))
    question = kind.question()
    if question is not None:
        ask([question])
    kind.inspect(columns)
    digests = FileDigests(whole=True)
    files = {}
    for name in _files(unfinished):
        digests.digest(unfinished / name)
        files[name] = digests.seen[str((unfinished / name).absolute())]
    write_record(trainings.seal(model.name, part), replace(seal, files=files))
    _put_in_place(unfinished, trainings.checkpoint(model.name, part))


def _left_in(folder: Path) -> Path:
    """Return the folder of the checkpoint or adapter: ``folder``, or one in it."""
    below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    left = [path for path in (folder, *below) if _is_checkpoint(path)]
    if not left:
        raise CheckpointError(
            f"its command ended well, but left neither a checkpoint nor an adapter in {shown_path(folder)}; save "
            "it there (save_pretrained, or Trainer.save_model)"
        )
    if len(left) > 1:
        names = [str(path.relative_to(folder)) for path in left]
        raise CheckpointError(
            f"its command left {len(left)} checkpoints in {shown_path(folder)} ({listed(names, 5, str)}), and it "
            "is unknown which is meant; keep one (save_strategy: no, and a save at the end)"
        )
    return left[0]


def _is_checkpoint(folder: Path) -> bool:
    has_weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    return (folder / ADAPTER).is_file() or ((folder / _CONFIG).is_file() and has_weights)


def _move_up(folder: Path, left: Path) -> None:
    """Move the files of a checkpoint in a folder of its own to where a member's files are looked for."""
    if left == folder:
        return
    aside = left.rename(folder / f".{left.name}.moving")  # a file in it may have the folder's name
    for path in sorted(aside.iterdir()):
        target = folder / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.rename(target)
    aside.rmdir()


def _files(folder: Path) -> list[str]:
    """Return the paths of all files below a folder, relative to it, sorted."""
    return sorted(
        os.path.relpath(os.path.join(parent, name), folder)  # noqa: PTH118
        for parent, _, names in os.walk(folder)
        for name in names
    )


def _put_in_place(unfinished: Path, folder: Path) -> None:
    """Give a sealed folder its final name, instead of what had that name before."""
    if folder.exists():
        shutil.rmtree(folder)
    unfinished.rename(folder)
    sync_directory(folder.parent)
