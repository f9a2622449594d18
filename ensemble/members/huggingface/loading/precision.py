"""The types of the weights and of the arithmetic on this device."""

from __future__ import annotations

import os

import torch

from ensemble.members.footprint import Capability
from ensemble.members.huggingface.loading.kernels import AMPERE
from ensemble.members.huggingface.spec import CheckpointSpec, choose_dtype


def capability(on_gpu: bool) -> Capability | None:
    """Return the compute capability of the least capable GPU that this process sees; None on a CPU."""
    if not on_gpu:
        return None
    return min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def model_dtype(spec: CheckpointSpec, least: Capability | None, notes: list[str]) -> torch.dtype | str:
    """Return the type for ``from_pretrained``: the spec's, or one that this device has; "auto": the checkpoint's.

    Args:
        least: the compute capability of the least capable device; None on a CPU.
        notes: takes a sentence if the type may surprise.
    """
    is_asked = "dtype" in spec.asked
    asked = spec.dtype if is_asked or spec.dtype == "float32" else "auto"
    stored = None if spec.dtype == "auto" else spec.dtype
    dtype = choose_dtype(asked, stored, least is not None, least)
    if least is not None and least < AMPERE:
        if is_asked and dtype == "bfloat16":
            notes.append(
                "dtype: bfloat16 is only emulated below compute capability 8.0: slow; float16 is what this GPU has"
            )
        elif not is_asked and dtype == "float16":
            notes.append("float16: bfloat16 is only emulated below compute capability 8.0")
    return dtype if dtype == "auto" else getattr(torch, dtype)


def set_tf32(spec: CheckpointSpec, least: Capability | None, notes: list[str]) -> None:
    """Let float32 products use TF32's 10 bits of mantissa or not, and note if that has no effect.

    By default torch turns it on for cuDNN.  All releases have these two switches; since torch 2.9 they set
    ``fp32_precision`` too, but once that is set directly, reading the switches raises an error.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = spec.allow_tf32
    if spec.allow_tf32 and least is not None:
        if least < AMPERE:
            notes.append("allow_tf32 has no effect below compute capability 8.0")
        elif os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # overrides what a program sets
            notes.append("allow_tf32 has no effect while NVIDIA_TF32_OVERRIDE=0 is in the environment")
