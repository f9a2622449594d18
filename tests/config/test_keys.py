"""Missing and unknown keys, and that no type lacks its words."""

from __future__ import annotations

from typing import Any

import pytest

from ensemble.common.extensions import SettingsByName
from ensemble.config import DataConfig, EnsembleConfig, MemberConfig, RunConfig, SubmissionConfig
from ensemble.config.load import validate
from ensemble.members.registry import KINDS
from tests.config.examples import SMALL, Problems, small


def test_an_empty_mapping_lists_what_is_required(problems: Problems) -> None:
    assert problems("{}") == (
        "data: required, for example data: {path: test.csv}",
        "labels: required, for example labels: [negative, positive]",
        "models: required, for example models: [{name: a, model_name_or_path: models/a, text_column: text}]",
        "output_dir: required, for example output_dir: runs/first",
    )


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("torch_dtype", "use dtype"),
        ("load_in_4bit", "use quantization_config: {load_in_4bit: true}"),
        ("load_in_8bit", "use quantization_config: {load_in_8bit: true}"),
        ("peft", "use adapter_name_or_path"),
        ("lora", "use adapter_name_or_path"),
        ("adapter", "use adapter_name_or_path"),
        ("model", "use model_name_or_path"),
        ("model_path", "use model_name_or_path"),
        ("path", "use model_name_or_path"),
        ("max_len", "use max_length"),
        ("template", "use prompt_template"),
        ("Max_Length", "did you mean max_length?"),
        ("wheight", "did you mean weight?"),
        ("zzz", "the keys here are name, task_type, weight"),
        ("a\nb", "the keys here are"),
        ("z" * 5000, "the keys here are"),
    ],
)
def test_unknown_keys_name_the_known_one(problems: Problems, key: str, words: str) -> None:
    (problem,) = problems(small(**{key: 1}))
    assert f"unknown key; {words}" in problem


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"defualts": {}}, "did you mean defaults?"),
        ({"data": {"path": "x", "csv": "y"}}, "use path"),
        ({"ensemble": {"weights": [1]}}, "use weight (in each"),
        ({"submission": {"sample": "x", "sampel": "y"}}, "did you mean sample?"),
        ({"output": "x"}, "use output_dir"),
    ],
)
def test_unknown_keys_elsewhere(problems: Problems, content: dict[str, Any], words: str) -> None:
    (problem,) = problems(SMALL | content)
    assert f"unknown key; {words}" in problem


def test_a_key_of_a_model_elsewhere(problems: Problems) -> None:
    (problem,) = problems(SMALL | {"data": {"path": "x", "text_column": "y"}})
    assert problem.startswith("data.text_column")
    assert problem.endswith(": belongs to a model, or to defaults")


KEYS = SettingsByName(KINDS).values()
MODELS: list[type[Any]] = [RunConfig, DataConfig, EnsembleConfig, SubmissionConfig, *KEYS]


@pytest.mark.parametrize("key", ["gguf_file", "model_kwargs", "tokenizer_kwargs"])
def test_keys_that_name_a_gguf_file(key: str, problems: Problems) -> None:
    value: Any = "model.gguf" if key == "gguf_file" else {"gguf_file": "model.gguf"}
    (problem,) = problems({**SMALL, "models": [{**SMALL["models"][0], key: value}]})
    assert f"{key} (line " in problem or f"{key}.gguf_file (line " in problem
    assert problem.endswith("; name a folder with the original model's safetensors")


def test_todays_keys_are_keys() -> None:
    """The table of older spellings names no key that is not there, and hides none that is."""
    for model in MODELS:
        for today, old in model.older_keys.items():
            keys = MemberConfig.model_fields if "in each model" in today else model.model_fields
            assert today.split(":")[0].split(" ")[0] in keys
            assert not set(old.split()) & set(model.model_fields)


def test_every_type_has_its_words() -> None:
    """No key of any model lacks the words for "must be ..."."""
    for model in MODELS:
        values = dict.fromkeys(model.model_fields, object())
        _, problems = validate(model, values)
        result = dict(problems)
        assert result.keys() == {(key,) for key in values}
        for sentence in result.values():
            assert sentence.startswith("must be ")
            assert "valid" not in sentence
            assert "instance" not in sentence
