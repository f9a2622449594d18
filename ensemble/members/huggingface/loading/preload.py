"""What can be done of loading before a device is free: the model's code imported, its weights in the page cache.

None of it is needed, and none of it fails: what is wrong with a checkpoint shows when it is loaded.
"""

from __future__ import annotations

import contextlib
import os
import threading
from importlib.util import find_spec
from pathlib import Path

import transformers
from transformers import AutoConfig

from ensemble.common.errors import CheckpointError
from ensemble.members.huggingface.checkpoint.adapter_files import WEIGHTS
from ensemble.members.huggingface.checkpoint.weight_files import shards_of
from ensemble.members.huggingface.spec import CheckpointSpec

_PIECE_BYTES = 8 << 20


def import_model_class(spec: CheckpointSpec) -> None:
    """Import the module of the model's class, unless it is code that the checkpoint brings along."""
    if spec.gguf_file is not None or spec.trust_remote_code:
        return
    # Packages of kernels that some models import ask for the device at once, which a standby has not got yet.
    if any(find_spec(name) for name in ("fla", "mamba_ssm")):
        return
    with contextlib.suppress(Exception):
        config = AutoConfig.from_pretrained(
            spec.model_name_or_path, revision=spec.revision or "main", trust_remote_code=False
        )
        getattr(transformers, spec.auto_class)._model_mapping[type(config)]


def weight_files(spec: CheckpointSpec) -> list[Path]:
    """The files that loading will read, as far as they are on this machine, in the order of their names."""
    found: list[Path] = []
    if folder := checkpoint_folder(spec.model_name_or_path, spec.revision):
        names = [] if spec.gguf_file is None else [spec.gguf_file]
        for single in ("model.safetensors", "pytorch_model.bin")[: 1 + spec.allow_pickle]:
            with contextlib.suppress(CheckpointError):  # there is no such index
                names = names or (
                    [single] if (folder / single).is_file() else shards_of(folder / f"{single}.index.json")
                )
        found += [folder / name for name in names]
    if adapter := spec.adapter_name_or_path and checkpoint_folder(spec.adapter_name_or_path, None):
        found.append(adapter / WEIGHTS)
    return [path for path in found if path.is_file()]


def checkpoint_folder(name_or_path: str, revision: str | None) -> Path | None:
    """A folder, or where the hub's files of this name lie; None where they do not."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    with contextlib.suppress(Exception):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name_or_path, revision=revision, local_files_only=True))
    return None


class ReadAhead(threading.Thread):
    """Reads files, so that they lie in the page cache; ``join`` waits until all is read, or asked for.

    Args:
        limit_bytes: no more than that.
    """

    def __init__(self, paths: list[Path], limit_bytes: int) -> None:
        super().__init__(name="read ahead", daemon=True)
        self.read_bytes = 0
        self._paths, self._limit_bytes = paths, limit_bytes
        self._is_loading = False
        self.start()

    def begin_load(self) -> None:
        """Somebody loads the files from now on, and must not be held up by this.

        Where the page cache may hold all of them, the kernel is asked to read the rest, without a copy for this
        process, and without waiting for it (posix_fadvise(2)); otherwise what is read ahead would push out what has
        not been loaded yet, and this ends after the piece in hand.
        """
        self._is_loading = True

    def run(self) -> None:
        buffer = memoryview(bytearray(min(_PIECE_BYTES, max(1, self._limit_bytes))))
        with contextlib.suppress(OSError):
            sizes = {path: path.stat().st_size for path in self._paths}
            may_go_on = sum(sizes.values()) <= self._limit_bytes and hasattr(os, "posix_fadvise")
            for path in self._paths:
                with path.open("rb", buffering=0) as file:
                    offset = 0
                    while not (is_loading := self._is_loading) or may_go_on:
                        if not is_loading:
                            size = file.readinto(buffer[: self._limit_bytes - self.read_bytes])
                        elif size := min(len(buffer), max(0, sizes[path] - offset)):
                            os.posix_fadvise(file.fileno(), offset, size, os.POSIX_FADV_WILLNEED)
                        if not size:
                            break
                        offset += size
                        self.read_bytes += size
