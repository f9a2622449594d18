"""Tokens that all prompts begin with, such as an instruction and examples: their keys and values, computed once.

A causal model's keys and values of a token depend on the tokens before it alone, so that they are the same in every
row.  The numbers are those of whole rows but for rounding: the same sums, in products of other shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ensemble.members.huggingface.scoring.encode import Encoded

# Fewer tokens, or fewer rows, are not worth a pass of their own.
MIN_TOKENS, _MIN_ROWS = 32, 4
# What is kept stays in use while it is so much of what could be shared.
_ENOUGH = 0.9


class _SharedLayer(DynamicLayer):  # type: ignore[misc]  # of a library without types
    """A layer's keys and values of the prefix, [1, heads, tokens, width], before those of any batch's rows.

    Nothing is added to it, so that no more than one layer's are joined at a time.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.keys, self.values = layer.keys, layer.values
        self.dtype, self.device, self.is_initialized = layer.keys.dtype, layer.keys.device, True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(key_states)
        return (
            torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2),
            torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2),
        )


class Prefix:
    """The tokens of a prefix, int64 [tokens], and the model's keys and values of them."""

    def __init__(self, tokens: npt.NDArray[np.int64], filled: DynamicCache) -> None:
        self.tokens = tokens
        self._layers = [_SharedLayer(layer) for layer in filled.layers]

    def cache(self) -> Cache:
        """For one pass."""
        return Cache(layers=[*self._layers])


def begins_with(
    encoded: Encoded, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Which of these rows begin with the tokens, and go on, bool [rows]."""
    count = len(tokens)
    ids = [encoded.inputs["input_ids"][row] for row in rows.tolist()]
    return np.array([len(one) > count and np.array_equal(one[:count], tokens) for one in ids], dtype=bool)


def shared_tokens(encoded: Encoded, known: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
    """The tokens that a chunk's rows begin with; ``known`` where these are nearly all; empty where they are few.

    Rows that were cut are as long as a row can be, and may have lost their beginning: the longest have no say where
    others are shorter.
    """
    nothing = np.empty(0, dtype=np.int64)
    chosen = np.flatnonzero(encoded.lengths > 0)
    if len(chosen) < _MIN_ROWS:
        return nothing
    lengths = encoded.lengths[chosen]
    shorter = chosen[lengths < lengths.max()]
    chosen = shorter if len(shorter) >= _MIN_ROWS else chosen
    ids = encoded.inputs["input_ids"]
    first = ids[int(chosen[0])]
    count = int(encoded.lengths[chosen].min()) - 1  # each row needs a token of its own
    for row in chosen.tolist():
        differs = np.flatnonzero(ids[row][:count] != first[:count])
        count = int(differs[0]) if len(differs) else count
    if (
        known is not None
        and _ENOUGH * count <= len(known) <= count
        and np.array_equal(first[: len(known)], known)
    ):
        return known
    return first[:count] if count >= MIN_TOKENS else nothing
