"""Tell encoders which tokens are padding, without a question to the device.

Given a mask of tokens, transformers asks the device in every pass whether all of it is true, to leave the mask out
then (masking_utils.py, ``_ignore_bidirectional_mask_sdpa``). The host waits for the answer, so that a GPU never has
more than one pass in its queue. But the host knows the lengths. Rows of equal length get no mask, as after such an
answer; only without a mask can torch's flash kernel compute them. Other rows get a mask of four dimensions, which
transformers passes on to attention as it is (``_preprocess_mask_arguments``).
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedModel


def takes_ready_mask(model: Any) -> bool:
    """Return whether transformers makes a model's masks with ``masking_utils``, for tokens that see all others.

    Only torch's fused attention reads a boolean mask: eager attention adds numbers, and flash-attention 2 wants two
    dimensions. A layer with a sliding window needs a mask of its own.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    names = {name for part in parts for name in vars(sys.modules.get(type(part).__module__, object))}
    is_causal = [module.is_causal for module in model.modules() if hasattr(module, "is_causal")]
    return (
        "create_bidirectional_mask" in names
        and not any("sliding_window" in name for name in names)
        and all(part.config._attn_implementation == "sdpa" for part in parts)
        and bool(is_causal)
        and not any(is_causal)
        and not getattr(model.config, "is_encoder_decoder", False)
    )


def ready_mask(mask: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
    """Return the mask of a batch as attention reads it.

    Args:
        mask: 1 for tokens and 0 for padding, [rows, width].

    Returns:
        bool [rows, 1, 1, width], the same for all heads and queries; None if no row has padding.
    """
    if mask.all():
        return None
    return mask.astype(np.bool_)[:, None, None]
