"""Numbers: which type the weights have on this device."""

from __future__ import annotations

import torch

from ensemble.protocol import WorkerSpec


def model_dtype(spec: WorkerSpec, on_gpu: bool, notes: list[str]) -> torch.dtype | str:
    """The type for ``from_pretrained``: what the user said, or what suits the device."""
    if spec.dtype != "auto":
        dtype = getattr(torch, spec.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype
    if not on_gpu:
        return torch.float32  # half precision is several times slower on a CPU
    if torch.cuda.get_device_capability(0) < (8, 0):
        # bf16 is only emulated there, whatever is_bf16_supported() says.
        notes.append("float16, because bfloat16 is emulated below compute capability 8.0")
        return torch.float16
    return "auto"
