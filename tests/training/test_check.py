"""What is said of trainings before any begins: each bad setting in one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common import packages
from ensemble.common.errors import ConfigError
from ensemble.config import LoadedConfig, mapping_config
from ensemble.data.trained_rows import TrainedRows, write_trained_rows
from ensemble.members.huggingface import training_from_base
from ensemble.pipeline.load import load
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.command import check_trainings
from tests.checkpoints import make_base, make_checkpoint, make_language_model
from tests.faults.machine import small_disk

# peft asks transformers for a property by its old name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
LABELS = ["yes", "no", "tie"]
POOLED = {"task_type": "pooled_cls", "pooling_mode": "mean"}
OF_TRAINING = "the training makes the head, a linear layer in the order of labels; drop this"


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    make_checkpoint(folder / "bert", "bert", ["LABEL_0", "LABEL_1"])
    make_base(folder / "llama", "llama")
    make_language_model(folder / "mamba", "mamba")
    return folder


def config(where: Path, **train: Any) -> LoadedConfig:
    """A config with a member that is trained as ``train`` says; ``member`` in it are the member's other keys."""
    keys = train.pop("member", {})
    member: dict[str, Any] = {"name": "m", "text_column": "text", "train": train, **keys}
    if keys.get("task_type") == "causal_lm":
        member["label_tokens"] = {label: f" {label}" for label in LABELS}
    document = {
        "data": {"path": str(where / "test.csv")},
        "labels": LABELS,
        "training": {"data": {"path": str(where / "train.csv"), "label_column": "label"}},
        "models": [member],
        "output_dir": str(where / "run"),
    }
    return load([mapping_config(document)])


def problems(where: Path, **train: Any) -> list[str]:
    """What is refused."""
    try:
        check_trainings(config(where, **train))
    except ConfigError as error:
        return [*error.problems]
    return []


@pytest.mark.parametrize(
    ("base", "keys"),
    [
        ("bert", {"method": "full", "training_arguments": {"learning_rate": 2e-5, "num_train_epochs": 2}}),
        ("bert", {"method": "head"}),
        ("llama", {"method": "lora", "lora_config": {"r": 4, "target_modules": ["q_proj", "v_proj"]}}),
        ("llama", {"method": "lora", "lora_config": {"target_modules": "all-linear"}}),
        ("bert", {"method": "lora", "member": POOLED}),
        ("llama", {"method": "head", "member": POOLED}),
        (
            "llama",
            {"method": "qlora", "member": {"task_type": "causal_lm"}, "training_arguments": {"bf16": True}},
        ),
    ],
)
def test_sound_trainings_have_no_problems(
    base: str, keys: dict[str, Any], bases: Path, tmp_path: Path
) -> None:
    assert problems(tmp_path, base_model=str(bases / base), **keys) == []


def test_keys_that_the_installed_libraries_do_not_know(bases: Path, tmp_path: Path) -> None:
    arguments = {"learning_rat": 1e-4, "weight_decay": "much"}
    lora = {"lora_alfa": 8, "r": 4.5}
    messages = problems(
        tmp_path,
        base_model=str(bases / "llama"),
        method="lora",
        training_arguments=arguments,
        lora_config=lora,
    )
    assert messages == [
        "models[0].train.training_arguments.learning_rat: the installed TrainingArguments has no such key (did you "
        "mean 'learning_rate'?)",
        "models[0].train.training_arguments.weight_decay: 'much' is not of its type, float",
        "models[0].train.lora_config.lora_alfa: the installed LoraConfig has no such key (did you mean "
        "'lora_alpha'?)",
        "models[0].train.lora_config.r: 4.5 is not of its type, int",
    ]
    (value,) = problems(
        tmp_path, base_model=str(bases / "bert"), training_arguments={"lr_scheduler_type": "cosin"}
    )
    assert value.startswith(
        "models[0].train.training_arguments: TrainingArguments does not take these values: cosin is not a valid "
        "SchedulerType, please select one of ['linear', 'cosine'"
    )


@pytest.mark.parametrize(
    ("key", "value", "is_averaged"),
    [
        ("bias", "lora_only", False),
        ("init_lora_weights", "pissa_niter_16", False),
        ("layer_replication", [[0, 1], [0, 1]], False),
        ("alora_invocation_tokens", [5], False),
        ("target_modules", ["embed_tokens"], False),
        ("target_modules", ["q_proj", "lm_head"], False),
        ("kasa_config", {"beta": 0.1}, False),
        ("use_dora", True, True),
    ],
)
def test_adapters_that_could_not_share_a_base_are_refused_before_they_are_trained(
    key: str, value: object, is_averaged: bool, bases: Path, tmp_path: Path
) -> None:
    keys = {"method": "lora", "lora_config": {key: value}} | (
        {"predict_with": "average"} if is_averaged else {}
    )
    messages = problems(tmp_path, base_model=str(bases / "llama"), **keys)
    assert messages[0].startswith(f"models[0].train.lora_config.{key}: the folds' adapters share one base"), (
        messages
    )
    assert not any("is not of its type" in sentence for sentence in messages)


