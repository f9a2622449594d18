"""PURE: the tensors of a checkpoint -> what they are once loaded, at a type or quantized."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ensemble.members.footprint import Weights
from ensemble.members.huggingface.checkpoint.architecture import Architecture
from ensemble.members.huggingface.checkpoint.quantization_keys import quantized_bits
from ensemble.members.huggingface.checkpoint.weight_files import (
    Tensor,
    is_left_out,
    stands_beside_packed,
)

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

_HEAD = re.compile(r"(^|\.)(score|classifier|classification_head)\.")
_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe|shared|relative_attention_bias)\.")
# Heads, which stay as they are: the worker names these to bitsandbytes.
UNQUANTIZED = ("score", "classifier", "classification_head")
# bitsandbytes scales blocks of so many weights, and so many of those scales where it quantizes them as well.
_BLOCK, _NESTED_BLOCK = 64, 256
# The 16 values that 4 bits stand for, float32, with every layer.
_TABLE_BYTES = 64
_BLOCK_OF_LAYER = re.compile(r".*?\.\d+\.")


def weights(
    tensors: Sequence[Tensor],
    architecture: Architecture,
    dtype: Dtype,
    quantization: Mapping[str, Any] | None,
    num_labels: int,
    is_adapter_base: bool = False,
) -> Weights:
    """What is in memory after ``AutoModelForSequenceClassification.from_pretrained``.

    Args:
        tensors: of the checkpoint.
        dtype: what floating-point tensors are loaded as.
        quantization: asked for when loading; a checkpoint that is stored quantized stays as it is.
        num_labels: of the head that is made where the checkpoint has none.
        is_adapter_base: whether an adapter brings a head of its own, kept beside the base model's.
    """
    size = DTYPE_BYTES[dtype]
    bits = 0 if architecture.quant_method else quantized_bits(quantization)
    packed = {tensor.name.removesuffix(".absmax") for tensor in tensors if tensor.name.endswith(".absmax")}
    parameters = total = 0
    blocks: dict[str, int] = {}
    # Encoder and decoder of one kind share their embeddings, which some checkpoints hold three times.
    is_shared = any(tensor.name.endswith("shared.weight") for tensor in tensors)
    kept = [
        tensor
        for tensor in tensors
        if not is_left_out(tensor.name)
        and not (is_shared and tensor.name.endswith("coder.embed_tokens.weight"))
    ]
    if is_adapter_base or not any(_HEAD.search(tensor.name) for tensor in kept):
        kept.append(Tensor("score.weight", "F32", (num_labels, architecture.hidden)))
    for tensor in kept:
        stored = not tensor.is_float or bool(architecture.quant_method and stands_beside_packed(tensor.name))
        loaded = tensor.stored_bytes if stored else tensor.elements * size
        if not stored and bits and _is_linear(tensor, architecture, quantization):
            loaded = _quantized_bytes(tensor, bits, quantization)
        match = _BLOCK_OF_LAYER.match(tensor.name)
        block = match[0] if match else tensor.name
        blocks[block] = blocks.get(block, 0) + loaded
        total += loaded
        parameters += _parameters(tensor, architecture, packed)
    return Weights(parameters, total, max(blocks.values()))


def _is_linear(tensor: Tensor, architecture: Architecture, quantization: Mapping[str, Any] | None) -> bool:
    """Whether bitsandbytes takes a tensor: the weight of a linear layer that is neither embedding nor head."""
    if len(tensor.shape) != 2 or not tensor.name.endswith(".weight") or _EMBEDDING.search(tensor.name):
        return False
    module = tensor.name.removesuffix(".weight")
    skipped = (quantization or {}).get("llm_int8_skip_modules") or ()
    # As transformers' should_convert_module: from the start up to a dot, or at the end.
    return not any(
        module.endswith(name) or f".{module}.".startswith(f".{name}.") for name in (*UNQUANTIZED, *skipped)
    )


def _quantized_bytes(tensor: Tensor, bits: int, quantization: Mapping[str, Any] | None) -> int:
    settings, elements = quantization or {}, tensor.elements
    if settings.get("load_in_8bit"):
        return elements + 4 * tensor.shape[0]  # int8, and a float32 scale for each row
    blocks = math.ceil(elements / _BLOCK)
    loaded = math.ceil(elements * bits / 8) + _TABLE_BYTES
    if not settings.get("bnb_4bit_use_double_quant"):
        return loaded + 4 * blocks
    # The scales in 8 bits with scales of their own; their table of 256 values and an offset, float32.
    return loaded + blocks + 4 * (math.ceil(blocks / _NESTED_BLOCK) + 256 + 1)


def _parameters(tensor: Tensor, architecture: Architecture, packed: set[str]) -> int:
    if not architecture.quant_method or tensor.name == "score.weight":
        return tensor.elements
    if stands_beside_packed(tensor.name):
        return 0
    if tensor.dtype == "U8" and tensor.name in packed:
        return 2 * tensor.elements  # bitsandbytes packs two into a byte
    if tensor.dtype == "I32" and tensor.name.endswith(("qweight", "weight_packed")):
        return tensor.elements * 32 // (architecture.quant_bits or 4)
    return tensor.elements
