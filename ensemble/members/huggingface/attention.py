"""PURE: which attention a member is told to take; never a default of the library, which differs between releases.

Shared by the plan, which decides, and the worker, which decides by the same rule where the plan could not read the
architecture (a GGUF file without a ``config.json``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# torch's fused attention has no place for a cap on its scores.  transformers names it for Gemma-2 all the same
# before 5.22, and leaves the cap out without a word; later releases refuse.
_NO_CAP = ("sdpa",)
# What transformers takes where a config.json does not say (configuration_gemma2.py, configuration_t5gemma.py).
_CAPPED_UNLESS_SAID = ("gemma2", "t5gemma", "t5_gemma_module")
_KEY = "attn_logit_softcapping"


def choose_attention(soft_capped: bool, supports_sdpa: bool, flash_suits: bool) -> str:
    """The attention that suits a model and its device, as transformers names it.

    Args:
        soft_capped: scores go through tanh (``is_soft_capped``).
        supports_sdpa: transformers runs the model with torch's fused attention.
        flash_suits: flash-attention 2 works on this device, with the type of the weights.
    """
    if soft_capped:  # eager takes memory with the square of the length
        return "flash_attention_2" if flash_suits else "eager"
    return "sdpa" if supports_sdpa else "eager"


def is_soft_capped(config: Mapping[str, Any]) -> bool:
    """Whether a model of this ``config.json``, or a part of it such as its encoder, caps its attention scores."""
    if config.get(_KEY, config.get("model_type") in _CAPPED_UNLESS_SAID):
        return True
    return any(is_soft_capped(part) for part in config.values() if isinstance(part, Mapping))


def leaves_out_cap(attention: str | None) -> bool:
    """Whether this attention would silently compute other numbers for a soft-capped model."""
    return attention in _NO_CAP


def no_cap_text(attention: str, model: str) -> str:
    """What to say of that, key first."""
    return (
        f"attn_implementation: {attention} leaves out the cap on attention scores that {model} was trained with "
        "(attn_logit_softcapping); leave the key out, or set eager"
    )
