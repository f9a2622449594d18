"""What a worker is told of a Hugging Face model, and the rules for the dtype, attention and length it is told.

Parent and child share it, so it imports nothing heavy.  The parent decides by these rules, and the spec carries
what it decided.  The child decides, by the same rules, only where no file told the parent enough, or where the
device is not what it was planned for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ensemble.common.protocol import CommonSpec, with_tuples

# Classes of transformers that load a checkpoint; a backbone is one without its head.
CLASSIFIER, LANGUAGE_MODEL = "AutoModelForSequenceClassification", "AutoModelForCausalLM"
BACKBONE = "AutoModel"
IMAGE_CLASSIFIER = "AutoModelForImageClassification"
# Those with a head of the labels.
WITH_LABELS = (CLASSIFIER, IMAGE_CLASSIFIER)
# Tokens a row may have where the config does not say, unless the tokenizer has fewer.
DEFAULT_MAX_LENGTH = 1024
# What transformers takes where a config.json does not say (configuration_gemma2.py, configuration_t5gemma.py).
_CAPPED_UNLESS_SAID = ("gemma2", "t5gemma", "t5_gemma_module")
_CAP = "attn_logit_softcapping"


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """How to load a checkpoint, whatever it reads, and what its batches may take.

    ``auto_class`` is the class of transformers that loads it.
    ``label_order[j]`` is the model's output column that holds the config's label ``j``.
    ``token_budget`` and ``batch_size`` are None when the worker shall choose.
    ``dtype`` and ``attn_implementation`` are what the parent decided; "auto" and None where no file told it enough.
    ``asked`` names those of them, and of ``max_length``, that the user has set.
    ``compute_dtype`` is what stored 4-bit layers compute in instead of what is stored; None: as stored, unless the
    device has another say (``choose_compute_dtype``).
    ``max_memory`` has bytes by the GPU's number within the lease, as text, and by "cpu".

    A batch of ``padded_tokens`` as wide as ``width`` takes ``padded_tokens * (bytes_per_token +
    bytes_per_token_pair * width)`` beside the weights, and ``fixed_bytes`` whatever its size; None where the plan
    does not know the architecture.
    ``width`` is the longest row to come, in tokens, as far as the parent can tell.
    """

    auto_class: str = CLASSIFIER
    model_name_or_path: str
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    adapter_name_or_path: str | None
    merge_adapter: bool
    gguf_file: str | None
    label_order: tuple[int, ...]
    batch_size: int | None
    token_budget: int | None
    dtype: str
    allow_tf32: bool
    expandable_segments: bool
    max_split_size_mb: int | None
    quantization_config: dict[str, Any] | None
    compute_dtype: str | None = None
    attn_implementation: str | None
    asked: tuple[str, ...]
    model_kwargs: dict[str, Any]
    device_map: str | dict[str, Any] | None
    max_memory: dict[str, int] | None
    offload_folder: str | None
    torch_compile: bool = False
    bytes_per_token: float | None
    bytes_per_token_pair: float | None
    fixed_bytes: int
    width: int | None


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec(CheckpointSettings, CommonSpec):
    """A checkpoint's settings and what every worker is told, side by side: all that loading goes by."""

    @classmethod
    def of(cls, common: CommonSpec, settings: Mapping[str, Any]) -> Self:
        """Out of what has come over the wire.

        Raises:
            TypeError: the settings are not those of this class.
        """
        return cls(**vars(common), **with_tuples(settings))


@dataclass(frozen=True, kw_only=True)
class ModelSettings(CheckpointSettings):
    """The same of a model that reads text; on the wire these are the ``settings`` of a ``WorkerSpec``.

    ``max_length`` is what the parent decided; None where no file told it enough.
    ``truncation`` is the key of that name: ``fields``, by column ``share`` and ``keep``, and ``marker``.
    ``view_templates`` has that of each view of the rows; None: as the member itself reads them.
    """

    prompt_template: str | None
    text_columns: tuple[str, ...]
    max_length: int | None
    truncation_side: str | None
    truncation: dict[str, Any] | None = None
    view_templates: tuple[str | None, ...] = ()
    add_special_tokens: bool
    tokenizer_kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelSettings, CheckpointSpec):
    """The text model's settings and what every worker is told: all that loading and scoring go by."""


