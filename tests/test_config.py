from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from ensemble import config as config_module
from ensemble.config import (
    DataConfig,
    EnsembleConfig,
    LoadedConfig,
    ModelConfig,
    RunConfig,
    SubmissionConfig,
    load_config,
)
from ensemble.errors import ConfigError

WHOLE = """\
data: {path: test.csv, id_column: id, label_column: label}
labels: [winner_model_a, winner_model_b, winner_tie]
models:
  - name: gemma2
    model_name_or_path: models/gemma-2-9b
    prompt_template: "<prompt>: {{ prompt | fromjson | join(' ') }} ..."
    max_length: 2048
    weight: 0.6
  - name: llama3
    model_name_or_path: models/llama-3-8b
    weight: 0.4
defaults: {prompt_template: "{{ text }}", max_length: 1024}
ensemble: {method: mean}
submission: {sample: sample_submission.csv, path: submission.csv}
output_dir: runs/first
"""
SMALL: dict[str, Any] = {
    "data": {"path": "test.csv"},
    "labels": ["neg", "pos"],
    "models": [{"name": "a", "model_name_or_path": "models/a", "text_column": "text"}],
    "output_dir": "runs/first",
}
Load = Callable[..., LoadedConfig]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    def _load(content: str | dict[str, Any], *overrides: str, **environ: str) -> LoadedConfig:
        path = tmp_path / "my config.yaml"
        text = content if isinstance(content, str) else yaml.safe_dump(content, sort_keys=False)
        path.write_text(text, encoding="utf-8", newline="")
        return load_config(path, overrides, environ=environ)

    return _load


@pytest.fixture
def problems(load: Load) -> Callable[..., tuple[str, ...]]:
    def _problems(content: str | dict[str, Any], *overrides: str, **environ: str) -> tuple[str, ...]:
        with pytest.raises(ConfigError) as caught:
            load(content, *overrides, **environ)
        assert all(problem and problem.isprintable() for problem in caught.value.problems)
        return caught.value.problems

    return _problems


def small(**model: Any) -> dict[str, Any]:
    """A valid config whose one model has these keys too; None takes a key away."""
    content = copy.deepcopy(SMALL)
    content["models"][0].update(model)
    content["models"][0] = {key: value for key, value in content["models"][0].items() if value is not None}
    return content


def test_what_a_user_writes(load: Load, tmp_path: Path) -> None:
    loaded = load(WHOLE.replace("\n", "\r\n"), "limit=10")
    assert loaded.text == WHOLE.replace("\n", "\r\n")
    assert loaded.path == tmp_path / "my config.yaml"
    assert loaded.overrides == ("limit=10",)
    run = loaded.config
    assert run.data == DataConfig(path=Path("test.csv"), id_column="id", label_column="label")
    assert run.labels == ("winner_model_a", "winner_model_b", "winner_tie")
    assert [(m.name, m.max_length, m.weight) for m in run.models] == [
        ("gemma2", 2048, 0.6),
        ("llama3", 1024, 0.4),
    ]
    assert run.models[0].prompt_template == "<prompt>: {{ prompt | fromjson | join(' ') }} ..."
    assert run.models[1].prompt_template == "{{ text }}"
    assert run.ensemble == EnsembleConfig(method="mean")
    assert run.submission == SubmissionConfig(
        sample=Path("sample_submission.csv"), path=Path("submission.csv")
    )
    assert (run.output_dir, run.limit, run.seed) == (Path("runs/first"), 10, 0)


def test_what_is_left_out_has_a_default(load: Load) -> None:
    run = load(SMALL).config
    assert (run.data.id_column, run.data.label_column) == ("id", None)
    assert run.submission is None
    expected = {
        "weight": 1.0,
        "batch_size": "auto",
        "replicas": "auto",
        "dtype": "auto",
        "task_type": "seq_cls",
        "add_special_tokens": True,
        "trust_remote_code": False,
        "label_map": {},
        "num_gpus": None,
    }
    assert {key: getattr(run.models[0], key) for key in expected} == expected


