"""Inspect an adapter of peft without loading it: its files, its head, and whether it fits a base."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ensemble.common.errors import CheckpointError
from ensemble.members.huggingface.checkpoint.hub import find_file, how_to_install, read_config
from ensemble.members.huggingface.checkpoint.weight_files import Tensor, pickle_refused, read_file

WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
# Adapters that need peft's own forward pass or choose among several adapters (peft.utils.PeftType); others change
# the base's layers in place, as the worker needs it.
_UNSUPPORTED_TYPES = (
    "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING ADAPTION_PROMPT CPT CARTRIDGE XLORA"
).split()
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.\w+)?\.weight")
_HEAD = re.compile(r"(.+\.)?(score|classifier|classification_head|logits_proj)(\.\w+)*\.(weight|bias)")
# The last layer of a head, whose rows are the labels.
_LAST_LAYER = re.compile(
    r"(.+\.)?(score|logits_proj|classifier(\.out_proj)?|classification_head\.out_proj)\.weight"
)


@dataclass(frozen=True)
class Adapter:
    """Describe an adapter by its two files.

    Attributes:
        base: the model that it was trained on, by its own account.
        head_rows: the labels of its head; None: it has no head, or its weights are not known yet (on the hub,
            pickled).
        shapes: of its tensors, by name without peft's prefix.
    """

    name: str
    base: str | None
    head_rows: int | None
    shapes: Mapping[str, tuple[int, ...]]

    @property
    def brings_head(self) -> bool | None:
        """Whether it brings a head; None where its weights are not known yet."""
        return any(map(is_head, self.shapes)) if self.shapes else None


def inspect_adapter(name_or_path: str, allow_pickle: bool = False) -> Adapter:
    """Read an adapter's ``adapter_config.json`` and the header of its weights.

    Args:
        name_or_path: a folder, or a name on the Hugging Face hub, of which only the config is fetched.
        allow_pickle: whether its weights may be a pickle, which only the worker reads.

    Raises:
        CheckpointError: a file is missing or broken, the kind cannot be run, or peft is not installed.
    """
    path = find_file(name_or_path, "adapter_config.json")
    config = read_config(path, str(path))
    kind, problems = config.get("peft_type"), []
    if not isinstance(kind, str):
        problems.append(
            f"{name_or_path}: its adapter_config.json names no peft_type; name the folder that peft wrote"
        )
    elif kind.upper() in _UNSUPPORTED_TYPES:
        wrong = f"is a {kind} adapter, which changes no layer of its base"
        problems.append(f"{name_or_path} {wrong}; use LoRA or one of its variants")
    elif config.get("alora_invocation_tokens"):
        wrong = "is an activated LoRA, which waits for tokens to begin with"
        problems.append(f"{name_or_path} {wrong}; only plain LoRA can be run")
    elif config.get("megatron_config"):  # peft imports whatever module megatron_core names
        problems.append(f"{name_or_path} was made for Megatron's layers; only plain LoRA can be run")
    if importlib.util.find_spec("peft") is None:
        problems.append(f"adapters need peft, which is not installed: {how_to_install('peft')}")
    weights, pickle = path.with_name(WEIGHTS), path.with_name(_PICKLE)
    tensors: tuple[Tensor, ...] = ()
    if Path(name_or_path).is_dir():  # from the hub only the worker fetches weights
        try:
            if weights.is_file():
                tensors = read_file(weights)
            elif not pickle.is_file():
                problems.append(f"{path.parent} has an adapter_config.json but no {WEIGHTS}; copy it too")
            elif not allow_pickle:
                problems.append(pickle_refused(pickle))
        except CheckpointError as error:
            problems += error.problems
    if problems:
        raise CheckpointError(problems)
    shapes = {tensor.name.removeprefix("base_model.model."): tensor.shape for tensor in tensors}
    base = config.get("base_model_name_or_path")
    return Adapter(name_or_path, str(base) if base else None, head_rows(shapes), shapes)


def base_problems(adapter: Adapter, base: str, tensors: Sequence[Tensor]) -> Iterator[str]:
    """Yield a sentence if an adapter certainly does not belong to this base.

    LoRA's A is [rank, in] and its B [out, rank] beside a layer of [out, in] (peft, tuners/lora/layer.py).
    Quantized weights are packed into other shapes and are skipped.

    Args:
        base: the base's name, for the sentence.
        tensors: of the base.
    """
    adapter_shapes: dict[str, list[int | None]] = {}  # [out, in] of each layer; None: not known
    for name, shape in adapter.shapes.items():
        if len(shape) != 2:
            continue
        lora = _LORA.fullmatch(name)
        if lora is not None:
            axis = "BA".index(lora["side"])
            adapter_shapes.setdefault(lora["module"], [None, None])[axis] = shape[axis]
        elif name.endswith(".weight") and not is_head(name) and ".lora_" not in name:
            adapter_shapes[name.removesuffix(".weight")] = [*shape]
    # The shapes of the base's layers by every ending of their names; that of a packed layer is empty.
    base_shapes: dict[str, list[tuple[int, ...]]] = {}
    for tensor in tensors:
        module, _, last = tensor.name.rpartition(".")
        while module and last == "weight":
            base_shapes.setdefault(module, []).append(tensor.shape if tensor.is_float else ())
            module = module.partition(".")[2]
    trained_on = f"it was trained on {adapter.base or 'a model it does not name'}"
    has_common_layer = False
    for module, adapter_shape in adapter_shapes.items():
        candidates = _lookup(module, base_shapes)
        has_common_layer = has_common_layer or bool(candidates)
        if candidates and all(len(shape) == 2 and not _fits(adapter_shape, shape) for shape in candidates):
            dimensions = " x ".join("?" if length is None else str(length) for length in adapter_shape)
            yield (
                f"adapter {adapter.name} is not for {base}: its {module} is made for {dimensions}, the base has "
                f"{candidates[0][0]} x {candidates[0][1]}; {trained_on}"
            )
            return
    has_floats = any(tensor.is_float and tensor.name.endswith(".weight") for tensor in tensors)
    if adapter_shapes and not has_common_layer and has_floats:
        layer = next(iter(adapter_shapes))
        yield f"adapter {adapter.name} is not for {base}: the base has no {layer}; {trained_on}"


def _lookup(module: str, shapes: Mapping[str, list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    # A checkpoint may lack the prefixes that a classifier adds to the names of its body.
    first = ""
    while module and not first.isdecimal():  # without its layer's number a name would mean every layer
        if module in shapes:
            return shapes[module]
        first, _, module = module.partition(".")
    return []


def _fits(adapter_shape: Sequence[int | None], base_shape: tuple[int, ...]) -> bool:
    def matches(shape: tuple[int, ...]) -> bool:
        return all(size in (None, other) for size, other in zip(adapter_shape, shape, strict=True))

    return matches(base_shape) or matches(base_shape[::-1])  # GPT-2's layers are stored transposed


def is_head(name: str) -> bool:
    """Whether a tensor of this name belongs to a classification head."""
    return ".lora_" not in name and _HEAD.fullmatch(name) is not None


def head_rows(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """Return the number of labels of the classification head among these tensors; None: there is no head."""
    rows = (shape[0] for name, shape in shapes.items() if _LAST_LAYER.fullmatch(name) and len(shape) == 2)
    return next(rows, None)


def other_base(adapter: Adapter, base: str) -> str:
    """Return the base that the adapter names if it is not ``base``; empty where they may be the same.

    A copy's path may contain the name anywhere: on Kaggle it ends with a version's number.
    """
    if not adapter.base:
        return ""
    folder = Path(base)
    parts = folder.resolve().parts if folder.is_dir() else (folder.name,)
    name = Path(adapter.base).name.lower()
    return "" if any(name in part.lower() for part in parts) else adapter.base
