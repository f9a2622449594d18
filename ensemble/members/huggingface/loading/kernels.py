"""The choice of torch's and cuBLAS' kernels for this GPU.

torch picks kernels by device, type and shape, and transformers by the arguments that it passes on.  On some GPUs
their defaults are slow, or round more than they need to.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.integrations import sdpa_attention

from ensemble.members.footprint import Capability

# GPUs below only emulate bfloat16, whatever is_bf16_supported() says, and have no TF32 (CUDA C++ Programming Guide,
# "Compute Capabilities": both came with Ampere, as did the flash kernels).
AMPERE: Capability = (8, 0)
# The widest heads that the flash kernel has (sdp_utils.cpp, check_flash_attention_head_dim).
_MAX_FLASH_WIDTH = 256
_of_transformers = sdpa_attention.use_gqa_in_sdpa


def choose_kernels(least: Capability | None) -> None:
    """Set the kernels of this process; on a CPU nothing changes.

    * cuDNN's attention makes a plan for each number of rows and width, about half a second each (transformers pull
      request 48163), and hardly two batches here have the same shape.  torch 2.11 and later prefer it on compute
      capability 9.0 and 10.0; the flash and the memory-efficient kernel need no plan.
    * Products in half precision are summed up in float32.  By default cuBLAS may split long sums and add the parts
      up in half precision: in float16 a part can overflow though the sum does not, bfloat16 keeps 8 bits, and since
      cuBLAS splits by shape, a row's numbers would change with the size of its batch.  Only products with a small
      result are split, such as those of the last token alone.
    * Shared keys are repeated if the flash kernel cannot run: see ``takes_shared_keys``.

    Args:
        least: the compute capability of the least capable GPU; None on a CPU.
    """
    if least is None:
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    sdpa_attention.use_gqa_in_sdpa = functools.partial(_passes_on_shared_keys, least)


def takes_shared_keys(least: Capability, dtype: torch.dtype, width: int) -> bool:
    """Return whether a fused kernel takes keys and values that several heads share without repeating them.

    Of torch's fused kernels only flash does, which needs half precision and compute capability 8.0 or higher.  If
    it cannot run, ``enable_gqa`` leads to plain products with all scores in float32 (transformers issue 48633 and
    pull request 46960); keys that are repeated first go through the memory-efficient kernel.

    Args:
        least: the compute capability of the least capable GPU.
        width: numbers of a head.
    """
    return least >= AMPERE and dtype in (torch.float16, torch.bfloat16) and width <= _MAX_FLASH_WIDTH


def _passes_on_shared_keys(
    least: Capability, attention_mask: torch.Tensor | None, key: torch.Tensor, *others: Any
) -> bool:
    """Replace ``use_gqa_in_sdpa``, which decides without regard to the GPU and the type.

    transformers 5.0 to 5.12 call it with mask and key, later releases with the value as well.
    """
    return takes_shared_keys(least, key.dtype, key.shape[-1]) and bool(
        _of_transformers(attention_mask, key, *others)
    )
