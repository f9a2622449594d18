"""PURE: names of a checkpoint's tensors that a classifier has no place for.

Shared by the plan, which counts what is loaded, and the worker, which refuses what went nowhere.
"""

from __future__ import annotations

import re

# Heads of other tasks, buffers that old releases stored, settings as text: nothing that is loaded onto a device.
_DROPPED = re.compile(
    r"(^|\.)(lm_head|cls\.(predictions|seq_relationship)|(lm|mask|generator|discriminator)_predictions"
    r"|vocab_(transform|layer_norm|projector)|embed_out|qa_outputs)\."
    r"|^decoder\.(weight|bias)$|\.quant_state\.|rotary_emb\.inv_freq$|position_ids$|\.attn\.(bias|masked_bias)$"
)
# What stands beside packed weights: bitsandbytes, GPTQ and AWQ, compressed-tensors.
_BESIDE_PACKED = re.compile(
    r"\.(absmax|quant_map|nested_absmax|nested_quant_map|SCB|qzeros|scales|g_idx"
    r"|weight_(format|scale|scale_inv|zero_point|shape|g_idx)|input_scale)$"
)


def is_left_out(name: str) -> bool:
    """Whether a tensor of this name is of no use to a classifier: another task's head, a buffer, a setting."""
    return _DROPPED.search(name) is not None


def stands_beside_packed(name: str) -> bool:
    """Whether a tensor of this name belongs to weights that are stored quantized."""
    return _BESIDE_PACKED.search(name) is not None
