"""Inspect an adapter of peft without loading it: its files and its head."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ensemble.common.errors import CheckpointError
from ensemble.common.files import read_json
from ensemble.members.huggingface.checkpoint.hub import find_file, read_config
from ensemble.members.huggingface.checkpoint.weight_files import Tensor, pickle_refused, read_file

WEIGHTS = "adapter_model.safetensors"
# Our own trainings write it: ``id2label`` and ``problem_type`` of an adapter's head, as in a config.json.
LABELS_FILE = "labels.json"
_PICKLE = "adapter_model.bin"
# Adapters that need peft's own forward pass or choose among several adapters (peft.utils.PeftType); others change
# the base's layers in place, as the worker needs it.
_UNSUPPORTED_TYPES = (
    "PROMPT_TUNING MULTITASK_PROMPT_TUNING P_TUNING PREFIX_TUNING ADAPTION_PROMPT CPT CARTRIDGE XLORA"
).split()
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
        config: the content of its ``adapter_config.json``.
        brings_head: None where its weights are not known yet (on the hub, pickled).
        head_rows: the labels of its head; None: it has no head, or its weights are not known yet.
        shapes: of its tensors, by their names within the base; empty where they are not known yet.
        labels: the content of its ``labels.json``; empty where a training of ours left none.
    """

    name: str
    base: str | None
    config: Mapping[str, Any] = field(repr=False)
    brings_head: bool | None
    head_rows: int | None
    shapes: Mapping[str, tuple[int, ...]] = field(repr=False)
    labels: Mapping[str, Any] = field(default_factory=dict)


def inspect_adapter(name_or_path: str, allow_pickle: bool = False) -> Adapter:
    """Read an adapter's ``adapter_config.json`` and the header of its weights.

    Args:
        name_or_path: a folder, or a name on the Hugging Face hub, of which only the config is fetched.
        allow_pickle: whether its weights may be a pickle, which only the worker reads.

    Raises:
        CheckpointError: a file is missing or broken, or the kind cannot be run.
    """
    path = find_file(name_or_path, "adapter_config.json")
    config = read_config(path, str(path))
    kind, problems = config.get("peft_type"), []
    if not isinstance(kind, str):
        problems.append(
            f"{name_or_path}: its adapter_config.json names no peft_type; name the folder that peft wrote"
        )
    elif kind.upper() in _UNSUPPORTED_TYPES or config.get("alora_invocation_tokens"):
        problems.append(
            f"{name_or_path} is a {kind} adapter that changes no layer of its base, or only after some tokens; use "
            "LoRA or one of its variants"
        )
    elif config.get("megatron_config"):  # peft imports whatever module megatron_core names
        problems.append(f"{name_or_path} was made for Megatron's layers; only plain LoRA can be run")
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
    brings_head = any(map(is_head, shapes)) if shapes else None
    labels = read_json(path.with_name(LABELS_FILE))
    return Adapter(
        name=name_or_path,
        base=str(base) if base else None,
        config=config,
        brings_head=brings_head,
        head_rows=_head_rows(shapes),
        shapes=shapes,
        labels=labels if "id2label" in labels else {},  # users have files of this name, too
    )


def widest_lora(folder: Path) -> tuple[int, int]:
    """Return the outputs and the rank of the widest layer with LoRA; zeros: there is none, or no file to read."""
    path = folder / WEIGHTS
    if not path.is_file():
        return 0, 0
    try:
        tensors = read_file(path)
    except CheckpointError:  # which the inspection reports
        return 0, 0
    shapes = [tensor.shape for tensor in tensors if ".lora_B." in tensor.name and len(tensor.shape) == 2]
    return max(((width, rank) for width, rank in shapes), default=(0, 0))


def is_head(name: str) -> bool:
    """Return whether a tensor of this name belongs to a classification head."""
    return ".lora_" not in name and _HEAD.fullmatch(name) is not None


def _head_rows(shapes: Mapping[str, tuple[int, ...]]) -> int | None:
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
