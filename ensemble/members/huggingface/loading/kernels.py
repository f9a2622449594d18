"""Choose kernels of torch and cuBLAS for this GPU where the defaults are slow or round too much."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers.integrations import sdpa_attention

from ensemble.members.footprint import Capability
from ensemble.members.huggingface.spec import CheckpointSpec

# GPUs below only emulate bfloat16, whatever is_bf16_supported() says, and have no TF32 (CUDA C++ Programming Guide,
# "Compute Capabilities": both came with Ampere, as did the flash kernels).
AMPERE: Capability = (8, 0)
# The widest heads that the flash kernel has (sdp_utils.cpp, check_flash_attention_head_dim).
_MAX_FLASH_WIDTH = 256
_of_transformers = sdpa_attention.use_gqa_in_sdpa


def capability(on_gpu: bool) -> Capability | None:
    """Return the compute capability of the least capable GPU that this process sees; None on a CPU."""
    if not on_gpu:
        return None
    return min(torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count()))


def choose_kernels(least: Capability | None) -> None:
    """Set this process's kernels, by the capability of the least capable GPU; nothing changes on a CPU (None)."""
    if least is None:
        return
    # cuDNN's attention plans for each shape of a batch, about half a second each (transformers pull request 48163),
    # and hardly two batches here have the same shape.
    torch.backends.cuda.enable_cudnn_sdp(False)
    # cuBLAS may split long sums by shape and add the parts up in half precision: a row's numbers would change with
    # the size of its batch, and a part can overflow though the sum does not.
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False

    def use_gqa(attention_mask: torch.Tensor | None, key: torch.Tensor, *others: Any) -> bool:
        """Decide as transformers does, but with regard to the GPU and the type."""
        takes = takes_shared_keys(least, key.dtype, key.shape[-1])
        return takes and bool(_of_transformers(attention_mask, key, *others))

    sdpa_attention.use_gqa_in_sdpa = use_gqa


def takes_shared_keys(least: Capability, dtype: torch.dtype, width: int) -> bool:
    """Return whether a fused kernel takes keys and values of this width that several heads share."""
    # Of torch's fused kernels only flash does. Where it cannot run, enable_gqa leads to plain products with all
    # scores in float32 (transformers issue 48633 and pull request 46960); keys that are repeated first go through
    # the memory-efficient kernel.
    return least >= AMPERE and dtype in (torch.float16, torch.bfloat16) and width <= _MAX_FLASH_WIDTH


def compile_in_this_process() -> None:
    """Let torch's compiler start no processes, which would outlive a worker that is killed."""
    from torch._inductor import config

    config.compile_threads = int(os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1"))


def set_tf32(spec: CheckpointSpec, least: Capability | None, notes: list[str]) -> None:
    """Let float32 products use TF32's 10 bits of mantissa or not, and note if that has no effect."""
    # Since torch 2.9 these switches set fp32_precision; once that is set directly, reading them raises an error.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = spec.allow_tf32
    if spec.allow_tf32 and least is not None:
        if least < AMPERE:
            notes.append("allow_tf32 has no effect below compute capability 8.0")
        elif os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":  # overrides what a program sets
            notes.append("allow_tf32 has no effect while NVIDIA_TF32_OVERRIDE=0 is in the environment")
