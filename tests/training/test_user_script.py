"""configs/train_classifier.py, a user's own script: by hand, and on two processes by ``accelerate launch``."""

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

SCRIPT = ROOT / "configs" / "train_classifier.py"
BASE = ROOT / "demo" / "models" / "gemma2"

pytestmark = pytest.mark.long


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Return the path of a small part of the demo's labelled table."""
    path = tmp_path / "train.csv"
    pd.read_csv(ROOT / "demo/small/train.csv", dtype=str)[:320].to_csv(path, index=False)
    return path


def train(launcher: list[str], table: Path, folder: Path) -> str:
    command = [*launcher, str(SCRIPT), "--base", str(BASE), "--train", str(table), "--out", str(folder)]
    command += ["--text-column", "gloss"]
    scratch = folder.with_name("scratch")  # torch's launcher leaves an empty folder behind
    scratch.mkdir()
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": python_path(),
        "TMPDIR": str(scratch),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return done.stdout


def check(folder: Path, table: Path) -> None:
    """Hold what was trained against plain transformers, and the rows that it was trained on."""
    rows = pd.read_csv(table, dtype=str)
    names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["id2label"]
    labels = [names[str(number)] for number in range(len(names))]
    assert labels == sorted(rows["label"].unique())
    shares = rows["label"].value_counts(normalize=True).to_numpy()
    prior = -(shares * np.log(shares)).sum()
    probabilities = reference(folder, rows["gloss"].tolist(), 128)
    of_truth = probabilities[np.arange(len(rows)), [labels.index(label) for label in rows["label"]]]
    assert -np.log(of_truth).mean() < 0.7 * prior


def test_by_hand(project: Project, table: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    assert "320 rows, process 1 of 1" in train([sys.executable], table, folder)
    check(folder, table)
    config = {
        "data": {"path": str(ROOT / "demo/small/test.csv"), "id_column": "id"},
        "labels": yaml.safe_load((ROOT / "configs/train_command.yaml").read_text(encoding="utf-8"))["labels"],
        "models": [{"name": "mine", "model_name_or_path": str(folder), "text_column": "gloss"}],
        "output_dir": "runs/mine",
    }
    project.write_config(config)
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 0, done.stderr


def test_on_two_processes(table: Path, tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch"]
    # Port 0 is any free one. `--cpu` would start a single process; two need mpirun, or this.
    launcher += ["--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]
    folder = tmp_path / "model"
    printed = train(launcher, table, folder)
    # The two write to one pipe, and may break each other's lines.
    assert "320 rows, process 1 of 2" in printed
    assert "320 rows, process 2 of 2" in printed
    check(folder, table)
