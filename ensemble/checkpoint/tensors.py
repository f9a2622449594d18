"""What a checkpoint's safetensors files hold, from their headers alone: names, types and shapes.

Format: 8 bytes with the header's length, the header as JSON, the data (safetensors' README, "Format").
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.checkpoint.weights import _LARGEST_HEADER, _LENGTH_BYTES
from ensemble.errors import CheckpointError

# Bits per element; safetensors' Dtype.
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class Tensor:
    """One stored tensor; ``dtype`` is safetensors' name for its type, such as BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return -(-self.elements * _BITS[self.dtype] // 8)


def read_tensors(folder: Path) -> tuple[Tensor, ...] | None:
    """The tensors of the files that transformers would load from a folder.

    Returns:
        In the files' order; None where there are no safetensors (pickles, or nothing downloaded yet).

    Raises:
        CheckpointError: a file is cut short, is missing though the index names it, or is no safetensors file.
    """
    files = _files(folder)
    if not files:
        return None
    return tuple(tensor for file in files for tensor in _read_header(file))


def _files(folder: Path) -> tuple[Path, ...]:
    # transformers looks for the single file first, then for the index. Other files, such as Mistral's
    # consolidated.safetensors, hold the same weights once more.
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return (single,)
    if not index.is_file():
        return tuple(sorted(folder.glob("*.safetensors")))
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is no index of weights; copy it again") from None
    return tuple(folder / name for name in sorted(names))


def _read_header(path: Path) -> list[Tensor]:
    try:
        with path.open("rb") as file:
            start = file.read(_LENGTH_BYTES)
            length = int.from_bytes(start, "little")
            if len(start) < _LENGTH_BYTES or not 0 < length <= _LARGEST_HEADER:
                raise CheckpointError(f"{path} is cut short or no safetensors file; copy it again")
            header = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}); copy it again") from error
    try:
        entries = json.loads(header)
        return [_tensor(name, entry) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} has a broken header; copy it again") from error


def _tensor(name: str, entry: Mapping[str, Any]) -> Tensor:
    if entry["dtype"] not in _BITS:
        raise CheckpointError(
            f"tensor {name} has the type {entry['dtype']}, which is unknown here; use a newer release"
        )
    return Tensor(name, entry["dtype"], tuple(int(size) for size in entry["shape"]))
