"""What the plan must know of each member, read from the checkpoint's files; no weights are loaded."""

from __future__ import annotations

import importlib.util
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.checkpoint.architecture import Architecture, read_architecture
from ensemble.checkpoint.inspection import Checkpoint
from ensemble.checkpoint.tensors import read_tensors
from ensemble.config import ModelConfig
from ensemble.planning.footprint import MemberFacts

# As in the worker: what a member without max_length gets where its tokenizer has no limit.
DEFAULT_MAX_LENGTH = 1024
_NO_LIMIT = 1_000_000
# Of a member whose checkpoint or table could not be read.
UNKNOWN = MemberFacts(
    lengths=np.zeros(1, dtype=np.int64),
    tensors=None,
    architecture=None,
    adapter_bytes=0,
    num_labels=1,
    max_length=DEFAULT_MAX_LENGTH,
    supports_sdpa=True,
    has_flash_attention=False,
)


def member_facts(
    model: ModelConfig, checkpoint: Checkpoint, lengths: npt.NDArray[np.int64], num_labels: int
) -> MemberFacts:
    """Facts of one member.

    Args:
        lengths: bytes of text per row, [rows].

    Raises:
        CheckpointError: a weight file is broken.
    """
    folder = checkpoint.folder
    config = _json(folder / "config.json")
    architecture = read_architecture(config)
    return MemberFacts(
        lengths=lengths,
        tensors=read_tensors(folder) if model.gguf_file is None else None,
        architecture=architecture,
        adapter_bytes=_adapter_bytes(model),
        num_labels=num_labels,
        max_length=_max_length(model, folder, architecture),
        supports_sdpa=supports_sdpa(checkpoint.model_type),
        has_flash_attention=importlib.util.find_spec("flash_attn") is not None,
    )


@cache
def supports_sdpa(model_type: str) -> bool:
    """Whether the installed transformers runs this kind of model with torch's fused attention.

    Read from its source, because importing it takes seconds; a kind that is not there is taken for one of today's,
    which do.
    """
    found = importlib.util.find_spec("transformers")
    places = list(found.submodule_search_locations or ()) if found is not None else []
    for place in places:
        for file in Path(place).glob(f"models/{model_type.replace('-', '_')}/modeling_*.py"):
            said = re.findall(
                r"^    _supports_sdpa = (True|False)", file.read_text(encoding="utf-8"), re.MULTILINE
            )
            return "True" in said
    return True


def _max_length(model: ModelConfig, folder: Path, architecture: Architecture | None) -> int:
    own = _json(folder / "tokenizer_config.json").get("model_max_length")
    limit = int(own) if isinstance(own, int | float) and own < _NO_LIMIT else DEFAULT_MAX_LENGTH
    length = model.max_length or min(DEFAULT_MAX_LENGTH, limit)
    positions = architecture.max_positions if architecture is not None else None
    return length if positions is None else min(length, positions)


def _adapter_bytes(model: ModelConfig) -> int:
    if model.adapter_name_or_path is None:
        return 0
    files = Path(model.adapter_name_or_path).glob("adapter_model.*")
    return sum(file.stat().st_size for file in files)


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