def choose_dtype(asked: str, stored: str | None, gpus: int, capability: tuple[int, int] | None) -> str:
    """The type of the weights: what was asked for, or what suits the device.

    bfloat16 is only emulated below compute capability 8.0, whatever torch's is_bf16_supported says; a CPU is
    several times slower in half precision.

    Args:
        stored: the checkpoint's own type; None: not known.
        gpus: of a replica; 0: the CPU.
        capability: of the least capable of them; None: not known.

    Returns:
        float32, float16 or bfloat16; "auto" for the checkpoint's own where that is not known.
    """
    if asked != "auto":
        return asked
    if not gpus:
        return "float32"
    if capability is not None and capability < (8, 0):
        return "float16"
    if stored is None:
        return "auto"
    return stored if stored in ("float16", "bfloat16") else "float32"


def choose_compute_dtype(stored: Mapping[str, Any] | None, capability: tuple[int, int] | None) -> str | None:
    """What the 4-bit layers of a checkpoint that was saved quantized compute in, where that is not what it says.

    bitsandbytes' layers go by what was saved, whatever type the rest is loaded in; bfloat16 is only emulated below
    compute capability 8.0.

    Args:
        stored: the quantization settings in its ``config.json``; None: it is not quantized.
        capability: of the least capable GPU; None: the CPU, or not known.

    Returns:
        "float16", or None for what was saved.
    """
    if not stored or not stored.get("load_in_4bit") or capability is None or capability >= (8, 0):
        return None
    computes_in = str(stored.get("bnb_4bit_compute_dtype")).removeprefix("torch.")
    return "float16" if computes_in == "bfloat16" else None


def choose_attention(soft_capped: bool, supports_sdpa: bool, flash_suits: bool) -> str:
    """The attention that suits a model and its device, as transformers names it.

    Never a default of the library, which differs between releases.

    Args:
        soft_capped: scores go through tanh (``is_soft_capped``).
        supports_sdpa: transformers runs the model with torch's fused attention.
        flash_suits: flash-attention 2 works on this device, with the type of the weights.
    """
    if soft_capped:  # eager takes memory with the square of the length
        return "flash_attention_2" if flash_suits else "eager"
    return "sdpa" if supports_sdpa else "eager"


def default_max_length(model_max_length: float) -> int:
    """Tokens that a row may have where the config does not say; the tokenizer's limit is astronomic for none."""
    return int(min(DEFAULT_MAX_LENGTH, model_max_length))


def is_soft_capped(config: Mapping[str, Any]) -> bool:
    """Whether a model of this ``config.json``, or a part of it such as its encoder, caps its attention scores."""
    if config.get(_CAP, config.get("model_type") in _CAPPED_UNLESS_SAID):
        return True
    return any(is_soft_capped(part) for part in config.values() if isinstance(part, Mapping))


def cap_problem(attention: str | None, model: str) -> str:
    """What is wrong with an attention for a soft-capped model, key first; empty where nothing is.

    torch's fused attention has no place for a cap on its scores.  transformers names it for Gemma-2 all the same
    before 5.22, and leaves the cap out without a word; later releases refuse.
    """
    if attention != "sdpa":
        return ""
    return (
        f"attn_implementation: {attention} leaves out the cap on attention scores that {model} was trained with "
        "(attn_logit_softcapping); leave the key out, or set eager"
    )


def too_much_text(tokens: int, room: int, fields: Sequence[str]) -> str:
    """That a template's text for every row is longer than a row may be.

    Args:
        fields: the columns that truncation may cut.
    """
    what = f"truncation cuts only {', '.join(fields)}" if fields else "every row loses some of it"
    return (
        f"prompt_template: the text that it has for every row is {tokens:,} tokens, more than the {room:,} that "
        f"max_length leaves for a prompt, and {what}; shorten it, or raise max_length"
    )
