"""PURE: the memory one replica of a member takes on a device, and whether that fits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ensemble.common.gpus import Device
from ensemble.config import ModelConfig
from ensemble.members.huggingface.attention import choose_attention
from ensemble.members.huggingface.checkpoint.architecture import Architecture
from ensemble.members.huggingface.checkpoint.safetensors_headers import Tensor
from ensemble.members.huggingface.memory.forward import (
    Activation,
    Dtype,
    Weights,
    activation,
    cuda_context_bytes,
    fits_tokens,
    weights,
)
from ensemble.members.huggingface.spec import CPU_TOKEN_BUDGET, GPU_TOKEN_BUDGET, RESERVE_SHARE

# What a Python with torch, transformers and CUDA-less libraries holds on a CPU before any weights.
PROCESS_BYTES = 450 << 20
Capability = tuple[int, int]


@dataclass(frozen=True)
class MemberFacts:
    """What the plan must know of a member.

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
class Footprint:
    """A replica's memory; all of it is an estimate from the checkpoint's files.

    ``width`` is the longest row to come, in tokens; ``context_bytes`` is what CUDA itself takes on each device,
    or the process on a CPU.  ``mapped_bytes`` of a file count as a process's memory while weights of another type
    are made of them; the system takes them back where memory is short.
    """

    weights: Weights
    activation: Activation
    context_bytes: int
    mapped_bytes: int
    dtype: Dtype
    quantization: str
    attention: str
    width: int

    def resident_bytes(self, gpus: int) -> int:
        """Per device, before the first batch, on ``gpus`` devices (0: the CPU)."""
        share = self.weights.bytes if gpus < 2 else math.ceil(self.weights.bytes / gpus)
        # Layers are not cut: one device can have most of a layer more than its share.
        uneven = self.weights.largest_layer_bytes if gpus > 1 else 0
        return min(self.weights.bytes, share + uneven) + self.context_bytes

    def peak_bytes(self, gpus: int, padded_tokens: int, width: int | None = None) -> int:
        """Per device, with a batch of ``padded_tokens`` of rows as wide as the longest, or as ``width``."""
        batch = self.activation.bytes(padded_tokens, width or self.width)
        return self.resident_bytes(gpus) + max(batch, 0 if gpus else self.mapped_bytes)

    def token_budget(self, gpus: int, room_bytes: int) -> int:
        """Padded tokens of the longest rows that a batch may hold; 0 where not even one such row fits."""
        tokens = fits_tokens(self.activation, room_bytes - self.resident_bytes(gpus), self.width)
        most = GPU_TOKEN_BUDGET if gpus else CPU_TOKEN_BUDGET
        return max(self.width, min(most, tokens)) if tokens >= self.width else 0


@dataclass(frozen=True)
class Fit:
    """A footprint on a device of ``total_bytes`` of which ``room_bytes`` are free to plan with.

    ``verdict``: ``fits``; ``tight``, where the weights fit but perhaps not the longest row beside them; ``short``,
    where that is so only because others use the device; ``held``, where others leave no room for the weights;
    ``never``.
    """

    verdict: str
    token_budget: int
    peak_bytes: int
    room_bytes: int


