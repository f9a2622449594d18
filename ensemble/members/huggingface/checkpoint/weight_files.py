"""Weight files as far as they can be judged without loading them: all there, none cut short, none a pickle."""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ensemble.common.errors import CheckpointError
from ensemble.common.files import unreadable
from ensemble.members.huggingface.checkpoint.safetensors_headers import read_file

# What a Trainer leaves beside the weights.
_TRAINERS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pt|pth)")


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files that transformers would read from a folder: safetensors, or else pickles."""
    for pattern in ("*.safetensors", "*.bin"):
        files = tuple(sorted(path for path in folder.glob(pattern) if not _TRAINERS.fullmatch(path.name)))
        if files:
            return files
    return ()


def weight_problems(folder: Path, allow_pickle: bool = False) -> Iterator[str]:
    """What is wrong with a checkpoint's weights, one sentence each; nothing for a whole one.

    Args:
        allow_pickle: they may be pickles, of which the worker reads no more than tensors.
    """
    files = weight_files(folder)
    others = [path for path in folder.glob("*.p*t*") if re.fullmatch(r".*\.(pt|pth)", path.name)]
    others = sorted(path for path in others if not _TRAINERS.fullmatch(path.name))
    if not files and others:
        yield (
            f"{others[0]} is a pickle of a kind that transformers does not read; load it where you trust it, and "
            "save it with save_pretrained, which writes safetensors"
        )
    elif not files:
        yield f"{folder} has a config.json but no weights (*.safetensors); copy them too"
    elif files[0].suffix != ".safetensors" and not allow_pickle:
        yield pickle_refused(files[0])
    for index in folder.glob("*.index.json"):
        yield from _index_problems(index, files, allow_pickle)
    for path in files:
        try:
            if path.suffix == ".safetensors":
                read_file(path)
            elif allow_pickle and _is_cut_short(path):
                yield f"{path} is cut short; copy it again"
        except CheckpointError as error:
            yield from error.problems


def pickle_refused(path: Path) -> str:
    """The sentence for weights that are a pickle, where the config does not allow one."""
    return (
        f"{path} is a pickle, and loading one can run code that is hidden in it; use a safetensors copy (load it "
        "where you trust it and call save_pretrained), or set allow_pickle: true"
    )


def _index_problems(index: Path, files: tuple[Path, ...], allow_pickle: bool) -> Iterator[str]:
    try:
        shards = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        yield f"{index} is not an index of weight files; copy it again"
        return
    pickles = sorted(name for name in shards if not name.endswith(".safetensors"))
    # transformers goes by each file's ending, whatever the index is called.
    if pickles and not allow_pickle and index.name.endswith(".safetensors.index.json"):
        yield pickle_refused(index.parent / pickles[0])
    missing = sorted(name for name in shards if not (index.parent / name).is_file())
    if missing and any(path.suffix == Path(missing[0]).suffix for path in files):
        what = missing[0] if len(missing) == 1 else f"{len(missing)} files, {missing[0]} the first of them"
        yield f"{index} names {what}, which {'is' if len(missing) == 1 else 'are'} not there; copy what is missing"


def _is_cut_short(path: Path) -> bool:
    # torch writes archives whose table of contents stands at the end; before 1.6 it wrote bare pickles.
    try:
        with path.open("rb") as file:
            starts_as_archive = file.read(2) == b"PK"
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    return starts_as_archive and not zipfile.is_zipfile(path)
