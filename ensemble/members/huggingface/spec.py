"""Define what a worker gets to know of a Hugging Face model, and the rules for its dtype, attention and length.

Parent and child share this file, so it imports nothing heavy.  The parent decides by these rules and puts its
decisions into the spec.  The child decides, by the same rules, only where files did not tell the parent enough, or
where the device differs from the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from ensemble.common.protocol import CommonSpec, with_tuples
from ensemble.members.huggingface.checkpoint.quantization_methods import compute_dtype_of

# The child side of all kinds that run a checkpoint, before a colon and the path of the kind's predictor.
CHILD = "ensemble.members.huggingface.child"
# Classes of transformers that load a checkpoint; a backbone is one without its head.
CLASSIFIER, LANGUAGE_MODEL = "AutoModelForSequenceClassification", "AutoModelForCausalLM"
BACKBONE = "AutoModel"
IMAGE_CLASSIFIER = "AutoModelForImageClassification"
# Classes whose head has the labels.
WITH_LABELS = (CLASSIFIER, IMAGE_CLASSIFIER)
# A revision that nobody can move to other code.
COMMIT = r"[0-9a-fA-F]{40}"
# What a training leaves of a head.
HEAD_FILE = "head.safetensors"
# Tokens that a row may have where the config does not say, unless the tokenizer has a lower limit.
DEFAULT_MAX_LENGTH = 1024
# Numbers of an image that count as a token: a patch of 16 by 16 pixels in three colours.
NUMBERS_OF_TOKEN = 16 * 16 * 3
_CAP = "attn_logit_softcapping"
# Our own attention for capped scores, as transformers knows it, and how many queries it computes at a time.
CAPPED_BLOCKS = "capped_blocks"
QUERIES_PER_BLOCK = 256
# torch's flex_attention over rows that stand one behind the other, in blocks of so many queries and keys.
FLEX = "flex"
FLEX_BLOCK = 128
# Arguments of model_kwargs and tokenizer_kwargs that say how files are fetched. They do not change predictions, and
# a token may change every day.
_FETCH_KEYS = (
    "token use_auth_token cache_dir force_download resume_download local_files_only proxies"
).split()


@dataclass(frozen=True)
class AdapterSource:
    """Name an adapter, or several adapters that become one.

    Attributes:
        names: folders, or names on the hub.
        combination_type: how peft's ``add_weighted_adapter`` calls the way that several are averaged, "cat" or
            "linear"; empty for a single adapter.
    """

    names: tuple[str, ...]
    combination_type: str = ""

    def __str__(self) -> str:
        names = ", ".join(self.names)
        return f"mean ({self.combination_type}) of {names}" if self.combination_type else names


def tokenizer_names(view_adapters: Sequence[AdapterSource | None]) -> list[str]:
    """Return the names of the views' adapters, each of which may bring a tokenizer; "" for the base alone."""
    return [name for source in view_adapters for name in (("",) if source is None else source.names)]


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """State how to load a checkpoint, whatever it reads, and how large its batches may be.

    Beside the weights, a batch of ``padded_tokens`` with rows of ``width`` tokens takes ``padded_tokens *
    (bytes_per_token + bytes_per_token_pair * width + bytes_per_row / width)``, and ``fixed_bytes`` whatever its
    size; None where the plan does not know the architecture.  ``Activation`` explains the others.

    Attributes:
        auto_class: the class of transformers that loads the checkpoint.
        averaged_checkpoints: folders, whose mean is loaded with all else of the first, ``model_name_or_path``.
        job_adapters: the adapter of each job; None: the base alone.
        label_order: ``label_order[j]`` is the model's output column for the config's label ``j``.
        batch_size, token_budget: None: the worker chooses.
        dtype, attn_implementation: the parent's decisions; "auto" and None where files did not tell it enough.
        asked: which of these two the user has set.
        compute_dtype: of stored 4-bit layers; None: as stored, or by ``choose_compute_dtype``.
        max_memory: bytes by the GPU's number within the lease, as text, and by "cpu".
        width: tokens of the longest row, as far as the parent can tell.
    """

    auto_class: str = CLASSIFIER
    model_name_or_path: str
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    job_adapters: tuple[AdapterSource | None, ...]
    merge_adapter: bool
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
    averaged_checkpoints: tuple[str, ...] = ()
    bytes_per_token: float | None = None
    bytes_per_token_pair: float = 0.0
    bytes_per_row: float = 0.0
    fixed_bytes: int = 0
    bytes_per_kept_token: float = 0.0
    width: int | None


@dataclass(frozen=True, kw_only=True)
class CheckpointSpec(CheckpointSettings, CommonSpec):
    """Join a checkpoint's settings with those of every worker: all that loading needs."""

    @classmethod
    def of(cls, common: CommonSpec, settings: Mapping[str, Any]) -> Self:
        """Make the spec from what the parent has sent.

        Raises:
            TypeError: the settings are not those of this class.
        """
        adapters = tuple(
            AdapterSource(**with_tuples(adapter)) if isinstance(adapter, Mapping) else adapter
            for adapter in settings["job_adapters"]
        )
        return cls(**vars(common), **{**with_tuples(settings), "job_adapters": adapters})


