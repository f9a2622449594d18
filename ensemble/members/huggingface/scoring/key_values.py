"""Keep keys and values of tokens that are computed already, and put them before those of a pass.

A layer's keys and values are [rows, heads, tokens, numbers of a head].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers.cache_utils import Cache, DynamicLayer

from ensemble.members.huggingface.loading.device_map import on_device

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


class LayerBehind(DynamicLayer):  # type: ignore[misc]  # of a library without types
    """Put a layer's earlier keys and values before those of a pass.

    Nothing joined is kept, so that only one layer's keys and values are joined at a time.

    Args:
        earlier: parts of tokens, each with one row, the same for all, or with the rows of a batch.
        rows: the batch's row of each row of the pass, int64 [rows]; None: they are the same rows.
        order: where each of the joined tokens is taken from, int64 [rows, tokens]; None: they stay.
        keeps: whether ``keys`` and ``values`` hold those of the pass alone afterwards.
    """

    def __init__(
        self,
        earlier: Sequence[KeysAndValues],
        rows: torch.Tensor | None = None,
        order: torch.Tensor | None = None,
        keeps: bool = False,
    ) -> None:
        super().__init__()
        self._earlier = earlier
        self._rows = rows
        self._order = order
        self._keeps = keeps
        self._length = sum(keys.shape[-2] for keys, _ in earlier)
        self.dtype, self.device = earlier[0][0].dtype, earlier[0][0].device
        self.is_initialized = True

    def get_seq_length(self) -> int:
        return self._length

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> KeysAndValues:
        if self._keeps:
            self.keys, self.values = key_states, value_states
        keys = self._joined([keys for keys, _ in self._earlier], key_states)
        return keys, self._joined([values for _, values in self._earlier], value_states)

    def _joined(self, earlier: Sequence[torch.Tensor], states: torch.Tensor) -> torch.Tensor:
        if self._rows is not None:
            earlier = [part if len(part) == 1 else part[self._rows] for part in earlier]
        parts = [part.expand(len(states), -1, -1, -1) for part in earlier]
        joined = torch.cat([*parts, states], dim=-2)
        if self._order is None:
            return joined
        return reordered(joined, self._order)


def cache_behind(
    parts: Sequence[Sequence[KeysAndValues]],
    rows: npt.NDArray[np.int64] | None = None,
    order: npt.NDArray[np.int64] | None = None,
    keeps: bool = False,
) -> Cache:
    """Return a cache of earlier parts, each with the keys and values of all layers; the rest is as in a layer."""
    # Of a model on several GPUs, each has its own copy.
    rows_on = functools.cache(lambda device: None if rows is None else on_device(rows, device))
    order_on = functools.cache(lambda device: None if order is None else on_device(order, device))
    layers = []
    for earlier in zip(*parts, strict=True):
        device = earlier[0][0].device
        layers.append(LayerBehind(earlier, rows_on(device), order_on(device), keeps))
    return Cache(layers=layers)


def reordered(states: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return a layer's keys or values with each row's tokens in this order, int64 [rows, tokens]."""
    _, heads, _, width = states.shape
    return states.gather(-2, order[:, None, :, None].expand(-1, heads, -1, width))


def padding_first(
    lengths: npt.NDArray[np.int64], earlier_tokens: int, tokens: int
) -> npt.NDArray[np.int64] | None:
    """Return the order in which each row's padding comes before its earlier tokens; None if no row has any.

    Attention within a window counts places of keys, so no padding may stand between two tokens of a row.

    Args:
        lengths: each row's earlier tokens without padding, int64 [rows].
        earlier_tokens: those of the longest row, to which the others are padded.
        tokens: of the pass; they stay at the end.

    Returns:
        int64 [rows, earlier_tokens + tokens]; padding is taken from the first token, and a mask has to hide it.
    """
    padding = earlier_tokens - lengths
    if not padding.any():
        return None
    earlier = np.maximum(np.arange(earlier_tokens) - padding[:, None], 0)
    behind = np.arange(earlier_tokens, earlier_tokens + tokens)
    return np.concatenate([earlier, np.broadcast_to(behind, (len(lengths), tokens))], axis=1)