def test_each_type_as_yaml_writes_it(load: Load) -> None:
    run = load(
        small(
            text_column=["premise", "hypothesis"],
            weight=2,
            batch_size=8,
            replicas=2,
            num_gpus=0,
            quantization_config={"load_in_4bit": True},
            label_map={"LABEL_0": "pos", "LABEL_1": "neg"},
            model_kwargs={"nested": {"list": [1, None]}},
        )
        | {"labels": ["neg", "pos", 3, 4]}
    ).config
    model = run.models[0]
    assert run.labels == ("neg", "pos", "3", "4")
    assert model.text_column == ("premise", "hypothesis")
    assert (model.weight, type(model.weight)) == (2.0, float)
    assert model.label_map == {"LABEL_0": "pos", "LABEL_1": "neg"}
    assert model.model_kwargs == {"nested": {"list": [1, None]}}


def test_labels_may_be_words_that_yaml_1_1_takes_for_others(load: Load) -> None:
    text = yaml.safe_dump(SMALL | {"labels": ["L"]}).replace("- L", "- yes\n- no\n- on\n- off\n- 1")
    assert load(text).config.labels == ("yes", "no", "on", "off", "1")


def test_labels_that_are_numbers_match_in_maps(load: Load) -> None:
    content = small(label_map={"x": 1}) | {"labels": [1, "2"]}
    content["submission"] = {"sample": "s.csv", "columns": {"target": 2}}
    run = load(content).config
    assert run.models[0].label_map == {"x": "1"}
    assert run.submission is not None
    assert run.submission.columns == {"target": "2"}


def test_the_home_folder_is_put_in(load: Load) -> None:
    content = small(model_name_or_path="~/models/a") | {"data": {"path": "~/a b.csv"}, "output_dir": "~"}
    run = load(content).config
    assert run.data.path == Path.home() / "a b.csv"
    assert run.output_dir == Path.home()
    assert run.models[0].model_name_or_path == str(Path.home() / "models/a")


@pytest.mark.parametrize("name", ["org/model", "./models/a", "models//a/", "a~b"])
def test_other_sources_stay_as_written(load: Load, name: str) -> None:
    assert load(small(model_name_or_path=name)).config.models[0].model_name_or_path == name


# -- defaults


def test_defaults_reach_models_that_do_not_say(load: Load) -> None:
    content = small(model_kwargs={"a": 1}, text_column=None)
    content["models"].append({"name": "b", "model_name_or_path": "models/b", "text_column": ["t", "u"]})
    content["models"].append({"name": "c", "model_name_or_path": "models/c", "max_length": None})
    content["defaults"] = {
        "prompt_template": "{{ x }}",
        "max_length": 7,
        "model_kwargs": {"b": {"c": []}},
        "weight": 3,
    }
    a, b, c = load(content).config.models
    assert (a.prompt_template, a.text_column, a.max_length, a.model_kwargs) == ("{{ x }}", None, 7, {"a": 1})
    assert (b.prompt_template, b.text_column, b.model_kwargs) == (None, ("t", "u"), {"b": {"c": []}})
    assert (c.max_length, c.weight) == (None, 3.0)
    assert b.model_kwargs["b"] is not c.model_kwargs["b"]


def test_a_models_template_drops_the_default_column(load: Load) -> None:
    content = small(text_column=None, prompt_template="{{ x }}") | {"defaults": {"text_column": "text"}}
    assert load(content).config.models[0].text_column is None


def test_empty_defaults_are_none(load: Load) -> None:
    assert load(yaml.safe_dump(SMALL) + "\ndefaults:\n").config.models[0].weight == 1.0


def test_a_wrong_default_is_reported_once(problems: Callable[..., tuple[str, ...]]) -> None:
    text = WHOLE.replace(
        "max_length: 1024}", "max_length: 0, wieght: 1, label_map: {x: nope}, batch_size: all, name: x}"
    )
    line = "(line 12)"
    assert sorted(problems(text)) == [
        f"defaults.batch_size {line}: must be a whole number of at least 1 or auto, not 'all'",
        f"defaults.label_map.x {line}: must be one of the labels, not 'nope'",
        f"defaults.max_length {line}: must be a whole number of at least 1, not 0",
        f"defaults.name {line}: belongs in each model; two models cannot share it",
        f"defaults.wieght {line}: unknown key; did you mean weight?",
    ]


