"""Folders that sentence-transformers' CrossEncoder has saved: what its ``predict`` makes of logits.

Where that stands has moved: ``sbert_ce_default_activation_function`` in config.json before 4.0, ``activation_fn``
in config.json's ``sentence_transformers`` up to 5.3, and since 5.4 in a file of its own beside it, which goes first
(sentence_transformers, cross_encoder/model.py, get_default_activation_fn and _parse_model_config).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ensemble.common.errors import CheckpointError
from ensemble.common.files import read_json
from ensemble.members.huggingface.checkpoint.hub import find_file

if TYPE_CHECKING:
    from ensemble.common.protocol import Activation

_SETTINGS, _MODULES = "config_sentence_transformers.json", "modules.json"
_KNOWN: Mapping[str, Activation] = {"Sigmoid": "sigmoid", "Softmax": "softmax", "Identity": "none"}


@dataclass(frozen=True)
class CrossEncoder:
    """What sentence-transformers has written about a classifier.

    ``activation`` is what ``predict`` does to its logits; None: nothing, and there are several of them, which its
    ``apply_softmax`` and config.json's ``problem_type`` are for.
    """

    activation: Activation | None
    problems: tuple[str, ...]
    warnings: tuple[str, ...]


def read_cross_encoder(
    name_or_path: str,
    folder: Path,
    config: Mapping[str, Any],
    labels: int,
    revision: str | None,
    problem_type: str | None,
) -> CrossEncoder | None:
    """What is known of a CrossEncoder; None where nothing says that it is one.

    Args:
        folder: where its config.json lies.
        config: its config.json.
        labels: of its head.
        problem_type: what the user says; then its own activation does not matter.
    """
    path = folder / _SETTINGS
    if not path.is_file() and not Path(name_or_path).is_dir() and labels == 1:
        with contextlib.suppress(CheckpointError):  # most models of the hub have no such file
            path = find_file(name_or_path, _SETTINGS, revision)
    settings, older = read_json(path), config.get("sentence_transformers")
    if path.is_file() and not settings:
        problem = f"{path} is empty, or is not JSON; copy it again: it says what {name_or_path} is"
        return CrossEncoder(None, (problem,), ())
    older = older if isinstance(older, Mapping) else {}
    oldest = config.get("sbert_ce_default_activation_function")
    if settings.get("model_type") != "CrossEncoder" and not older and oldest is None:
        return None
    named = next(
        (one for one in (settings.get("activation_fn"), older.get("activation_fn"), oldest) if one), ""
    )
    problems, warnings = list[str](), list[str]()
    activation: Activation | None = "sigmoid" if labels == 1 else None
    last = str(named).rpartition(".")[2]
    if named and not str(named).startswith("torch."):
        # sentence-transformers does not import it either, unless it is told to.
        if problem_type is None:
            warnings.append(
                f"{name_or_path}: its activation {named} is code of its own, which is not run here; "
                "sentence-transformers takes its default instead, and so does this; problem_type says otherwise"
            )
    elif last in _KNOWN:
        activation = None if last == "Identity" and labels > 1 else _KNOWN[last]
    elif named and problem_type is None:
        problems.append(
            f"{name_or_path}: sentence-transformers puts its logits through {named}, which is unknown here; set "
            "problem_type to say what they stand for, or call its predict (task_type: python)"
        )
    problems += _other_modules(name_or_path, folder)
    prompts, prompt = settings.get("prompts"), settings.get("default_prompt_name")
    if isinstance(prompts, Mapping) and (text := prompts.get(prompt)):
        warnings.append(
            f"{name_or_path}: sentence-transformers puts a prompt before its texts ({text!r:.60}); nothing does so "
            "here, so put it into the texts"
        )
    return CrossEncoder(activation, tuple(problems), tuple(warnings))


def _other_modules(name_or_path: str, folder: Path) -> list[str]:
    """What is wrong where it is more than a model of transformers with its own head."""
    stored: Any = ()
    with contextlib.suppress(OSError, ValueError, RecursionError):
        stored = json.loads((folder / _MODULES).read_text(encoding="utf-8"))
    if not isinstance(stored, list):
        return []
    kinds = [str(one.get("type", "")).rpartition(".")[2] for one in stored if isinstance(one, Mapping)]
    if len(kinds) < 2:
        return []
    instead = "task_type: python runs it"
    if "LogitScore" in kinds:
        instead = "task_type: causal_lm runs it, with label_tokens (its LogitScore has their ids)"
    return [
        f"{name_or_path}: sentence-transformers makes this CrossEncoder of {', '.join(kinds)}, and not of a "
        f"classifier of transformers alone; {instead}"
    ]
