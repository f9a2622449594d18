"""Compute RMS norms in one or two GPU kernels, instead of the six that transformers' modules launch.

``torch.nn.functional.rms_norm`` is fused on CUDA (pytorch pull request 153666). On a CPU it is slower in bfloat16
than the modules are, so nothing is replaced there.
"""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch.nn import functional

# How far each number of a fused norm may be from that of the module which it replaces, relative to it, in float32.
_TOLERANCE = 1e-5
_ROWS = 3


class FusedNorm(torch.nn.Module):
    """Compute what an RMS norm of transformers computes.

    Attributes:
        original: the module that this one replaces; it computes where types of input and weights differ.
        adds_one: whether the factor is ``1 + weight``, as in Gemma, and not ``weight``.
    """

    def __init__(self, original: torch.nn.Module, eps: float, adds_one: bool) -> None:
        super().__init__()
        self.original = original
        self.eps = eps
        self.adds_one = adds_one

    @property
    def weight(self) -> torch.Tensor:  # models look at it, for instance for its type
        return cast(torch.Tensor, self.original.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if hidden.dtype != weight.dtype:
            return cast(torch.Tensor, self.original(hidden))
        if not self.adds_one:
            return functional.rms_norm(hidden, weight.shape, weight, self.eps)
        # The sum of 1 and a weight of half precision would be rounded, for every row in the same direction.
        normed = functional.rms_norm(hidden, weight.shape, None, self.eps)
        return torch.addcmul(normed, normed, weight)


def fuse_norms(model: torch.nn.Module) -> int:
    """Replace the RMS norms of a loaded model for which :class:`FusedNorm` gives the same numbers.

    A norm that accelerate moves its weights for, or that takes other arguments, stays.

    Returns:
        how many were replaced.
    """
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            fused = _fused(child)
            if fused is not None:
                setattr(parent, name, fused)
                count += 1
    return count


def _fused(module: Any) -> FusedNorm | None:
    """Return the replacement of a module; None where there is none."""
    weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
    eps = getattr(module, "eps", None) if eps is None else eps
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(eps, float):
        return None
    if len(inspect.signature(module.forward).parameters) != 1 or hasattr(module, "_hf_hook"):
        return None
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or weight.is_meta:
        return None
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(_ROWS, weight.shape[0], generator=generator).to(weight.device, weight.dtype)
    rounding = _TOLERANCE if weight.dtype == torch.float32 else 2 * torch.finfo(weight.dtype).eps
    candidates = [FusedNorm(module, eps, adds_one) for adds_one in (False, True)]
    with torch.no_grad():
        expected = module(hidden).float()
        # Number by number: beside a single weight of 100 all others would be free to be wrong.
        sizes = expected.abs().clamp_min(torch.finfo(weight.dtype).tiny)
        errors = [((fused(hidden).float() - expected).abs() / sizes).max() for fused in candidates]
        first, second = torch.stack(errors).tolist()  # the host waits once
    if not min(first, second) <= rounding:
        return None
    return candidates[0 if first <= second else 1]
