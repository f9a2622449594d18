"""Keys that do not go together."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml

from tests.config.examples import SMALL, Load, Problems, begin, small


def test_exactly_one_input(problems: Problems) -> None:
    both = small(prompt_template="{{ x }}")
    assert problems(both) == (
        "models[0].prompt_template (line 10): give either prompt_template or text_column, not both",
    )
    (neither,) = problems(small(text_column=None))
    assert neither.startswith("models[0] (line 7): prompt_template or text_column")


def test_code_from_the_hub_demands_a_revision(load: Load, problems: Problems, tmp_path: Path) -> None:
    remote: dict[str, Any] = {"trust_remote_code": True, "model_name_or_path": "org/model"}
    (problem,) = problems(small(**remote))
    assert problem.startswith("models[0].revision (line 7): required with trust_remote_code: true")
    (problem,) = problems(small(**remote, revision="main"))
    assert "revision (line 11): with trust_remote_code: true this is a commit's whole hash" in problem
    assert load(small(**remote, revision="0a" * 20)).config.models[0].trust_remote_code
    assert load(small(**remote | {"model_name_or_path": str(tmp_path)})).config.models[0].trust_remote_code
    assert problems(small(**remote | {"model_name_or_path": "x" * 5000}))


def test_names_differ_whatever_their_case(problems: Problems) -> None:
    content = copy.deepcopy(SMALL)
    content["models"] += [content["models"][0] | {"name": "A"}, content["models"][0] | {"name": "b"}]
    (problem,) = problems(yaml.dump(content, Dumper=_Plain))
    assert problem.startswith("models[1].name (line ")
    assert "the same as models[0].name" in problem


class _Plain(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        return True


def test_weights_are_not_all_zero(load: Load, problems: Problems) -> None:
    content = small(weight=0)
    (problem,) = problems(content)
    assert problem.startswith("models (line 6): the weights are all 0")
    content["models"].append(content["models"][0] | {"name": "b", "weight": 1e308})
    assert load(content).config.models[1].weight == 1e308


def test_weights_by_label_and_by_length_bin(load: Load, problems: Problems) -> None:
    content = small(weight={"neg": 0.5, "pos": 0}) | {"ensemble": {"length_bins": [500, 2000]}}
    content["models"].append(content["models"][0] | {"name": "b", "weight": [1, 0.5, 2]})
    config = load(content).config
    assert [model.weight for model in config.models] == [{"neg": 0.5, "pos": 0.0}, (1.0, 0.5, 2.0)]
    assert config.ensemble.length_bins == (500, 2000)
    assert load(content, "models.0.weight.pos=3").config.models[0].weight == {
        "neg": 0.5,
        "pos": 3,
    }

    def message_of(first: object, second: object, **ensemble: object) -> list[str]:
        content["models"][0]["weight"], content["models"][1]["weight"] = first, second
        return [re.sub(r" .line \d+.", "", text) for text in problems(content | {"ensemble": ensemble})]

    assert begin(
        message_of({"neg": -1, "poz": "x"}, 1),
        "models[0].weight.neg: must be a number",
        "models[0].weight.poz: must be a number",
    )
    assert begin(
        message_of({"neg": 1, "poz": 1}, 1),
        "models[0].weight: has no number for 'pos'; give one for each label",
        "models[0].weight.poz: is none of",
    )
    assert begin(
        message_of([0.5, 1], [0.5, None], length_bins=[9, 10]),
        "models[0].weight: 2 of ensemble.length_bins make 3 bins; give one number for each bin",
        "models[1].weight[1]: must be a number",
    )
    assert message_of([0.5, 1], 1) == [
        "models[0].weight: a list of weights needs ensemble.length_bins; give one number for each bin"
    ]
    all_0 = "are all 0; at least one must be more"
    assert message_of({"neg": 1, "pos": 0}, 0) == [f"models: the weights for pos {all_0}"]
    assert message_of({"neg": 1, "pos": 0}, [1, 0], length_bins=[9]) == [
        f"models: the weights for pos in length bin 2 of 2 {all_0}"
    ]
    assert message_of([0, 1], [0, 1], length_bins=[9]) == [
        f"models: the weights in length bin 1 of 2 {all_0}"
    ]
    assert message_of({}, 1)[0].startswith("models[0].weight: has no number for 'neg', 'pos'")
    assert "or one for each label or each of ensemble.length_bins, not []" in message_of([], 1)[0]
    bins = (
        "ensemble.length_bins: must be a list of whole numbers of at least 1, each more than the one before"
    )
    for edges in ([], [0], [2, 1], [1, 1], ["x"], 5, [1.5]):
        assert message_of(1, 1, length_bins=edges)[0].startswith(bins), edges


def test_what_is_wrong_with_when_is_told_where_it_stands(load: Load, problems: Problems) -> None:
    content = small()
    content["models"].append(content["models"][0] | {"name": "b"})

    def message_of(when: object) -> list[str]:
        content["models"][1]["when"] = when
        return [re.sub(r"models.1..when| .line \d+.", "", text) for text in problems(content)]

    wrong: list[object] = [{}, 0.3, [], {"margin": 0.2}, {"share": 0.2, "margin_below": 0.3}]
    wrong += [{rule: number} for rule in ("share", "margin_below") for number in (0, 1.5, -1, "0.3", True)]
    wrong += [{"entropy_above": number} for number in (-1, float("inf"), None)]
    for value in wrong:
        (text,) = message_of(value)
        assert text.startswith(": must be one of {margin_below: m} "), value
    content["models"][1]["when"] = {"share": 1}
    assert load(content).config.models[1].when == {"share": 1.0}


def test_calibration_and_the_keys_of_methods(load: Load, problems: Problems) -> None:
    good = small(calibration={"temperature": 2, "scale": {"neg": 0.5}, "bias": {"pos": -1}})
    calibration = load(good).config.models[0].calibration
    assert (calibration.temperature, calibration.scale, calibration.bias) == (
        2.0,
        {"neg": 0.5},
        {"pos": -1.0},
    )

    def message_of(content: dict[str, Any]) -> list[str]:
        return [re.sub(r" .line \d+.", "", text) for text in problems(content)]

    temperature = (
        "models[0].calibration.temperature: must be a number of more than 0 (from 0.000001 to 1000000)"
    )
    for wrong, shown in ((0, "0"), (-1, "-1"), (float("inf"), "inf"), (float("nan"), "nan"), ("x", "'x'")):
        assert message_of(small(calibration={"temperature": wrong})) == [f"{temperature}, not {shown}"]
    assert message_of(small(calibration={"scale": {"neg": "x", "nag": 1}, "bias": [1], "temp": 2})) == [
        "models[0].calibration.scale.neg: must be a number from -1000000 to 1000000, not 'x'",
        "models[0].calibration.bias: must be a mapping of labels to numbers, not [1]",
        "models[0].calibration.temp: unknown key; use temperature",
    ]
    assert begin(
        message_of(small(calibration={"scale": {"neg": 1, "nag": 1}})),
        "models[0].calibration.scale.nag: is none of",
    )
    assert begin(message_of(small(calibration=1.5)), "models[0].calibration: must be a mapping")

    def of_method(**ensemble: object) -> list[str]:
        return message_of(small() | {"ensemble": ensemble})

    power = "must be a number from -1000 to 1000, and not 0, which is method: geometric_mean"
    assert of_method(method="power_mean") == ["ensemble.power: required, for example power: 2"]
    assert of_method(method="power_mean", power=0) == [f"ensemble.power: {power}, not 0"]
    assert begin(of_method(method="mean", power=2), "ensemble.power: unknown key")
    assert of_method(method="stacking", coefficients={"a": {"neg": {"pos": "x"}}, "b": 1}) == [
        "ensemble.coefficients.a: must be a number, a number for each label, or a mapping of labels to such "
        "mappings, not a mapping"
    ]
    stacked = {"method": "stacking", "coefficients": {"a": {"neg": {"pos": 1}}}, "intercept": {"neg": 0.5}}
    settings = load(small() | {"ensemble": stacked}).config.ensemble
    assert settings.coefficients == {"a": {"neg": {"pos": 1.0}}}


def test_each_label_is_given_once(problems: Problems) -> None:
    (problem,) = problems(small(label_map={"x": "pos", "y": "neg", "z": "pos"}))
    assert problem.startswith("models[0].label_map.z (line ")
    assert "the same label as label_map.x has" in problem


def test_a_time_limit_and_what_to_fill_in(load: Load, problems: Problems) -> None:
    content = small() | {"fill": "sample", "time_limit": "0m"}
    fill, limit = sorted(problems(content))
    assert limit.startswith("time_limit (line ")
    assert "): must be a time of more than 0s" in limit
    assert fill.startswith("fill (line ")
    assert "): sample needs submission.sample" in fill
    assert len(problems(small() | {"time_limit": 0, "labels": "x"})) == 2, "said beside wrong types as well"
    run = load(content | {"submission": {"sample": "s.csv"}, "time_limit": "1m"}).config
    assert (run.fill, run.time_limit) == ("sample", 60.0)
    assert load(small() | {"fill": "prior"}).config.time_limit is None


def test_label_columns(load: Load, problems: Problems) -> None:
    def told(**data: object) -> tuple[str, ...]:
        return problems(small() | {"data": {"path": "t.csv", **data}})

    (both,) = told(label_column="label", label_columns=["pos", "neg"])
    assert both.startswith("data.label_columns (line ")
    assert both.endswith("one of the two")
    (stranger,) = told(label_columns=["pos", "ngea"])
    assert "label_columns[1]" in stranger
    assert stranger.endswith("one of the labels (of a column with another name: {column: label}), not 'ngea'")
    (lacking,) = told(label_columns={"p": "pos"})
    assert "data.label_columns" in lacking
    assert "has no column for some of the labels" in lacking
    (twice,) = told(label_columns={"p": "pos", "q": "pos"})
    assert "data.label_columns.q" in twice
    assert "the same label as label_columns.p has" in twice
    run = load(small() | {"data": {"path": "t.csv", "label_columns": {"n": "neg", "p": "pos"}}}).config
    assert run.data.truth_columns(run.labels) == tuple(label[0] for label in run.labels)
    run = load(small() | {"data": {"path": "t.csv", "label_columns": ["pos", "neg"]}}).config
    assert run.data.truth_columns(run.labels) == run.labels


def test_rules_need_something_to_set(load: Load, problems: Problems) -> None:
    content = small() | {"rules": [{"when": "{{ text == '' }}", "set": {}}]}
    (empty,) = problems(content)
    assert empty.startswith("rules[0].set (line ")
    assert empty.endswith("): must not be empty")
    content["rules"] = [{"when": "{{ text == '' }}", "set": {"pos": 1}}]
    rules = load(content).config.rules
    assert rules is not None
    assert [rule.set for rule in rules] == [{"pos": 1.0}]


def test_answers_of_the_submission(load: Load, problems: Problems) -> None:
    def submitted(column: object, **changes: Any) -> dict[str, Any]:
        return copy.deepcopy(SMALL) | {"submission": {"sample": "s.csv", "columns": {"x": column}}} | changes

    for column, sentence in (
        ({"answer": {"top": 3}}, "x.answer.top (line 13): more than there are: 2 labels"),
        (
            {"answer": {"expected": [1, 2], "thresholds": [1.5, 1.5]}},
            "x.answer.thresholds (line 13): must be a list of numbers, each more than the one before",
        ),
        (
            {"answer": {"expected": [1, 2], "thresholds": [1.2, 1.5]}},
            "x.answer.thresholds (line 13): 2 between 2 numbers; give 1",
        ),
        (
            {"answer": {"expected": [1, 2, 3]}},
            "x.answer.expected (line 13): 3 for 2 labels; give one for each, in their order",
        ),
        ({"answer": {}}, "x.answer (line 13): give one of top, above and expected"),
        (
            {"answer": {"top": 1, "expected": [1, 2]}},
            "x.answer (line 13): give one of top, above and expected",
        ),
        (
            {"answer": "best"},
            "x.answer (line 13): must be label, {top: 3} or {above: 0.5}, not 'best'",
        ),
        ({"answer": "label", "nmes": {}}, "x.nmes (line 13): unknown key; did you mean names?"),
        ({"names": {"neg": "N"}}, "x.answer (line 13): required, for example answer: label"),
        (
            {"answer": "label", "names": {"N": "neg"}},
            "x.names.N (line 13): is none of the labels, which are 'neg', 'pos'",
        ),
        (
            {"answer": {"expected": [1, 2]}, "names": {"neg": "N"}},
            "x.names (line 13): are for labels; write text around the numbers of expected by format",
        ),
        (
            {"answer": {"above": {"neg": 1.5}}},
            "x.answer.above.neg (line 13): must be a number from 0 to 1, not 1.5",
        ),
        (
            {"answer": {"above": [0.5]}},
            "x.answer.above (line 13): must be a number from 0 to 1, not [0.5]",
        ),
        (
            {"answer": {"above": {"tie": 0.5}}},
            "x.answer.above.tie (line 13): is none of the labels, which are 'neg', 'pos'",
        ),
        ({"answer": {"above": {}}}, "x.answer.above (line 13): must not be empty"),
        (
            {"answer": {"above": 0.5, "at_least": 2}},
            "x.answer.at_least (line 13): every row would have all its labels",
        ),
        (
            {"answer": {"above": {"pos": 0.5}, "at_least": 1}},
            "x.answer.at_least (line 13): every row would have all its labels",
        ),
        ({"answer": {"top": 1, "none": "-"}}, "x.answer.none (line 13): is for above, which is not given"),
        ("best", "x (line 13): must be one of the labels, not 'best'"),
    ):
        (problem,) = problems(yaml.safe_dump(submitted(column), sort_keys=False, default_flow_style=None))
        assert re.sub(r"line \d+", "line 13", problem).startswith(f"submission.columns.{sentence}")
    (problem,) = problems(submitted({"answer": {"thresholds": [1]}, "names": {}}) | {"labels": ["pos"]})[1:]
    assert problem.endswith("are between the numbers of expected, which is not given")
    (problem,) = problems(submitted({"answer": "label"}, labels=["pos"]))
    assert problem.endswith("there is a single label, so that all answers would be the same")
    (problem,) = problems(submitted({"answer": "label"}, fill="sample", time_limit="1m"))
    assert problem.endswith("sample has answers, not probabilities; choose uniform or prior")
    config = load(submitted({"answer": {"top": 2}, "names": {"neg": 0}})).config
    assert config.submission is not None
    assert config.submission.answers["x"].names == {"neg": "0"}
    assert config.submission.label_by_column == {}


def test_isotonic_lines(load: Load, problems: Problems) -> None:
    def message_of(line: Any, **others: Any) -> str:
        (text,) = problems(small(calibration={"isotonic": {"neg": line}, **others}))
        return re.sub(r" .line \d+.", "", text).removeprefix("models[0].calibration.isotonic")

    line = {"x": [0.1, 0.9], "y": [0.3, 0.6]}
    calibration = load(small(calibration={"isotonic": {"neg": line}})).config.models[0].calibration
    assert calibration.isotonic["neg"].y == (0.3, 0.6)
    rising = ".neg.x: must be a list of numbers, each more than the one before, not "
    assert message_of({**line, "x": [0.9, 0.1]}) == f"{rising}[0.9, 0.1]"
    assert message_of({**line, "x": [0.1, 0.1]}) == f"{rising}[0.1, 0.1]"
    assert message_of({**line, "y": [0.1]}) == ".neg.y: 1 for 2 of x; give one for each"
    assert (
        message_of({**line, "y": [0.1, 1.1]})
        == ".neg.y: must be a list of numbers from 0 to 1, not [0.1, 1.1]"
    )
    assert message_of({"x": [0.1]}) == ".neg.y: required, for example y: [0.05, 0.5, 0.9]"
    assert message_of(line, temperature=2) == ": temperature, scale or bias is given as well; keep one way"
    (text,) = problems(small(calibration={"isotonic": {"nag": line}}))
    assert "isotonic.nag" in text


def test_inputs_are_members_before_with_all_rows(load: Load, problems: Problems) -> None:
    content = small()
    mine = {"name": "mine", "task_type": "python", "predict": "mine.py:predict"}
    swapped = {"name": "swapped", "swap": {"columns": ["text", "more"]}, "when": {"share": 0.5}}
    content["models"] += [
        content["models"][0] | {"name": "part", "when": {"share": 0.5}},
        content["models"][0] | {"name": "views", "views": [{"name": "whole"}, swapped]},
        mine | {"inputs": ["a"]},
        mine | {"name": "last", "inputs": ["a", "mine"]},
    ]
    config = load(content).config
    assert config.models[4].input_names == ("a", "mine")
    assert config.models[4].input_columns(("x", "y")) == ("a/x", "a/y", "mine/x", "mine/y")
    assert config.models[0].input_names == ()
    wrong = ["last", "mine", "ab", "part", "views", "a", "a"]
    content["models"][3]["inputs"] = wrong
    texts = [re.sub(r" \(line \d+\)", "", text) for text in problems(yaml.dump(content, Dumper=_Plain))]
    has_when = "has when, so that it lacks rows; name members that predict every row in all views"
    assert texts == [
        f"models[3].inputs[{number}]: {text}"
        for number, text in enumerate(
            (
                "is listed after this member; list it before",
                "is the member itself; name members that are listed before it",
                "is no member (did you mean 'a'?); name members that are listed before this one",
                has_when,
                has_when,
            )
        )
    ] + ["models[3].inputs[6]: the same twice; name each member once"]


def test_inputs_stand_in_for_columns_and_stay_on_one_machine(load: Load, problems: Problems) -> None:
    content = small()
    mine = {"name": "mine", "task_type": "python", "predict": "mine.py:predict"}
    content["models"].append(mine)
    (problem,) = problems(content)
    assert problem.startswith("models[1].columns (line ")
    assert problem.endswith("is missing; name columns of the table, or inputs")
    content["models"][1] = mine | {"inputs": ["a"]}
    assert load(content).config.models[1].input_names == ("a",)
    (problem,) = problems(content | {"launcher": "ray"})
    assert problem.endswith("works on one machine alone, as predictions stay there; set launcher: local")
    content["models"][1] = content["models"][0] | {"name": "b", "inputs": ["a"]}
    (problem,) = problems(content)
    assert problem.endswith("no key of task_type seq_cls; python, command have it (docs/reference/config.md)")