@dataclass(frozen=True, kw_only=True)
class ModelSettings(CheckpointSettings):
    """State how to load and feed a model that reads text; sent as the ``settings`` of a ``WorkerSpec``.

    Attributes:
        max_length: the user's; None: the tokenizer's own limit.
        truncation: as in the config: ``fields``, with ``share`` and ``keep`` by column, and ``marker``.
        job_templates: the template of each job; None: the member's own.
        compile_timeout: seconds for compiling the attention.
    """

    prompt_template: str | None
    text_columns: tuple[str, ...]
    max_length: int | None
    truncation_side: str | None
    truncation: dict[str, Any] | None = None
    job_templates: tuple[str | None, ...] = (None,)
    add_special_tokens: bool
    tokenizer_kwargs: dict[str, Any]
    compile_timeout: float = 120.0


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelSettings, CheckpointSpec):
    """Join a text model's settings with those of every worker: all that loading and scoring need."""

    asks_for_segments: bool = True  # that its tokenizer loses, and its model has learnt


def choose_dtype(asked: str, stored: str | None, gpus: int, capability: tuple[int, int] | None) -> str:
    """Choose the type of the weights: what the user asked for, or what suits the device.

    bfloat16 is only emulated below compute capability 8.0, whatever torch's is_bf16_supported says; a CPU is
    several times slower in half precision.

    Args:
        asked: the key ``dtype``.
        stored: the checkpoint's type; None: not known.
        gpus: of a replica; 0: the CPU.
        capability: of the least capable GPU; None: not known.

    Returns:
        "float32", "float16" or "bfloat16"; "auto" for the checkpoint's type where that is not known.
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


def choose_compute_dtype(
    stored: Mapping[str, Any] | None, capability: tuple[int, int] | None, dtype: str
) -> str | None:
    """Choose the type that stored 4-bit layers compute in; None: the stored type.

    bitsandbytes' layers use the stored type, whatever the type of the other layers.  bfloat16 is only emulated
    below compute capability 8.0.  float32, which transformers stores where nobody chose a type, does without tensor
    cores: where the other layers are in half precision, these compute in half precision, too.

    Args:
        stored: the quantization settings in its ``config.json``; None: it is not quantized.
        capability: of the least capable GPU; None: the CPU, or not known.
        dtype: of the other layers.
    """
    if not stored or not stored.get("load_in_4bit") or capability is None:
        return None
    stored_dtype = compute_dtype_of(stored)
    if stored_dtype == "float32" and dtype in ("float16", "bfloat16"):
        return "float16" if capability < (8, 0) else dtype
    return "float16" if stored_dtype == "bfloat16" and capability < (8, 0) else None


def choose_attention(
    soft_capped: bool, supports_sdpa: bool, flash_suits: bool, flex_suits: bool = False
) -> str:
    """Choose the attention that suits a model and its device, as transformers names it.

    The library's default is never used, since it differs between releases.

    Args:
        soft_capped: whether scores go through tanh (``is_soft_capped``).
        supports_sdpa: whether transformers runs the model with torch's fused attention.
        flash_suits: whether flash-attention 2 works on this device, with the type of the weights.
        flex_suits: whether packed rows and compiled attention suit the model, its rows and the device.
    """
    if flex_suits and not (soft_capped and flash_suits):
        return FLEX
    if soft_capped:
        return "flash_attention_2" if flash_suits else CAPPED_BLOCKS
    return "sdpa" if supports_sdpa else "eager"


def default_max_length(model_max_length: float) -> int:
    """Return the tokens that a row may have where the config does not say.

    A tokenizer without a limit has an astronomic ``model_max_length``.
    """
    return int(min(DEFAULT_MAX_LENGTH, model_max_length))


def is_soft_capped(config: Mapping[str, Any]) -> bool:
    """Return whether a model of this config, or a part such as its encoder, caps its attention scores."""
    if config.get(_CAP):
        return True
    return any(is_soft_capped(part) for part in config.values() if isinstance(part, Mapping))


def cap_problem(attention: str | None, model: str) -> str:
    """Return the problem with an attention for a soft-capped model, key first; empty: none.

    torch's fused attention cannot cap its scores.  Before 5.22 transformers accepts it for Gemma-2 and silently
    leaves the cap out; later releases refuse.
    """
    if attention != "sdpa":
        return ""
    return (
        f"attn_implementation: {attention} leaves out the cap on attention scores that {model} was trained with "
        "(attn_logit_softcapping); leave the key out, or set eager"
    )


def without_fetching(kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return arguments of ``from_pretrained`` without those that say how files are fetched."""
    return {key: value for key, value in kwargs.items() if key not in _FETCH_KEYS}


def too_much_text(tokens: int, max_tokens: int, fields: Sequence[str]) -> str:
    """Return the sentence that a template's text for every row is longer than a prompt may be.

    Args:
        fields: the columns that truncation may cut.
    """
    effect = f"truncation cuts only {', '.join(fields)}" if fields else "every row loses some of it"
    return (
        f"prompt_template: the text that it has for every row is {tokens:,} tokens, more than the "
        f"{max_tokens:,} that max_length leaves for a prompt, and {effect}; shorten it, or raise max_length"
    )
