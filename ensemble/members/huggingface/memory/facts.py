"""What the plan must know of each member, read from the checkpoint's files; no weights are loaded."""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ensemble.common.files import read_json
from ensemble.members.huggingface.checkpoint.architecture import Architecture, read_architecture
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
from ensemble.members.huggingface.checkpoint.safetensors_headers import read_tensors
from ensemble.members.huggingface.memory.replica import CheckpointFacts
from ensemble.members.huggingface.settings import TextSettings
from ensemble.members.huggingface.spec import DEFAULT_MAX_LENGTH, NO_LENGTH_LIMIT

# Tables in transformers' models/auto: the class of each kind's classifier, the folder of its source.
_CLASSIFIERS = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
_FOLDERS = "SPECIAL_MODEL_TYPE_TO_MODULE_NAME"


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
    config = read_json(folder / "config.json")
    architecture = read_architecture(config)
    return CheckpointFacts(
        lengths=lengths,
        tensors=read_tensors(folder) if _is_whole(model, folder) else None,
        architecture=architecture,
        adapter_bytes=_adapter_bytes(model),
        num_labels=num_labels,
        max_length=_max_length(model, folder, architecture),
        supports_sdpa=supports_sdpa(checkpoint.model_type),
        pools_last_token=not scores_every_position(checkpoint.model_type),
        has_flash_attention=False,  # the planner asks a process that has torch, where it matters
    )


def supports_sdpa(model_type: str) -> bool:
    """Whether the installed transformers runs classifiers of this kind with torch's fused attention.

    A kind that is not there is taken for one of today's, which do.  A class that does not say so does not
    (transformers, modeling_utils.py, PreTrainedModel).
    """
    source = _source_of(model_type)
    return source is None or re.search(r"^    _supports_sdpa = True", source, re.MULTILINE) is not None


def scores_every_position(model_type: str) -> bool:
    """Whether a classifier of this kind sends all positions through its head, and not only the one it pools.

    So do the decoders that have a forward of their own; for the others the worker pools first.
    """
    return "self.score(hidden_states)" in (_source_of(model_type) or "")


@cache
def _source_of(model_type: str) -> str | None:
    """The file of the installed transformers that defines a kind's classifier; None where there is none.

    Read and not imported, because importing it takes seconds.
    """
    found = importlib.util.find_spec("transformers")
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        models = Path(place) / "models"
        name = _listed(models / "auto" / "modeling_auto.py", _CLASSIFIERS, r"\w+", model_type)
        folder = _folder_of(model_type, models / "auto")
        for parent in ("models", "models/deprecated"):
            for file in Path(place).glob(f"{parent}/{folder}/modeling_*.py"):
                text = file.read_text(encoding="utf-8")
                if f"\nclass {name}(" in text:  # a folder may hold other models too, such as ESMFold
                    return text
    return None


def _folder_of(model_type: str, auto: Path) -> str:
    """Where the source of a kind of model is: under its own name, but for those in a table of transformers'."""
    for file in ("auto_mappings.py", "configuration_auto.py"):  # of transformers 5 and 4
        if folder := _listed(auto / file, _FOLDERS, "[a-z0-9_]+", model_type):
            return folder
    return model_type.replace("-", "_")


def _listed(file: Path, table: str, pattern: str, model_type: str) -> str | None:
    """What stands for a kind of model in a table of transformers' source, or after it; None for nothing."""
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    found = re.search(rf'\("{re.escape(model_type)}",\s*"({pattern})"', text.partition(f"\n{table}")[2])
    return found[1] if found else None


def _is_whole(model: TextSettings, folder: Path) -> bool:
    """Whether the weights are safetensors and all here; in the hub's cache they may be so in part."""
    if model.gguf_file is not None:
        return False
    if Path(model.model_name_or_path).is_dir():
        return True
    shards = read_json(folder / "model.safetensors.index.json").get("weight_map")
    names = set(shards.values()) if isinstance(shards, dict) else {"model.safetensors"}
    return all((folder / str(name)).is_file() for name in names)


def _max_length(model: TextSettings, folder: Path, architecture: Architecture | None) -> int:
    own = read_json(folder / "tokenizer_config.json").get("model_max_length")
    limit = int(own) if isinstance(own, int | float) and own < NO_LENGTH_LIMIT else DEFAULT_MAX_LENGTH
    length = model.max_length or min(DEFAULT_MAX_LENGTH, limit)
    positions = architecture.max_positions if architecture is not None else None
    return length if positions is None else min(length, positions)


def _adapter_bytes(model: TextSettings) -> int:
    if model.adapter_name_or_path is None:
        return 0
    files = Path(model.adapter_name_or_path).glob("adapter_model.*")
    return sum(file.stat().st_size for file in files)
