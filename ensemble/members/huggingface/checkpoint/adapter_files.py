"""What can be known of an adapter of peft without loading it: its files, its head, and whether it fits a base."""

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
# Kinds that live in peft's own forward pass or choose among several adapters (peft.utils.PeftType); the others
# change the base's layers in place, which is what the worker runs.
_OUTSIDE_THE_LAYERS = (
    "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING ADAPTION_PROMPT CPT CARTRIDGE XLORA"
).split()
_LORA = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(\.\w+)?\.weight")
_HEAD = re.compile(r"(.+\.)?(score|classifier|classification_head|logits_proj)(\.\w+)*\.(weight|bias)")
# The last layer of a head; what stands before it has as many rows as the model is wide.
_LAST = re.compile(
    r"(.+\.)?(score|logits_proj|classifier(\.out_proj)?|classification_head\.out_proj)\.weight"
)


@dataclass(frozen=True)
class Adapter:
    """An adapter as its two files describe it.

    ``base`` is the model it says it was trained on; ``head_rows`` counts the labels of the head it brings, None
    where it brings none or its weights are not known yet (on the hub, pickled); ``shapes`` are its tensors', by
    name without peft's prefix.
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
        allow_pickle: its weights may be a pickle, into which only the worker looks.

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
    elif kind.upper() in _OUTSIDE_THE_LAYERS:
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
    if Path(name_or_path).is_dir():  # of one on the hub, the weights are the worker's to fetch
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
    """Why an adapter does not belong to this base, in one sentence; nothing where it does or nobody can tell.

    LoRA's A is [rank, in] and its B [out, rank] beside a layer of [out, in] (peft, tuners/lora/layer.py).
    Weights that are quantized already are packed into other shapes and are passed over.

    Args:
        base: the base's name, for the sentence.
        tensors: those of the base.
    """
    made_for: dict[str, list[int | None]] = {}  # [out, in] of each layer, as far as it is known
    for name, shape in adapter.shapes.items():
        if len(shape) == 2 and (lora := _LORA.fullmatch(name)):
            axis = "BA".index(lora["side"])
            made_for.setdefault(lora["module"], [None, None])[axis] = shape[axis]
        elif len(shape) == 2 and name.endswith(".weight") and not is_head(name) and ".lora_" not in name:
            made_for[name.removesuffix(".weight")] = [*shape]
    # The base's layers by every ending of their names; of a packed one nothing can be said, and its shape is empty.
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for tensor in tensors:
        module, _, last = tensor.name.rpartition(".")
        while module and last == "weight":
            shapes.setdefault(module, []).append(tensor.shape if tensor.is_float else ())
            module = module.partition(".")[2]
    trained_on = f"it was trained on {adapter.base or 'a model it does not name'}"
    found = False
    for module, made in made_for.items():
        known = _lookup(module, shapes)
        found = found or bool(known)
        if known and all(len(shape) == 2 and not _fits(made, shape) for shape in known):
            dimensions = " x ".join("?" if length is None else str(length) for length in made)
            yield (
                f"adapter {adapter.name} is not for {base}: its {module} is made for {dimensions}, the base has "
                f"{known[0][0]} x {known[0][1]}; {trained_on}"
            )
            return
    has_floats = any(tensor.is_float and tensor.name.endswith(".weight") for tensor in tensors)
    if made_for and not found and has_floats:
        yield f"adapter {adapter.name} is not for {base}: the base has no {next(iter(made_for))}; {trained_on}"


def _lookup(module: str, shapes: Mapping[str, list[tuple[int, ...]]]) -> list[tuple[int, ...]]:
    # A checkpoint may have been saved with or without the names that the classifier puts in front of its body's.
    first = ""
    while module and not first.isdecimal():  # without its layer's number a name would mean every layer
        if known := shapes.get(module):
            return known
        first, _, module = module.partition(".")
    return []


def _fits(made: Sequence[int | None], shape: tuple[int, ...]) -> bool:
    ways = (shape, shape[::-1])  # GPT-2's layers are stored transposed
    return any(all(one in (None, there) for one, there in zip(made, way, strict=True)) for way in ways)


def is_head(name: str) -> bool:
    """Whether a tensor of this name belongs to a classification head."""
    return ".lora_" not in name and _HEAD.fullmatch(name) is not None


def head_rows(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    """How many labels a classification head among these tensors has; None where there is none."""
    rows = (shape[0] for name, shape in shapes.items() if _LAST.fullmatch(name) and len(shape) == 2)
    return next(rows, None)


def other_base(adapter: Adapter, base: str) -> str:
    """The base that the adapter names, where ``base`` goes by another name; empty where they may be the same.

    Copies lie in folders of all kinds (Kaggle's end in a version's number), so that its name may stand anywhere
    in the path.
    """
    if not adapter.base:
        return ""
    folder = Path(base)
    parts = folder.resolve().parts if folder.is_dir() else (folder.name,)
    name = Path(adapter.base).name.lower()
    return "" if any(name in part.lower() for part in parts) else adapter.base
