"""Vocabulary files, and ``config.json`` against weights: found before anything loads."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import ensemble
from ensemble.common.errors import CheckpointError
from ensemble.members import questions
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint, checkpoint_question
from ensemble.members.huggingface.loading.describe import release_warning
from ensemble.members.huggingface.spec import CLASSIFIER
from ensemble.members.questions import Answer, Question
from ensemble.members.seq_cls.parent import SequenceClassifierSettings
from tests.checkpoints import (
    answers_of_this_process,
    inspect_folder,
    make_checkpoint,
    make_language_model,
)
from tests.project import Project

LABELS = ["yes", "no", "tie"]
MODEL = SequenceClassifierSettings.model_validate(
    {"name": "m", "model_name_or_path": "nowhere", "text_column": "text"}
)
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
REAL_PROCESS = questions.ask_process  # before the session replaces it
DESCRIBE = "ensemble.members.huggingface.loading.describe"


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


def tokenizer_notes(folder: Path) -> list[str]:
    """What the worker says of a tokenizer."""
    from ensemble.members.huggingface.loading.checks import check_tokenizer
    from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
    from tests.members.huggingface.scoring.test_predict import worker_spec

    spec = worker_spec(folder)
    return list(check_tokenizer(spec, load_tokenizer(spec), ["some text"]))


def inspected(folder: Path) -> Checkpoint:
    return inspect_folder(folder, LABELS)


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (
            "llama",
            {"num_hidden_layers": 1},
            "it makes 1 layer of layers, and the file holds 2 layers (up to layers.1)",
        ),
        ("llama", {"num_hidden_layers": 3}, "it makes 3 layers of layers, and the file holds 2 layers"),
        (
            "llama",
            {"vocab_size": 300},
            "embed_tokens.weight is [359, 64] in the file, and [300, 64] by the config.json (vocab_size is 300)",
        ),
        ("llama", {"intermediate_size": 32}, "(intermediate_size is 32)"),
        ("llama", {"num_key_value_heads": 4}, "k_proj.weight is [32, 64] in the file, and [64, 64] by "),
        ("bert", {"hidden_size": 128}, "(hidden_size is 128"),
        ("bert", {"max_position_embeddings": 512}, "(max_position_embeddings is 512)"),
        ("bert", {"type_vocab_size": 1}, "(type_vocab_size is 1)"),
        ("gpt2", {"n_layer": 1}, "it makes 1 layer of h, and the file holds 2 layers (up to h.1)"),
    ],
)
def test_numbers_that_the_weights_contradict(
    kind: str, changes: dict[str, int], message: str, intact: dict[str, Path], tmp_path: Path
) -> None:
    inspected(intact[kind])
    with pytest.raises(CheckpointError) as caught:
        inspected(changed(intact[kind], tmp_path / "copy", **changes))
    assert message in str(caught.value)


def test_a_model_that_transformers_does_not_know_is_refused_in_its_words(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(
        CheckpointError, match=r"cannot read its config.json \(ValueError: .*model type `tomorrow`"
    ):
        inspected(changed(intact["llama"], tmp_path / "a", model_type="tomorrow"))
    with pytest.raises(
        CheckpointError, match=r"cannot build the model of its config.json \(ValueError: .*multiple"
    ):
        inspected(changed(intact["bert"], tmp_path / "b", num_attention_heads=5))
    with pytest.raises(CheckpointError, match="of the kind 'vit' for this task"):
        inspected(changed(intact["bert"], tmp_path / "c", model_type="vit"))


@pytest.mark.long
def test_one_process_answers_for_all_and_its_answers_are_kept(
    intact: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENSEMBLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(questions, "_answers", {})
    asked = [
        checkpoint_question(MODEL.model_copy(update={"model_name_or_path": str(folder)}), folder, CLASSIFIER)
        for folder in intact.values()
    ]
    processes = []

    def start(module: str, several: Sequence[Question]) -> list[Answer]:
        processes.append(len(several))
        answer = REAL_PROCESS if len(processes) == 1 else answers_of_this_process
        return answer(module, several)

    monkeypatch.setattr(questions, "ask_process", start)
    answers = questions.ask(asked)
    assert [answer.failure for answer in answers] == ["", "", ""]
    expected = answers_of_this_process(DESCRIBE, asked)
    assert answers == expected
    monkeypatch.setattr(questions, "_answers", {})
    assert questions.ask(asked) == answers
    copy = changed(intact["llama"], tmp_path / "copy", hidden_act="relu")
    (tmp_path / "cache").rename(tmp_path / "elsewhere")
    (tmp_path / "cache").write_text("no folder")  # an unwritable cache is no error
    question = checkpoint_question(MODEL, copy, CLASSIFIER)
    assert questions.ask([question, question])[0].fields is not None
    assert processes == [3, 1]


def test_checkpoints_of_folds_have_one_answer_in_the_cache(tmp_path: Path) -> None:
    """Their weights differ in values alone; headers that were cut do not."""
    folders = [make_checkpoint(tmp_path / str(seed), "llama", LABELS, seed=seed) for seed in (1, 2)]
    first, second = (checkpoint_question(MODEL, folder, CLASSIFIER).key() for folder in folders)
    assert first == second
    weights = folders[1] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert checkpoint_question(MODEL, folders[1], CLASSIFIER).key() != first


def test_an_answer_depends_on_all_code_that_judges_a_checkpoint(intact: dict[str, Path]) -> None:
    """So that no answer of an older version is taken from the cache."""
    show = "for name in [*sys.modules]: print(getattr(sys.modules[name], '__file__', ''))"
    command = f"import sys, {DESCRIBE}\n{show}"
    imported = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    room = Path(ensemble.__file__).parent / "members" / "huggingface"
    judges = {Path(line) for line in imported.stdout.splitlines() if line.startswith(str(room))}
    assert len(judges) > 10
    assert judges <= {*checkpoint_question(MODEL, intact["llama"], CLASSIFIER).files}


def test_a_process_that_dies_is_a_problem(
    intact: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "ask_process", REAL_PROCESS)
    monkeypatch.setattr(questions, "TIMEOUT_SECONDS", 0.01)
    monkeypatch.setattr(questions, "SECONDS_PER_QUESTION", 0.01)
    copy = changed(intact["llama"], tmp_path / "copy", hidden_act="gelu")
    with pytest.raises(CheckpointError, match=r"could not be asked what it is \(no answer within 0.02 s\)"):
        inspected(copy)


def test_a_text_that_a_tokenizer_cannot_encode_takes_no_other_answer(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    copy = changed(intact["llama"], tmp_path / "copy")
    # tokenizers knows no token for what is not in this vocabulary, and raises.
    tokenizer = json.loads((copy / "tokenizer.json").read_text())
    tokenizer["model"] = {"type": "WordLevel", "vocab": {"known": 0, ":": 1, "word": 2}, "unk_token": "[UNK]"}
    tokenizer |= {"added_tokens": [], "pre_tokenizer": {"type": "Whitespace"}}
    tokenizer |= {"normalizer": None, "post_processor": None, "decoder": None}
    (copy / "tokenizer.json").write_text(json.dumps(tokenizer))
    model = MODEL.model_copy(update={"text_column": None, "prompt_template": "neverseen {{ text }}"})
    asked = [
        checkpoint_question(model.model_copy(update={"model_name_or_path": str(folder)}), folder, CLASSIFIER)
        for folder in (copy, intact["llama"])
    ]
    answers = questions.ask(asked)
    facts = [answer.fields or {} for answer in answers]
    assert [item["problems"] for item in facts] == [[], []]
    assert [len(item["text_ids"]) for item in facts] == [0, 1]
    assert all(item["parameters"] for item in facts)


def test_a_refusal_is_not_kept_for_the_next_command(
    intact: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(questions.CACHE, str(tmp_path / "cache"))
    copy = changed(intact["bert"], tmp_path / "copy")
    (copy / "tokenizer.json").rename(tmp_path / "aside.json")
    settings = {"tokenizer_class": "BertTokenizer"}
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    elsewhere = tmp_path / "elsewhere.json"

    def command() -> Checkpoint:
        monkeypatch.setattr(questions, "_answers", {})
        return inspect_folder(copy, LABELS, tokenizer_kwargs={"tokenizer_file": str(elsewhere)})

    with pytest.raises(CheckpointError, match="would know special tokens only"):
        command()
    (tmp_path / "aside.json").rename(elsewhere)
    assert command().facts.problems == []


@pytest.mark.parametrize(
    ("kind", "changes"), [("llama", {"model_type": "tomorrow"}), ("bert", {"num_attention_heads": 5})]
)
def test_a_config_that_is_refused_is_not_kept_for_the_next_command(
    kind: str,
    changes: dict[str, Any],
    intact: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A package that a model needs may be installed until then."""
    monkeypatch.setenv(questions.CACHE, str(tmp_path / "cache"))
    monkeypatch.setattr(questions, "_answers", {})
    with pytest.raises(CheckpointError):
        inspected(changed(intact[kind], tmp_path / "copy", **changes))
    assert not [*tmp_path.glob("cache/**/*.json")]
    inspected(changed(intact[kind], tmp_path / "sound", hidden_act="gelu_new"))
    assert len([*tmp_path.glob("cache/**/*.json")]) == 1