@pytest.mark.parametrize(
    "lora", [{"use_dora": True}, {"init_lora_weights": "orthogonal"}, {"target_modules": ["q_proj"]}]
)
def test_adapters_that_can_share_a_base(lora: dict[str, Any], bases: Path, tmp_path: Path) -> None:
    assert problems(tmp_path, base_model=str(bases / "llama"), method="lora", lora_config=lora) == []


@pytest.mark.parametrize(
    ("lora", "key"),
    [
        ({"init_lora_weights": "eva", "eva_config": {"rho": 2.0}}, "init_lora_weights"),
        ({"monteclora_config": {}}, "monteclora_config"),
    ],
)
@pytest.mark.filterwarnings("ignore:lora with eva")
def test_methods_of_which_peft_leaves_a_part_to_programs_are_refused(
    lora: dict[str, Any], key: str, bases: Path, tmp_path: Path
) -> None:
    """It would train plain LoRA under their name."""
    messages = problems(tmp_path, base_model=str(bases / "llama"), method="lora", lora_config=lora)
    assert messages[0].startswith(
        f"models[0].train.lora_config.{key}: peft leaves a part of this to the program"
    )


@pytest.mark.parametrize("key", ["merge_adapter", "torch_compile"])
def test_keys_of_a_member_with_which_adapters_cannot_take_turns(
    key: str, bases: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=f"{key}: the folds' adapters take turns"):
        config(tmp_path, base_model=str(bases / "llama"), method="lora", member={key: True})


def test_keys_that_are_not_the_users(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, base_model="base", training_arguments={"auto_find_batch_size": True})
    (sentence,) = caught.value.problems
    assert (
        "models[0].train.training_arguments.auto_find_batch_size: is not set here: it would begin" in sentence
    )


@pytest.mark.parametrize(
    ("arguments", "epochs"),
    [
        ({"num_train_epochs": 0}, "0"),
        ({"num_train_epochs": 0.0, "max_steps": 0}, "0.0"),
        ({"num_train_epochs": -1, "max_steps": -1}, "-1"),
        ({"num_train_epochs": float("inf")}, "inf"),
    ],
)
def test_epochs_without_a_step(arguments: dict[str, Any], epochs: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, base_model="base", training_arguments=arguments)
    assert caught.value.problems == (
        f"models[0].train.training_arguments.num_train_epochs: {epochs} epochs are no training; give a number "
        "above 0, or max_steps",
    )
    for sound in ({"max_steps": 3}, {"num_train_epochs": 0.1}):
        config(tmp_path, base_model="base", training_arguments={**arguments, **sound})


@pytest.mark.parametrize(
    ("keys", "place", "sentence"),
    [
        ({"head": "head.safetensors"}, "head", OF_TRAINING),
        ({"head_layers": ["fc"]}, "head_layers", OF_TRAINING),
        ({"head_labels": ["no", "yes", "tie"]}, "head_labels", OF_TRAINING),
        ({"head_dropout": 1.0}, "head_dropout", "must be a number from 0 to less than 1, not 1.0"),
        (
            {"views": [{"name": "v", "head": "head.safetensors"}]},
            "views[0].head",
            "with train the training makes the member's heads; drop this",
        ),
        (
            {"train": {"method": "head", "pooling_mode": "cls"}},
            "train.pooling_mode",
            "the member's own pooling_mode counts; drop this",
        ),
        (
            {"train": {"method": "lora", "predict_with": "average"}},
            "train.predict_with",
            "each fold has a head of its own beside its adapter; choose folds or refit",
        ),
        (
            {"train": {"method": "head"}, "problem_type": "regression"},
            "train.method",
            "head is a regression of labels that exclude each other; choose full or lora",
        ),
    ],
)
def test_keys_that_do_not_go_with_a_head_that_is_trained(
    keys: dict[str, Any], place: str, sentence: str, tmp_path: Path
) -> None:
    train = {"base_model": "base", **keys.pop("train", {})}
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, **train, member={**POOLED, **keys})
    assert caught.value.problems == (f"models[0].{place}: {sentence}",)


def test_target_modules_that_the_base_does_not_have(bases: Path, tmp_path: Path) -> None:
    llama = {"base_model": str(bases / "llama"), "method": "lora"}
    assert problems(tmp_path, **llama, lora_config={"target_modules": ["q_proj", "query"]}) == [
        "models[0].train.lora_config.target_modules: the base has no module 'query'; its linear layers are q_proj, "
        "k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj, score"
    ]
    (messages,) = problems(tmp_path, **llama, lora_config={"target_modules": ".*query"})
    assert messages.startswith("models[0].train.lora_config: peft cannot add this adapter to the base: ")