@pytest.mark.parametrize("defaults", ["[]", "text", "0", "false"])
def test_defaults_are_a_mapping(problems: Callable[..., tuple[str, ...]], defaults: str) -> None:
    (problem,) = problems(yaml.safe_dump(SMALL) + f"\ndefaults: {defaults}\n")
    assert "must be a mapping of a model's keys to values, not" in problem


def test_defaults_are_checked_without_models(problems: Callable[..., tuple[str, ...]]) -> None:
    found = problems(
        {**SMALL, "models": [], "defaults": {"dtype": "half", "text_column": "a", "prompt_template": "b"}}
    )
    assert [problem.split(" (")[0] for problem in found] == [
        "models",
        "defaults.dtype",
        "defaults.prompt_template",
    ]
    found = problems({**SMALL, "models": 5, "defaults": {"text_column": "a", "prompt_template": "b"}})
    assert "defaults.prompt_template (line 10): give either prompt_template or text_column, not both" in found


# -- problems


def test_all_problems_come_at_once_and_in_order(problems: Callable[..., tuple[str, ...]]) -> None:
    text = """\
data: {pth: test.csv}
labels: [a, b, a]
models:
  - name: gemma2
    model_name_or_path: models/a
    max_lenght: 2048
    weight: .nan
    label_map: {x: c}
    dtype: "${NO}"
  - name: Gemma2
    text_column: text
    torch_dtype: float16
    batch_size: 2
    batch_size: 4
submission: {sample: s.csv, columns: {x: d}}
limit: 0
"""
    assert problems(text, "seed=abc", "nothing") == (
        "data.path (line 1): required, for example path: test.csv",
        "data.pth (line 1): unknown key; did you mean path?",
        "labels[2] (line 2): the same as labels[0]; each label stands once",
        "models[0] (line 4): prompt_template or text_column is required, for example text_column: text",
        "models[0].max_lenght (line 6): unknown key; did you mean max_length?",
        "models[0].weight (line 7): must be a number of at least 0, not nan",
        "models[0].label_map.x (line 8): must be one of the labels, not 'c'",
        "models[0].dtype (line 9): the environment variable NO is not set; to keep ${NO}, write $${NO}",
        "models[1].model_name_or_path (line 10): required, for example model_name_or_path: models/gemma-2-9b",
        "models[1].name (line 10): the same as models[0].name; names must differ in more than their case",
        "models[1].torch_dtype (line 12): unknown key; use dtype",
        "models[1].batch_size (line 13): given twice; again on line 14",
        "submission.columns.x (line 15): must be one of the labels, not 'd'",
        "limit (line 16): must be a whole number of at least 1, not 0",
        "--set nothing: needs the form key=value, for example --set limit=100",
        "output_dir: required, for example output_dir: runs/first",
        "--set seed=abc: must be a whole number from 0 to 4294967295, not 'abc'",
    )


def test_an_empty_mapping_lists_what_is_required(problems: Callable[..., tuple[str, ...]]) -> None:
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
        ("peft", "adapters are not supported yet"),
        ("lora", "adapters are not supported yet"),
        ("adapter", "adapters are not supported yet"),
        ("model", "use model_name_or_path"),
        ("model_path", "use model_name_or_path"),
        ("path", "use model_name_or_path"),
        ("max_len", "use max_length"),
        ("template", "use prompt_template"),
        ("Max_Length", "did you mean max_length?"),
        ("wheight", "did you mean weight?"),
        ("zzz", "the keys here are name, model_name_or_path, revision"),
        ("a\nb", "the keys here are"),
        ("z" * 5000, "the keys here are"),
    ],
)
def test_unknown_keys_name_the_known_one(
    problems: Callable[..., tuple[str, ...]], key: str, words: str
) -> None:
    (problem,) = problems(small(**{key: 1}))
    assert f"unknown key; {words}" in problem


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"defualts": {}}, "did you mean defaults?"),
        ({"data": {"path": "x", "csv": "y"}}, "use path"),
        ({"ensemble": {"weights": [1]}}, "use weight (in each model)"),
        ({"submission": {"sample": "x", "sampel": "y"}}, "did you mean sample?"),
        ({"output": "x"}, "use output_dir"),
    ],
)
def test_unknown_keys_elsewhere(
    problems: Callable[..., tuple[str, ...]], content: dict[str, Any], words: str
) -> None:
    (problem,) = problems(SMALL | content)
    assert f"unknown key; {words}" in problem