def footprint(
    model: ModelConfig,
    facts: MemberFacts,
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
    architecture = facts.architecture
    dtype = chosen_dtype(model.dtype, stored_dtype(facts), gpus, capability)
    settings = quantization or model.quantization_config
    if settings is not None and settings.get("load_in_4bit"):
        settings = {"bnb_4bit_compute_dtype": dtype, **settings}  # as the worker sets it
    attention = chosen_attention(model, facts, dtype, gpus, capability)
    assert attention is not None  # as the architecture is known
    # Rows of one length need no mask; what transformers then takes for shared keys can need more.
    padded, even = (
        activation(
            architecture,
            dtype,
            attention,
            facts.num_labels,
            settings,
            on_gpu=gpus > 0,
            padded=is_padded,
            pools_last_token=facts.pools_last_token,
            capability=capability,
        )
        for is_padded in (True, False)
    )
    longest = int(facts.lengths.max(initial=1))
    base = weights(
        facts.tensors,
        architecture,
        dtype,
        settings,
        facts.num_labels,
        is_adapter_base=bool(facts.adapter_bytes),
    )
    if facts.adapter_bytes:
        grown = base.bytes + facts.adapter_bytes
        base = Weights(base.parameters, grown, base.largest_layer_bytes)
    return Footprint(
        weights=base,
        activation=Activation((*padded.stages, *even.stages), max(padded.fixed_bytes, even.fixed_bytes)),
        context_bytes=cuda_context_bytes(capability) if gpus else PROCESS_BYTES,
        mapped_bytes=_mapped_bytes(facts.tensors, base.bytes),
        dtype=dtype,
        quantization=quantization_name(settings, architecture),
        attention=attention,
        # A token is a byte at the least; templates and special tokens add some.
        width=min(facts.max_length, longest + 64),
    )


def _mapped_bytes(tensors: Sequence[Tensor], loaded_bytes: int) -> int:
    """What of the file is not itself the loaded weights, which stay mapped where the type is the stored one."""
    stored = sum(tensor.stored_bytes for tensor in tensors)
    return 0 if abs(stored - loaded_bytes) < 0.02 * stored else stored


def stored_dtype(facts: MemberFacts) -> str | None:
    """The type that the checkpoint says it has, or else its first floating tensor's, as transformers has it."""
    if facts.architecture is not None and facts.architecture.dtype is not None:
        return facts.architecture.dtype
    names = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    return next((names[tensor.dtype] for tensor in facts.tensors or () if tensor.dtype in names), None)


def chosen_dtype(
    asked: Dtype | Literal["auto"], stored: str | None, gpus: int, capability: Capability | None
) -> Dtype:
    """The type of the weights: what was asked for, or what suits the device.

    bfloat16 is only emulated below compute capability 8.0, whatever torch's is_bf16_supported says; a CPU is
    several times slower in half precision.
    """
    if asked != "auto":
        return asked
    if not gpus:
        return "float32"
    if capability is not None and capability < (8, 0):
        return "float16"
    return "bfloat16" if stored == "bfloat16" else "float16" if stored == "float16" else "float32"


def chosen_attention(
    model: ModelConfig, facts: MemberFacts, dtype: str, gpus: int, capability: Capability | None
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


def fit(
    needed: Footprint,
    device: Device,
    gpus: int,
    workers_per_gpu: int,
    asked_tokens: int | None,
    held_bytes: int = 0,
) -> Fit:
    """How ``needed`` fits on ``device``.

    Args:
        workers_per_gpu: how many workers share the device.
        asked_tokens: the user's own budget for a batch, padded tokens of the longest rows.
        held_bytes: what others use of it.
    """
    total = device.total_bytes // workers_per_gpu
    free = max(0, device.total_bytes - held_bytes) // workers_per_gpu
    room = max(0, int(free - RESERVE_SHARE * total))
    budget = needed.token_budget(gpus, room)
    verdict = _verdict(needed, gpus, total, free, asked_tokens)
    if verdict == "tight" and _verdict(needed, gpus, total, total, asked_tokens) == "fits":
        verdict = "short"
    tokens = asked_tokens or budget
    return Fit(verdict, tokens, needed.peak_bytes(gpus, max(tokens, needed.width)), room)


def _verdict(needed: Footprint, gpus: int, total: int, free: int, asked_tokens: int | None) -> str:
    resident = needed.resident_bytes(gpus)
    if resident > free:
        return "never" if resident > total else "held"
    if asked_tokens is not None:
        return "tight" if needed.peak_bytes(gpus, asked_tokens) > free else "fits"
    return "fits" if needed.token_budget(gpus, int(free - RESERVE_SHARE * total)) else "tight"
