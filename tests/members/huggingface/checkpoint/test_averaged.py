"""What is told of averaged checkpoints before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file, save_file

from ensemble.common.errors import CheckpointError
from tests.checkpoints import inspect_folder, make_checkpoint

LABELS = ["a", "b", "c"]


@pytest.fixture(scope="module")
def folds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("folds")
    return [make_checkpoint(folder / str(number), "llama", LABELS, seed=number) for number in range(2)]


def problems(*folders: Path | str) -> list[str]:
    average = {"average": [*map(str, folders)]}
    try:
        checkpoint = inspect_folder(Path(folders[0]), LABELS, {}, checkpoints=average)
    except CheckpointError as error:
        return [*error.problems]
    assert checkpoint.label_order == (0, 1, 2)
    return []


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    change(content)
    path.write_text(json.dumps(content), encoding="utf-8")


def test_what_changes_no_number_may_differ(folds: list[Path], tmp_path: Path) -> None:
    other = shutil.copytree(folds[1], tmp_path / "other")
    of_trainings = {"attention_dropout": 0.3, "dtype": "bfloat16", "transformers_version": "5.0.0"}
    edit(other / "config.json", lambda config: config.update(of_trainings, new_key_of_a_release=1))
    cut = {"direction": "Right", "max_length": 9, "strategy": "LongestFirst", "stride": 0}
    edit(other / "tokenizer.json", lambda rules: rules.update(truncation=cut))
    assert problems(*folds, other) == []
    for path in other.glob("tokenizer*"):
        path.unlink()
    assert problems(*folds, other) == []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"id2label": {"0": "b", "1": "a", "2": "c"}}, "id2label of config.json is {'0': 'a', "),
        ({"model_type": "qwen2"}, "model_type of config.json is llama in "),
        ({"rms_norm_eps": 0.5}, "rms_norm_eps of config.json is 1e-06 in "),
        (
            {"rope_parameters": {"rope_theta": 5.0}},
            "rope_parameters of config.json is {'rope_theta': 10000.0, ",
        ),
        ({"quantization_config": {"load_in_4bit": True}}, "other has quantization_config, and only plain"),
    ],
    ids=str,
)
def test_a_config_of_another_model(
    change: dict[str, Any], sentence: str, folds: list[Path], tmp_path: Path
) -> None:
    other = shutil.copytree(folds[1], tmp_path / "other")
    edit(other / "config.json", lambda config: config.update(change))
    (problem,) = problems(*folds, other)
    assert problem.startswith("checkpoints.average: ")
    assert sentence in problem


def test_another_tokenizer(folds: list[Path], tmp_path: Path) -> None:
    other = shutil.copytree(folds[1], tmp_path / "other")
    edit(other / "tokenizer.json", lambda rules: rules["model"]["vocab"].popitem())
    (problem,) = problems(*folds, other)
    assert "checkpoints.average: model of tokenizer.json is " in problem
    assert f" in {folds[0]} and " in problem


def test_tensors_of_other_shapes_and_names(folds: list[Path], tmp_path: Path) -> None:
    other = shutil.copytree(folds[1], tmp_path / "other")
    weights = other / "model.safetensors"
    tensors = load_file(weights)
    save_file({**tensors, "score.weight": tensors["score.weight"][:2].copy()}, weights)
    (problem,) = problems(*folds, other)
    assert f"score.weight is [3, 64] in {folds[0]} and [2, 64] in {other}; average checkpoints" in problem
    del tensors["score.weight"]
    save_file(tensors, weights)
    assert f"score.weight is [3, 64] in {folds[0]} and missing in {other};" in problems(*folds, other)[0]
    assert f"score.weight is missing in {other} and [3, 64] in {folds[0]};" in problems(other, *folds)[0]


def test_files_that_are_not_averaged(folds: list[Path], tmp_path: Path) -> None:
    import torch

    pickled, cut, adapted, empty = (
        shutil.copytree(folds[1], tmp_path / name) for name in ("pickled", "cut", "adapted", "empty")
    )
    torch.save({}, pickled / "pytorch_model.bin")
    for folder in (pickled, empty):
        (folder / "model.safetensors").unlink()
    content = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(content[:-100])
    (adapted / "adapter_config.json").write_text("{}", encoding="utf-8")
    told = problems(*folds, "org/name", pickled, cut, adapted, empty)
    sentences = (
        "org/name is no folder; correct the path, or download it from the hub first",
        "pickled has pickles, and only plain safetensors are averaged",
        "model.safetensors has 0 bytes",
        "adapted has an adapter beside it, and only plain",
        "empty has a config.json but no weights",
    )
    assert len(told) == len(sentences)
    for problem, sentence in zip(told, sentences, strict=True):
        assert sentence.replace("0 bytes", f"{len(content) - 100:,} bytes") in problem