def test_todays_keys_are_keys() -> None:
    """The table of older spellings names no key that is gone, and hides none that is there."""
    for model, older in config_module._OLDER.items():
        for today, old in older.items():
            keys = ModelConfig.model_fields if "in each model" in today else model.model_fields
            assert today.split(":")[0].split(" ")[0] in keys
            assert not set(old.split()) & set(model.model_fields)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("name", "", "made of letters"),
        ("name", ".a", "made of letters"),
        ("name", "a/b", "made of letters"),
        ("name", "a b", "made of letters"),
        ("name", "é", "made of letters"),
        ("name", "a\n", "made of letters"),
        ("name", "a" * 101, "made of letters"),
        ("name", "Ensemble", "not 'ensemble'"),
        ("name", 1, "made of letters"),
        ("model_name_or_path", "", "the path of a folder or a name on the hub, not ''"),
        ("model_name_or_path", "~nobody-of-this-name/a", "the path of a folder or a name on the hub"),
        ("revision", "", "text, and not empty, not ''"),
        ("revision", 12, "text, and not empty, not 12"),
        ("weight", -0.5, "a number of at least 0, not -0.5"),
        ("weight", float("inf"), "a number of at least 0, not inf"),
        ("weight", "0.5", "a number of at least 0, not '0.5'"),
        ("weight", True, "a number of at least 0, not true"),
        ("weight", 10**200, "cannot be read as a whole number"),
        ("text_column", "", "the name of a column or a list of two columns, not ''"),
        ("text_column", ["a"], "the name of a column or a list of two columns, not ['a']"),
        ("text_column", ["a", "b", "c"], "a list of two columns, not ['a', 'b', 'c']"),
        ("text_column", ["a", 1], "a list of two columns, not ['a', 1]"),
        ("text_column", {"a": 1}, "a list of two columns, not a mapping"),
        ("max_length", 0, "a whole number of at least 1, not 0"),
        ("max_length", 1.5, "a whole number of at least 1, not 1.5"),
        ("max_length", "abc", "a whole number of at least 1, not 'abc'"),
        ("truncation_side", "middle", "one of left, right, not 'middle'"),
        ("add_special_tokens", "yes", "true or false, not 'yes'"),
        ("task_type", "causal_lm", "seq_cls, not 'causal_lm'"),
        ("problem_type", [], "one of single_label_classification, "),
        ("label_map", ["a"], "a mapping of names to labels, not ['a']"),
        ("label_map", {"x": "nope"}, "one of the labels, not 'nope'"),
        ("label_map", {"x": None}, "text (true, false and 0.5 only in quotes), not empty"),
        ("batch_size", 0, "a whole number of at least 1 or auto, not 0"),
        ("batch_size", "many", "a whole number of at least 1 or auto, not 'many'"),
        ("dtype", "fp16", "one of auto, float32, float16, bfloat16, not 'fp16'"),
        ("quantization_config", True, "a mapping of keys to values, not true"),
        ("num_gpus", -1, "a whole number of at least 0, not -1"),
        ("replicas", 0, "a whole number of at least 1 or auto, not 0"),
        ("trust_remote_code", 1, "true or false, not 1"),
        ("model_kwargs", "x" * 500, "a mapping of keys to values, not 'xxx"),
    ],
)
def test_wrong_values(problems: Callable[..., tuple[str, ...]], key: str, value: object, words: str) -> None:
    content = small(**{key: value})
    (problem,) = problems(content)
    assert problem.startswith(f"models[0].{key}")
    assert words in problem
    assert len(problem) < 250


