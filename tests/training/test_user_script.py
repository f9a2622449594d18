"""configs/train_classifier.py, a user's own script, by hand."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from tests.checkpoints import reference
from tests.project import ROOT, Project, python_path


@pytest.mark.long
def test_its_checkpoint_has_learned_the_rows_and_is_a_members(project: Project, tmp_path: Path) -> None:
    table, folder = tmp_path / "train.csv", tmp_path / "model"
    rows = pd.read_csv(ROOT / "demo/small/train.csv", dtype=str)[:320]
    rows.to_csv(table, index=False)
    command = [sys.executable, str(ROOT / "configs/train_classifier.py"), "--text-column", "gloss"]
    command += ["--base", str(ROOT / "demo/models/gemma2"), "--train", str(table), "--out", str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "320 rows, process 1 of 1" in done.stdout
    names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["id2label"]
    labels = [names[str(number)] for number in range(len(names))]
    assert labels == sorted(rows["label"].unique())
    shares = rows["label"].value_counts(normalize=True).to_numpy()
    prior = -(shares * np.log(shares)).sum()
    probabilities = reference(folder, rows["gloss"].tolist(), 128)
    of_truth = probabilities[np.arange(len(rows)), [labels.index(label) for label in rows["label"]]]
    assert -np.log(of_truth).mean() < 0.7 * prior
    config = {
        "data": {"path": str(ROOT / "demo/small/test.csv"), "id_column": "id"},
        "labels": yaml.safe_load((ROOT / "configs/train_command.yaml").read_text(encoding="utf-8"))["labels"],
        "models": [{"name": "mine", "model_name_or_path": str(folder), "text_column": "gloss"}],
        "output_dir": "runs/mine",
    }
    project.write_config(config)
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 0, done.stderr
