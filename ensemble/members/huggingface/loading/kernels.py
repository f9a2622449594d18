"""Kernels: which of torch's and cuBLAS' serve a pass on this GPU.

torch picks them by device, type and shape, and transformers by what it passes on.  On some GPUs what they pick by
themselves is slow, or rounds more than it needs to.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.integrations import sdpa_attention

from ensemble.members.footprint import Capability

# Below, bfloat16 is only emulated, whatever is_bf16_supported() says, and there is no TF32 (CUDA C++ Programming
# Guide, "Compute Capabilities": both came with Ampere, as did the flash kernels).
AMPERE: Capability = (8, 0)
# The widest heads that the flash kernel has (sdp_utils.cpp, check_flash_attention_head_dim).
_MAX_FLASH_WIDTH = 256
_of_transformers = sdpa_attention.use_gqa_in_sdpa


def choose_kernels(least: Capability | None) -> None:
    """Set, for this process, what its passes run on; on a CPU all stays as it is.

    * cuDNN's attention plans anew for each number of rows and width, about half a second each (transformers pull
      request 48163), and batches are cut by length here: hardly two have the same.  torch 2.11 and later prefer
      it on compute capability 9.0 and 10.0; the flash and the memory-efficient kernel need no plan.
    * Products in half precision are summed up in float32.  By default cuBLAS may split long sums and add the parts
      up in half precision: in float16 a part can overflow where the sum does not, in bfloat16 8 bits are left, and
      as it splits by shape, a row's numbers would change with the size of its batch.  Only products with a small
      result are split, such as those of the last token alone.
    * Shared keys are repeated where the flash kernel cannot run: see ``takes_shared_keys``.

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
    """Whether a fused kernel takes keys and values that queries of several heads share, as they are.

    Of torch's fused kernels only flash does, which is for half precision from compute capability 8.0 on.  Where
    it cannot run, ``enable_gqa`` leaves plain products with all the scores, in float32 (transformers issue 48633
    and pull request 46960); keys that are repeated first go through the memory-efficient kernel.

    Args:
        least: the compute capability of the least capable GPU.
        width: numbers of a head.
    """
    return least >= AMPERE and dtype in (torch.float16, torch.bfloat16) and width <= _MAX_FLASH_WIDTH


def _passes_on_shared_keys(
    least: Capability, attention_mask: torch.Tensor | None, key: torch.Tensor, *others: Any
) -> bool:
    """In the place of ``use_gqa_in_sdpa``, which decides without asking for the GPU or the type.

    transformers 5.0 to 5.12 call it with mask and key, later ones with the value as well.
    """
    return takes_shared_keys(least, key.dtype, key.shape[-1]) and bool(
        _of_transformers(attention_mask, key, *others)
    )
