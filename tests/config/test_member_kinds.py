"""Each model has the keys of its kind; defaults serve all kinds at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ensemble.common.errors import ConfigError
from ensemble.config import EnsembleConfig, MemberConfig
from ensemble.config.load import load_config
from ensemble.members.registry import KINDS
from tests.config.examples import Load, Problems, begin, small

MATE = {"name": "mate", "task_type": "csv", "path": "mate.csv"}


def both(defaults: dict[str, Any], **mate: Any) -> dict[str, Any]:
    content = small()
    content["models"].append({**MATE, **mate})
    return {**content, "defaults": defaults}


def test_a_default_goes_to_the_kinds_that_have_the_key(load: Load) -> None:
    defaults = {"max_length": 64, "weight": 0.5, "activation": "sigmoid", "prompt_template": "{{ x }}"}
    model, mate = load(both(defaults)).config.models
    assert (model.max_length, model.weight, model.text_column) == (64, 0.5, "text")
    assert model.prompt_template is None, "its own text_column takes its place"
    assert mate.model_dump() == {
        **MATE,
        "path": Path("mate.csv"),
        "weight": 0.5,
        "id_column": None,
        "activation": "sigmoid",
        "calibration": None,
        "when": None,
        "columns": {},
        "values": "probabilities",
        "partial": False,
        "sha256": None,
    }


def test_a_default_can_name_the_kind(load: Load) -> None:
    content = small(task_type="seq_cls")
    content["models"] += [{"name": name, "path": f"{name}.csv"} for name in ("b", "c")]
    _, b, c = load({**content, "defaults": {"task_type": "csv"}}).config.models
    assert (b.task_type, c.path) == ("csv", Path("c.csv"))


@pytest.mark.parametrize(
    ("defaults", "expected"),
    [
        ({"max_lenght": 64}, "defaults.max_lenght (line 15): unknown key; "),
        ({"activaton": "none"}, "defaults.activaton (line 15): unknown key; "),
        ({"torch_dtype": "x"}, "defaults.torch_dtype (line 15): unknown key; use dtype"),
        ({"max_length": 0}, "defaults.max_length (line 15): must be"),
        (
            {"activation": "relu"},
            "defaults.activation (line 15): must be 'softmax', 'sigmoid' or 'none', not 'relu'",
        ),
        (
            {"task_type": "vote"},
            "defaults.task_type (line 15): unknown task_type; ",
        ),
    ],
)
def test_what_no_kind_knows_is_an_error(problems: Problems, defaults: dict[str, Any], expected: str) -> None:
    assert begin(problems(both(defaults)), expected)


def test_a_default_that_only_a_kind_without_members_knows_is_no_error(load: Load) -> None:
    assert load({**small(), "defaults": {"activation": "none"}}).config.models[0].max_length is None


def test_a_model_has_the_keys_of_its_kind_and_no_others(problems: Problems) -> None:
    messages = problems(both({}, max_length=3, file="x", path=None))
    assert messages == (
        "models[1].path (line 12): required, for example path: mate.csv",
        "models[1].max_length (line 13): no key of task_type csv; seq_cls, pooled_cls, causal_lm have it "
        "(docs/reference/config.md)",
        "models[1].file (line 14): unknown key; use path",
    )
    content = both({})
    del content["models"][1]["path"]
    assert begin(problems(content), "models[1].path (line 10): required")


def test_what_is_wrong_with_models_together_is_said_beside_it(problems: Problems) -> None:
    messages = problems(both({}, name="A", weight="x"))
    assert begin(
        messages,
        "models[1].name (line 10): the same",
        "models[1].weight (line 13): must be a number",
    )


def test_a_package_that_is_broken_hides_no_unknown_key(tmp_path: Path) -> None:
    class Kinds(dict[str, type[MemberConfig]]):
        def __getitem__(self, name: str) -> type[MemberConfig]:
            if name == "broken":
                raise ConfigError(["the package broken cannot be imported"])
            return super().__getitem__(name)

    kinds = Kinds({name: KINDS.load(name).Settings for name in ("seq_cls", "csv")}, broken=MemberConfig)
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(both({}, max_length=3)), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_config([path], (), {"mean": EnsembleConfig}, kinds)
    (problem,) = caught.value.problems
    assert problem.endswith("; seq_cls has it (docs/reference/config.md)")