@pytest.mark.parametrize(
    ("content", "start", "words"),
    [
        ({"data": []}, "data (", "must be a mapping of keys to values, not []"),
        ({"data": None}, "data (", "must be a mapping of keys to values, not empty"),
        ({"data": {"path": ""}}, "data.path (", "must be the path of a file or folder, not ''"),
        ({"data": {"path": 1}}, "data.path (", "must be the path of a file or folder, not 1"),
        (
            {"data": {"path": "a", "id_column": " "}},
            "data.id_column (",
            "must be the name of a column, not ' '",
        ),
        (
            {"data": {"path": "a", "label_column": 1}},
            "data.label_column (",
            "must be the name of a column, not 1",
        ),
        ({"data": {"path": "a", "id_column": "pos"}}, "labels[1] (", "the same as data.id_column"),
        ({"labels": []}, "labels (", "must be a list of one or more labels, not []"),
        ({"labels": "a"}, "labels (", "must be a list of one or more labels, not 'a'"),
        ({"labels": {"a": 1}}, "labels (", "must be a list of one or more labels, not a mapping"),
        ({"labels": ["a", ""]}, "labels[1] (", "must be text (true, false and 0.5 only in quotes), not ''"),
        (
            {"labels": ["a", True]},
            "labels[1] (",
            "must be text (true, false and 0.5 only in quotes), not true",
        ),
        ({"labels": ["a", ["b"]]}, "labels[1] (", "must be text"),
        ({"labels": ["1", 1]}, "labels[1] (", "the same as labels[0]"),
        ({"models": []}, "models (", "must be a list of models, not []"),
        ({"models": {"a": {}}}, "models (", "must be a list of models, not a mapping"),
        ({"models": [*SMALL["models"], "b"]}, "models[1] (", "must be a mapping of keys to values, not 'b'"),
        (
            {"models": [*SMALL["models"], None]},
            "models[1] (",
            "must be a mapping of keys to values, not empty",
        ),
        ({"ensemble": "mean"}, "ensemble (", "must be a mapping of keys to values, not 'mean'"),
        ({"ensemble": {"method": "voting"}}, "ensemble.method (", "must be mean, not 'voting'"),
        ({"submission": {}}, "submission.sample (", "required, for example sample: sample_submission.csv"),
        ({"submission": "s.csv"}, "submission (", "must be a mapping of keys to values, not 's.csv'"),
        ({"output_dir": None}, "output_dir (", "must be the path of a file or folder, not empty"),
        ({"limit": 0}, "limit (", "must be a whole number of at least 1, not 0"),
        ({"seed": -1}, "seed (", "must be a whole number from 0 to 4294967295, not -1"),
    ],
)
def test_wrong_values_elsewhere(
    problems: Callable[..., tuple[str, ...]], content: dict[str, Any], start: str, words: str
) -> None:
    (problem,) = problems(SMALL | content)
    assert problem.startswith(start)
    assert words in problem


# -- keys that do not go together


def test_exactly_one_input(problems: Callable[..., tuple[str, ...]]) -> None:
    both = small(prompt_template="{{ x }}")
    assert problems(both) == (
        "models[0].prompt_template (line 10): give either prompt_template or text_column, not both",
    )
    (neither,) = problems(small(text_column=None))
    assert neither.startswith("models[0] (line 7): prompt_template or text_column is required")


def test_code_from_the_hub_demands_a_revision(
    load: Load, problems: Callable[..., tuple[str, ...]], tmp_path: Path
) -> None:
    remote: dict[str, Any] = {"trust_remote_code": True, "model_name_or_path": "org/model"}
    (problem,) = problems(small(**remote))
    assert problem.startswith("models[0].revision (line 7): required with trust_remote_code: true")
    assert load(small(**remote, revision="abc")).config.models[0].trust_remote_code
    assert load(small(**remote | {"model_name_or_path": str(tmp_path)})).config.models[0].trust_remote_code
    assert problems(small(**remote | {"model_name_or_path": "x" * 5000}))


def test_names_differ_whatever_their_case(problems: Callable[..., tuple[str, ...]]) -> None:
    content = copy.deepcopy(SMALL)
    content["models"] += [content["models"][0] | {"name": "A"}, content["models"][0] | {"name": "b"}]
    (problem,) = problems(yaml.dump(content, Dumper=_Plain))
    assert problem.startswith("models[1].name (line ")
    assert "the same as models[0].name" in problem


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def test_weights_are_not_all_zero(load: Load, problems: Callable[..., tuple[str, ...]]) -> None:
    content = small(weight=0)
    assert problems(content) == ("models (line 6): the weights are all 0; at least one must be more",)
    content["models"].append(content["models"][0] | {"name": "b", "weight": 1e308})
    assert load(content).config.models[1].weight == 1e308
    content["models"][0]["weight"] = 1e308
    (problem,) = problems(content)
    assert "add up to more than a number can hold" in problem


