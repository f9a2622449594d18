"""What a checkpoint's files hold, as digests: weights by samples or every byte, tokenizers whole.

It says whether files are still those of an earlier run.  It does not judge them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ensemble.common.digests import FileDigests, Samples
from ensemble.members.huggingface.checkpoint.tokenizer_files import TOKENIZER_FILES
from ensemble.members.huggingface.checkpoint.weight_files import (
    LENGTH_BYTES,
    header_entries,
    read_header,
    weight_files,
)

_EDGE_BYTES = 1 << 20
_BLOCK_BYTES = 4_096
_BLOCKS = 64
_MAX_TENSORS = 512
# What decides, beside the weights, what model is made of them; an adapter_config.json makes transformers load an
# adapter and its base.
_DESCRIPTIONS = ("config.json", "adapter_config.json", "*.index.json")
# With one of these in model_kwargs, transformers may pass over safetensors for pickles.
_CHOOSE_FORMAT = ("variant", "use_safetensors")


def weights_digest(
    folder: Path, model_kwargs: Mapping[str, Any], gguf_file: str | None, runs_code: bool, files: FileDigests
) -> str:
    """A digest of the weights in a folder and of what describes them; the same whatever the folder is called.

    Args:
        model_kwargs: the member's; they can choose among the files.
        gguf_file: the one file that holds the weights, instead of those that transformers would look for.
        runs_code: whether the folder's Python files are part of the model.

    Raises:
        CheckpointError: a file cannot be read.
    """
    weights: list[Path] = []
    small: list[Path] = []
    for inside in _folders(folder, model_kwargs):
        weights += weight_files(inside) if gguf_file is None else ()
        if any(key in model_kwargs for key in _CHOOSE_FORMAT):
            weights += inside.glob("*.bin")
        for pattern in (*_DESCRIPTIONS, *(["*.py"] if runs_code else [])):
            small += inside.glob(pattern)
    if gguf_file is not None:
        weights.append(folder / gguf_file)
    return _together(folder, weights, small, files)


def tokenizer_digest(folder: Path | None, tokenizer_kwargs: Mapping[str, Any], files: FileDigests) -> str:
    """A digest of a tokenizer's files, and of files that its settings name.

    Args:
        folder: holds them; None: only what the settings name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    found = [
        path
        for inside in (_folders(folder, tokenizer_kwargs) if folder is not None else ())
        for pattern in TOKENIZER_FILES
        for path in inside.glob(pattern)
    ]
    texts = [value for value in tokenizer_kwargs.values() if isinstance(value, str)]
    # Not Path.is_file, which raises an error for a text that can be no name.
    named = [Path(text) for text in texts if os.path.isfile(text)]  # noqa: PTH113
    return _together(folder or Path(), (), (*found, *named), files)


def hub_commit(name_or_path: str, folder: Path) -> str | None:
    """The commit of which the hub's cache holds a name's files; None for a folder of the user's own.

    It stands for all that is in the files, also for those that are not here yet: the worker fetches them.
    The cache keeps a commit's files in models--<name>/snapshots/<commit> (huggingface_hub, "Understand caching").
    """
    is_cached = not Path(name_or_path).is_dir() and folder.parent.name == "snapshots"
    return folder.name if is_cached else None


def _folders(folder: Path, kwargs: Mapping[str, Any]) -> list[Path]:
    subfolder = kwargs.get("subfolder")
    return [folder, folder / subfolder] if isinstance(subfolder, str) and subfolder else [folder]


def weight_samples(path: Path) -> Samples:
    """What is read of a weight file: its size, the header of safetensors, and samples of its content.

    Samples are the first and the last MiB, 64 blocks of 4 KiB evenly between, and of safetensors 4 KiB in the
    middle of each tensor (of 512 tensors where there are more).  A model that was trained again differs there,
    under the same name, size and header, and so does one in which only some layers were trained.  An edit of a
    few bytes between the samples is seen only where every byte is read.
    """

    def samples(file: BinaryIO) -> Iterator[bytes]:
        size = os.fstat(file.fileno()).st_size
        yield size.to_bytes(8, "little")
        header = read_header(file, size) if path.suffix == ".safetensors" else b""
        yield header
        end = size - _EDGE_BYTES
        span = end - _EDGE_BYTES - _BLOCK_BYTES
        if span <= _BLOCKS * _BLOCK_BYTES:
            file.seek(0)
            yield file.read()
            return
        offsets = {_EDGE_BYTES + span * number // (_BLOCKS - 1) for number in range(_BLOCKS)}
        with contextlib.suppress(ValueError, KeyError, AttributeError, TypeError, RecursionError):  # broken
            found = (entry["data_offsets"] for entry in header_entries(header).values())
            spans = sorted((int(start), int(stop)) for start, stop, *_ in found)
            first = LENGTH_BYTES + len(header)
            for start, stop in spans[:: -(-len(spans) // _MAX_TENSORS) or 1]:
                offsets.add(first + max(start, (start + stop - _BLOCK_BYTES) // 2))
        for offset in (0, *sorted(one for one in offsets if _EDGE_BYTES <= one < end), end):
            file.seek(offset)
            yield file.read(_BLOCK_BYTES if 0 < offset < end else _EDGE_BYTES)

    return samples


def _together(folder: Path, weights: Iterable[Path], others: Iterable[Path], files: FileDigests) -> str:
    """One digest of those of these files that are there; the others are read to the last byte."""
    wanted: dict[Path, Samples | None] = dict.fromkeys(filter(Path.is_file, others))
    return files.together(folder, wanted | {path: weight_samples(path) for path in weights if path.is_file()})
