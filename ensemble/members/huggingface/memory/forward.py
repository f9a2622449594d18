"""PURE: how many bytes a forward pass takes beside the weights.

Arithmetic over the numbers of a ``config.json``; nothing is loaded.  The forms come from reading transformers'
modelling code (5.x) and are held to what a tracker of live tensors sees (tests/planning/test_memory.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ensemble.members.footprint import Activation, Stage
from ensemble.members.huggingface.checkpoint.architecture import Architecture
from ensemble.members.huggingface.checkpoint.quantization_keys import quantized_bits
from ensemble.members.huggingface.memory.loaded_size import DTYPE_BYTES, Dtype

# Post-norm encoders: BERT and what was made from its code.
_LIKE_BERT = frozenset("bert camembert data2vec-text distilbert electra ernie roberta xlm-roberta".split())
# Pre-norm decoders whose layers drop what attention gave once it is added.
_LIKE_LLAMA = frozenset(
    "falcon gemma gemma2 gemma3_text llama ministral mistral olmo olmo2 opt phi3 qwen2 qwen3 smollm3".split()
)
# Pre-norm layers that hold on to it until they end.
_LIKE_GPT2 = frozenset(("gpt2", "modernbert"))
# Eager attention that takes its softmax in float32, whatever the weights; the other known ones keep their type.
_FLOAT32_SOFTMAX = (_LIKE_LLAMA - {"falcon"}) | {"modernbert"}
# Token ids and attention mask, int64, and what is made of them.
_INPUT_BYTES = 24
# torch's attention of CUDA sums values of more than this width up in float32 (its kernel_forward.h).
_REGISTER_WIDTH = 128


def cuda_context_bytes(capability: tuple[int, int] | None) -> int:
    """What a process takes on a GPU before its first tensor: context, kernels, the workspace of cuBLAS.

    With lazily loaded kernels, which CUDA has from 11.7 on, a context takes about 300 MB (a torch developer in
    pytorch issue 107667; more than 1 GB before), and more the more multiprocessors a device has; users report
    up to 600 MB.  torch gives cuBLAS 32 MiB on compute capability 9.0 and 8.1 MiB elsewhere (CublasHandlePool.cpp).
    """
    major = capability[0] if capability else 8
    context = 300 if major < 8 else 450 if major < 9 else 600
    return (context + (32 if major >= 9 else 9)) << 20


def activation(
    architecture: Architecture,
    dtype: Dtype,
    attention: str,
    num_labels: int,
    quantization: Mapping[str, Any] | None,
    on_gpu: bool,
    padded: bool = True,
    pools_last_token: bool = True,
    capability: tuple[int, int] | None = None,
) -> Activation:
    """What one forward pass in inference mode takes beside the weights.

    Args:
        dtype: of the weights that are not quantized, and so of what is computed.
        attention: as transformers names it: eager, sdpa, flash_attention_2, flex_attention.
        num_labels: columns of the head; for a head over the vocabulary its size.
        quantization: what bitsandbytes is asked for when loading, None without.
        padded: whether rows of a batch differ in length, so that sdpa is given a mask.
        pools_last_token: whether the head sees only one position of each row.
        capability: of the GPU; None counts as 8.0 or above.
    """
    a, size = architecture, DTYPE_BYTES[dtype]
    mask = _mask(a, size, attention, padded)
    bits, computed = quantized_bits(quantization), _compute_bytes(size, quantization)
    mlp = size * (_hidden_copies(a) * a.hidden + a.inner_copies * a.intermediate)
    if bits == 8:
        # The product of int8 is int32, then half precision; the input is quantized first.
        mlp += (4 + 2 - size) * a.intermediate + a.hidden
    elif bits == 4 and computed != size:
        # Input and output once more in the type that bitsandbytes computes in.
        mlp += computed * (a.hidden + a.intermediate)
    # The layer's forward still names the attention weights that eager attention gave it.
    scores = a.heads * size if attention == "eager" and not a.relative_terms else 0
    stages = _attention_stages(a, size, attention, mask, on_gpu, padded, capability)
    stages.append(Stage(mlp + _INPUT_BYTES, mask + scores))
    if not pools_last_token:
        # Hidden states before and after the last norm; the logits, and those in float32.
        head = 2 * a.hidden * size + num_labels * (size + 4)
        stages.append(Stage(head + _INPUT_BYTES, mask))
    fixed = 0
    if bits == 4 or (a.quant_method == "bitsandbytes" and a.quant_bits == 4):
        # The largest linear layer's weight, which bitsandbytes makes anew from 4 bits for every product.
        largest = a.hidden * max(a.intermediate * (2 if a.fused_gate else 1), a.heads * a.head_dim)
        fixed = largest * _compute_bytes(size, quantization or a.quantization)
    if a.relative_terms:
        # The table of relative positions: normed, and projected to keys and queries, in two layouts each.
        fixed += 5 * 2 * a.position_buckets * a.hidden * size
    return Activation(tuple(stages), fixed)


def _hidden_copies(a: Architecture) -> int:
    """Tensors as wide as the hidden states that live while a layer's MLP runs.

    The embeddings, which the backbone's forward keeps; the layer's input; and of a post-norm layer what attention
    gave, of a pre-norm one the sum with it and its normed copy.
    """
    if a.relative_terms or a.model_type in ("deberta", "deberta-v2"):
        return a.layers + 2  # DeBERTa's encoder keeps the states of every layer, asked or not
    if a.model_type in _LIKE_BERT:
        return 3
    if a.model_type in _LIKE_LLAMA:
        return 4
    return (
        5 if a.model_type in _LIKE_GPT2 else 6
    )  # of an unknown family the worst that is known, and one more


def _mask(a: Architecture, size: int, attention: str, padded: bool) -> float:
    """Bytes per token pair of the masks that live throughout: floats for eager attention, booleans for sdpa."""
    if a.relative_terms:
        # An int64 product of the mask with itself, and three tables of positions that a batch's rows share.
        return 16.0
    if attention == "eager":
        return float(size * a.masks)
    return float(a.masks) if attention == "flex_attention" or (attention == "sdpa" and padded) else 0.0


def _attention_stages(
    a: Architecture,
    size: int,
    attention: str,
    mask: float,
    on_gpu: bool,
    padded: bool,
    capability: tuple[int, int] | None,
) -> list[Stage]:
    queries, keys = a.heads * a.head_dim, a.kv_heads * a.head_dim
    live: float = size * (_hidden_copies(a) - 1) * a.hidden + _INPUT_BYTES
    if a.relative_terms:
        return _disentangled(a, size, live + size * 3 * queries, mask)
    if a.model_type not in _LIKE_BERT | _LIKE_LLAMA | _LIKE_GPT2:
        live += 2 * 2 * 4 * queries  # some turn queries and keys in float32
    # Rotary embedding: beside queries, keys and values three more tensors like the queries.
    rotary = Stage(live + size * (4 * queries + 2 * keys), mask)
    given = live + size * (queries + 2 * keys)
    repeated = 2 * size * queries if a.kv_heads < a.heads else 0
    if attention == "eager":
        return [rotary, Stage(given + repeated, mask + a.heads * _score_bytes(a, size, on_gpu))]
    if attention == "flash_attention_2":
        # Without padding once more: queries, keys, values, the result; and the result with padding.
        return [rotary, Stage(given + size * (3 * queries + 2 * keys), mask)]
    result = size * queries
    if a.head_dim > _REGISTER_WIDTH and size == 2 and on_gpu:
        result += 4 * queries
    if padded or attention == "flex_attention":
        # sdpa casts the boolean mask for every layer, and copies it where its width is no multiple of 16.
        cast = Stage(given + repeated, mask + 2 * size)
        return [rotary, cast, Stage(given + repeated + result, mask + size)]
    if on_gpu and repeated and (size == 4 or (capability is not None and capability < (8, 0))):
        # Shared keys are passed on as they are where there is no mask, and only torch's flash kernel takes them;
        # for float32 and below 8.0 it falls back to plain products, in float32, with all the scores.
        return [rotary, Stage(given + 4 * 4 * queries, a.heads * 8.0)]
    return [rotary, Stage(given + result, 0.0)]


def _score_bytes(a: Architecture, size: int, on_gpu: bool) -> float:
    """Bytes per head and token pair while eager attention takes its softmax."""
    if a.model_type not in _FLOAT32_SOFTMAX:
        if a.model_type in _LIKE_BERT | _LIKE_GPT2:
            return 2.0 * size  # the scores and their softmax
        # Falcon masks a copy and casts it twice; unknown families may add a bias in float32 as well.
        return 4.0 * size if a.model_type == "falcon" else max(4.0 * size, 12.0)
    if size == 4:
        return 8.0
    # Scores, their softmax in float32, its cast; a CPU casts the scores first.
    return size + 4.0 + (size if on_gpu else 4.0)


def _disentangled(a: Architecture, size: int, live: float, mask: float) -> list[Stage]:
    """DeBERTa's attention: scores between contents, from contents to positions, from positions to contents.

    Each of the latter two is a product with the table of positions, [heads, width, 2 * buckets], out of which
    the scores are gathered.  The table's two projections are repeated for every row of the batch,
    in all but the first version.
    """
    scores = a.heads * size
    table = 0 if a.model_type == "deberta" else 2 * 2 * a.position_buckets * a.hidden * size
    product = 2 * a.position_buckets * scores
    return [
        Stage(live + product, mask + 2 * a.relative_terms * scores, table),
        Stage(live, mask + (1 + 2 * a.relative_terms) * scores, table),
    ]


def _compute_bytes(size: int, quantization: Mapping[str, Any] | None) -> int:
    # transformers' BitsAndBytesConfig computes in float32 unless it is told otherwise.
    name = str((quantization or {}).get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")
    return {"float16": 2, "bfloat16": 2, "float32": 4}.get(name, size)