def test_a_base_without_a_class_for_its_task(bases: Path, tmp_path: Path) -> None:
    (messages,) = problems(tmp_path, base_model=str(bases / "mamba"), method="lora")
    assert re.fullmatch(
        rf"models\[0\]\.train\.base_model: {bases}/mamba: transformers \S+ has no model of the kind 'mamba' for "
        "this task; to train a head on its backbone, write task_type: pooled_cls, pooling_mode: lasttoken; "
        "task_type: causal_lm runs its MambaForCausalLM, or install a newer release",
        messages,
    )
    written = {"member": {"task_type": "pooled_cls", "pooling_mode": "lasttoken"}}
    assert problems(tmp_path, base_model=str(bases / "mamba"), **written) == []
    (messages,) = problems(tmp_path, base_model=str(bases / "lama"))
    assert messages == (
        f"models[0].train.base_model: {bases}/lama: no such folder; did you mean {bases}/llama?"
    )


def test_packages_that_are_not_installed(
    bases: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without(names: Any) -> dict[str, str]:
        return {
            name: version for name, version in packages.installed_versions(names).items() if name != "peft"
        }

    monkeypatch.setattr(training_from_base, "installed_versions", without)
    (messages,) = problems(tmp_path, base_model=str(bases / "llama"), method="lora")
    assert messages.startswith(
        "models[0].train.method: lora needs the package peft, which is not installed: pip install peft"
    )


def test_a_disk_that_cannot_hold_the_checkpoints(bases: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "small", "1m") as small:
        (messages,) = problems(small, base_model=str(bases / "bert"))
        assert re.fullmatch(
            rf"output_dir: its trainings write about [\d.]+ MiB to {small}/run/training, where 1.0 MiB are free; "
            "make room, choose another output_dir, or train with method: lora",
            messages,
        )
        directory = TrainingDir(small / "run")
        for fold in range(5):
            directory.checkpoint("m", Part(fold)).mkdir(parents=True)
            directory.seal("m", Part(fold)).touch()
        write_trained_rows(
            directory.trained_rows("m"), TrainedRows(np.zeros((5, 2), np.uint64), np.arange(5))
        )
        assert problems(small, base_model=str(bases / "bert")) == [], "finished trainings write nothing"
        assert problems(small, base_model=str(bases / "bert"), method="head") == []


def test_what_is_reckoned_is_what_lies_there(bases: Path, tmp_path: Path) -> None:
    """Of each fold the float32 weights, and of the one that runs a save with AdamW's averages."""
    parameters = sum(path.stat().st_size for path in (bases / "bert").glob("*.safetensors")) / 4
    with small_disk(tmp_path / "small", f"{int(parameters * (5 * 4 + 12)) + 2**16}") as small:
        assert problems(small, base_model=str(bases / "bert")) == []
    with small_disk(tmp_path / "smaller", f"{int(parameters * (5 * 4 + 11)) - 2**16}") as small:
        (messages,) = problems(small, base_model=str(bases / "bert"))
        assert messages.startswith("output_dir: its trainings write")


def test_commands(tmp_path: Path) -> None:
    places = ["--train", "{train}", "--out", "{out}"]
    assert problems(tmp_path, command=["python3", "train.py", *places, "--fold", "{fold}"]) == []
    assert problems(tmp_path, command=["pyhton", *places, "{folds}"]) == [
        "models[0].train.command: the program pyhton is not on the PATH; name an installed program, or its path",
        "models[0].train.command: {folds} stands for nothing; did you mean {fold}?",
    ]
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/sh\n")
    (messages,) = problems(tmp_path, command=[str(script), *places, json.dumps({"lr": 1})])
    assert messages == (
        f"models[0].train.command: the program {script} is no file that may be executed; name an installed "
        "program, or its path"
    )
    script.chmod(0o755)
    assert problems(tmp_path, command=[str(script), *places]) == []


@pytest.mark.parametrize(
    ("train", "member", "sentence"),
    [
        (
            {"effective_batch_size": 8},
            {},
            "train.effective_batch_size: is not for method: head; drop it, or choose another method",
        ),
        (
            {"method": "full", "C": 2.0},
            {},
            "train.C: is not for method: full; drop it, or choose another method",
        ),
        (
            {},
            {"problem_type": "multi_label_classification"},
            "train.method: head is a regression of labels that exclude each other; choose full or lora",
        ),
    ],
)
def test_keys_that_a_head_does_not_have(
    train: dict[str, Any], member: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        config(tmp_path, base_model="base", **{"method": "head", **train}, member=member)
    assert caught.value.problems == (f"models[0].{sentence}",)
