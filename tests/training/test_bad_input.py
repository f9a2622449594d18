"""What cannot be trained, by the commands themselves: one sentence each, and the usual exit codes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from tests.checkpoints import make_base, make_language_model
from tests.faults.machine import small_disk
from tests.project import Project
from tests.training import tables
from tests.training.tables import BY_COMMAND, frame

pytestmark = pytest.mark.long


@pytest.fixture
def project(project: Project) -> Project:
    frame().to_csv(project.folder / "train.csv", index=False)
    frame(6, first=900).drop(columns="label").to_csv(project.folder / "test.csv", index=False)
    return project


def errors(project: Project, command: str, exit_code: int) -> list[str]:
    """The sentences of a command that fails."""
    done = project.ensemble(command, "config.yaml")
    assert done.returncode == exit_code, done.stdout + done.stderr
    return [" ".join(text.split()) for text in done.stderr.split("error: ")[1:]]


def write(project: Project, table: pd.DataFrame, name: str = "train.csv") -> None:
    table.to_csv(project.folder / name, index=False)


def validated(project: Project, **training: Any) -> str:
    """The one sentence of ``validate``, which ``train`` ends with, too."""
    command = ["true", "{train}", "{out}"]
    tables.config(project.folder, {**BY_COMMAND, "train": {"command": command}}, **training)
    (sentence,) = errors(project, "validate", 2)
    assert errors(project, "train", 2) == [sentence]
    assert not (project.folder / "runs").exists(), "nothing is written"
    return sentence


def test_tables_that_cannot_be_learned(project: Project) -> None:
    table = frame()
    write(
        project,
        table.assign(fold=[1 if label == "tie" else row % 2 for row, label in enumerate(table["label"])]),
    )
    sentence = validated(project, folds={"column": "fold"})
    assert "all rows with the label 'tie' are held" in sentence
    write(project, table.assign(fold="1"))
    assert "holds '1' in every row" in validated(project, folds={"column": "fold"})
    write(project, table)
    sentence = validated(project, folds={"column": "fold", "group_column": "label"})
    assert "divides 3 groups of 'label' ('neg', 'pos', 'tie')" in sentence
    ties = int((table["label"] == "tie").sum())
    sentence = validated(project, folds={"n_splits": ties + 1})
    assert f"of 'tie' ({ties})" in sentence
    write(project, frame(4, first=500).assign(label="tye"), "more.csv")
    sentence = validated(project, extra=[{"path": str(project.folder / "more.csv")}])
    assert "'tye' (did you mean 'tie'?)" in sentence


def test_a_view_with_the_name_of_a_folds_model(project: Project) -> None:
    member = {**BY_COMMAND, "views": [{"name": "plain"}, {"name": "plain-fold-0"}]}
    tables.config(project.folder, {**member, "train": {"command": ["true", "{train}", "{out}"]}})
    for command in ("validate", "train", "run"):
        (sentence,) = errors(project, command, 2)
        assert re.match(r"models\[0\]\.views\[1\]\.name \(line \d+\): with train, names", sentence)


def test_a_text_with_two_labels_is_counted_and_named(project: Project) -> None:
    table = frame()
    table.loc[[40, 44], ["text", "group"]] = ["twice", "g"]
    table.loc[[40, 44], "label"] = ["neg", "pos"]
    write(project, table)
    tables.config(project.folder, BY_COMMAND, folds={"group_column": "group"})
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert "2 rows (id '0040', '0044') whose text" in " ".join(done.stdout.split())


def test_bases_that_cannot_be_trained_and_a_disk_that_is_too_small(project: Project, tmp_path: Path) -> None:
    llama = make_base(tmp_path / "llama", "llama")
    make_language_model(tmp_path / "mamba", "mamba")
    models = [
        {"name": "mamba", "text_column": "text", "train": {"base_model": str(tmp_path / "mamba")}},
        {
            "name": "lora",
            "text_column": "text",
            "train": {
                "base_model": str(llama),
                "method": "lora",
                "lora_config": {"target_modules": ["query"]},
            },
        },
        {"name": "full", "text_column": "text", "train": {"base_model": str(llama)}},
    ]
    tables.config(project.folder, *models)
    with small_disk(project.folder / "runs", "64k"):
        for command in ("validate", "train", "run"):
            sentences = errors(project, command, 2)
            assert len(sentences) == 3
            assert "models[0].train.base_model" in sentences[0]
            assert "'mamba'" in sentences[0]
            assert "models[1].train.lora_config.target_modules: the base" in sentences[1]
            assert re.match(r"output_dir: its trainings write", sentences[2])


@pytest.mark.fresh
def test_a_learning_rate_that_diverges(project: Project, tmp_path: Path) -> None:
    base = str(make_base(tmp_path / "base", "llama"))
    arguments = {"learning_rate": 1e30, "max_grad_norm": 0.0}
    member = {
        "name": "m",
        "text_column": "text",
        "train": {"base_model": base, "training_arguments": arguments},
    }
    tables.config(project.folder, member, folds={"n_splits": 2})
    (sentence,) = errors(project, "train", 1)
    assert re.match(r"member m failed: fold 0: the loss of step \d is nan", sentence), sentence
