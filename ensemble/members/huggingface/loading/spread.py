"""Spread a model over several GPUs whose stages wait for each other as little as possible.

accelerate's hooks copy each input of a module to its device (``AlignDevicesHook.pre_forward``): the attention
mask, the positions and the rotary embeddings again at every layer.  A copy between two GPUs begins when both have
finished all earlier work, and both wait for its end (ATen/native/cuda/Copy.cu).  So the first GPU would be idle
until the last one has finished, instead of starting on the next batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from ensemble.members.huggingface.loading.device_map import align_hooks, execution_device, input_device
from ensemble.members.huggingface.loading.pair_copies import THROUGH_HOST, through_host


class Spread:
    """Copy the constant inputs of a forward pass to each device of a spread model once.

    Modules that only hold constants, such as the rotary embedding, compute on the first device, and logits stay on
    the last.  Models on one device are left alone.  ``stages`` counts the devices that a batch passes through.
    Where copies between the devices are wrong (``pair_copies.py``), they go by way of the host's memory.
    """

    def __init__(self, model: nn.Module) -> None:
        # By identity, and weak: copies go with their tensor, and no other tensor can take over its entry.
        self._copies: MutableMapping[torch.Tensor, dict[torch.device, torch.Tensor]] = (
            WeakTensorKeyDictionary()
        )
        self._is_in_pass = False
        self._goes_through_host = bool(getattr(model, THROUGH_HOST, False))
        blocks = dict(_blocks(model))
        self.stages = max(1, len(set(blocks.values())))
        if self.stages < 2:
            return
        start = input_device(model)
        for block, device in blocks.items():
            if any(True for _ in block.buffers()) and not any(True for _ in block.parameters()):
                block.cpu()  # and from there to the first device, so that no copy between GPUs is needed
                for hook in align_hooks(block):
                    hook.execution_device = start
                    hook.init_hook(block)
                device = start
            skipped: set[str] = set()
            for keys in [hook.skip_keys for hook in align_hooks(block)]:
                skipped |= {keys} if isinstance(keys, str) else set(keys or ())
            block.register_forward_pre_hook(partial(self._send, device, skipped), with_kwargs=True)
        for hook in [hook for part in model.modules() for hook in align_hooks(part)]:
            # The whole model's hook sends its inputs to one of the devices, and its logits back to theirs.
            if hook.io_same_device:
                hook.execution_device, hook.io_same_device = start, False

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Enter a forward pass; no copies are kept after it."""
        self._is_in_pass = True
        try:
            yield
        finally:
            self._is_in_pass = False
            self._copies.clear()

    def _send(
        self,
        device: torch.device,
        skipped: set[str],
        _: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Copy a block's inputs, except the hidden states, which blocks do not share and may change in place."""
        if self._goes_through_host:
            return tree_map(partial(_through_host, device), (args, kwargs))  # type: ignore[no-any-return]
        if not self._is_in_pass:
            return None
        others = tuple(self._on(device, value) for value in args[1:])
        return (*args[:1], *others), {
            key: value if key == "hidden_states" or key in skipped else self._on(device, value)
            for key, value in kwargs.items()
        }

    def _on(self, device: torch.device, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device == device:
                return value
            copies = self._copies.setdefault(value, {})
            if device not in copies:
                copies[device] = value.to(device)
            return copies[device]
        if type(value) in (tuple, list):
            return type(value)(self._on(device, item) for item in value)
        if type(value) is dict:
            return {key: self._on(device, item) for key, item in value.items()}
        return value  # to be moved by accelerate, if at all


def _through_host(device: torch.device, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.device not in (device, torch.device("cpu")):
        return through_host(value, device)
    return value


def _blocks(module: nn.Module) -> Iterator[tuple[nn.Module, torch.device]]:
    """Yield the parts that accelerate has placed as a whole, with the devices on which they compute."""
    # The dispatched model itself has a device, too: that of its first part.
    device = None if hasattr(module, "hf_device_map") else execution_device(module)
    if device is not None:
        yield module, device
        return
    for child in module.children():
        yield from _blocks(child)
