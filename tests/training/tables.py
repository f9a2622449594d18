"""A labelled table in a folder, and the config of members that are trained on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from ensemble.common.errors import EnsembleError
from ensemble.pipeline.load import load
from ensemble.training.data import TrainingData, read_training_data

LABELS = ["neg", "pos", "tie"]
COMMAND = ["python", "train.py", "{train}", "{fold}", "{out}"]
BUILT_IN = {"name": "m", "text_column": "text", "train": {"base_model": "models/base"}}
BY_COMMAND = {"name": "c", "text_column": "text", "train": {"command": COMMAND}}


def frame(rows: int = 60, seed: int = 0, first: int = 0) -> pd.DataFrame:
    """Rows whose ids begin with zeros, whose texts need quotes; twelve groups, four folds, three labels."""
    rng = np.random.default_rng(seed)
    numbers = np.arange(first, first + rows)
    return pd.DataFrame(
        {
            "id": [f"{number:04d}" for number in numbers],
            "text": [f'text "{number}", é\nof seed {seed}' for number in numbers],
            "label": rng.choice(LABELS, rows, p=[0.5, 0.3, 0.2]),
            "group": [f"g{number % 12}" for number in numbers],
            "fold": [("10", "9", "2.5", "-1")[number % 4] for number in numbers],
            "note": [f"0{number}" for number in numbers],
        }
    )


def config(
    folder: Path, *models: dict[str, Any], data: dict[str, Any] | None = None, **training: Any
) -> Path:
    """Write the config of members that are trained on ``train.csv``; keyword arguments are keys of ``training``."""
    table = {"path": str(folder / "train.csv"), "label_column": "label", **(data or {})}
    document = {
        "data": {"path": str(folder / "test.csv")},
        "labels": LABELS,
        "models": list(models) or [BUILT_IN],
        "training": {"data": table, **training},
        "output_dir": str(folder / "runs"),
    }
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return path


def read(folder: Path, *models: dict[str, Any], **changes: Any) -> TrainingData:
    return read_training_data(load(config(folder, *models, **changes)))


def problems(folder: Path, *models: dict[str, Any], **changes: Any) -> Sequence[str]:
    """The sentences of what is refused, in the exit code of a wrong table or config."""
    with pytest.raises(EnsembleError) as caught:
        read(folder, *models, **changes)
    assert caught.value.exit_code == 2
    return caught.value.problems
