"""How many bytes of tensors live at once: what a forward pass really allocates, whatever the device.

Tensors are watched where torch dispatches their operators, so that meta and fake tensors, which hold nothing,
are counted as if they held their data.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


class PeakTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operators allocate while this mode is entered, from their making to their end.

    ``peak_bytes`` is the most that lived at once, beyond what existed on entry.
    """

    supports_higher_order_operators = True  # such as flex_attention

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        for tensor in _tensors((args, kwargs)):
            self._watch(tensor, counted=False)
        # Inference mode hands over operators such as matmul whole; what they allocate inside counts as well.
        if func.namespace == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(
            func.name(), _COMPOSITE
        ):
            with self:
                return func._op_dk(_COMPOSITE, *args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._watch(tensor, counted=True)
        return result

    def _watch(self, tensor: torch.Tensor, counted: bool) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._known:
            return
        size = storage.nbytes() if counted else 0
        self._known[key] = weakref.ref(storage, functools.partial(self._forget, key, size))
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int, size: int, _: object) -> None:
        del self._known[key]
        self.live_bytes -= size


def _tensors(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
