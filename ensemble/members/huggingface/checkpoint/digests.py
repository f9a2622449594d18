"""Compute digests of a checkpoint's files: weights by samples or every byte, tokenizers whole.

They tell whether files are still those of an earlier run, not whether files are correct.
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
# Files that decide which model is made of the weights; with an adapter_config.json transformers loads an adapter
# and its base.
_DESCRIPTIONS = ("config.json", "adapter_config.json", "*.index.json")
# With one of these in model_kwargs, transformers may prefer pickles to safetensors.
_FORMAT_KEYS = ("variant", "use_safetensors")


def weights_digest(folder: Path, model_kwargs: Mapping[str, Any], runs_code: bool, files: FileDigests) -> str:
    """Return a digest of the weights in a folder and of the files that describe them, whatever the folder's name.

    Args:
        model_kwargs: the member's; they can choose among the files.
        runs_code: whether the folder's Python files are part of the model.

    Raises:
        CheckpointError: a file cannot be read.
    """
    weights: list[Path] = []
    small: list[Path] = []
    patterns = (*_DESCRIPTIONS, "*.py") if runs_code else _DESCRIPTIONS
    for subfolder in _folders(folder, model_kwargs):
        weights += weight_files(subfolder)
        if any(key in model_kwargs for key in _FORMAT_KEYS):
            weights += subfolder.glob("*.bin")
        for pattern in patterns:
            small += subfolder.glob(pattern)
    return _together(folder, weights, small, files)


def any_digest(path: Path, files: FileDigests) -> str:
    """Return a digest of a file of any kind, or of all files below a folder, with their names in it."""
    paths = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    # Large files are sampled, unless the run asks for every byte (hash_weights).
    samples = {file: weight_samples(file) if file.stat().st_size > 256 << 20 else None for file in paths}
    return files.together(path if path.is_dir() else path.parent, samples)


def tokenizer_digest(folder: Path | None, tokenizer_kwargs: Mapping[str, Any], files: FileDigests) -> str:
    """Return a digest of a tokenizer's files and of files that its settings name.

    Args:
        folder: None: only files that the settings name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    texts = [value for value in tokenizer_kwargs.values() if isinstance(value, str)]
    # Not Path.is_file, which raises an error for a text that cannot be a name.
    paths = [Path(text) for text in texts if os.path.isfile(text)]  # noqa: PTH113
    subfolders = [] if folder is None else _folders(folder, tokenizer_kwargs)
    for subfolder in subfolders:
        for pattern in TOKENIZER_FILES:
            paths += subfolder.glob(pattern)
    return _together(folder or Path(), (), paths, files)


def hub_commit(name_or_path: str, folder: Path) -> str | None:
    """Return the commit whose files the hub's cache holds; None for a folder of the user's.

    A commit identifies all of its files, including those that the worker has yet to fetch.  The cache keeps them in
    models--<name>/snapshots/<commit> (huggingface_hub, "Understand caching").
    """
    is_cached = not Path(name_or_path).is_dir() and folder.parent.name == "snapshots"
    return folder.name if is_cached else None


def _folders(folder: Path, kwargs: Mapping[str, Any]) -> list[Path]:
    subfolder = kwargs.get("subfolder")
    return [folder, folder / subfolder] if isinstance(subfolder, str) and subfolder else [folder]


def weight_samples(path: Path) -> Samples:
    """Return a function that reads a weight file's size, its safetensors header, and samples of its content.

    Samples are the first and the last MiB, 64 blocks of 4 KiB evenly between them, and in safetensors 4 KiB in the
    middle of each tensor (of 512 tensors where there are more).  A model that was trained again differs there, even
    if only some layers were trained.  An edit of a few bytes between the samples is seen only where every byte is
    read.
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
            entries = (entry["data_offsets"] for entry in header_entries(header).values())
            spans = sorted((int(start), int(stop)) for start, stop, *_ in entries)
            first = LENGTH_BYTES + len(header)
            for start, stop in spans[:: -(-len(spans) // _MAX_TENSORS) or 1]:
                offsets.add(first + max(start, (start + stop - _BLOCK_BYTES) // 2))
        for offset in (0, *sorted(offset for offset in offsets if _EDGE_BYTES <= offset < end), end):
            file.seek(offset)
            yield file.read(_BLOCK_BYTES if 0 < offset < end else _EDGE_BYTES)

    return samples


def _together(folder: Path, weights: Iterable[Path], others: Iterable[Path], files: FileDigests) -> str:
    """Return one digest of those files that exist; ``others`` are read to the last byte."""
    samples: dict[Path, Samples | None] = {path: None for path in others if path.is_file()}
    samples |= {path: weight_samples(path) for path in weights if path.is_file()}
    return files.together(folder, samples)
