"""What can be done of loading before a device is free: the model's code imported, its weights in the page cache.

None of it is needed, and none of it fails: what is wrong with a checkpoint shows when it is loaded.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoConfig, AutoModelForSequenceClassification

from ensemble.members.huggingface.spec import ModelSpec

_PIECE_BYTES = 8 << 20


def import_model_class(spec: ModelSpec) -> None:
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
        AutoModelForSequenceClassification._model_mapping[type(config)]


def weight_files(spec: ModelSpec) -> list[Path]:
    """The files that loading will read, as far as they are on this machine, in the order of their names."""
    folder = checkpoint_folder(spec.model_name_or_path, spec.revision)
    found: list[Path] = []
    if folder is not None and spec.gguf_file is not None:
        found.append(folder / spec.gguf_file)
    elif folder is not None:
        kinds = ["model.safetensors"] + ["pytorch_model.bin"] * spec.allow_pickle
        found += next((files for kind in kinds if (files := _of_kind(folder, kind))), [])
    if spec.adapter_name_or_path is not None:
        folder = checkpoint_folder(spec.adapter_name_or_path, None)
        found += [] if folder is None else [folder / "adapter_model.safetensors"]
    return [path for path in found if path.is_file()]


class ReadAhead:
    """Reads files in a thread, so that they lie in the page cache.

    Args:
        limit_bytes: no more than that.
        step: called in that thread after each piece.
    """

    def __init__(self, paths: list[Path], limit_bytes: int, step: Callable[[], None] = lambda: None) -> None:
        self.read_bytes = 0
        self._paths, self._limit_bytes, self._step = paths, limit_bytes, step
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._read, name="read ahead", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """No more after the piece in hand: whoever loads the files now reads them himself."""
        self._stopped.set()

    def wait(self) -> None:
        """Until all is read."""
        self._thread.join()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            for size in _pieces(self._paths, self._limit_bytes):
                self.read_bytes += size
                self._step()
                if self._stopped.is_set():
                    return


def _pieces(paths: list[Path], limit_bytes: int) -> Iterator[int]:
    buffer = memoryview(bytearray(min(_PIECE_BYTES, max(1, limit_bytes))))
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while limit_bytes > 0 and (size := file.readinto(buffer[:limit_bytes])):
                limit_bytes -= size
                yield size


def _of_kind(folder: Path, name: str) -> list[Path]:
    """The shards that an index names, or the one file."""
    index = folder / f"{name}.index.json"
    if not index.is_file():
        return [folder / name] if (folder / name).is_file() else []
    with contextlib.suppress(OSError, ValueError, KeyError, AttributeError):
        return sorted(
            {folder / str(shard) for shard in json.loads(index.read_bytes())["weight_map"].values()}
        )
    return []


def checkpoint_folder(name_or_path: str, revision: str | None) -> Path | None:
    """A folder, or where the hub's files of this name lie; None where they do not."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    with contextlib.suppress(Exception):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name_or_path, revision=revision, local_files_only=True))
    return None