def test_each_label_is_given_once(problems: Callable[..., tuple[str, ...]]) -> None:
    (problem,) = problems(small(label_map={"x": "pos", "y": "neg", "z": "pos"}))
    assert problem.startswith("models[0].label_map.z (line ")
    assert "the same label as label_map.x has" in problem


def test_the_rules_hold_without_yaml() -> None:
    model = ModelConfig(name="a", model_name_or_path="b", text_column="c", weight=0)
    values: dict[str, Any] = {"data": {"path": "x"}, "labels": ["a"], "output_dir": "y"}
    with pytest.raises(ValidationError, match="weights are all 0"):
        RunConfig(**values, models=(model,))
    with pytest.raises(ValidationError, match="is required"):
        ModelConfig(name="a", model_name_or_path="b")
    with pytest.raises(ValidationError, match="not both"):
        ModelConfig(name="a", model_name_or_path="b", text_column="c", prompt_template="d")
    with pytest.raises(ValidationError, match="must be one of the labels"):
        RunConfig(**values, models=(model.model_copy(update={"weight": 1.0, "label_map": {"x": "b"}}),))


def test_values_cannot_be_changed(load: Load) -> None:
    run = load(SMALL).config
    with pytest.raises(ValidationError):
        run.seed = 1


# -- overrides


def test_overrides_reach_defaults_and_members(load: Load) -> None:
    run = load(
        WHOLE,
        "models.gemma2.weight=0.5",
        "models[1].weight=1",
        "defaults.max_length=99",
        "data.path=a b.csv",
        "submission=",
    ).config
    assert [(m.weight, m.max_length) for m in run.models] == [(0.5, 2048), (1.0, 99)]
    assert run.data.path == Path("a b.csv")
    assert run.submission is None


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("output_dri=x", "--set output_dri=x: unknown key; did you mean output_dir?"),
        ("limit=none", "--set limit=none: must be a whole number of at least 1, not 'none'"),
        ("models.llama3.weight=-1", "--set models.llama3.weight=-1: must be a number of at least 0, not -1"),
        (
            "defaults.dtype=x",
            "--set defaults.dtype=x: must be one of auto, float32, float16, bfloat16, not 'x'",
        ),
        ("submision.path=x", "--set submision.path=x: submision: unknown key; did you mean submission?"),
        ("data={}", "--set data={}: data.path: required, for example path: test.csv"),
        (
            "models.llama.weight=1",
            "--set models.llama.weight=1: models has nothing named 'llama'; did you mean 'llama3'?",
        ),
    ],
)
def test_problems_of_an_override_name_it(
    problems: Callable[..., tuple[str, ...]], override: str, problem: str
) -> None:
    assert problems(WHOLE, override) == (problem,)


# -- the environment


def test_variables_are_put_in(load: Load, tmp_path: Path) -> None:
    content = small(
        model_name_or_path="${ROOT}/a", text_column=None, prompt_template="$${x} ${WORD} {{ text }}"
    )
    content["data"]["path"] = "${CONFIG_DIR}/test.csv"
    run = load(content, "output_dir=${ROOT}/out", ROOT="/models", WORD="yes", CONFIG_DIR="elsewhere").config
    assert run.data.path == tmp_path / "test.csv"
    assert run.output_dir == Path("/models/out")
    assert run.models[0].model_name_or_path == "/models/a"
    assert run.models[0].prompt_template == "${x} yes {{ text }}"


def test_the_processs_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENSEMBLE_TEST_FOLDER", "some folder")
    path = tmp_path / "my config.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"output_dir": "${ENSEMBLE_TEST_FOLDER}/x"}), encoding="utf-8")
    assert load_config(path).config.output_dir == Path("some folder/x")


