"""A limit on what torch may allocate on a CPU, raising torch's own OutOfMemoryError as CUDA's allocator does.

It sits in torch's dispatcher, below every model, and knows nothing of the code under test.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class AllocatorLimit(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses tensors over a size, or the n-th embedding look-ups (one per forward pass) of a process.

    Args:
        largest_bytes: no single tensor may be larger.
        fail_at: numbers of the forward passes, from 0, that run out of memory whatever their size.
    """

    def __init__(self, largest_bytes: int | None = None, fail_at: frozenset[int] = frozenset()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._largest_bytes = largest_bytes
        self._fail_at = fail_at
        self.passes = 0
        self.refused = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if "embedding" in str(func) and isinstance(result, torch.Tensor) and result.dim() == 3:
            number, self.passes = self.passes, self.passes + 1
            if number in self._fail_at:
                self._refuse()
        if isinstance(result, torch.Tensor) and self._largest_bytes is not None:
            size = result.numel() * result.element_size()
            if size > self._largest_bytes:
                self._refuse()
        return result

    def _refuse(self) -> None:
        self.refused += 1
        raise torch.OutOfMemoryError("CUDA out of memory (a limit set by a test).")
