"""A mapping from the YAML -> transformers' quantization config."""

from __future__ import annotations

import inspect
from typing import Any

from transformers import BitsAndBytesConfig
from transformers.quantizers.auto import AutoQuantizationConfig

# Heads stay unquantized: they are small, and transformers finds by itself only the ones named like Llama's.
_HEADS = ("score", "classifier", "classification_head")


def quantization_config(settings: dict[str, Any]) -> Any:
    """transformers' quantization config for a mapping from the YAML.

    Raises:
        ValueError: a key that this kind of quantization does not know.
    """
    if "quant_method" in settings:
        return AutoQuantizationConfig.from_dict(settings)
    known = set(inspect.signature(BitsAndBytesConfig.__init__).parameters) - {"self", "kwargs"}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise ValueError(
            f"quantization_config: unknown key {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    skipped = settings.get("llm_int8_skip_modules") or []
    return BitsAndBytesConfig(**{**settings, "llm_int8_skip_modules": [*dict.fromkeys([*skipped, *_HEADS])]})
