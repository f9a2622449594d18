"""Compute attention with capped scores, such as Gemma-2's, one block of queries at a time.

torch's fused attention cannot cap its scores, and eager attention holds them for all pairs of tokens at once. Here
a block of queries sees only the keys that it may see. So no products are taken with later keys, or with keys before
a sliding window, and memory grows with the tokens of a batch instead of with the square of its width.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ensemble.members.huggingface.spec import CAPPED_BLOCKS, QUERIES_PER_BLOCK


def register_capped_blocks() -> None:
    """Make ``attn_implementation: capped_blocks`` known to transformers in this process."""
    AttentionInterface.register(CAPPED_BLOCKS, capped_blocks)
    AttentionMaskInterface.register(CAPPED_BLOCKS, sdpa_mask)


def capped_blocks(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention as transformers' eager attention of Gemma-2 does; for inference only.

    Args:
        query: [rows, heads, queries, numbers of a head].
        key, value: [rows, key heads, keys, numbers of a head]; the last query is that of the last key.
        attention_mask: True for keys that a query sees, or numbers to add, [rows, 1, queries, keys]; None: all
            earlier keys within the window, or all keys where the module is not causal.
        scaling: factor of the scores; None: one over the root of the numbers of a head.
        softcap: scores become ``softcap * tanh(score / softcap)``; None: they stay.
        sliding_window: how many keys, its own included, a query of this layer sees; None: all.

    Returns:
        [rows, queries, heads, numbers of a head]; and None for the weights, which are not kept.
    """
    rows, heads, queries, width = query.shape
    key_heads, keys = key.shape[1], key.shape[2]
    factor = (width**-0.5 if scaling is None else scaling) / (softcap or 1.0)
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    blocks = []
    for start in range(0, queries, QUERIES_PER_BLOCK):
        end = min(start + QUERIES_PER_BLOCK, queries)
        first, last = 0, keys
        if is_causal:
            last = keys - queries + end
            if sliding_window is not None:
                first = max(0, keys - queries + start + 1 - sliding_window)
        # The heads that share keys are one matrix, so that keys and values need not be repeated.
        block = (query[:, :, start:end] * factor).reshape(rows, key_heads, -1, width)
        scores = block @ key[:, :, first:last].transpose(2, 3)
        scores = scores.view(rows, heads, end - start, last - first)
        if softcap is not None:
            scores.tanh_().mul_(softcap)
        if attention_mask is not None:
            mask = attention_mask[:, :, start:end, first:last]
        elif is_causal:
            mask = _causal_mask(keys - queries, start, end, first, last, sliding_window, query.device)
        else:
            mask = None
        if mask is not None and mask.dtype == torch.bool:
            scores.masked_fill_(mask.logical_not(), torch.finfo(scores.dtype).min)
        elif mask is not None:
            scores += mask
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        del scores
        weights = weights.view(rows, key_heads, -1, last - first)
        result = weights @ value[:, :, first:last]
        blocks.append(result.view(rows, heads, end - start, -1).transpose(1, 2))
    return torch.cat(blocks, dim=1), None


def _causal_mask(
    earlier: int, start: int, end: int, first: int, last: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """Return which keys from ``first`` to ``last`` the queries of a block see, [queries, keys]."""
    query_places = torch.arange(earlier + start, earlier + end, device=device)[:, None]
    key_places = torch.arange(first, last, device=device)
    mask = key_places <= query_places
    if window is not None:
        mask &= key_places > query_places - window
    return mask
