"""What the plan must know of each member, read from the checkpoint's files; no weights are loaded."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ensemble.common.files import read_json
from ensemble.members.huggingface.checkpoint.architecture import read_architecture
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
from ensemble.members.huggingface.checkpoint.tokenizer_files import own_max_length
from ensemble.members.huggingface.checkpoint.transformers_source import modeling_source
from ensemble.members.huggingface.checkpoint.weight_files import read_tensors, shards_of
from ensemble.members.huggingface.memory.replica import CheckpointFacts
from ensemble.members.huggingface.settings import TextSettings
from ensemble.members.huggingface.spec import DEFAULT_MAX_LENGTH


def checkpoint_facts(
    model: TextSettings, checkpoint: Checkpoint, lengths: npt.NDArray[np.int64], num_labels: int
) -> CheckpointFacts:
    """Facts of one member's checkpoint.

    Args:
        lengths: bytes of text per row, [rows].

    Raises:
        CheckpointError: a weight file is broken.
    """
    folder = checkpoint.folder
    architecture = read_architecture(read_json(folder / "config.json"))
    own = own_max_length(folder)
    max_length = model.max_length or (DEFAULT_MAX_LENGTH if own is None else own)
    if architecture is not None and architecture.max_positions is not None:
        max_length = min(max_length, architecture.max_positions)
    adapter = model.adapter_name_or_path
    adapter_files = Path(adapter).glob("adapter_model.*") if adapter is not None else ()
    return CheckpointFacts(
        lengths=lengths,
        tensors=read_tensors(folder) if _is_whole(model, folder) else None,
        architecture=architecture,
        adapter_bytes=sum(file.stat().st_size for file in adapter_files),
        num_labels=num_labels,
        max_length=max_length,
        supports_sdpa=supports_sdpa(checkpoint.model_type),
        pools_last_token=not scores_every_position(checkpoint.model_type),
        has_flash_attention=False,  # the planner asks a process that has torch, where it matters
    )


def supports_sdpa(model_type: str) -> bool:
    """Whether the installed transformers runs classifiers of this kind with torch's fused attention.

    A kind that is not there is taken for one of today's, which do.  A class that does not say so does not
    (transformers, modeling_utils.py, PreTrainedModel).
    """
    source = modeling_source(model_type)
    return source is None or re.search(r"^    _supports_sdpa = True", source, re.MULTILINE) is not None


def scores_every_position(model_type: str) -> bool:
    """Whether a classifier of this kind sends all positions through its head, and not only the one it pools.

    So do the decoders that have a forward of their own; for the others the worker pools first.
    """
    return "self.score(hidden_states)" in (modeling_source(model_type) or "")


def _is_whole(model: TextSettings, folder: Path) -> bool:
    """Whether the weights are safetensors and all here; in the hub's cache they may be so in part."""
    if model.gguf_file is not None:
        return False
    if Path(model.model_name_or_path).is_dir():
        return True
    index = folder / "model.safetensors.index.json"
    names = shards_of(index) if index.is_file() else ["model.safetensors"]
    return all((folder / name).is_file() for name in names)
