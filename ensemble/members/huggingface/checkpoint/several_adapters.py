"""Say why adapters cannot take turns on one base, or have no mean, before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ensemble.members.huggingface.checkpoint.adapter_files import Adapter

# Starts of init_lora_weights: peft then subtracts the adapter's first values from the base, or makes the base anew
# (tuners/lora/layer.py).
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
# Settings of adapters that are more than a product of two matrices added to a layer.
_NOT_PLAIN = ("use_dora", "use_qalora", "use_bdlora", "target_parameters", "arrow_config")
# Settings of adapters that cannot give way to others.
_OF_ONE_ADAPTER = ("alora_invocation_tokens", "megatron_config")
# How the names of a plain LoRA's tensors end.
_MATRICES = (".lora_A.weight", ".lora_B.weight", ".lora_embedding_A", ".lora_embedding_B")


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
    if "embed_tokens" in (lora_config.get("target_modules") or ()):  # peft saves these whole
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
    return "layer_replication" if config.get("layer_replication") else ""
