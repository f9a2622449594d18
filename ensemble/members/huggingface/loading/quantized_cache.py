"""Quantize once: a member's 4-bit weights as the first load made them, for the loads that follow.

They are a checkpoint of transformers' own, written before the first forward pass: on CPUs with AVX512_BF16
bitsandbytes repacks its weights in that pass.  What stands under the final name is complete, and its note says what
made it; anything else is quantized anew.  Nothing that happens here makes a member fail.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ensemble.common.files import TEMPORARY, check_unchanged, free_bytes, may_keep, read_json, sync_directory
from ensemble.common.text import gib
from ensemble.members.huggingface.spec import CheckpointSpec

# Of the weights at most so many are copied to the host's memory at a time.
_SHARD_SIZE = "1GB"
_NAME, _NOTE, _LOCK = "quantized", "made_of.json", ".lock"


class QuantizedCache:
    """Where a member's quantized weights stand, or would; they are those of its base where it has an adapter.

    The folder belongs to the member's fingerprint: weights, settings and type are those of this work.

    Args:
        dtype: of what is not quantized.

    Attributes:
        folder: for ``from_pretrained``, where ``missing`` finds them.
    """

    def __init__(self, spec: CheckpointSpec, dtype: torch.dtype | str) -> None:
        assert spec.cache_dir is not None
        self.folder = Path(spec.cache_dir) / _NAME
        self._files = spec.files
        self._made_by = {
            "transformers": version("transformers"),
            "bitsandbytes": version("bitsandbytes"),
            "dtype": str(dtype).removeprefix("torch."),
            "settings": json.loads(json.dumps(spec.quantization_config, default=str)),
        }

    def missing(self) -> list[str] | None:
        """The weights that the checkpoint did not have, such as a head; None where nothing can be loaded here."""
        note = read_json(self.folder / _NOTE)
        sizes, missing = note.get("bytes"), note.get("missing")
        if note.get("made_by") != self._made_by or not isinstance(missing, list) or not sizes:
            return None
        return [str(key) for key in missing] if sizes == _sizes(self.folder) else None

    def write(self, model: Any, missing: Sequence[str]) -> str:
        """Keep a model's weights, unless another replica is doing so; returns a note for the user, or nothing.

        Args:
            model: as ``from_pretrained`` has made it, before its first forward pass.
            missing: those of its weights that the checkpoint did not have.
        """
        if getattr(getattr(model, "hf_quantizer", None), "pre_quantized", True):
            return ""  # the checkpoint itself is what would be written
        temporary = self.folder.with_name(f".{_NAME}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
        try:
            self.folder.parent.mkdir(exist_ok=True)
            with _alone(self.folder.parent / _LOCK) as is_alone:
                if not is_alone or self.missing() is not None:
                    return ""
                for leftover in self.folder.parent.glob(
                    f".{_NAME}{TEMPORARY}*"
                ):  # of a writer that was killed
                    shutil.rmtree(leftover)
                shutil.rmtree(self.folder, ignore_errors=True)
                needed = sum(one.nbytes for one in (*model.parameters(), *model.buffers()))
                free = free_bytes(self.folder.parent)
                if free is not None and not may_keep(needed, free):  # since the plan, others have written
                    return (
                        f"its quantized weights ({gib(needed)}) are not kept: the disk has {gib(free)} free"
                    )
                temporary.mkdir()
                model.save_pretrained(temporary, max_shard_size=_SHARD_SIZE)
                note = {"made_by": self._made_by, "missing": [*missing], "bytes": _sizes(temporary)}
                (temporary / _NOTE).write_text(json.dumps(note), encoding="utf-8")
                for path in temporary.iterdir():
                    with path.open("rb") as written:
                        os.fsync(written.fileno())
                sync_directory(temporary)
                check_unchanged(self._files)  # else they are of old and new files together
                temporary.rename(self.folder)
                sync_directory(self.folder.parent)
        except Exception as error:  # a full disk; what transformers and safetensors raise has many kinds
            return f"its quantized weights are not kept ({type(error).__name__}: {str(error)[:200]})"
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return f"its quantized weights ({gib(needed)}) are kept in the run directory for later loads"

    def discard(self) -> None:
        """They cannot be loaded after all."""
        shutil.rmtree(self.folder, ignore_errors=True)


def cached_weight_files(spec: CheckpointSpec) -> list[Path]:
    """The weights that a load will probably read instead of the checkpoint's; empty where none are kept."""
    if spec.cache_dir is None or not (folder := Path(spec.cache_dir) / _NAME).is_dir():
        return []
    return sorted(folder.glob("*.safetensors"))


def _sizes(folder: Path) -> Mapping[str, int]:
    """Bytes of each file but the note, by name; empty where the folder cannot be read."""
    with contextlib.suppress(OSError):
        return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != _NOTE}
    return {}


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Whether this process alone holds the file; the kernel lets go when it ends, however it ends."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)
