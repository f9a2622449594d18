"""Trainings of tiny checkpoints as the parent prepares them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.registry import KINDS
from tests.worker.test_session import publish

LABELS = ["yes", "no", "tie"]
# The second has several tokens, and begins as the third does.
LABEL_TOKENS = {"yes": " a", "no": " large animal", "tie": " large group"}


def make_spec(
    folder: Path,
    base: Path,
    texts: Sequence[str],
    targets: npt.NDArray[np.float64],
    weights: npt.NDArray[np.float64] | None = None,
    *,
    member: dict[str, Any] | None = None,
    train: dict[str, Any] | None = None,
    groups: Sequence[int] | None = None,
    labels: Sequence[str] = LABELS,
    others: Sequence[str] = (),
    **changes: Any,
) -> dict[str, Any]:
    """The content of a training's spec, with all that it names."""
    folder.mkdir(exist_ok=True)
    columns = {"text": list(texts), **({"other": list(others)} if others else {})}
    places = publish(folder / "table", columns)
    keys: dict[str, Any] = {
        "name": "m",
        "text_column": "text",
        "train": {"base_model": str(base), **(train or {})},
    }
    keys |= member or {}
    of_kind = KINDS.load(keys.get("task_type", "seq_cls"))
    kind = of_kind(of_kind.Settings.model_validate(keys))
    assert isinstance(kind, TextCheckpoint)
    rows: dict[str, Any] = {"rows": np.arange(len(texts)), "targets": targets}
    rows["weights"] = np.ones(len(texts)) if weights is None else weights
    if groups is not None:
        rows["groups"] = np.array(groups)
    np.savez(folder / "rows.npz", **rows)
    (folder / "out").mkdir(exist_ok=True)
    assert kind.settings.train is not None
    spec = {
        "table": places["table_path"],
        "rows": str(folder / "rows.npz"),
        "out": str(folder / "out"),
        "labels": list(labels),
        "seed": 3,
        "settings": kind.training_settings(labels),
        "train": kind.settings.train.model_dump(mode="json"),
        "micro_batch": 4,
        **changes,
    }
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    read: dict[str, Any] = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    return read


def soft_targets(count: int, labels: int, seed: int = 0) -> npt.NDArray[np.float64]:
    """Probabilities, one half of them 0 and 1."""
    generator = np.random.default_rng(seed)
    targets = generator.dirichlet(np.ones(labels), count)
    hard = generator.random(count) < 0.5
    targets[hard] = np.eye(labels)[generator.integers(0, labels, int(hard.sum()))]
    return targets


def without_dropout(folder: Path) -> Path:
    """A checkpoint whose training draws no random numbers."""
    path = folder / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    for key, value in config.items():
        if ("drop" in key or "pdrop" in key) and isinstance(value, int | float):
            config[key] = 0.0
    path.write_text(json.dumps(config), encoding="utf-8")
    return folder
