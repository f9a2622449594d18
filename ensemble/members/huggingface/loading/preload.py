"""The part of loading that needs no device: importing the model's code.

It never fails: problems of a checkpoint show when it is loaded.
"""

from __future__ import annotations

import contextlib
from importlib.util import find_spec
from pathlib import Path

import transformers
from transformers import AutoConfig

from ensemble.members.huggingface.spec import CheckpointSpec


def import_model_class(spec: CheckpointSpec) -> None:
    """Import the module of the model's class, unless the checkpoint brings its own code."""
    if spec.gguf_file is not None or spec.trust_remote_code:
        return
    # Some models import packages of kernels that look for the device at once, which a standby does not have yet.
    if any(find_spec(name) for name in ("fla", "mamba_ssm")):
        return
    with contextlib.suppress(Exception):
        config = AutoConfig.from_pretrained(
            spec.model_name_or_path, revision=spec.revision or "main", trust_remote_code=False
        )
        getattr(transformers, spec.auto_class)._model_mapping[type(config)]


def checkpoint_folder(name_or_path: str, revision: str | None) -> Path | None:
    """Return a checkpoint's folder, or the one in the hub's cache; None if it is in neither."""
    if Path(name_or_path).is_dir():
        return Path(name_or_path)
    with contextlib.suppress(Exception):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name_or_path, revision=revision, local_files_only=True))
    return None
