"""Check weight files without loading them, and list their tensors.

Of safetensors files only the header is read: 8 bytes with its length, then JSON, before the data (safetensors'
README, "Format").
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from ensemble.common.errors import CheckpointError
from ensemble.common.files import load_json, unreadable
from ensemble.common.text import listed

LENGTH_BYTES = 8
NO_GGUF = (
    "GGUF files are llama.cpp's and cannot be loaded; name a folder with the original model's safetensors"
)
# transformers' names of a file with all weights, the first that there is; shards have an index of this name.
_WHOLE = ("model.safetensors", "pytorch_model.bin")
# What a Trainer leaves beside the weights.
_TRAINERS = re.compile(r"(training_args|optimizer|scheduler|scaler|rng_state(_\d+)?)\.(bin|pt|pth)")
_MAX_HEADER_BYTES = 100_000_000  # safetensors' own limit
# Bits per element; safetensors' Dtype.
_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}
# Heads of other tasks, buffers that old releases stored, settings as text: nothing that is loaded onto a device.
_DROPPED = re.compile(
    r"(^|\.)(lm_head|cls\.(predictions|seq_relationship)|(lm|mask|generator|discriminator)_predictions"
    r"|vocab_(transform|layer_norm|projector)|embed_out|qa_outputs)\."
    r"|^decoder\.(weight|bias)$|\.quant_state\.|rotary_emb\.inv_freq$|position_ids$|\.attn\.(bias|masked_bias)$"
)
# Tensors that accompany packed weights: of bitsandbytes, GPTQ and AWQ, compressed-tensors.
_BESIDE_PACKED = re.compile(
    r"\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB|qzeros|scales|g_idx"
    r"|weight_(format|scale|scale_inv|zero_point|shape|g_idx)|input_scale)$"
)


@dataclass(frozen=True)
class Tensor:
    """Describe a stored tensor; ``dtype`` is safetensors' name for its type, such as BF16."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def is_float(self) -> bool:
        return self.dtype in ("F64", "F32", "F16", "BF16")

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        return -(-self.elements * _BITS[self.dtype] // 8)


def read_tensors(folder: Path) -> tuple[Tensor, ...] | None:
    """Return the tensors that transformers would load from a folder, in the files' order.

    None stands for a folder without safetensors (pickles, or nothing downloaded yet).

    Raises:
        CheckpointError: a file is cut short, is missing though the index names it, or is no safetensors file.
    """
    files = [path for path in loaded_files(folder) if path.suffix == ".safetensors"]
    return tuple(tensor for file in files for tensor in read_file(file)) if files else None


def loaded_files(folder: Path) -> Sequence[Path]:
    """Return the weight files that transformers would load: not Mistral's consolidated.safetensors, for example.

    Raises:
        CheckpointError: the index is broken.
    """
    index = _index_of(folder)
    if index is not None:
        return [folder / name for name in shards_of(index)]
    whole = [folder / name for name in _WHOLE if (folder / name).is_file()]
    return whole[:1] or weight_files(folder)


def _index_of(folder: Path) -> Path | None:
    """Return the index that transformers would read; None: a file is whole, or there is none."""
    # It looks for the whole file first, then for the index (modeling_utils.py, _get_resolved_checkpoint_files).
    for name in _WHOLE:
        if (folder / name).is_file():
            return None
        if (folder / f"{name}.index.json").is_file():
            return folder / f"{name}.index.json"
    return None


def shards_of(index: Path) -> list[str]:
    """Return the names of the weight files in an index, sorted.

    Raises:
        CheckpointError: the file is not such an index.
    """
    try:
        names = sorted({str(name) for name in load_json(index)["weight_map"].values()})
        if names:
            return names
        raise ValueError("empty")
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        raise CheckpointError(f"{index} is not an index of weight files; copy it again") from None


def read_header(file: BinaryIO, size: int) -> bytes:
    """Read the header of a safetensors file of ``size`` bytes; empty if it has none."""
    length = int.from_bytes(file.read(LENGTH_BYTES), "little")
    return file.read(length) if 0 < length <= min(_MAX_HEADER_BYTES, size - LENGTH_BYTES) else b""


def header_entries(header: bytes) -> dict[str, Any]:
    """Return a header's entries by the names of their tensors.

    Raises:
        ValueError, AttributeError: the header is broken.
    """
    return {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}


def read_file(path: Path) -> tuple[Tensor, ...]:
    """Return the tensors of a safetensors file.

    Raises:
        CheckpointError: the file cannot be read, is cut short, is no safetensors file, or has an unknown type.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header = read_header(file, size)
            file.seek(0)
            is_pointer = file.read(LENGTH_BYTES) == b"version "
    except OSError as error:
        raise CheckpointError(unreadable(path, error)) from error
    if is_pointer:
        raise CheckpointError(f"{path} is only a git-lfs pointer to the weights; copy it again")
    if not header:
        wrong = f"is cut short or not a safetensors file ({size:,} bytes)"
        raise CheckpointError(f"{path} {wrong}; copy it again")
    try:
        entries = header_entries(header)
        tensors = tuple(
            Tensor(name, str(entry["dtype"]), tuple(map(int, entry["shape"])))
            for name, entry in entries.items()
        )
        data_bytes = max((entry["data_offsets"][1] for entry in entries.values()), default=0)
        expected = LENGTH_BYTES + len(header) + data_bytes
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} has a broken header; copy it again") from error
    unknown = next((tensor for tensor in tensors if tensor.dtype not in _BITS), None)
    if unknown is not None:
        what = f"tensor {unknown.name} has the type {unknown.dtype}, which is unknown here"
        raise CheckpointError(f"{path}: {what}; use a newer release")
    if size != expected:
        raise CheckpointError(f"{path} has {size:,} bytes and should have {expected:,}; copy it again")
    return tensors


def is_left_out(name: str) -> bool:
    """Return whether classifiers ignore a tensor: another task's head, a buffer, a setting."""
    return _DROPPED.search(name) is not None


def stands_beside_packed(name: str) -> bool:
    """Return whether a tensor of this name belongs to quantized weights."""
    return _BESIDE_PACKED.search(name) is not None


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the weight files that transformers would read from a folder: safetensors, otherwise pickles."""
    for pattern in ("*.safetensors", "*.bin"):
        files = tuple(sorted(path for path in folder.glob(pattern) if not _TRAINERS.fullmatch(path.name)))
        if files:
            return files
    return ()


def weight_problems(folder: Path, config: Mapping[str, Any], allow_pickle: bool) -> Iterator[str]:
    """Yield problems with a checkpoint's weight files.

    Args:
        config: its ``config.json``.
        allow_pickle: whether they may be pickles, from which the worker reads only tensors.
    """
    files = weight_files(folder)
    others = sorted(path for pattern in ("*.pt", "*.pth") for path in folder.glob(pattern))
    unread = [path for path in others if not _TRAINERS.fullmatch(path.name)]
    gguf = gguf_problem(folder)
    if gguf:
        yield gguf
    elif not files and unread:
        yield (
            f"{unread[0]} is a pickle of a kind that transformers does not read; load it where you trust it, and "
            "save it with save_pretrained, which writes safetensors"
        )
    elif not files:
        yield f"{folder} has a config.json but no weights (*.safetensors); copy them too"
    # transformers also reads a file that config.json names, and an adapter beside the model.
    named_file = config.get("transformers_weights")
    pickles = [folder / named_file] if isinstance(named_file, str) and named_file.endswith(".bin") else []
    if (folder / "adapter_config.json").is_file() and not (folder / "adapter_model.safetensors").is_file():
        pickles.append(folder / "adapter_model.bin")
    pickles += [path for path in files[:1] if path.suffix != ".safetensors"]
    if not allow_pickle:
        yield from (pickle_refused(path) for path in dict.fromkeys(pickles) if path.is_file())
    index = _index_of(folder)
    try:
        loaded = loaded_files(folder)
    except CheckpointError as error:
        yield from error.problems
        return
    unsafe = [path for path in loaded if path.suffix != ".safetensors"]
    # transformers decides by each file's ending, whatever the name of the index.
    if index is not None and unsafe and not allow_pickle and index.name.endswith(".safetensors.index.json"):
        yield pickle_refused(unsafe[0])
    missing = [path.name for path in loaded if index is not None and not path.is_file()]
    if missing and any(path.suffix == Path(missing[0]).suffix for path in files):
        yield f"{index} names {listed(missing, 4, str)}, not there; copy what is missing"
    for path in loaded:
        try:
            if path.suffix == ".safetensors" and path.name not in missing:
                read_file(path)
        except CheckpointError as error:
            yield from error.problems


def gguf_problem(path: Path) -> str:
    """Return the sentence for a GGUF file, or for a folder with no other weights; empty: it is neither."""
    files = [path] if path.is_file() else sorted(path.glob("*.gguf"))
    if not files or files[0].suffix != ".gguf" or weight_files(path):
        return ""
    return f"{files[0]}: {NO_GGUF}"


def pickle_refused(path: Path) -> str:
    """Return the sentence for weights in a pickle that the config does not allow."""
    return (
        f"{path} is a pickle, and loading one can run code that is hidden in it; use a safetensors copy (load it "
        "where you trust it and call save_pretrained), or set allow_pickle: true"
    )