def test_validate_shows_where_a_prompt_ends_and_that_rows_are_cut(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels = project.config()["labels"]
    bert = make_checkpoint(project.folder / "bert", "bert", labels)
    model = make_language_model(project.folder / "model", "llama")
    asked = {
        "task_type": "causal_lm",
        "model_name_or_path": str(model),
        "prompt_template": "{{ label }}\nAnswer:",
        "label_tokens": {label: f" {label}" for label in labels},
    }
    models = [
        {"name": "bert", "model_name_or_path": str(bert), "text_column": "text"},
        {"name": "lm", **asked},
    ]
    project.write_config(project.config(models=models, defaults={"max_length": 300}))
    monkeypatch.chdir(project.folder)
    shown = str(ensemble.validate("config.yaml"))
    assert "models[0].max_length: 300 is more than the 128 positions of the model" in shown
    assert (
        f"lm: with a label's text behind it, it ends in '{project.truth[0]}\\nAnswer: {labels[0]}'" in shown
    )


def test_labels_that_the_head_does_not_have(intact: dict[str, Path], tmp_path: Path) -> None:
    copy = changed(intact["llama"], tmp_path / "copy", id2label={"0": "yes", "1": "no"})
    with pytest.raises(CheckpointError, match=r"score\.weight is \[3, \d+\] in the file, and \[2, \d+\]"):
        inspect_folder(copy, ["yes", "no"])


def test_rope_types_that_this_release_does_not_know(intact: dict[str, Path], tmp_path: Path) -> None:
    copy = changed(
        intact["llama"], tmp_path / "a", rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}
    )
    with pytest.raises(CheckpointError, match=r"cannot build .*spiral.*install a newer release"):
        inspected(copy)
    inspected(changed(intact["llama"], tmp_path / "b", rope_parameters=LLAMA3))


