"""Weight files as far as they can be judged without loading them: all there, none cut short, none a pickle."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

from ensemble.common.errors import CheckpointError
from ensemble.common.files import unreadable
from ensemble.members.huggingface.checkpoint.safetensors_headers import read_file, shards_of


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files that transformers would read from a folder: safetensors, or else pickles."""
    for pattern in ("*.safetensors", "*.bin"):
        files = tuple(sorted(path for path in folder.glob(pattern) if not _is_trainers(path)))
        if files:
            return files
    return ()


def weight_problems(folder: Path, allow_pickle: bool = False) -> Iterator[str]:
    """What is wrong with a checkpoint's weights, one sentence each; nothing for a whole one.

    Args:
        allow_pickle: they may be pickles, of which the worker reads no more than tensors.
    """
    files = weight_files(folder)
    pickles = sorted(
        path
        for path in folder.glob("*.pt*")
        if re.fullmatch(r"\.pth?", path.suffix) and not _is_trainers(path)
    )
    if not files and pickles:
        yield (
            f"{pickles[0]} is a pickle of a kind that transformers does not read; load it where you trust it, and "
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
            elif allow_pickle:
                # torch writes archives whose table of contents stands at the end; before 1.6 it wrote bare pickles.
                with path.open("rb") as file:
                    starts_as_archive = file.read(2) == b"PK"
                if starts_as_archive and not zipfile.is_zipfile(path):
                    yield f"{path} is cut short; copy it again"
        except CheckpointError as error:
            yield from error.problems
        except OSError as error:
            yield unreadable(path, error)


def _is_trainers(path: Path) -> bool:
    """Whether a file is one that a Trainer leaves beside the weights."""
    names = r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pt|pth)"
    return re.fullmatch(names, path.name) is not None


def pickle_refused(path: Path) -> str:
    """The sentence for weights that are a pickle, where the config does not allow one."""
    return (
        f"{path} is a pickle, and loading one can run code that is hidden in it; use a safetensors copy (load it "
        "where you trust it and call save_pretrained), or set allow_pickle: true"
    )


def _index_problems(index: Path, files: tuple[Path, ...], allow_pickle: bool) -> Iterator[str]:
    try:
        shards = shards_of(index)
    except CheckpointError as error:
        yield from error.problems
        return
    pickles = [name for name in shards if not name.endswith(".safetensors")]
    # transformers goes by each file's ending, whatever the index is called.
    if pickles and not allow_pickle and index.name.endswith(".safetensors.index.json"):
        yield pickle_refused(index.parent / pickles[0])
    missing = [name for name in shards if not (index.parent / name).is_file()]
    if missing and any(path.suffix == Path(missing[0]).suffix for path in files):
        one = f"{missing[0]}, which is"
        what = (
            one if len(missing) == 1 else f"{len(missing)} files, {missing[0]} the first of them, which are"
        )
        yield f"{index} names {what} not there; copy what is missing"
