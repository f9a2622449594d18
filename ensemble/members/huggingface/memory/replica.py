"""PURE: the memory one replica of a member takes on a device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ensemble.members.footprint import Activation, Capability, Footprint, MemoryEstimate
from ensemble.members.huggingface.checkpoint.architecture import Architecture
from ensemble.members.huggingface.checkpoint.weight_files import Tensor
from ensemble.members.huggingface.memory.forward import activation, cuda_context_bytes
from ensemble.members.huggingface.memory.loaded_size import Dtype, weights
from ensemble.members.huggingface.settings import HuggingFaceSettings
from ensemble.members.huggingface.spec import cap_problem, choose_attention, choose_dtype

# What a Python with torch, transformers and CUDA-less libraries holds on a CPU before any weights.
PROCESS_BYTES = 450 << 20
# What is proposed where the weights are too large for every GPU.
_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@dataclass(frozen=True)
class CheckpointFacts:
    """What is known of a member's checkpoint and rows.

    ``lengths`` has the bytes of text per row, int64 [rows].  ``tensors`` and ``architecture`` are None where
    they cannot be known yet (on the hub, pickled); ``adapter_bytes`` is the size of its adapter's file.
    ``max_length`` is how many tokens a row may have; ``pools_last_token`` is False where logits are computed at
    every position; ``has_flash_attention``: flash-attention 2 was seen to work on these devices.
    """

    lengths: npt.NDArray[np.int64]
    tensors: tuple[Tensor, ...] | None
    architecture: Architecture | None
    adapter_bytes: int
    num_labels: int
    max_length: int
    supports_sdpa: bool
    pools_last_token: bool
    has_flash_attention: bool


@dataclass(frozen=True)
class CheckpointMemory(MemoryEstimate):
    """What is known of a member's memory by the files of its checkpoint."""

    settings: HuggingFaceSettings
    facts: CheckpointFacts

    @property
    def max_length(self) -> int:  # type: ignore[override]
        return self.facts.max_length

    def footprint(self, gpus: int, capability: Capability | None) -> Footprint | None:
        return footprint(self.settings, self.facts, gpus, capability)

    def dtype(self, gpus: int, capability: Capability | None) -> str:
        return choose_dtype(self.settings.dtype, stored_dtype(self.facts), gpus, capability)

    def attention(self, dtype: str, gpus: int, capability: Capability | None) -> str | None:
        return chosen_attention(self.settings, self.facts, dtype, gpus, capability)

    def problem(self) -> str:
        asked, architecture = self.settings.attn_implementation, self.facts.architecture
        is_capped = architecture is not None and architecture.soft_capping
        return cap_problem(asked, self.settings.name) if is_capped else ""

    def smaller(self, capability: Capability | None) -> Iterator[tuple[str, Footprint]]:
        plain = self.footprint(1, capability)
        if plain is None or plain.quantization or self.settings.merge_adapter:
            return
        four = footprint(self.settings, self.facts, 1, capability, quantization=_FOUR_BITS)
        if four is not None:
            keys = ", ".join(f"{key}: {str(value).lower()}" for key, value in _FOUR_BITS.items())
            yield f"quantization_config: {{{keys}}}", four

    def with_flash_attention(self) -> MemoryEstimate | None:
        if self.settings.attn_implementation is not None:
            return None
        return replace(self, facts=replace(self.facts, has_flash_attention=True))


def footprint(
    model: HuggingFaceSettings,
    facts: CheckpointFacts,
    gpus: int,
    capability: Capability | None,
    quantization: Mapping[str, Any] | None = None,
) -> Footprint | None:
    """What a replica takes on ``gpus`` devices of this capability; None where too little is known.

    Args:
        quantization: instead of the member's own, to see what it would change.
    """
    if facts.tensors is None or facts.architecture is None:
        return None
    architecture, tensors = facts.architecture, facts.tensors
    dtype = cast(Dtype, choose_dtype(model.dtype, stored_dtype(facts) or "float32", gpus, capability))
    settings = quantization or model.quantization_config
    if settings is not None and settings.get("load_in_4bit"):
        settings = {"bnb_4bit_compute_dtype": dtype, **settings}  # as the worker sets it
    attention = chosen_attention(model, facts, dtype, gpus, capability)
    assert attention is not None  # as the architecture is known
    # Rows of one length need no mask; what transformers then takes for shared keys can need more.
    form = (architecture, dtype, attention, facts.num_labels, settings, gpus > 0)
    padded, even = (
        activation(*form, is_padded, facts.pools_last_token, capability) for is_padded in (True, False)
    )
    has_adapter = facts.adapter_bytes > 0
    base = weights(tensors, architecture, dtype, settings, facts.num_labels, is_adapter_base=has_adapter)
    base = replace(base, bytes=base.bytes + facts.adapter_bytes)
    stored_bytes = sum(tensor.stored_bytes for tensor in tensors)
    # What of the file is not itself the loaded weights, which stay mapped where the type is the stored one.
    is_mapped = abs(stored_bytes - base.bytes) < 0.02 * stored_bytes
    return Footprint(
        weights=base,
        activation=Activation((*padded.stages, *even.stages), max(padded.fixed_bytes, even.fixed_bytes)),
        context_bytes=cuda_context_bytes(capability) if gpus else PROCESS_BYTES,
        mapped_bytes=0 if is_mapped else stored_bytes,
        dtype=dtype,
        quantization=quantization_name(settings, architecture),
        attention=attention,
        # A token is a byte at the least; templates and special tokens add some.
        width=min(facts.max_length, int(facts.lengths.max(initial=1)) + 64),
    )


def stored_dtype(facts: CheckpointFacts) -> str | None:
    """The type that the checkpoint says it has, or else its first floating tensor's, as transformers has it."""
    if facts.architecture is not None and facts.architecture.dtype is not None:
        return facts.architecture.dtype
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return next((names[tensor.dtype] for tensor in facts.tensors or () if tensor.dtype in names), None)


def chosen_attention(
    model: HuggingFaceSettings, facts: CheckpointFacts, dtype: str, gpus: int, capability: Capability | None
) -> str | None:
    """The attention that a member's workers are told to take; None where only they can see the architecture.

    The kernels of flash-attention 2 are for half precision from compute capability 8.0 on.
    """
    if model.attn_implementation is not None:
        return model.attn_implementation
    if facts.architecture is None:
        return None
    is_half = dtype in ("float16", "bfloat16")
    is_able = gpus > 0 and capability is not None and capability >= (8, 0)
    flash_suits = facts.has_flash_attention and is_half and is_able
    return choose_attention(facts.architecture.soft_capping, facts.supports_sdpa, flash_suits)


def quantization_name(settings: Mapping[str, Any] | None, architecture: Architecture) -> str:
    """What people call a quantization: nf4, fp4, int8, gptq, ...; empty without one."""
    if settings is None:
        return architecture.quant_method or ""
    if settings.get("load_in_4bit"):
        return str(settings.get("bnb_4bit_quant_type", "fp4"))
    return "int8" if settings.get("load_in_8bit") else str(settings.get("quant_method", ""))