def test_a_variable_gives_text_and_never_shows(problems: Callable[..., tuple[str, ...]]) -> None:
    token = "hf_secret_0123"
    content = small(
        name="${T}/",
        weight="${T}",
        dtype="${T}",
        text_column=["${T}"],
        label_map={"x": "${T}", "y": "${T}"},
        model_kwargs="${T}",
        trust_remote_code=True,
    )
    content["labels"] = ["${T}", "b", "${T}"]
    content["data"] = {"path": "x", "id_column": "${T}"}
    content["submission"] = {"sample": "x", "columns": {"a": "x${T}"}}
    found = problems(content, "seed=${T}", T=token)
    assert len(found) > 8
    assert not any(token in problem for problem in found)
    assert any(
        "weight" in problem and "not '${T}' (a variable always gives text)" in problem for problem in found
    )


def test_the_cause_of_the_error_holds_no_value(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load(small(weight="${T}"), T="hf_secret_0123")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_what_an_unset_variable_brings_about_is_not_reported(
    problems: Callable[..., tuple[str, ...]],
) -> None:
    content = small(label_map={"x": "neg"}, text_column=["a", "${NO}"], weight="${NO}") | {
        "labels": ["${NO}", "pos"]
    }
    assert [problem.split(" (")[0] for problem in problems(content)] == [
        "labels[0]",
        "models[0].text_column[1]",
        "models[0].weight",
    ]


# -- anything else


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not here\.yaml: no such file"):
        load_config(tmp_path / "not here.yaml")


def test_importing_brings_in_nothing_heavy() -> None:
    code = "import sys, ensemble.config; print(*{m.split('.')[0] for m in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "pandas", "pyarrow", "numpy"} & set(ran.stdout.split())


def test_every_type_has_its_words() -> None:
    """No key of any model lacks the words for "must be ..."."""
    models: list[type[BaseModel]] = [RunConfig, DataConfig, ModelConfig, EnsembleConfig, SubmissionConfig]
    for model in models:
        for key, hint in config_module._hints(model).items():
            if key in model.model_fields:
                assert config_module._expected(hint)
            for part in get_args(hint):
                assert not isinstance(part, config_module.MustBe) or part.phrase


def steps(value: object, loc: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if loc:
        yield loc
    if isinstance(value, dict):
        for key, item in value.items():
            yield from steps(item, (*loc, key))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from steps(item, (*loc, index))


VALID = {
    **SMALL,
    "models": [
        {**SMALL["models"][0], "label_map": {"x": "neg"}, "weight": 0.5, "trust_remote_code": False},
        {
            "name": "b",
            "model_name_or_path": "b",
            "text_column": ["t", "u"],
            "quantization_config": {"a": [1]},
        },
    ],
    "defaults": {"prompt_template": "{{ x }}", "dtype": "auto", "batch_size": 2},
    "submission": {"sample": "s.csv", "columns": {"a": "neg"}},
}
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.sampled_from(["${X}", "${NO}", "~", "neg"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, database=None, derandomize=True)  # type: ignore[untyped-decorator, unused-ignore]
@given(  # type: ignore[untyped-decorator, unused-ignore]
    loc=st.sampled_from(sorted(steps(VALID), key=str)),
    value=ANYTHING,
    how=st.sampled_from(["set", "drop", "rename"]),
)
def test_a_changed_config_loads_or_is_refused(
    tmp_path_factory: pytest.TempPathFactory, loc: tuple[str | int, ...], value: object, how: str
) -> None:
    content = copy.deepcopy(VALID)
    parent: Any = content
    for step in loc[:-1]:
        parent = parent[step]
    if how == "set":
        parent[loc[-1]] = value
    elif how == "drop":
        del parent[loc[-1]]
    elif isinstance(parent, dict):
        parent[str(value)] = parent.pop(loc[-1])
    path = tmp_path_factory.getbasetemp() / "changed config.yaml"
    path.write_text(json.dumps(content), encoding="utf-8")
    try:
        assert isinstance(load_config(path, environ={"X": "hf_secret"}).config, RunConfig)
    except ConfigError as error:
        found = error.problems
    else:
        return
    assert found
    assert all("\n" not in problem and "hf_secret" not in problem for problem in found)
