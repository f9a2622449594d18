"""Several devices on a machine that has one: tensors that say they are elsewhere and compute on the CPU.

A dispatch mode below all of torch's Python sees every operation. As on real devices, one whose tensors are on
different ones is an error, but for copies and for numbers on the CPU; copies between devices are counted.

It also keeps the time that CUDA's streams would take, in steps of one operation each. The host launches without
waiting, and a device works off what it was given. A copy between two runs when both have done all they were given
before, and both go on when it is over (torch, aten/src/ATen/native/cuda/Copy.cu, a two-way barrier). Who looks at a
value waits for its device.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

# One that torch knows (2.6 in autocast, too) and has no code for, so that nothing computes there behind our back.
TYPE = "ipu"
_COPIES = (torch.ops.aten._to_copy, torch.ops.aten.copy_, torch.ops.aten.to)
_LOOKS = (
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.item,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.nonzero,
    torch.ops.aten.equal,
)


class Elsewhere(torch.Tensor):
    """``value``, a tensor on the CPU, said to be on ``device``."""

    value: torch.Tensor

    @staticmethod
    def __new__(cls: type[Elsewhere], value: torch.Tensor, device: torch.device) -> Elsewhere:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            value.shape,
            strides=value.stride(),
            storage_offset=value.storage_offset(),
            dtype=value.dtype,
            device=device,
        )
        made.value = value
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Those that ask the device itself before they come to the operations below.
        if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__, torch.Tensor.contiguous):
            tensor, *others = tree_map(_on_cpu, args)
            if any(leaf.device != args[0].device for leaf in tree_leaves(args[1:]) if isinstance(leaf, cls)):
                raise RuntimeError("indices are on another device")
            result = func(tensor, *others, **(kwargs or {}))
            return result if result is None else Elsewhere(result, args[0].device)
        # Not the default, which makes tensors on the CPU look like these.
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} outside of the machine")


class Machine(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While entered, devices of this type exist, such as "ipu:0" and "ipu:1".

    Attributes:
        copies: what was copied from one of them to another, in order, with where it went.
        looks: operations for which the host waits.
        wrong: by source and target, how a copy between them goes wrong: "zeros", or "late": it begins after what
            asked for it has gone on, so that the target still has what was copied there before.
        busy_until: when each device has done what it was given, in steps.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies: list[tuple[Any, torch.device]] = []
        self.looks: list[Any] = []
        self.busy_until: dict[torch.device, int] = {}
        self.wrong: dict[tuple[str, str], str] = {}
        self._lay_there: dict[tuple[Any, ...], torch.Tensor] = {}
        self._host = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        # Single numbers on the CPU may meet tensors of any device.
        devices = {tensor.device for tensor in tensors if tensor.dim() or tensor.device.type == TYPE}
        is_copy = func.overloadpacket in _COPIES
        if len(devices) > 1 and not is_copy:
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, got {devices}")
        messages = [leaf for leaf in leaves if isinstance(leaf, torch.device)]
        (device,) = messages or [*devices, torch.device("cpu")][:1]
        if is_copy and device.type == TYPE and tensors[0].device.type == TYPE:
            if tensors[0].device != device:
                self.copies.append((tensors[0], device))
            elif func.overloadpacket is torch.ops.aten.to and tensors[0].dtype == _dtype(leaves, tensors[0]):
                return tensors[0]
        self._pass_time(
            func, is_copy, {tensor.device for tensor in tensors if tensor.device.type == TYPE}, device
        )
        done = func(*tree_map(_on_cpu, args), **tree_map(_on_cpu, kwargs))
        if func._schema.is_mutable:
            return args[0]
        if device.type != TYPE:
            return done
        if is_copy and tensors[0].device != device:
            done = self._delivered(done, str(tensors[0].device), str(device))
        return tree_map(
            lambda item: Elsewhere(item, device) if isinstance(item, torch.Tensor) else item, done
        )

    def _delivered(self, right: torch.Tensor, source: str, target: str) -> torch.Tensor:
        """What a copy between two devices brings."""
        how = self.wrong.get((source, target))
        if how is None:
            return right
        before = self._lay_there.get((target, right.shape), torch.zeros_like(right))
        self._lay_there[target, right.shape] = right.clone()
        return before if how == "late" else torch.zeros_like(right)

    def _pass_time(self, func: Any, is_copy: bool, sources: set[torch.device], device: torch.device) -> None:
        there = {*sources, *([device] if device.type == TYPE else [])}
        if not there:
            return
        now = max(self._host, *(self.busy_until.get(path, 0) for path in there))
        for path in there:
            self.busy_until[path] = now + (len(there) == 1)
        if func.overloadpacket in _LOOKS or (is_copy and device.type != TYPE):
            self.looks.append(func)
            self._host = now + 1


def _on_cpu(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.value
    is_elsewhere = isinstance(value, torch.device) and value.type == TYPE
    return torch.device("cpu") if is_elsewhere else value


def _dtype(leaves: list[Any], tensor: torch.Tensor) -> torch.dtype:
    return next((leaf for leaf in leaves if isinstance(leaf, torch.dtype)), tensor.dtype)
