"""What a worker is told of a Hugging Face model; parent and child share it, so it imports nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ensemble.common.protocol import CommonSpec, with_tuples

# Tokens a row may have where neither config nor tokenizer says; those without a limit say something astronomic.
DEFAULT_MAX_LENGTH = 1024
NO_LENGTH_LIMIT = 1_000_000


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """How to load a model and feed it; on the wire these are the ``settings`` of a ``WorkerSpec``.

    ``label_order[j]`` is the model's output column that holds the config's label ``j``.
    ``token_budget`` and ``batch_size`` are None when the worker shall choose.
    ``dtype`` is the config's; ``gpu_dtype`` is what "auto" means on the run's GPUs.  ``max_memory`` has bytes by
    the GPU's number within the lease, as text, and by "cpu".  ``attn_implementation`` is the user's
    (``is_attention_asked``) or the plan's choice, None where the plan could not read the architecture.

    A batch of ``padded_tokens`` as wide as ``width`` takes ``padded_tokens * (bytes_per_token +
    bytes_per_token_pair * width)`` beside the weights, and ``fixed_bytes`` whatever its size; None where the plan
    does not know the architecture.
    ``width`` is the longest row to come, in tokens, as far as the parent can tell.
    """

    model_name_or_path: str
    revision: str | None
    trust_remote_code: bool
    allow_pickle: bool
    adapter_name_or_path: str | None
    merge_adapter: bool
    gguf_file: str | None
    label_order: tuple[int, ...]
    prompt_template: str | None
    text_columns: tuple[str, ...]
    max_length: int | None
    truncation_side: str | None
    add_special_tokens: bool
    batch_size: int | None
    token_budget: int | None
    dtype: str
    gpu_dtype: str
    allow_tf32: bool
    expandable_segments: bool
    max_split_size_mb: int | None
    quantization_config: dict[str, Any] | None
    attn_implementation: str | None
    is_attention_asked: bool
    model_kwargs: dict[str, Any]
    tokenizer_kwargs: dict[str, Any]
    device_map: str | dict[str, Any] | None
    max_memory: dict[str, int] | None
    offload_folder: str | None
    bytes_per_token: float | None
    bytes_per_token_pair: float | None
    fixed_bytes: int
    width: int | None


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelSettings, CommonSpec):
    """The model's settings and what every worker is told, side by side: all that loading and scoring go by."""

    @classmethod
    def of(cls, common: CommonSpec, settings: Mapping[str, Any]) -> ModelSpec:
        """Out of what has come over the wire.

        Raises:
            TypeError: the settings are not those of this class.
        """
        return cls(**vars(common), **with_tuples(settings))