@pytest.mark.fault(30)
def test_numbers_that_only_a_newer_release_reads_are_said_and_no_other_keys(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    left_over = {"gradient_checkpointing": False, "position_embedding_type": "absolute"}
    copy = changed(intact["llama"], tmp_path / "copy", transformers_version="99.1.0", **left_over)
    assert inspected(copy).warnings == ()
    config = {
        "model_type": "gpt_oss",
        "transformers_version": "5.24.0",
        "swiglu_limit": 5.0,
        "swiglu_alpha": 1.702,
    }
    (warning,) = release_warning(config, ["vocab_size"])
    assert "with swiglu_limit: 5.0, and" in warning
    assert "computes with 7.0" in warning
    assert not [*release_warning(config, ["swiglu_limit"])]


def test_numbers_that_are_none_are_a_problem_and_no_stack_trace(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    copy = changed(intact["llama"], tmp_path / "copy", layer_types=[["full"], ["sliding"]])
    with pytest.raises(CheckpointError, match=r"its files cannot be judged \(TypeError: unhashable"):
        inspect_folder(copy, LABELS, trust_remote_code=True)


def test_a_checkpoint_with_code_of_its_own_is_said_to_have_it(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    code = {"auto_map": {"AutoModelForSequenceClassification": "modeling_own.Own"}, "num_attention_heads": 5}
    with pytest.raises(CheckpointError, match="comes with Python code"):
        inspected(changed(intact["bert"], tmp_path / "copy", **code))


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer_class": "LlamaTokenizer"}, "no tokenizer.json, nor tokenizer.model"),
        (
            {"tokenizer_class": "GPT2TokenizerFast"},
            "of GPT2Tokenizer (no tokenizer.json, nor vocab.json and merges.txt)",
        ),
        ({"tokenizer_class": "BertTokenizer"}, "nor vocab.txt"),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, "tokenizer"),
        ({"tokenizer_class": "ByT5Tokenizer"}, ""),
    ],
)
def test_files_that_a_tokenizers_class_needs(
    settings: dict[str, str], message: str, intact: dict[str, Path], tmp_path: Path
) -> None:
    copy = changed(intact["llama"], tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    if not message:
        inspected(copy)
        return
    with pytest.raises(CheckpointError) as caught:
        inspected(copy)
    assert message in str(caught.value)


@pytest.mark.fault(28)
@pytest.mark.parametrize("class_name", ["BertTokenizer", "GemmaTokenizer", "GPT2Tokenizer"])
def test_a_class_that_makes_a_vocabulary_of_special_tokens_up_is_refused(
    class_name: str, intact: dict[str, Path], tmp_path: Path
) -> None:
    copy = changed(intact["llama"], tmp_path / "copy")
    (copy / "tokenizer.json").unlink()
    settings = json.loads((copy / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": class_name, "unk_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    added = {"<|endoftext|>": True, "<tool>": False}  # the file of settings has these, and no text
    settings["added_tokens_decoder"] = {
        str(number): {"content": token, "special": special}
        for number, (token, special) in enumerate(added.items())
    }
    (copy / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(CheckpointError, match="has no tokenizer files with the vocabulary of"):
        inspected(copy)
    with pytest.raises(ValueError, match="would know special tokens only"):  # where the parent could not ask
        tokenizer_notes(copy)


@pytest.mark.fault(28)
def test_a_tokenizer_of_less_than_a_hundredth_of_the_embeddings_is_refused(
    intact: dict[str, Path], tmp_path: Path
) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    from ensemble.members.huggingface.loading.load import load
    from tests.members.huggingface.scoring.test_predict import worker_spec

    copy = changed(intact["llama"], tmp_path / "copy")
    vocabulary = Tokenizer(models.WordLevel({"<unk>": 0, "plants": 1, "food": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=vocabulary, unk_token="<unk>").save_pretrained(copy)
    with pytest.raises(CheckpointError, match="knows 3 tokens, and its model has embeddings of 359"):
        inspected(copy)
    with pytest.raises(ValueError, match="knows 3 tokens, and its model has embeddings of 359"):
        load(worker_spec(copy))


@pytest.mark.usefixtures("warm")
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
    result = project.ensemble("validate", "config.yaml")
    text = " ".join(result.stderr.split())
    assert result.returncode == 2
    assert "no tokenizer files" in text
    assert "it makes 1 layer of layers" in text
    code = (
        "import sys, ensemble.pipeline.prepare\n"
        "print('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    message = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert message.strip() == "False"


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
    assert "no better than always" in " ".join(run.stdout.split())
