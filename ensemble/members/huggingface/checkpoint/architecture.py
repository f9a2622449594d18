"""Gather the numbers of a model that its memory depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.members.huggingface.checkpoint.description import Description
from ensemble.members.huggingface.checkpoint.quantization_methods import method_of, quantized_bits
from ensemble.members.huggingface.spec import is_soft_capped

NOTHING_KNOWN = Description()
# Names in a file; transformers has the first for all kinds.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")


@dataclass(frozen=True)
class Architecture:
    """Hold the numbers that memory depends on.

    Attributes:
        mlp_width: numbers per token at the peak of a feed-forward part, those of all its experts.
        largest_weight: elements of the largest linear layer.
        max_positions: the longest row; None: positions are not learnt, or not known.
        soft_capping: whether attention scores go through tanh, as in Gemma-2.
        dtype: the stored type (float32, float16, bfloat16); None: not stored.
        quant_method, quant_bits, quantization: of a checkpoint that is stored quantized.
        masks: attention masks of a forward pass; two where only some layers have a window.
        supports_sdpa: None: not known.
        is_old: whether its code has only attention of its own, which takes more.
        experts: of a mixture, that compute a token; 1: it is none.
        keeps_states: whether the states of every layer live until the end, as in DeBERTa.
        relative_terms: how many of DeBERTa's c2p and p2c it has.
        position_buckets: half the size of DeBERTa's table of positions.
        repeats_table: whether that table is repeated for every row of a batch.
    """

    layers: int
    hidden: int
    mlp_width: int
    largest_weight: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int | None
    soft_capping: bool
    dtype: str | None
    quant_method: str | None
    quant_bits: int = 0
    quantization: Mapping[str, Any] | None = None
    masks: int = 1
    supports_sdpa: bool | None = None
    is_old: bool = False
    experts: int = 1
    keeps_states: bool = False
    relative_terms: int = 0
    position_buckets: int = 0
    repeats_table: bool = False
    vocabulary: int = 0


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the part that reads text: ``text_config`` takes precedence over the rest."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else dict(config)


def read_architecture(
    config: Mapping[str, Any], described: Description = NOTHING_KNOWN
) -> Architecture | None:
    """Return the numbers of a ``config.json``; None where they are not known.

    Args:
        described: what transformers says of it; if nothing, the file's own numbers count.
    """
    numbers = described.numbers or text_settings(config)
    hidden, layers = _number(numbers, *_HIDDEN), _number(numbers, *_LAYERS)
    if not (hidden and layers):
        return None
    heads = _number(numbers, *_HEADS) or 1  # FNet mixes tokens without attention
    head_dim = _number(numbers, "head_dim") or max(1, hidden // heads)
    intermediate = _number(numbers, "intermediate_size") or 4 * hidden
    quantization = config.get("quantization_config")
    stored = quantization if isinstance(quantization, Mapping) and quantization else None
    # The tokens that some layers look back at.  Qwen2 stores a window that it does not use.
    window = _number(numbers, "sliding_window") or _number(numbers, "local_attention")
    has_window = window > 0 and numbers.get("use_sliding_window") is not False
    layer_types = numbers.get("layer_types")
    are_alike = isinstance(layer_types, list) and len(set(layer_types)) == 1
    terms = numbers.get("pos_att_type") or ()
    terms = terms.split("|") if isinstance(terms, str) else terms
    dtype = str(config.get("dtype") or config.get("torch_dtype") or numbers.get("dtype") or "")
    relative_terms = len({"c2p", "p2c"} & {str(term).strip().lower() for term in terms})
    experts = _number(numbers, "num_experts_per_tok", "top_k_experts") or 1
    # A gated feed-forward part takes more than one without a gate.
    mlp_width = (described.mlp_width or 3 * intermediate) * experts
    soft_capping = is_soft_capped(described.numbers or config)
    is_old = described.supports_sdpa is False and not (relative_terms or soft_capping)
    if is_old:
        mlp_width *= 3  # older code writes its activation out: Bloom's holds six tensors
    elif "gelu_new" in (numbers.get("activation_function"), numbers.get("hidden_act")):
        mlp_width *= (
            2  # written out in products and sums: x, x / 2, its cube and a multiple of that live at once
        )
    return Architecture(
        layers=layers,
        hidden=hidden,
        mlp_width=mlp_width,
        largest_weight=described.largest_weight or hidden * max(intermediate, heads * head_dim),
        heads=heads,
        kv_heads=1 if numbers.get("multi_query") else _number(numbers, "num_key_value_heads") or heads,
        head_dim=head_dim,
        max_positions=described.max_positions,
        soft_capping=soft_capping,
        dtype=dtype.removeprefix("torch.") or None,
        quant_method=method_of(stored),
        quant_bits=quantized_bits(stored),
        quantization=stored,
        masks=2 if has_window and not are_alike else 1,
        supports_sdpa=described.supports_sdpa,
        is_old=is_old,
        experts=experts,
        keeps_states="pos_att_type" in numbers,
        relative_terms=relative_terms,
        position_buckets=_number(
            numbers, "position_buckets", "max_relative_positions", "max_position_embeddings"
        ),
        repeats_table="position_buckets" in numbers,
        vocabulary=_number(numbers, "vocab_size"),
    )


def _number(numbers: Mapping[str, Any], *names: str) -> int:
    values = (numbers.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)
