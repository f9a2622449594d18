"""Whatever a config, ``--set`` and the environment hold: a ``RunConfig``, or sentences that say what to fix."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ensemble.common.errors import ConfigError
from ensemble.config import DataConfig, EnsembleConfig, RunConfig, SubmissionConfig
from ensemble.members.seq_cls.parent import SequenceClassifierSettings
from ensemble.pipeline.load import load as load_config
from tests.config.examples import WHOLE, small
from tests.properties import configs
from tests.sampling import tries

# The keys of a model, all of them listed, take 700 characters; everything else is shorter.
LONGEST_SENTENCE = 1_200
# What a sentence starts with: the override, or a place such as models[1].weight (line 7).
_STEP = r"""\[('(\\.|[^'])*'|"(\\.|[^"])*"|\d+)(\.\.\.)?\]"""
_PLACE = rf"--set |top level: |([\w-]{{1,60}}|{_STEP})(\.[\w-]{{1,60}}|{_STEP})*( \(line \d+\))?: "
_NOT_TEXT = r"[\x00\ud800-\udfff]"
_NEVER = ("Traceback", "Error", "object at 0x", "<class", "pydantic", "tag:yaml.org", "s3cret")


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    return folder / "my config.yaml"


def outcome(
    file: Path, content: str | bytes, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> RunConfig | tuple[str, ...]:
    """What loading gives: a config of nothing but text, or sentences that read like sentences."""
    file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
    try:
        config = load_config(file, overrides, environ=environ or {}).config
    except ConfigError as error:
        refused = error
    else:
        assert isinstance(config, RunConfig)
        assert all(re.search(_NOT_TEXT, text) is None for text in texts_in(config.model_dump()))
        return config
    assert refused.exit_code == 2
    assert refused.problems
    for problem in refused.problems:
        assert problem.isprintable(), problem
        assert len(problem) <= LONGEST_SENTENCE, problem
        assert problem.startswith((f"{file}: ", f"{file} (line ")) or re.match(_PLACE, problem), problem
        assert not any(word in problem for word in _NEVER), problem
    return refused.problems


def texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from texts_in([*value, *value.values()])
    elif isinstance(value, list | tuple):
        for item in value:
            yield from texts_in(item)


@tries(150)
@given(text=configs.texts)
@example(text="!!python/object/apply:os.system [id]")
@example(text="!!int x")
def test_any_text_that_looks_like_yaml(file: Path, text: str) -> None:
    outcome(file, text)
    outcome(file, WHOLE + text)
    outcome(file, f"x: {text}\n{WHOLE}")


def test_the_good_config_is_good_and_has_every_key(file: Path) -> None:
    assert isinstance(outcome(file, json.dumps(configs.GOOD)), RunConfig)
    assert configs.GOOD.keys() == {"defaults", *RunConfig.model_fields}
    assert configs.GOOD["models"][0].keys() == SequenceClassifierSettings.model_fields.keys()
    for key, model in (("data", DataConfig), ("ensemble", EnsembleConfig), ("submission", SubmissionConfig)):
        assert configs.GOOD[key].keys() == model.model_fields.keys()


def changed(steps: configs.Steps, value: object) -> dict[str, Any]:
    content = copy.deepcopy(configs.GOOD)
    configs.inside(content, steps[:-1])[steps[-1]] = value
    return content


PLACES = sorted(configs.places(configs.GOOD), key=str)


@tries(120)
@given(data=st.data())
def test_a_changed_config(file: Path, data: st.DataObject) -> None:
    content = data.draw(configs.changed_configs())
    outcome(file, data.draw(configs.written(content)), environ={"X": "s3cret"})


@tries(120)
@given(overrides=configs.override_lists)
@example(overrides=["models=!!int x", "models.models=1"])
@example(overrides=["models.0.model_kwargs.\udcff=1"])
def test_any_overrides(file: Path, overrides: list[str]) -> None:
    outcome(file, WHOLE, overrides)


@tries(200)
@given(steps=st.sampled_from(PLACES), value=configs.values)
@example(steps=("time_limit",), value="9" * 400 + "h")
@example(steps=("time_limit",), value="1h" + " " * 50_000 + "x")
@example(steps=("models", 0, "max_memory"), value={"0": "9" * 400 + "GB"})
@example(steps=("models", 0, "max_memory"), value={"9" * 5000: 1})
def test_an_override_does_what_an_edit_does(file: Path, steps: configs.Steps, value: object) -> None:
    edited = outcome(file, json.dumps(changed(steps, value), ensure_ascii=False))
    override = f"{'.'.join(map(str, steps))}={json.dumps(value, ensure_ascii=False)}"
    overridden = outcome(file, json.dumps(configs.GOOD), [override])
    if value is not None:  # which takes a key away that an edit may have to remove
        assert isinstance(overridden, RunConfig) == isinstance(edited, RunConfig)
    if isinstance(edited, RunConfig):
        is_of_fit = steps[-1] in ("weight", "calibration") or steps[0] == "ensemble"
        if is_of_fit and isinstance(overridden, RunConfig) and overridden.fitted_on is None:
            edited = edited.model_copy(update={"fitted_on": None})  # an override of weights drops it
        assert str(overridden) == str(edited)  # in which NaN is like NaN


@tries(60)
@given(data=st.data())
def test_what_is_right_is_read_as_it_is_written(file: Path, data: st.DataObject) -> None:
    # Only escaped can YAML hold control characters, and line ends as they are.
    plain = st.characters(
        codec="utf-8", exclude_categories=["Cc", "Zl", "Zp"], exclude_characters="$\ufffe\uffff"
    )
    text = st.text(plain, min_size=1).filter(str.strip)
    keys = st.text(plain, min_size=1, max_size=60).filter(
        str.strip
    )  # YAML allows 1,024 characters, escapes included
    kwargs = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(10**90), 10**90)
        | st.floats(allow_nan=False, allow_infinity=False)
        | text,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=8,
    )
    labels = data.draw(
        st.lists(text.filter(lambda label: label != "id"), min_size=1, max_size=4, unique=True)
    )
    model = {
        "weight": data.draw(st.floats(0.1, 1e300) | st.integers(1, 2**53)),
        "text_column": data.draw(text),
        "max_length": data.draw(st.none() | st.integers(1, 2**31 - 1)),
        "trust_remote_code": False,
        "label_map": dict(zip(data.draw(st.lists(keys, unique=True)), labels, strict=False)),
        "model_kwargs": data.draw(st.dictionaries(keys, kwargs, max_size=3)),
    }
    content = {**small(), "labels": labels, "models": [{**small()["models"][0], **model}], "seed": 2**32 - 1}
    config = outcome(file, data.draw(configs.written(content)))
    assert isinstance(config, RunConfig), config
    assert config.labels == tuple(labels)
    assert config.seed == 2**32 - 1
    assert {key: getattr(config.models[0], key) for key in model} == model
