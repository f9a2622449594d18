"""Gather the numbers of a model that its memory depends on, from its modules and its ``config.json``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from ensemble.members.huggingface.checkpoint.facts import Architecture
from ensemble.members.huggingface.spec import choose_attention, is_soft_capped

# Names in a file; transformers has the first for all kinds.
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_POSITIONS = re.compile(r"(^|[._])(wpe|positions?_embed\w*|embed_positions?)$")


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the part that reads text: ``text_config`` takes precedence over the rest."""
    nested = config.get("text_config")
    return {**config, **nested} if isinstance(nested, Mapping) else dict(config)


def read_architecture(
    config: Mapping[str, Any], numbers: Mapping[str, Any], model: Any = None
) -> Architecture | None:
    """Return the numbers of a checkpoint; None where they are not known.

    Args:
        config: its ``config.json``.
        numbers: of the part that reads text or images, defaults included.
        model: without weights; None: it could not be made, and the numbers alone count.
    """
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
    dtype = str(config.get("dtype") or config.get("torch_dtype") or numbers.get("dtype") or "")
    is_deberta = bool(numbers.get("pos_att_type"))
    experts = _number(numbers, "num_experts_per_tok", "top_k_experts") or 1
    shapes = [] if model is None else [*_linear_shapes(model)]
    # A gated feed-forward part takes more than one without a gate.
    mlp_width = (_mlp_width(shapes) or 3 * intermediate) * experts
    soft_capping = is_soft_capped(numbers) or is_soft_capped(config)
    supports_sdpa = None if model is None else bool(model._supports_sdpa)
    is_old = supports_sdpa is False and not (is_deberta or soft_capping)
    largest_weight = max((inputs * outputs for _, inputs, outputs in shapes), default=0)
    if is_old:
        mlp_width *= 3  # older code writes its activation out: Bloom's holds six tensors
    elif "gelu_new" in (numbers.get("activation_function"), numbers.get("hidden_act")):
        # Written out in products and sums: x, x / 2, its cube and a multiple of that live at once.
        mlp_width *= 2
    return Architecture(
        layers=layers,
        hidden=hidden,
        mlp_width=mlp_width,
        largest_weight=largest_weight or hidden * max(intermediate, heads * head_dim),
        heads=heads,
        kv_heads=1 if numbers.get("multi_query") else _number(numbers, "num_key_value_heads") or heads,
        head_dim=head_dim,
        max_positions=None if model is None else learnt_positions(model),
        soft_capping=soft_capping,
        dtype=dtype.removeprefix("torch.") or None,
        quantization=stored,
        masks=2 if has_window and not are_alike else 1,
        supports_sdpa=supports_sdpa,
        is_old=is_old,
        experts=experts,
        position_buckets=is_deberta
        * _number(numbers, "position_buckets", "max_relative_positions", "max_position_embeddings"),
        vocabulary=_number(numbers, "vocab_size"),
        is_causal=model is not None and is_causal(model),
        window=window if has_window else 0,
    )


def is_causal(model: Any) -> bool:
    """Return whether all attention is declared causal: no token sees a later one, nor padding on the right."""
    flags = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
    return not is_encoder_decoder and bool(flags) and all(flag is True for flag in flags)


def attention_of_padded(model: Any) -> str:
    """Choose the attention of transformers, or our own, that suits padded batches of a loaded model anywhere."""
    is_capped = is_soft_capped(model.config.to_dict())
    return choose_attention(is_capped, model._supports_sdpa, flash_suits=False)


def layer_windows(config: Any) -> set[int | None]:
    """Return how many tokens a decoder's layers look back at, by its config; None: a layer looks at all.

    Raises:
        ValueError: a layer has attention of another kind, or none.
    """
    text = config.get_text_config()
    window = getattr(text, "sliding_window", None)
    types = set(getattr(text, "layer_types", None) or ("sliding_attention",))
    if not types <= {"full_attention", "sliding_attention"}:
        raise ValueError(f"layers of {', '.join(sorted(types))} cannot tell rows apart")
    return {window if name == "sliding_attention" else None for name in types}


def _number(numbers: Mapping[str, Any], *names: str) -> int:
    values = (numbers.get(name) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), 0)


def learnt_positions(model: Any) -> int | None:
    """Return how many tokens the tables of learnt positions can number; None for models without."""
    limits = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _POSITIONS.search(name):
            # RoBERTa and its kin count from the padding's id on; BART and OPT have an offset.
            skipped = module.padding_idx + 1 if module.padding_idx is not None else 0
            limits.append(module.num_embeddings - max(skipped, int(getattr(module, "offset", 0))))
    return min(limits, default=None)


def _linear_shapes(model: Any) -> Iterator[tuple[str, int, int]]:
    """Yield the name, inputs and outputs of each linear layer within a block, and of a block's experts."""
    for name, module in model.named_modules():
        if not re.search(r"\.\d+\.", name):
            continue
        if isinstance(module, nn.Linear):
            yield name, module.in_features, module.out_features
        elif hasattr(module, "nf"):  # GPT-2's Conv1D
            yield name, *module.weight.shape
    for name, parameter in model.named_parameters():
        # Experts of a mixture are one tensor, [experts, outputs, inputs] or [experts, inputs, outputs].
        if parameter.dim() == 3 and "expert" in name and "down" not in name:
            yield name, min(parameter.shape[1:]), max(parameter.shape[1:])


def _mlp_width(shapes: Iterable[tuple[str, int, int]]) -> int:
    """Return the numbers per token that live at the peak of the widest feed-forward part."""
    # The outputs of all its layers that widen, and once more the widest: the activated gate times the input, or the
    # function's output.
    widths: dict[str, list[int]] = {}
    for name, inputs, outputs in shapes:
        if outputs > inputs:
            widths.setdefault(name.rpartition(".")[0], []).append(outputs)
    return max((sum(outputs) + max(outputs) for outputs in widths.values()), default=0)
