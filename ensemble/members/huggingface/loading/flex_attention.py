"""Compute attention of rows that stand one behind the other, with torch's compiled ``flex_attention``.

The kernel is compiled for one length, and shorter batches are padded for it alone. It caps scores, and skips blocks
of keys that no query sees, such as those before a layer's window. Padded batches are computed in blocks
(``capped_attention.py``).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from threading import Event
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from ensemble.members.huggingface.loading.capped_attention import capped_blocks, register_capped_blocks
from ensemble.members.huggingface.loading.device_map import on_device
from ensemble.members.huggingface.loading.kernels import compile_in_this_process
from ensemble.members.huggingface.spec import FLEX, FLEX_BLOCK

Numbers = npt.NDArray[np.int32]
_WITHOUT_WINDOW = np.iinfo(np.int32).max


class Packing:
    """Say which keys the tokens of a packed batch see, for the attention of each layer.

    A token sees a key that is not later, is within the layer's window, and whose ``ends`` is behind the token.

    Args:
        ends: the place behind the last token that sees each token, int32 [tokens]: the end of a token's row, or of
            all rows that begin with it. Their number is a multiple of ``FLEX_BLOCK``; the model may get fewer.
        positions: of the tokens in their rows, int32 [tokens].
        device: of all layers.

    Attributes:
        masks: for each window of the layers that have run; None: a layer without one.
    """

    def __init__(self, ends: Numbers, positions: Numbers, device: torch.device) -> None:
        self.tokens = len(ends)
        self._arrays = ends, positions
        self._tensors = on_device(ends, device), on_device(positions, device)
        self._device = device
        self.masks: dict[int | None, Any] = {}

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Let passes of this thread be over this batch."""
        token = _packing.set(self)
        try:
            yield
        finally:
            _packing.reset(token)

    def mask(self, window: int | None) -> Any:
        """Return the block mask of layers with this window; it is made once."""
        if window not in self.masks:
            self.masks[window] = self._make_mask(_WITHOUT_WINDOW if window is None else window)
        return self.masks[window]

    def _make_mask(self, window: int) -> Any:
        from torch.nn.attention.flex_attention import BlockMask

        # All that differs between batches and layers is a tensor: a number would be compiled anew, and one of no
        # dimension is an error in torch 2.6.
        ends, positions = self._tensors
        first = on_device(self._arrays[1] - np.int32(window - 1), self._device)

        def sees(_: Any, __: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            is_in_row = (key <= query) & (query < ends[key])
            return is_in_row & (positions[key] >= first[query])

        some, every = self._blocks(window)
        counts, numbers = _listed(some & ~every, self._device)
        all_counts, all_numbers = _listed(every, self._device)
        return BlockMask.from_kv_blocks(
            counts, numbers, all_counts, all_numbers, BLOCK_SIZE=FLEX_BLOCK, mask_mod=sees
        )

    def _blocks(self, window: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Return which blocks of queries may see some keys of others, and which see all, bool [blocks, blocks]."""
        ends, positions = (array.reshape(-1, FLEX_BLOCK) for array in self._arrays)
        number = np.arange(len(ends))
        first = number * FLEX_BLOCK
        last = first + FLEX_BLOCK - 1
        lowest, highest = positions.min(1), positions.max(1)
        some = number[:, None] >= number
        some &= ends.max(1) > first[:, None]
        some &= lowest[:, None] - highest < window
        every = number[:, None] > number
        every &= ends.min(1) > last[:, None]
        every &= highest[:, None] - lowest < window
        return some, every


# Set once compiling took too long: the pass that waits for it ends with an error.
is_given_up = Event()
_packing: ContextVar[Packing | None] = ContextVar("packing", default=None)


def _listed(blocks: npt.NDArray[np.bool_], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return how many blocks of keys each block of queries has, and all numbers, those of its own first."""
    order = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    counts = blocks.sum(axis=1, dtype=np.int32)
    return on_device(counts[None, None], device), on_device(order[None, None], device)


def register_flex() -> None:
    """Make ``attn_implementation: flex`` known to transformers in this process, and what may take its place."""
    register_capped_blocks()
    AttentionInterface.register(FLEX, flex)
    AttentionMaskInterface.register(FLEX, _mask)


def _mask(*arguments: Any, **options: Any) -> torch.Tensor | None:
    """Return the mask of a padded batch; a packed one has another (``Packing``)."""
    return sdpa_mask(*arguments, **options) if _packing.get() is None else None


def flex(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute causal attention of a packed batch; of others what :func:`capped_blocks` does, for inference only.

    Arguments and results are those of :func:`capped_blocks`.
    """
    packing = _packing.get()
    if packing is None:
        return capped_blocks(module, query, key, value, attention_mask, **options)
    # Only the attention has a fixed length: all else computes no padding.
    length, softcap = query.shape[2], options.get("softcap")
    missing = (0, 0, 0, 0, 0, packing.tokens - length)
    query, key, value = (
        torch.nn.functional.pad(part.transpose(1, 2), missing).transpose(1, 2) for part in (query, key, value)
    )
    result = compiled_attention()(
        query,
        key,
        value,
        score_mod=None if softcap is None else _cap(softcap),
        block_mask=packing.mask(options.get("sliding_window")),
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if is_given_up.is_set():
        raise TimeoutError("another attention has taken over while this one was compiled")
    return result.transpose(1, 2)[:, :length].contiguous(), None


@functools.cache
def compiled_attention() -> Callable[..., torch.Tensor]:
    """Import torch's compiler, which takes seconds and no device; what is returned compiles when it is called."""
    import torch._inductor.compile_fx
    from torch.nn.attention.flex_attention import flex_attention

    compile_in_this_process()
    compiled: Callable[..., torch.Tensor] = torch.compile(flex_attention, dynamic=False, fullgraph=True)
    return compiled


@functools.cache
def _cap(softcap: float) -> Callable[..., torch.Tensor]:
    def capped(score: torch.Tensor, *_: Any) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped
