"""What the parent tells a worker of a member of this kind."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ensemble.members.huggingface.checkpoint.digests import hub_commit
from ensemble.members.huggingface.spec import ModelSettings

if TYPE_CHECKING:
    from ensemble.config import ModelConfig
    from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
    from ensemble.members.huggingface.memory.replica import Footprint

CHILD = "ensemble.members.seq_cls.child"


def worker_settings(
    model: ModelConfig,
    checkpoint: Checkpoint,
    text_columns: Sequence[str],
    gpu_dtype: str,
    attention: str | None,
    footprint: Footprint | None,
    offload_folder: Path | None,
) -> ModelSettings:
    """The settings of one worker.

    Args:
        text_columns: what the member reads where it has no template.
        gpu_dtype: what "auto" means on the run's GPUs.
        attention: the user's choice or the plan's; None where nobody could choose.
        footprint: a replica's memory; None where it is not known.
        offload_folder: for this worker alone.
    """
    per_token, per_pair = footprint.activation.line(footprint.width) if footprint else (None, None)
    return ModelSettings(
        model_name_or_path=model.model_name_or_path,
        # What was checked is what is loaded: a branch of the hub may have moved since.
        revision=hub_commit(model.model_name_or_path, checkpoint.folder) or model.revision,
        trust_remote_code=model.trust_remote_code,
        allow_pickle=model.allow_pickle,
        adapter_name_or_path=model.adapter_name_or_path,
        merge_adapter=model.merge_adapter,
        gguf_file=model.gguf_file,
        label_order=checkpoint.label_order,
        prompt_template=model.prompt_template,
        text_columns=tuple(text_columns),
        max_length=model.max_length,
        truncation_side=model.truncation_side,
        add_special_tokens=model.add_special_tokens,
        batch_size=None if model.batch_size == "auto" else model.batch_size,
        token_budget=model.max_num_batched_tokens,
        dtype=model.dtype,
        gpu_dtype=gpu_dtype,
        allow_tf32=model.allow_tf32,
        expandable_segments=model.expandable_segments,
        max_split_size_mb=model.max_split_size_mb,
        quantization_config=model.quantization_config,
        attn_implementation=attention,
        is_attention_asked=model.attn_implementation is not None,
        model_kwargs=model.model_kwargs,
        tokenizer_kwargs=model.tokenizer_kwargs,
        device_map=model.device_map,
        max_memory=None
        if model.max_memory is None
        else {str(key): size for key, size in model.max_memory.items()},
        offload_folder=None if offload_folder is None else str(offload_folder.resolve()),
        bytes_per_token=per_token,
        bytes_per_token_pair=per_pair,
        fixed_bytes=footprint.activation.fixed_bytes if footprint else 0,
        width=footprint.width if footprint else None,
    )
