"""Calculate the bytes of loaded weights and of a forward pass.

The inputs are the tensors of a checkpoint and the numbers of its ``config.json``; nothing is loaded.  The formulas
come from reading transformers' modelling code (5.x) and are tested against a tracker of live tensors
(tests/members/huggingface/memory/test_memory.py).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from ensemble.members.footprint import Activation, Capability, Stage, Weights
from ensemble.members.huggingface.checkpoint.architecture import Architecture
from ensemble.members.huggingface.checkpoint.quantization_methods import (
    compute_dtype_of,
    quantized_bits,
)
from ensemble.members.huggingface.checkpoint.weight_files import Tensor, is_left_out, stands_beside_packed
from ensemble.members.huggingface.spec import CAPPED_BLOCKS, QUERIES_PER_BLOCK

Dtype = Literal["float32", "float16", "bfloat16"]
DTYPE_BYTES: dict[str, int] = {"float32": 4, "float16": 2, "bfloat16": 2}

_HEAD = re.compile(r"(^|\.)(score|classifier|classification_head)\.")
_VOCABULARY_HEAD = re.compile(r"(^|\.)(lm_head|embed_out)\.")
_EMBEDDING = re.compile(r"embed|(^|\.)(wte|wpe|shared|relative_attention_bias)\.")
# Embeddings themselves; other layers within an embedding module, such as a projection, are multiplied.
_LOOKED_UP = re.compile(
    r"(^|[._])(embed(dings?)?(_in|_tokens(_per_layer)?|_positions)?|wte|wpe|shared)\.weight$"
)
# Heads, which are not quantized: the worker passes these names to bitsandbytes.
UNQUANTIZED = ("score", "classifier", "classification_head", "lm_head")
# bitsandbytes has a scale for each block of weights, and with nested quantization another for each block of scales.
_BLOCK, _NESTED_BLOCK = 64, 256
# The 16 values that 4 bits stand for, float32, with every layer.
_TABLE_BYTES = 64
_BLOCK_OF_LAYER = re.compile(r".*?\.\d+\.")
# Tensors as wide as the hidden states that live while a layer's feed-forward part runs: the embeddings, which the
# backbone's forward keeps; the layer's input; the attention's output; the sum of these; and its normalized copy.  A
# layer that frees some of them earlier, as Llama's and BERT's do, takes up to a fifth less.
_HIDDEN_COPIES = 5
# Per token: token ids and attention mask, int64, and tensors made from them.
_INPUT_BYTES = 24
# Above this width torch's attention on CUDA sums values in float32 (kernel_forward.h).
_REGISTER_WIDTH = 128


def weights(
    tensors: Sequence[Tensor],
    architecture: Architecture,
    dtype: Dtype,
    quantization: Mapping[str, Any] | None,
    num_labels: int,
    is_adapter_base: bool = False,
    is_language_model: bool = False,
    head: Sequence[Tensor] | None = None,
) -> Weights:
    """Calculate the size of a loaded classifier, language model, or backbone with a head.

    Args:
        quantization: applied when loading; a checkpoint that is stored quantized stays as it is.
        num_labels: of the head that is made where the checkpoint has none.
        is_adapter_base: whether an adapter brings a head, which is kept in addition to the base model's.
        head: a separate head in float32, instead of the checkpoint's; None: there is none.
    """
    is_packed, settings = bool(architecture.quant_method), quantization or {}
    bits = 0 if is_packed else quantized_bits(quantization)
    packed = {tensor.name.removesuffix(".absmax") for tensor in tensors if tensor.name.endswith(".absmax")}
    # Encoder and decoder of T5 share their embeddings, which some checkpoints hold three times.
    is_shared = any(tensor.name.endswith("shared.weight") for tensor in tensors)
    kept = [
        tensor
        for tensor in tensors
        if (not is_left_out(tensor.name) or (is_language_model and _VOCABULARY_HEAD.search(tensor.name)))
        and not (is_shared and tensor.name.endswith("coder.embed_tokens.weight"))
    ]
    if head is not None:
        kept = [tensor for tensor in kept if not _HEAD.search(tensor.name)]
    elif not is_language_model and (is_adapter_base or not any(_HEAD.search(tensor.name) for tensor in kept)):
        kept.append(Tensor("score.weight", "F32", (num_labels, architecture.hidden)))
    parameters, embedding_parameters = 0, 0
    blocks: Counter[str] = Counter()
    for tensor in kept:
        name, count = tensor.name, tensor.elements
        is_beside = is_packed and stands_beside_packed(name)
        if not tensor.is_float or is_beside:
            loaded_bytes = tensor.stored_bytes
        elif bits and _is_linear(tensor, settings):
            loaded_bytes = _quantized_bytes(tensor, bits, settings)
        else:
            loaded_bytes = count * DTYPE_BYTES[dtype]
        match = _BLOCK_OF_LAYER.match(name)
        blocks[match[0] if match else name] += loaded_bytes
        if is_beside:
            continue
        if is_packed and tensor.dtype == "U8" and name in packed:
            count *= 2  # bitsandbytes packs two into a byte
        elif is_packed and tensor.dtype == "I32" and name.endswith(("qweight", "weight_packed")):
            count = count * 32 // (architecture.quant_bits or 4)
        parameters += count
        # A patch embedding, with four dimensions, is multiplied.
        if len(tensor.shape) == 2 and _LOOKED_UP.search(name):
            embedding_parameters += count
    head_parameters = sum(tensor.elements for tensor in head or ())
    return Weights(
        parameters=parameters + head_parameters,
        bytes=blocks.total() + 4 * head_parameters,
        largest_layer_bytes=max(blocks.values()),
        embedding_parameters=embedding_parameters,
    )


def _is_linear(tensor: Tensor, settings: Mapping[str, Any]) -> bool:
    """Return whether a tensor is quantized: a linear layer's weight, except embeddings and heads."""
    if len(tensor.shape) != 2 or not tensor.name.endswith(".weight") or _EMBEDDING.search(tensor.name):
        return False
    module = tensor.name.removesuffix(".weight")
    skipped = settings.get("llm_int8_skip_modules") or ()
    # As transformers' should_convert_module: from the start up to a dot, or at the end.
    return not any(
        module.endswith(name) or f".{module}.".startswith(f".{name}.") for name in (*UNQUANTIZED, *skipped)
    )


