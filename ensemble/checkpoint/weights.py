"""Weight files as far as they can be judged without loading them: all there, none cut short."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# The format: 8 bytes with the header's length, the header as JSON, the tensors (safetensors' README, "Format").
_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000


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
        if path.suffix == ".safetensors" and (reason := safetensors_problem(path)):
            yield f"{path} {reason}; copy it again"


def safetensors_problem(path: Path) -> str:
    """What is wrong with a safetensors file, as the end of a sentence; empty for a whole one."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        if start.startswith(b"version "):
            return "is only a git-lfs pointer to the weights"
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or not 0 < length <= min(_LARGEST_HEADER, size - _LENGTH_BYTES):
            return f"is cut short or no safetensors file ({size:,} bytes)"
        header = file.read(length)
    try:
        tensors = [value for key, value in json.loads(header).items() if key != "__metadata__"]
        end = max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    except (ValueError, KeyError, IndexError, AttributeError, TypeError):
        return "has a broken header"
    expected = _LENGTH_BYTES + length + end
    return "" if size == expected else f"has {size:,} bytes and should have {expected:,}"


def read_header(path: Path) -> dict[str, Any]:
    """The header of a whole safetensors file: its tensors' types and shapes by name."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        entries = json.loads(file.read(length))
    return {name: entry for name, entry in entries.items() if name != "__metadata__"}
