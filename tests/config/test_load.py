"""A config as a user has it: read, merged, overridden and checked in one go."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from ensemble.common.errors import ConfigError
from ensemble.config import DataConfig, EnsembleConfig, SubmissionConfig
from ensemble.pipeline.load import load as load_config
from tests.config.examples import SMALL, WHOLE, Load, Problems, begin, small


def test_what_a_user_writes(load: Load, tmp_path: Path) -> None:
    loaded = load(WHOLE.replace("\n", "\r\n"), "limit=10")
    assert loaded.text == WHOLE.replace("\n", "\r\n")
    assert loaded.paths == (tmp_path / "my config.yaml",)
    assert loaded.overrides == ("limit=10",)
    run = loaded.config
    assert run.data == DataConfig(path=Path("test.csv"), id_column="id", label_column="label")
    assert run.labels == ("winner_model_a", "winner_model_b", "winner_tie")
    assert [(m.name, m.max_length, m.weight) for m in run.models] == [
        ("gemma2", 2048, 0.6),
        ("llama3", 1024, 0.4),
    ]
    assert run.models[0].prompt_template == yaml.safe_load(WHOLE)["models"][0]["prompt_template"]
    assert run.models[1].prompt_template == "{{ text }}"
    assert run.ensemble == EnsembleConfig(method="mean")
    assert run.submission == SubmissionConfig(
        sample=Path("sample_submission.csv"), path=Path("submission.csv")
    )
    assert (run.output_dir, run.limit, run.seed) == (Path("runs/first"), 10, 0)


def test_all_problems_come_at_once_and_in_order(problems: Problems) -> None:
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
    assert begin(
        problems(text, "seed=abc", "nothing"),
        "models[0].dtype (line 9): the environment variable NO",
        "models[1].batch_size (line 13): given twice",
        "--set nothing: needs the form key=value, for example --set limit=100",
    )
    text = text.replace("    batch_size: 4\n", "").replace("${NO}", "auto")
    # Then the values, in the order of their lines.
    assert begin(
        problems(text, "seed=abc"),
        "data.path (line 1): required",
        "data.pth (line 1): unknown key",
        "labels[2] (line 2): the same as labels[0]; name each label once",
        "models[0].max_lenght (line 6): unknown key",
        "models[0].weight (line 7): must be a number",
        "models[1].model_name_or_path (line 10): required",
        "models[1].name (line 10): the same as models[0].name",
        "models[1].torch_dtype (line 12): unknown key; use dtype",
        "submission.columns.x (line 14): must be one of",
        "limit (line 15): must be a whole",
        "--set seed=abc: must be a whole",
        "output_dir: required",
    )
    mended = text.replace("max_lenght", "max_length").replace(".nan", "1")
    second_look = problems(mended)
    # Whether keys go together is asked once each of them is right.
    assert begin(
        [problem for problem in second_look if problem.startswith("models[0]")],
        "models[0] (line 4): prompt_template or text_column is required",
        "models[0].label_map.x (line 8): must be one of",
    )


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


def test_a_wrong_default_is_reported_once(problems: Problems) -> None:
    text = WHOLE.replace(
        "max_length: 1024}", "max_length: 0, wieght: 1, label_map: {x: nope}, batch_size: all, name: x}"
    )
    line = "(line 12)"
    right = (
        text.replace("max_length: 0", "max_length: 1")
        .replace("all, name: x", "auto")
        .replace("wieght", "weight")
    )
    assert begin(problems(right), f"defaults.label_map.x {line}: must be")
    assert begin(
        sorted(problems(text)),
        f"defaults.batch_size {line}: must be a whole",
        f"defaults.max_length {line}: must be a whole",
        f"defaults.name {line}: belongs to each model; two models cannot share it",
        f"defaults.wieght {line}: unknown key",
    )


@pytest.mark.parametrize("defaults", ["[]", "text", "0", "false"])
def test_defaults_are_a_mapping(problems: Problems, defaults: str) -> None:
    (problem,) = problems(yaml.safe_dump(SMALL) + f"\ndefaults: {defaults}\n")
    assert "a mapping of a model's keys" in problem


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
        ("output_dri=x", "--set output_dri=x: unknown key; "),
        ("limit=none", "--set limit=none: must be a whole"),
        ("models.llama3.weight=-1", "--set models.llama3.weight=-1: must be a number"),
        (
            "defaults.dtype=x",
            "--set defaults.dtype=x: must be 'auto', 'float32'",
        ),
        ("submision.path=x", "--set submision.path=x: submision: unknown key"),
        ("data={}", "--set data={}: data.path: required"),
        (
            "models.llama.weight=1",
            "--set models.llama.weight=1: models has nothing named 'llama' (did you mean 'llama3'?)",
        ),
    ],
)
def test_problems_of_an_override_name_it(problems: Problems, override: str, problem: str) -> None:
    assert begin(problems(WHOLE, override), problem)


def test_the_processs_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENSEMBLE_TEST_FOLDER", "some folder")
    path = tmp_path / "my config.yaml"
    path.write_text(yaml.safe_dump(SMALL | {"output_dir": "${ENSEMBLE_TEST_FOLDER}/x"}), encoding="utf-8")
    assert load_config(path).config.output_dir == Path("some folder/x")


def test_a_variable_gives_text_and_never_shows(problems: Problems) -> None:
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
    messages = problems(content, "seed=${T}", T=token)
    assert len(messages) == 8
    assert not any(token in problem for problem in messages)
    assert any(
        "weight" in problem and "not '${T}' (a variable always gives text)" in problem for problem in messages
    )


def test_the_cause_of_the_error_holds_no_value(load: Load) -> None:
    with pytest.raises(ConfigError) as caught:
        load(small(weight="${T}"), T="hf_secret_0123")
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None


def test_what_an_unset_variable_brings_about_is_not_reported(
    problems: Problems,
) -> None:
    content = small(label_map={"x": "neg"}, text_column=["a", "${NO}"], weight="${NO}") | {
        "labels": ["${NO}", "pos"]
    }
    assert [problem.split(" (")[0] for problem in problems(content)] == [
        "labels[0]",
        "models[0].text_column[1]",
        "models[0].weight",
    ]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"not here\.yaml: no such file"):
        load_config(tmp_path / "not here.yaml")


def test_importing_brings_in_nothing_heavy() -> None:
    code = "import sys, ensemble.config; print(*{m.split('.')[0] for m in sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "pandas", "pyarrow", "numpy"} & set(ran.stdout.split())
