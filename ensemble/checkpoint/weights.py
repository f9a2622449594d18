"""Weight files as far as they can be judged without loading them: all there, none cut short."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from ensemble.checkpoint.tensors import read_file
from ensemble.errors import CheckpointError


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The weight files that transformers would read from a folder: safetensors, or else pickles."""
    for pattern in ("*.safetensors", "*.bin"):
        files = tuple(sorted(path for path in folder.glob(pattern) if path.name != "training_args.bin"))
        if files:
            return files
    return ()


def weight_problems(folder: Path) -> Iterator[str]:
    """What is wrong with a checkpoint's weights, one sentence each; nothing for a whole one."""
    files = weight_files(folder)
    if not files:
        yield f"{folder} has a config.json but no weights (*.safetensors or *.bin); copy them too"
    for index in folder.glob("*.index.json"):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            yield f"{index} is no index of weights; copy it again"
            continue
        missing = sorted(shard for shard in shards if not (folder / str(shard)).is_file())
        if missing and any(path.suffix == Path(missing[0]).suffix for path in files):
            yield f"{index} names {len(missing)} files that are not there, the first is {missing[0]}; copy them too"
    for path in files:
        if path.suffix == ".safetensors":
            try:
                read_file(path)
            except CheckpointError as error:
                yield from error.problems