def _quantized_bytes(tensor: Tensor, bits: int, settings: Mapping[str, Any]) -> int:
    if settings.get("load_in_8bit"):
        return tensor.elements + 4 * tensor.shape[0]  # with a float32 scale for each row
    blocks = math.ceil(tensor.elements / _BLOCK)
    weight_bytes = math.ceil(tensor.elements * bits / 8) + _TABLE_BYTES
    if not settings.get("bnb_4bit_use_double_quant"):
        return weight_bytes + 4 * blocks
    # Scales of 8 bits with scales of their own; their table of 256 values and an offset, float32.
    return weight_bytes + blocks + 4 * (math.ceil(blocks / _NESTED_BLOCK) + 256 + 1)


def cuda_context_bytes(capability: Capability | None) -> int:
    """Return what a process takes on a GPU before its first tensor: context, kernels, the workspace of cuBLAS."""
    # With lazily loaded kernels a context takes about 300 MB (pytorch issue 107667), on large devices up to 600 MB.
    # cuBLAS gets 32 MiB on compute capability 9.0 and 8.1 MiB elsewhere.
    major = capability[0] if capability else 8
    if major < 8:
        return (300 + 9) << 20
    return (450 + 9 if major < 9 else 600 + 32) << 20


def activation(
    architecture: Architecture,
    dtype: Dtype,
    attention: str,
    num_labels: int,
    quantization: Mapping[str, Any] | None,
    on_gpu: bool,
    pools_last_token: bool = True,
    vocabulary_positions: int = 0,
    shared_tokens: int = 0,
    keeps_prompts: bool = False,
    width: int = QUERIES_PER_BLOCK,
    lora: tuple[int, int] = (0, 0),
) -> Activation:
    """Calculate the memory of a forward pass in inference mode, without the weights.

    Rows of a batch count as differing in length, so that sdpa gets a mask; rows of one length take less.

    Args:
        dtype: of the weights that are not quantized, and so of activations.
        num_labels: columns of the head; for a head over the vocabulary its size.
        quantization: bitsandbytes' settings for loading.
        pools_last_token: whether the head sees only one position of each row.
        vocabulary_positions: the positions of a row that go through a head over the vocabulary; 0: another head.
        shared_tokens: the first tokens of all rows, whose keys and values are kept from batch to batch.
        keeps_prompts: whether all layers keep the keys and values of a batch while its labels are computed.
        lora: outputs and rank of the widest layer with unmerged LoRA; zeros: none.
        width: tokens of the longest row; only capped_blocks, of shorter rows than a block, needs less.
    """
    a, size = architecture, DTYPE_BYTES[dtype]
    # Bytes per token pair of the masks that live throughout: floats for eager attention, else booleans.
    mask = 0.0 if attention == "flash_attention_2" else float(a.masks)
    if a.relative_terms:
        # An int64 product of the mask with itself, and three tables of positions that a batch's rows share.
        mask = 16.0
    elif attention == "eager":
        mask *= size
    bits, computed = quantized_bits(quantization), _compute_bytes(size, quantization)
    mlp = size * (_hidden_copies(a) * a.hidden + a.mlp_width)
    if bits == 8:
        # The product of int8 is int32, then half precision; the input is quantized first.
        mlp += (4 + 2 - size) * a.mlp_width // 3 + a.hidden
    elif bits == 4 and computed != size:
        # Input and output once more in the type that bitsandbytes computes in.
        mlp += computed * (a.hidden + a.mlp_width // 3)
    # The layer's forward keeps a reference to the attention weights of eager attention.
    scores = a.heads * size if attention == "eager" and not a.relative_terms else 0
    stages = _attention_stages(a, size, attention, mask, on_gpu, width)
    stages.append(Stage(mlp + _INPUT_BYTES, mask + scores))
    lora_outputs, rank = lora
    if lora_outputs:
        # peft holds the base's result, LoRA's, and LoRA's scaled or the sum (forward in peft/tuners/lora); beside
        # these lives the other half of a gated feed-forward part.
        other_half = min(lora_outputs, max(0, a.mlp_width - 2 * lora_outputs))
        numbers = _hidden_copies(a) * a.hidden + 3 * lora_outputs + other_half + rank
        stages.append(Stage(size * numbers + _INPUT_BYTES, mask + scores))
    if a.experts > 1:
        # transformers up to 5.12 weights the experts' outputs in float32, in the order of experts and of tokens.
        outputs = size * a.mlp_width + a.experts * (2 * size + 8) * a.hidden
        stages.append(Stage(outputs + (5 * size + 4) * a.hidden + _INPUT_BYTES, mask))
    # Hidden states before and after the last norm, then logits, and those in float32.
    states = 2 * a.hidden * size + _INPUT_BYTES
    if not pools_last_token:
        stages.append(Stage(states + num_labels * (size + 4), mask))
    if vocabulary_positions:
        # In addition, the logits' exponentials.
        row = vocabulary_positions * a.vocabulary * (size + 4 + (4 if size == 2 else 0))
        stages.append(Stage(states, mask, row))
    kept_by_token = 2 * a.layers * a.kv_heads * a.head_dim * size
    if keeps_prompts:
        stages = [replace(stage, bytes_per_token=stage.bytes_per_token + kept_by_token) for stage in stages]
    fixed = shared_tokens * kept_by_token
    if bits == 4 or (a.quant_method == "bitsandbytes" and a.quant_bits == 4):
        # The largest linear layer's weight, which bitsandbytes unpacks from 4 bits for every product.
        fixed += a.largest_weight * _compute_bytes(size, quantization or a.quantization)
    if a.relative_terms:
        # The table of relative positions: normalized, and projected to keys and queries, in two layouts each.
        fixed += 5 * 2 * a.position_buckets * a.hidden * size
    return Activation(tuple(stages), fixed)


def _hidden_copies(a: Architecture) -> int:
    return a.layers + 2 if a.keeps_states else _HIDDEN_COPIES


def _attention_stages(
    a: Architecture, size: int, attention: str, mask: float, on_gpu: bool, width: int
) -> list[Stage]:
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    live: float = size * (_hidden_copies(a) - 1) * a.hidden + _INPUT_BYTES
    if a.relative_terms:
        # DeBERTa's scores between contents, from contents to positions, from positions to contents. Each of the
        # latter two is gathered from a product with the table of positions, [heads, width, 2 * buckets]. The
        # table's two projections are repeated for every row of the batch, except in the first version.
        live += size * 3 * queries
        scores = a.heads * size
        table = 2 * 2 * a.position_buckets * a.hidden * size if a.repeats_table else 0
        product = 2 * a.position_buckets * scores
        return [
            Stage(live + product, mask + 2 * a.relative_terms * scores, table),
            Stage(live, mask + (1 + 2 * a.relative_terms) * scores, table),
        ]
    if a.is_old:
        live += 2 * 2 * 4 * queries  # some turn queries and keys in float32
    # Rotary embedding: queries, keys, values, and three more tensors like the queries.
    rotary = Stage(live + size * (4 * queries + 2 * keys), mask)
    inputs = live + size * (queries + 2 * keys)
    repeated = 2 * size * queries if a.kv_heads < a.heads else 0
    if attention == "eager":
        return [rotary, Stage(inputs + repeated, mask + a.heads * _score_bytes(a, size, on_gpu))]
    if attention == CAPPED_BLOCKS:
        # Scores of a block of queries with all keys of their rows; the result, and a copy of the values.
        of_block = a.heads * min(width, QUERIES_PER_BLOCK) * _score_bytes(a, size, on_gpu)
        return [rotary, Stage(inputs + size * (queries + keys) + of_block, mask)]
    if attention == "flash_attention_2":
        # Copies without padding of queries, keys, values and the result; and the result with padding.
        return [rotary, Stage(inputs + size * (3 * queries + 2 * keys), mask)]
    result = size * queries
    if a.head_dim > _REGISTER_WIDTH and size == 2 and on_gpu:
        result += 4 * queries
    # sdpa casts the boolean mask for every layer, and copies it where its width is no multiple of 16.
    cast = Stage(inputs + repeated, mask + 2 * size)
    return [rotary, cast, Stage(inputs + repeated + result, mask + size)]


def _score_bytes(a: Architecture, size: int, on_gpu: bool) -> float:
    """Return the bytes per head and token pair during eager attention's softmax, computed in float32."""
    if a.is_old:
        return max(4.0 * size, 12.0)  # older code adds a bias in float32 to copies
    if size == 4:
        return 8.0
    # Scores, their softmax in float32, its cast; a CPU casts the scores first.
    return size + 4.0 + (size if on_gpu else 4.0)


def _compute_bytes(size: int, quantization: Mapping[str, Any] | None) -> int:
    return {"float16": 2, "bfloat16": 2, "float32": 4}.get(compute_dtype_of(quantization), size)
