"""Check quantization settings without importing the packages that would use them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from ensemble.members.footprint import Capability

BITSANDBYTES = "bitsandbytes"
# Heads, which are not quantized: the worker passes these names to bitsandbytes.
UNQUANTIZED = ("score", "classifier", "classification_head", "lm_head")
# bitsandbytes' products of int8 take the tensor cores of Turing (its documentation, "LLM.int8()").
_INT8_CAPABILITY: Capability = (7, 5)
# The package of each method that needs one (transformers, quantizers/quantizer_*.py, validate_environment).
_PACKAGES = {
    **{
        name: name for name in "aqlm auto-round bitsandbytes compressed-tensors hqq sinq torchao vptq".split()
    },
    "gptq": "gptqmodel",
    "awq": "gptqmodel",
    "quanto": "optimum-quanto",
    "quark": "amd-quark",
}
_BOOLEANS = (
    "load_in_4bit load_in_8bit bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight"
).split()
_WORDS = {
    "bnb_4bit_quant_type": ("fp4", "nf4"),
    "bnb_4bit_compute_dtype": ("float16", "bfloat16", "float32"),
}


def method_of(settings: Mapping[str, Any] | None) -> str | None:
    """Return the method of the settings, by default bitsandbytes; None without settings."""
    if settings is None:
        return None
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return BITSANDBYTES
    return str(settings.get("quant_method") or BITSANDBYTES)


def compute_dtype_of(settings: Mapping[str, Any] | None) -> str:
    """Return the type that stored 4-bit layers compute in: float32 where none is set (BitsAndBytesConfig)."""
    return str((settings or {}).get("bnb_4bit_compute_dtype") or "float32").removeprefix("torch.")


def capability_problem(settings: Mapping[str, Any] | None, capability: Capability | None) -> str:
    """Return why a GPU cannot compute with these settings, key first; empty if it can, or if nothing is known."""
    if settings is None or capability is None or not settings.get("load_in_8bit"):
        return ""
    if capability >= _INT8_CAPABILITY:
        return ""
    needed, available = (f"{major}.{minor}" for major, minor in (_INT8_CAPABILITY, capability))
    return (
        f"quantization_config: load_in_8bit needs compute capability {needed}, and the least capable GPU has "
        f"{available}; use load_in_4bit: true, leave such GPUs out (devices), or set num_gpus: 0"
    )


def package_of(settings: Mapping[str, Any] | None) -> str | None:
    """Return the package that these settings need; None without one."""
    return _PACKAGES.get(method_of(settings) or "")


def quantized_bits(settings: Mapping[str, Any] | None) -> int:
    """Return the bits of a weight under these settings; 0 without settings."""
    if not settings:
        return 0
    if settings.get("load_in_4bit") or settings.get("load_in_8bit"):
        return 4 if settings.get("load_in_4bit") else 8
    groups = settings.get("config_groups")  # compressed-tensors: how the layers of each group are stored
    groups = groups.values() if isinstance(groups, Mapping) else ()
    weights = [group.get("weights") for group in groups if isinstance(group, Mapping)]
    for part in (settings, *weights):
        if not isinstance(part, Mapping):
            continue
        for key in ("bits", "nbits", "w_bit", "num_bits"):
            bits = part.get(key)
            if isinstance(bits, int) and bits > 0:
                return bits
    if method_of(settings) == BITSANDBYTES:
        return 0
    # Others say it in a name, such as torchao's int4_weight_only or fp8.
    words = " ".join(map(str, settings.values()))
    named = re.search(r"(?:int|fp|nf|float)_?([248])(?!\d)", words)
    return int(named[1]) if named else 8


def quantization_problems(
    settings: Mapping[str, Any] | None, stored: Mapping[str, Any] | None, merges_adapter: bool
) -> Iterator[str]:
    """Yield problems with a member's quantization; each sentence begins with its key.

    Args:
        settings: the YAML's ``quantization_config``.
        stored: the checkpoint's settings, which take precedence in transformers.
    """
    if settings is not None and method_of(settings) == BITSANDBYTES:
        # Values that bitsandbytes would refuse only once weights are loaded, if at all.
        for key, value in settings.items():
            if key in _BOOLEANS and not isinstance(value, bool):
                yield f"quantization_config.{key}: must be true or false"
            elif key in _WORDS and str(value).removeprefix("torch.") not in _WORDS[key]:
                yield f"quantization_config.{key}: must be one of {', '.join(_WORDS[key])}"
        widths = [key for key in ("load_in_4bit", "load_in_8bit") if settings.get(key)]
        if len(widths) == 2:
            yield "quantization_config: load_in_4bit and load_in_8bit exclude each other; keep one"
        elif not widths:
            yield "quantization_config: it quantizes nothing; add load_in_4bit: true or load_in_8bit: true"
    if stored is None:
        return
    method, config_method = method_of(stored), method_of(settings)
    if config_method not in (None, method):
        yield (
            f"quantization_config: it says {config_method}, but the checkpoint was saved in {method}, and weights "
            "are quantized only once; leave it out"
        )
    elif merges_adapter:
        yield (
            f"merge_adapter: the checkpoint was saved in {method}, and quantized weights cannot take an adapter in "
            "without rounding it away; leave it unmerged"
        )


def quantization_warnings(
    settings: Mapping[str, Any] | None, stored: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield effects that a user may not expect; arguments as for ``quantization_problems``.

    fp4 is bitsandbytes' default for 4-bit weights.  With three small trained classifiers it changed probabilities
    by 0.10 to 0.21 on average, nf4 by half as much or less.
    """
    if settings is None:
        return
    if stored is not None:
        yield (
            f"quantization_config: the checkpoint was saved in {method_of(stored)} and its own settings are used; "
            "of the ones given here at most those that concern loading"
        )
    elif settings.get("load_in_4bit") and "bnb_4bit_quant_type" not in settings:
        yield (
            "quantization_config: load_in_4bit without bnb_4bit_quant_type means fp4, which changes probabilities "
            "twice as much as nf4 or more (three small models: by 0.10 to 0.21 on average); set "
            "bnb_4bit_quant_type: nf4, or fp4 if you mean it"
        )
    elif settings.get("load_in_8bit") and settings.get("llm_int8_threshold") != 0:
        yield (
            "quantization_config: with int8 an outlier in a row changes the numbers of the other rows in its batch "
            "by about a tenth of what int8 itself changes, and a GPU waits for the host in every layer; "
            "llm_int8_threshold: 0.0 avoids both, and keeps no outliers apart (tune measures it)"
        )
