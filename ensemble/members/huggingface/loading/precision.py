"""Numbers: which types the weights and the arithmetic have on this device."""

from __future__ import annotations

import os

import torch

from ensemble.members.footprint import Capability
from ensemble.members.huggingface.loading.kernels import AMPERE
from ensemble.members.huggingface.spec import CheckpointSpec, choose_dtype


def capability(on_gpu: bool) -> Capability | None:
    """The compute capability of the least capable GPU that this process sees; None on a CPU."""
    if not on_gpu:
        return None
    return min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def model_dtype(spec: CheckpointSpec, least: Capability | None, notes: list[str]) -> torch.dtype | str:
    """The type for ``from_pretrained``: the spec's, or what this device has instead; "auto": the checkpoint's own.

    Args:
        least: the compute capability of the least capable device; None on a CPU.
        notes: takes a sentence where the type may surprise.
    """
    is_asked, planned = "dtype" in spec.asked, spec.dtype
    asked = planned if is_asked or planned == "float32" else "auto"
    dtype = choose_dtype(asked, None if planned == "auto" else planned, least is not None, least)
    if least is not None and least < AMPERE:
        if is_asked and dtype == "bfloat16":
            notes.append(
                "dtype: bfloat16 is only emulated below compute capability 8.0: slow; float16 is what this GPU has"
            )
        elif not is_asked and dtype == "float16":
            notes.append("float16: bfloat16 is only emulated below compute capability 8.0")
    return dtype if dtype == "auto" else getattr(torch, dtype)


def set_tf32(spec: CheckpointSpec, least: Capability | None, notes: list[str]) -> None:
    """Let float32 products use TF32's 10 bits of mantissa or not, and note what did not take effect.

    cuDNN's is on in torch unless it is set.  The two switches are the ones that all releases have; since torch
    2.9 they set ``fp32_precision`` too, while after setting that one, whatever reads these raises an error.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = spec.allow_tf32
    if spec.allow_tf32 and least is not None:
        if least < AMPERE:
            notes.append("allow_tf32 has no effect below compute capability 8.0")
        elif os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # of cuBLAS and cuDNN, whatever a program sets
            notes.append("allow_tf32 has no effect while NVIDIA_TF32_OVERRIDE=0 is in the environment")
