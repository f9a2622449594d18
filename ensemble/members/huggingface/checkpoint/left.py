"""Find the checkpoint that a training's command has left."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ensemble.common.errors import CheckpointError
from ensemble.common.files import remove_folder
from ensemble.common.text import listed, shown_path
from ensemble.members.huggingface.spec import HEAD_FILE

_OF_STEP = re.compile(r"checkpoint-\d+")  # Trainer's own names
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


def lift_checkpoint(folder: Path) -> str:
    """Move the checkpoint, adapter or head that a command has left to the top of its folder, if it lies below.

    Of what Trainer saves on the way (``checkpoint-500``) nothing counts beside a final model.

    Returns:
        what the user should know of it; empty: nothing.

    Raises:
        CheckpointError: there is none, or several.
    """
    for aside in sorted(folder.glob(".*.moving")):  # a kill came while it was moved
        _move_up(aside, folder)
    # A command may have removed it, or put a link in its place.
    left = [path for path in sorted(Path(path) for path, _, _ in os.walk(folder)) if _is_checkpoint(path)]
    on_the_way = [path for path in left if any(map(_OF_STEP.fullmatch, path.relative_to(folder).parts))]
    left = [path for path in left if path not in on_the_way] or on_the_way
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
    note = ""
    if left == on_the_way:
        step = left[0].relative_to(folder)
        note = f"its command left no final model, and what it saved on the way is taken ({step})"
    if left == [folder]:
        return note
    aside = left[0].rename(folder / f".{left[0].name}.moving")  # a file in it may have the folder's name
    _move_up(aside, folder)
    return note


def _move_up(aside: Path, folder: Path) -> None:
    for path in sorted(aside.iterdir()):
        target = folder / path.name
        remove_folder(target)
        path.rename(target)
    aside.rmdir()


def _is_checkpoint(folder: Path) -> bool:
    has_weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    is_whole = (folder / "config.json").is_file() and has_weights
    return is_whole or any((folder / name).is_file() for name in ("adapter_config.json", HEAD_FILE))
