"""Tokens that all prompts begin with, such as an instruction and examples: keys and values are computed once.

In a causal model the keys and values of a token depend only on the tokens before it, so that they are the same in
every row.  The numbers equal those of whole rows but for rounding, as matrix products have other shapes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from ensemble.members.huggingface.scoring.encode import Encoded

# Fewer tokens or rows are not worth a separate pass.
MIN_TOKENS, _MIN_ROWS = 32, 4
# A computed prefix stays in use while it is at least this share of what could be shared.
_MIN_SHARE = 0.9


class _SharedLayer(DynamicLayer):  # type: ignore[misc]  # of a library without types
    """A layer's keys and values of the prefix, [1, heads, tokens, width], before those of any batch's rows.

    The rows' own keys and values are not kept, so that only one layer's are joined at a time.
    """

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.keys, self.values = layer.keys, layer.values
        self.dtype, self.device = layer.keys.dtype, layer.keys.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = len(key_states)
        return (
            torch.cat([self.keys.expand(rows, -1, -1, -1), key_states], dim=-2),
            torch.cat([self.values.expand(rows, -1, -1, -1), value_states], dim=-2),
        )


class Prefix:
    """The tokens of a prefix, int64 [tokens], with the model's keys and values."""

    def __init__(self, tokens: npt.NDArray[np.int64], filled: DynamicCache) -> None:
        self.tokens = tokens
        self._layers = [_SharedLayer(layer) for layer in filled.layers]

    def cache(self) -> Cache:
        """Return a cache for one pass."""
        return Cache(layers=list(self._layers))


def begins_with(
    encoded: Encoded, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return which of these rows begin with the tokens and have more, bool [rows]."""
    count = len(tokens)
    ids = encoded.inputs["input_ids"]
    return np.array(
        [len(ids[row]) > count and np.array_equal(ids[row][:count], tokens) for row in rows.tolist()],
        dtype=bool,
    )


def shared_tokens(encoded: Encoded, computed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the tokens that a chunk's rows begin with; none if they are too few.

    Rows that were cut have the maximal length, and may have lost their beginning: the longest rows count only if
    there are too few others.

    Args:
        computed: tokens that have been computed already, or none; returned if they are nearly all shared tokens.
    """
    nothing = np.empty(0, dtype=np.int64)
    rows = np.flatnonzero(encoded.lengths > 0)
    if len(rows) < _MIN_ROWS:
        return nothing
    lengths = encoded.lengths[rows]
    shorter = rows[lengths < lengths.max()]
    rows = shorter if len(shorter) >= _MIN_ROWS else rows
    ids = encoded.inputs["input_ids"]
    first = ids[int(rows[0])]
    count = int(encoded.lengths[rows].min()) - 1  # each row needs a token of its own
    for row in rows.tolist():
        differences = np.flatnonzero(ids[row][:count] != first[:count])
        if len(differences):
            count = int(differences[0])
    is_enough = _MIN_SHARE * count <= len(computed) <= count
    if is_enough and np.array_equal(first[: len(computed)], computed):
        return computed
    return first[:count] if count >= MIN_TOKENS else nothing
