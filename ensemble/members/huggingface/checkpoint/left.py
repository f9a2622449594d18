"""Find the checkpoint that a training's command has left."""

from __future__ import annotations

from pathlib import Path

from ensemble.common.errors import CheckpointError
from ensemble.common.files import remove_folder
from ensemble.common.text import listed, shown_path
from ensemble.members.huggingface.spec import HEAD_FILE

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")


def lift_checkpoint(folder: Path) -> None:
    """Move the checkpoint, adapter or head that a command has left to the top of its folder, if it lies below.

    Raises:
        CheckpointError: there is none, or several.
    """
    inside = sorted(folder.iterdir()) if folder.is_dir() else []  # a command may have removed it
    below = [path for path in inside if path.is_dir() and not path.is_symlink()]
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
    if left == [folder]:
        return
    aside = left[0].rename(folder / f".{left[0].name}.moving")  # a file in it may have the folder's name
    for path in sorted(aside.iterdir()):
        target = folder / path.name
        remove_folder(target)
        path.rename(target)
    aside.rmdir()


def _is_checkpoint(folder: Path) -> bool:
    has_weights = any(any(folder.glob(pattern)) for pattern in _WEIGHTS)
    is_whole = (folder / "config.json").is_file() and has_weights
    return is_whole or any((folder / name).is_file() for name in ("adapter_config.json", HEAD_FILE))
