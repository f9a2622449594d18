"""Read which activation sentence-transformers' CrossEncoder applies to logits.

The place of this setting depends on the release that saved the folder: before 4.0
``sbert_ce_default_activation_function`` in config.json, up to 5.3 ``activation_fn`` in config.json's
``sentence_transformers``, and from 5.4 on a file of its own, which takes precedence (sentence_transformers,
cross_encoder/model.py, get_default_activation_fn and _parse_model_config).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import CheckpointError
from ensemble.common.files import read_json
from ensemble.members.huggingface.checkpoint.hub import find_file

if TYPE_CHECKING:
    from ensemble.common.protocol import Activation

_SETTINGS = "config_sentence_transformers.json"
_ACTIVATIONS: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}


@dataclass(frozen=True)
class CrossEncoder:
    """Hold what sentence-transformers has stored about a classifier.

    ``activation`` is what ``predict`` applies to logits; None: ``predict`` applies nothing to several logits, and
    config.json's ``problem_type`` decides.
    """

    activation: Activation | None
    warnings: tuple[str, ...]


def read_cross_encoder(
    name_or_path: str,
    folder: Path,
    config: Mapping[str, Any],
    labels: int,
    revision: str | None,
    problem_type: str | None,
) -> CrossEncoder | None:
    """Read the settings of a CrossEncoder; None where nothing says that the folder holds one.

    Args:
        folder: of its config.json.
        config: its config.json.
        labels: of its head.
        problem_type: the user's, which replaces the stored activation.

    Raises:
        CheckpointError: the settings cannot be read, or name an activation that is not known.
    """
    path = folder / _SETTINGS
    if not path.is_file() and not Path(name_or_path).is_dir() and labels == 1:
        with contextlib.suppress(CheckpointError):  # most models of the hub have no such file
            path = find_file(name_or_path, _SETTINGS, revision)
    settings, older = read_json(path), config.get("sentence_transformers")
    if path.is_file() and not settings:
        raise CheckpointError(
            f"{path} is empty, or is not JSON; copy it again: it says what {name_or_path} is"
        )
    older = older if isinstance(older, Mapping) else {}
    oldest = config.get("sbert_ce_default_activation_function")
    if settings.get("model_type") != "CrossEncoder" and not older and oldest is None:
        return None
    stored = str(settings.get("activation_fn") or older.get("activation_fn") or oldest or "")
    warnings: list[str] = []
    activation: Activation | None = "sigmoid" if labels == 1 else None
    name = stored.rpartition(".")[2]
    if stored and not stored.startswith("torch."):
        # sentence-transformers does not import it either, unless it is told to.
        if problem_type is None:
            warnings.append(
                f"{name_or_path}: its activation {stored} is code of its own, which is not run here; "
                "sentence-transformers takes its default instead, and so does this; problem_type says otherwise"
            )
    elif name in _ACTIVATIONS:
        activation = None if name == "Identity" and labels > 1 else _ACTIVATIONS[name]
    elif stored and problem_type is None:
        raise CheckpointError(
            f"{name_or_path}: sentence-transformers puts its logits through {stored}, which is unknown here; set "
            "problem_type to say what they stand for, or call its predict (task_type: python)"
        )
    prompts = settings.get("prompts")
    text = prompts.get(settings.get("default_prompt_name")) if isinstance(prompts, Mapping) else None
    if text:
        warnings.append(
            f"{name_or_path}: sentence-transformers puts a prompt before its texts ({text!r:.60}); nothing does so "
            "here, so put it into the texts"
        )
    return CrossEncoder(activation, tuple(warnings))
