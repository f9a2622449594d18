"""What each kind of value takes, and the words with which it refuses the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.config.examples import SMALL, Load, Problems, small


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


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("name", "", "made of letters"),
        ("name", "-a", "no '-' first"),
        ("name", "a.", "no '.' first or last"),
        ("name", "NUL", "nor a device of Windows"),
        ("name", "Ensemble", "not 'ensemble'"),
        ("name", 1, "made of letters"),
        ("model_name_or_path", "", "the path of a folder or a name on the hub, not ''"),
        ("model_name_or_path", "models/a\n", r"the path of a folder or a name on the hub, not 'models/a\n'"),
        ("model_name_or_path", "~nobody-of-this-name/a", "the path of a folder or a name on the hub"),
        ("revision", "", "text, and not empty, not ''"),
        ("revision", 12, "text, and not empty, not 12"),
        ("weight", -0.5, "a number of at least 0, not -0.5"),
        ("weight", "0.5", "a number of at least 0, not '0.5'"),
        ("weight", True, "a number of at least 0, not true"),
        ("weight", 10**200, "cannot be read as a whole number"),
        ("text_column", "", "the name of a column or a list of two columns, not ''"),
        ("text_column", ["a"], "the name of a column or a list of two columns, not ['a']"),
        ("text_column", ["a", 1], "a list of two columns, not ['a', 1]"),
        ("max_length", 0, "a whole number of at least 1, not 0"),
        ("max_length", "abc", "a whole number of at least 1, not 'abc'"),
        ("truncation_side", "middle", "'left' or 'right', not 'middle'"),
        ("add_special_tokens", "yes", "true or false, not 'yes'"),
        ("task_type", "seq_clz", "unknown task_type; did you mean seq_cls?"),
        (
            "task_type",
            "voting",
            "unknown task_type; the task_types here are seq_cls, pooled_cls, causal_lm, image_cls, csv, python",
        ),
        ("task_type", 3, "a kind of member, such as seq_cls, not 3"),
        ("problem_type", [], "must be 'single_label_classification', "),
        ("label_map", ["a"], "a mapping of names to labels, not ['a']"),
        ("label_map", {"x": "nope"}, "one of the labels, not 'nope'"),
        ("label_map", {"x": None}, "in quotes), not empty"),
        ("batch_size", 0, "a whole number of at least 1 or 'auto', not 0"),
        ("dtype", "fp16", "'auto', 'float32', 'float16' or 'bfloat16', not 'fp16'"),
        ("quantization_config", True, "keys to values, not true"),
        ("num_gpus", -1, "a whole number of at least 0, not -1"),
        ("replicas", 0, "a whole number of at least 1 or 'auto', not 0"),
        ("trust_remote_code", 1, "true or false, not 1"),
        ("train", {"command": [1]}, "command[0] (line 12): must be text, and not empty, not 1"),
        ("model_kwargs", "x" * 500, "to values, not 'xxx"),
    ],
)
def test_wrong_values(problems: Problems, key: str, value: object, words: str) -> None:
    content = small(**{key: value})
    (problem,) = problems(content)
    assert problem.startswith(f"models[0].{key}")
    assert words in problem
    assert len(problem) < 250


@pytest.mark.parametrize(
    ("content", "start", "words"),
    [
        ({"data": []}, "data (", "to values, not []"),
        ({"data": None}, "data (", "required, for example data:"),
        ({"data": {"path": ""}}, "data.path (", "must be the path of a file, not ''"),
        ({"data": {"path": "a\n"}}, "data.path (", r"must be the path of a file, not 'a\n'"),
        (
            {"data": {"path": "a", "id_column": " "}},
            "data.id_column (",
            "a column, not ' '",
        ),
        (
            {"data": {"path": "a", "label_column": 1}},
            "data.label_column (",
            "a column, not 1",
        ),
        ({"data": {"path": "a", "id_column": "pos"}}, "labels[1] (", "the same as data.id_column"),
        ({"labels": []}, "labels (", "must be a list of one or more labels, not []"),
        ({"labels": "a"}, "labels (", "must be a list of one or more labels, not 'a'"),
        ({"labels": ["a", ""]}, "labels[1] (", "must be text (true, false and 0.5 only in quotes), not ''"),
        (
            {"labels": ["a", True]},
            "labels[1] (",
            "must be text (true, false and 0.5 only in quotes), not true",
        ),
        ({"labels": ["a", ["b"]]}, "labels[1] (", "must be text"),
        ({"labels": ["1", 1]}, "labels[1] (", "the same as labels[0]"),
        ({"models": []}, "models (", "must be a list of models, not []"),
        ({"models": [*SMALL["models"], "b"]}, "models[1] (", "to values, not 'b'"),
        (
            {"models": [*SMALL["models"], None]},
            "models[1] (",
            "to values, not empty",
        ),
        ({"ensemble": "mean"}, "ensemble (", "to values, not 'mean'"),
        (
            {"ensemble": {"method": "xyz"}},
            "ensemble.method (",
            "unknown method; the methods here are mean",
        ),
        ({"ensemble": {"method": "meam"}}, "ensemble.method (", "unknown method; did you mean mean?"),
        (
            {"ensemble": {"method": 3}},
            "ensemble.method (",
            "a merge method, such as mean, not 3",
        ),
        ({"submission": {}}, "submission.sample (", "required, for example sample: sample_submission.csv"),
        ({"submission": "s.csv"}, "submission (", "to values, not 's.csv'"),
        ({"output_dir": None}, "output_dir (", "required, for example"),
        ({"limit": 0}, "limit (", "1, not 0"),
        ({"seed": -1}, "seed (", "must be a whole number from 0 to 4294967295, not -1"),
    ],
)
def test_wrong_values_elsewhere(problems: Problems, content: dict[str, Any], start: str, words: str) -> None:
    (problem,) = problems(SMALL | content)
    assert problem.startswith(start)
    assert words in problem
