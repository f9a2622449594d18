"""A mapping from the YAML -> transformers' quantization config; heads are kept out of it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import AutoQuantizationConfig

from ensemble.members.huggingface.memory.sizes import UNQUANTIZED

_BITSANDBYTES = "bitsandbytes"


def is_bitsandbytes(settings: Mapping[str, Any] | None) -> bool:
    """Return whether settings from the YAML or a config.json mean bitsandbytes, which needs no name there."""
    return settings is not None and settings.get("quant_method", _BITSANDBYTES) == _BITSANDBYTES


def quantization_config(settings: Mapping[str, Any], dtype: torch.dtype | str = "auto") -> Any:
    """Return transformers' quantization config for a mapping from the YAML.

    Args:
        dtype: of the other weights.  4-bit layers compute in it unless the settings say otherwise.
    """
    if not is_bitsandbytes(settings):
        return AutoQuantizationConfig.from_dict(dict(settings))
    # A config.json that was saved names the method and repeats two keys with a line in front.
    keys = {
        key: value for key, value in settings.items() if key != "quant_method" and not key.startswith("_")
    }
    parameters = set(inspect.signature(BitsAndBytesConfig.__init__).parameters) - {"self", "kwargs"}
    unknown = sorted(set(keys) - parameters)
    if unknown:
        raise ValueError(
            f"quantization_config: unknown key {', '.join(unknown)}; known: {', '.join(sorted(parameters))}"
        )
    if keys.get("load_in_4bit") and isinstance(dtype, torch.dtype):
        keys.setdefault("bnb_4bit_compute_dtype", dtype)
    # Heads are small, and transformers finds by itself only heads that are named like Llama's.
    return BitsAndBytesConfig(**keep_whole(keys, UNQUANTIZED))


def keep_whole(settings: Mapping[str, Any], modules: Iterable[str]) -> dict[str, Any]:
    """Return bitsandbytes' settings with these modules left unquantized."""
    skipped = settings.get("llm_int8_skip_modules") or []
    return {**settings, "llm_int8_skip_modules": [*dict.fromkeys([*skipped, *modules])]}
