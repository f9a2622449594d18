"""Vocabulary files, and ``config.json`` against weights: found before anything loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from ensemble.common.errors import CheckpointError
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
from ensemble.members.huggingface.checkpoint.tokenizer_files import vocabulary_problems
from tests.checkpoints import inspect_folder, make_checkpoint
from tests.project import Project

LABELS = ["yes", "no", "tie"]


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("intact")
    return {kind: make_checkpoint(folder / kind, kind, LABELS) for kind in ("llama", "bert", "gpt2")}


def changed(folder: Path, copy: Path, **changes: Any) -> Path:
    """A copy with other keys in its config.json; None takes a key away."""
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    config = {**json.loads((copy / "config.json").read_text()), **changes}
    (copy / "config.json").write_text(
        json.dumps({key: value for key, value in config.items() if value is not None})
    )
    return copy


def inspected(folder: Path) -> Checkpoint:
    return inspect_folder(folder, LABELS)


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (
            "llama",
            {"num_hidden_layers": 1},
            "num_hidden_layers is 1, and the file holds 2 layers (up to model.layers.1)",
        ),
        ("llama", {"num_hidden_layers": 3}, "num_hidden_layers is 3, and the file holds 2 layers"),
        ("llama", {"vocab_size": 300}, "vocab_size is 300, and model.embed_tokens.weight has 359 rows"),
        ("llama", {"intermediate_size": 32}, "intermediate_size is 32, and "),
        ("llama", {"num_key_value_heads": 4}, "num_key_value_heads is 4 and head_dim is 16, and "),
        ("bert", {"hidden_size": 128}, "hidden_size is 128, and "),
        ("bert", {"max_position_embeddings": 512}, "max_position_embeddings is 512, and "),
        ("bert", {"type_vocab_size": 1}, "type_vocab_size is 1, and "),
        ("gpt2", {"n_layer": 1}, "n_layer is 1, and the file holds 2 layers (up to transformer.h.1)"),
    ],
)
def test_numbers_that_the_weights_contradict(
    kind: str, changes: dict[str, int], said: str, intact: dict[str, Path], tmp_path: Path
) -> None:
    inspected(intact[kind])
    with pytest.raises(CheckpointError) as caught:
        inspected(changed(intact[kind], tmp_path / "copy", **changes))
    assert said in str(caught.value)


def test_labels_that_the_head_does_not_have(intact: dict[str, Path], tmp_path: Path) -> None:
    copy = changed(intact["llama"], tmp_path / "copy", id2label={"0": "yes", "1": "no"})
    with pytest.raises(CheckpointError, match=r"it has 2 labels .* the classification head has 3 rows"):
        inspect_folder(copy, ["yes", "no"])


def test_rope_types_that_this_release_does_not_know(intact: dict[str, Path], tmp_path: Path) -> None:
    copy = changed(
        intact["llama"], tmp_path / "a", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}
    )
    with pytest.raises(CheckpointError, match="asks for the rope_type 'spiral', which transformers"):
        inspected(copy)
    inspected(
        changed(intact["llama"], tmp_path / "b", rope_parameters={"rope_type": "llama3", "factor": 8.0})
    )


@pytest.mark.fault(30)
def test_a_checkpoint_of_a_newer_release_is_said_with_the_keys_that_are_unknown_here(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    assert inspected(intact["llama"]).warnings == ()
    copy = changed(intact["llama"], tmp_path / "copy", transformers_version="99.1.0", attention_curvature=2)
    (warning,) = inspected(copy).warnings
    assert "saved by transformers 99.1.0" in warning
    assert (
        f"{metadata.version('transformers')} is installed, which knows nothing of its attention_curvature;"
        in warning
    )


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("settings", "files", "said"),
    [
        (
            {"tokenizer_class": "LlamaTokenizer"},
            [],
            ["no tokenizer.json, nor tokenizer.model", "holds no vocabulary"],
        ),
        ({"tokenizer_class": "GPT2TokenizerFast"}, ["vocab.json"], ["of GPT2Tokenizer", "merges.txt"]),
        ({"tokenizer_class": "BertTokenizer"}, [], ["nor vocab.txt"]),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, [], ["no tokenizer.json"]),
        ({}, [], ["no tokenizer files"]),
        ({"tokenizer_class": "BertTokenizer"}, ["vocab.txt"], []),
        ({"tokenizer_class": "GPT2Tokenizer"}, ["vocab.json", "merges.txt"], []),
        ({"tokenizer_class": "DebertaV2Tokenizer"}, ["spm.model"], []),
        ({"tokenizer_class": "ByT5Tokenizer"}, [], []),
        ({"tokenizer_class": "LlamaTokenizer"}, ["tokenizer.model"], []),
        ({"tokenizer_class": "ClassOfTomorrow"}, ["vocab.bin"], []),
    ],
)
def test_files_that_a_tokenizers_class_needs(
    settings: dict[str, str], files: Sequence[str], said: Sequence[str], tmp_path: Path
) -> None:
    if settings:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    for file in files:
        (tmp_path / file).write_text("x")
    problems = list(vocabulary_problems(tmp_path, {}, {}))
    assert len(problems) == bool(said)
    assert all(one in problems[0] for one in said)


@pytest.mark.fault(28)
def test_validate_finds_a_missing_vocabulary_and_missing_layers_without_torch(
    project: Project, tmp_path: Path
) -> None:
    gemma = changed(project.models / "gemma", tmp_path / "gemma")
    (gemma / "tokenizer.json").unlink()
    llama = changed(project.models / "llama", tmp_path / "llama", num_hidden_layers=1)
    config = project.config()
    for model, folder in zip(config["models"], (gemma, llama), strict=True):
        model["model_name_or_path"] = str(folder)
    project.write_config(config)
    found = project.ensemble("validate", "config.yaml")
    text = " ".join(found.stderr.split())
    assert found.returncode == 2
    assert "no tokenizer files with the vocabulary" in text
    assert "num_hidden_layers is 1, and the file holds 2 layers" in text
    code = (
        "import sys, ensemble.pipeline.prepare\n"
        "print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.strip() == "False"


@pytest.mark.usefixtures("warm")
@pytest.mark.fault(36)
def test_a_run_marks_members_that_know_nothing_of_the_labels(project: Project) -> None:
    project.write_config(project.config())  # random weights, random labels
    run = project.ensemble("run", "config.yaml")
    assert run.returncode == 0, run.stderr
    scores = project.run_json()["scores"]
    assert any(score["no_better_than_prior"] for score in scores.values())
    lines = run.stdout.splitlines()
    for name, score in scores.items():
        (row,) = [line for line in lines if line.split()[:1] == [name] and "%" in line and "+/-" not in line]
        assert (f"! {score['log_loss']:.4f}" in row) == score["no_better_than_prior"]
        assert score["prior_log_loss"] < 1.1
    assert "no better than always predicting how often each label occurs" in " ".join(run.stdout.split())
