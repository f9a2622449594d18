"""Inspect adapters of peft without loading them: files, heads, and why several have no common base or mean."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
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
# Starts of init_lora_weights: peft then subtracts the adapter's first values from the base, or makes the base anew
# (tuners/lora/layer.py).
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings of adapters that are more than a product of two matrices added to a layer.
_NOT_PLAIN = ("use_dora", "use_qalora", "use_bdlora", "target_parameters", "arrow_config")
# Settings of adapters that cannot give way to others.
_OF_ONE_ADAPTER = ("alora_invocation_tokens", "megatron_config")
# How the names of a plain LoRA's tensors end.
_MATRICES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


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


def uses_base_head(adapters: Sequence[Adapter | None]) -> bool:
    """Return whether one of these has no head of its own; None: the base alone."""
    return any(adapter is None or adapter.brings_head is False for adapter in adapters)


def shared_base_problems(adapters: Sequence[Adapter | None]) -> Iterator[str]:
    """Yield why adapters cannot take turns on one base; None: the base alone."""
    for adapter in adapters:
        setting = "" if adapter is None else _changes_base(adapter.config)
        if adapter is not None and setting:
            yield (
                f"adapter {adapter.name} was trained with {setting}, which changes the base that the other views "
                "use; make it a member of its own"
            )


def unshared_settings(lora_config: Mapping[str, Any], is_averaged: bool) -> Iterator[str]:
    """Yield the keys of ``LoraConfig`` with which adapters could not take turns on one base, or have no mean."""
    changes_base = _changes_base(lora_config)
    if changes_base:
        yield changes_base.partition(":")[0]
    yield from (key for key in _OF_ONE_ADAPTER if lora_config.get(key))
    targets = lora_config.get("target_modules") or ()
    if "embed_tokens" in targets or "lm_head" in targets:  # peft saves these whole
        yield "target_modules"
    if is_averaged:
        yield from (key for key in _NOT_PLAIN if lora_config.get(key))


def average_problems(adapters: Sequence[Adapter], combination_type: str) -> Iterator[str]:
    """Yield why these adapters have no mean; those whose weights are not known yet are checked by the worker."""
    for adapter in adapters:
        config = adapter.config
        kind = str(config["peft_type"])
        reasons = [f"peft_type: {kind}"] if kind.upper() != "LORA" else []
        reasons += [key for key in _NOT_PLAIN if config.get(key)]
        reasons += [name for name in adapter.shapes if ".lora_" in name and not name.endswith(_MATRICES)]
        reason = _changes_base(config) or next(iter(reasons), "")
        if reason:
            yield (
                f"adapters.average: {adapter.name} has {reason}, and only plain LoRA can be averaged; make a "
                "view of each adapter"
            )
    with_shapes = [adapter for adapter in adapters if adapter.shapes]
    for adapter in with_shapes[1:]:
        yield from _difference(with_shapes[0], adapter, combination_type)


def _difference(first: Adapter, second: Adapter, combination_type: str) -> Iterator[str]:
    """Yield the first difference for which two adapters have no mean."""
    for name in sorted({*first.shapes, *second.shapes}):
        shape, other = first.shapes.get(name, ()), second.shapes.get(name, ())
        is_lora = ".lora_" in name
        # A layer that one of them lacks counts as zero.
        if shape == other or (is_lora and not (shape and other)):
            continue
        rank_axis = int(name.endswith((".lora_B.weight", ".lora_embedding_B")))
        is_rank = is_lora and shape[1 - rank_axis] == other[1 - rank_axis]
        if is_rank and combination_type == "cat":
            continue
        advice = "take adapters of one base that were trained with the same modules_to_save and labels"
        if is_rank:
            advice = "combination_type: linear needs equal ranks, so take cat"
        sizes = [f"{list(size)} in" if size else "not in" for size in (shape, other)]
        yield f"adapters.average: {name} is {sizes[0]} {first.name} and {sizes[1]} {second.name}; {advice}"
        return


def _changes_base(config: Mapping[str, Any]) -> str:
    """Return the setting by which loading an adapter changes the base's own weights; empty: there is none."""
    for key, values in (("bias", ("all", "lora_only")), ("init_lora_weights", _CHANGES_BASE)):
        if str(config.get(key)).lower().startswith(values):
            return f"{key}: {config[key]}"
    return next((key for key in ("layer_replication", "kasa_config") if config.get(key) is not None), "")
