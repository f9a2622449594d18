"""What commands say of a config whose members are not trained yet, or cannot be."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make_base, make_language_model
from tests.faults.machine import small_disk
from tests.project import Project
from tests.training import tables

pytestmark = pytest.mark.usefixtures("warm")
COMMAND = ["python", "train.py", "--train", "{train}", "--out", "{out}"]


def config(project: Project, **member: Any) -> dict[str, Any]:
    """The usual config, in which one member is trained from a base and another one by a command."""
    base = {"base_model": str(project.models / "llama"), "method": "lora"}
    members = [
        {"name": "built_in", "train": base},
        {"name": "own", "train": {"command": COMMAND}, **member},
    ]
    return project.config(models=[*members, project.config()["models"][0]], training={})


@pytest.mark.long
def test_everything_else_is_checked(project: Project) -> None:
    project.write_config(config(project))
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 0, done.stderr
    printed = " ".join(done.stdout.split())
    folds = "5 trainings to do (fold 0, fold 1, fold 2, fold 3, fold 4)"
    assert f"built_in: not trained yet, weight 1, {folds}, lora, from " in printed
    assert f"own: not trained yet, weight 1, {folds}, by its command, on the CPU" in printed
    assert "gemma: Gemma2ForSequenceClassification" in printed
    plan = project.ensemble("plan", "config.yaml")
    assert plan.returncode == 0, plan.stderr
    printed = " ".join(plan.stdout.split())
    assert f"own: not trained yet: {folds}, by its command, on the CPU" in printed
    assert "memory and time of a training are not known before the first has run" in printed
    written = "trainings from a base_model write about "
    assert re.search(rf"{written}[\d.]+ [KM]iB to runs/first/training, where [\d.]+ [GT]iB are free", printed)
    assert "the whole run takes" not in printed
    plan = project.ensemble("plan", "config.yaml", "--set", "training.folds.column=id")
    assert "a training for each fold of its column" in " ".join(plan.stdout.split()), plan.stderr
    assert written not in " ".join(plan.stdout.split()), "how many folds there are is not known"


def test_problems_that_no_checkpoint_is_needed_for(project: Project) -> None:
    project.write_config(config(project, prompt_template="{{ txt }}", text_column=None))
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    assert "'txt'" in done.stderr
    project.write_config(config(project, truncation={"fields": {"text": {}}}, prompt_template="{{ id }}"))
    done = project.ensemble("validate", "config.yaml")
    assert "truncation.fields.text: prompt_template does not read" in " ".join(done.stderr.split())


def test_a_config_of_such_members_alone(project: Project) -> None:
    models = config(project)["models"][:2]
    project.write_config(project.config(models=models, training={}))
    for command in ("validate", "plan"):
        done = project.ensemble(command, "config.yaml")
        assert done.returncode == 0, done.stderr


def test_commands_that_train_nothing_say_what_lacks(project: Project) -> None:
    project.write_config(config(project))
    for command in (("rehearse", "config.yaml"), ("tune", "config.yaml"), ("fit", "config.yaml")):
        done = project.ensemble(*command)
        assert done.returncode == 2
        folds = ", ".join(f"fold {fold}" for fold in range(5))
        printed = " ".join(done.stderr.split())
        assert f"built_in: not trained yet: {folds}; run" in printed, printed


@pytest.mark.long
def test_every_command_refuses_what_cannot_be_trained_before_it_writes_anything(
    project: Project, tmp_path: Path
) -> None:
    tables.frame().to_csv(project.folder / "train.csv", index=False)
    tables.frame(6, first=900).drop(columns="label").to_csv(project.folder / "test.csv", index=False)
    by_command = {**tables.BY_COMMAND, "train": {"command": ["true", "{train}", "{out}"]}}
    tables.config(project.folder, by_command, folds={"column": "fold", "group_column": "label"})
    for command in ("validate", "train", "run"):
        done = project.ensemble(command, "config.yaml")
        assert done.returncode == 2, done.stdout
        assert "training.folds.column: " in done.stderr
    assert not (project.folder / "runs").exists()

    llama = str(make_base(tmp_path / "llama", "llama"))
    make_language_model(tmp_path / "mamba", "mamba")
    lora = {"base_model": llama, "method": "lora", "lora_config": {"target_modules": ["query"]}}
    trainings = {
        "mamba": {"base_model": str(tmp_path / "mamba")},
        "lora": lora,
        "full": {"base_model": llama},
    }
    models = [{"name": name, "text_column": "text", "train": train} for name, train in trainings.items()]
    tables.config(project.folder, *models)
    with small_disk(project.folder / "runs", "64k"):
        for command in ("validate", "train", "run"):
            done = project.ensemble(command, "config.yaml")
            assert done.returncode == 2, done.stdout
            sentences = [" ".join(text.split()) for text in done.stderr.split("error: ")[1:]]
            assert len(sentences) == 3
            assert "models[0].train.base_model" in sentences[0]
            assert "'mamba'" in sentences[0]
            assert "models[1].train.lora_config.target_modules: the base" in sentences[1]
            assert sentences[2].startswith("output_dir: its trainings write")
