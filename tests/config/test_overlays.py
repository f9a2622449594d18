"""Several config files as one: later ones override earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from ensemble.common.errors import ConfigError
from ensemble.config import EnsembleConfig, LoadedConfig, RunConfig
from ensemble.config import load_config as load_with
from ensemble.config.document import SECTIONS, dump, parse
from ensemble.members.registry import KINDS
from ensemble.pipeline.load import load as load_config
from tests.config.examples import FILE, WHOLE, begin

Overlaid = Callable[..., Any]  # a LoadedConfig, whose models have the keys of their kinds


@pytest.fixture
def overlaid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Overlaid:
    """Loads WHOLE as base.yaml with further files over it, 1.yaml, 2.yaml and so on."""
    monkeypatch.chdir(tmp_path)

    def load(*overlays: str, sets: Sequence[str] = (), base: str = WHOLE, **environ: str) -> LoadedConfig:
        paths = [Path("base.yaml"), *(Path(f"{number}.yaml") for number in range(1, len(overlays) + 1))]
        for path, text in zip(paths, (base, *overlays), strict=True):
            path.write_text(text, encoding="utf-8")
        return load_config(paths, sets, environ=environ)

    return load


def problems(overlaid: Overlaid, *overlays: str, **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        overlaid(*overlays, **options)
    return caught.value.problems


def test_the_sections_are_those_of_a_config() -> None:
    fields = RunConfig.model_fields.items()
    sections = {name for name, field in fields if "Config" in str(field.annotation)}
    # A list of each; and what was measured was so as a whole.
    sections -= {"models", "rules", "metrics", "tuned_on", "fitted_on"}
    assert {*SECTIONS} == {*sections, "defaults"}


def test_a_train_goes_key_by_key_unless_it_names_another_way(overlaid: Overlaid) -> None:
    base = """
data: {path: t.csv, label_column: label}
labels: [a, b]
output_dir: out
defaults: {text_column: text}
models:
  - name: m
    train: {base_model: base, method: lora, lora_config: {r: 4}, training_arguments: {num_train_epochs: 2}}
"""
    (model,) = overlaid(
        "models: [{name: m, train: {training_arguments: {learning_rate: 0.1}, num_gpus: 2}}]", base=base
    ).config.models
    assert model.train.model_dump(exclude_unset=True) == {
        "base_model": "base",
        "method": "lora",
        "lora_config": {"r": 4},
        "training_arguments": {"learning_rate": 0.1},
        "num_gpus": 2,
    }
    by_command = 'models: [{name: m, train: {command: [sh, t.sh, "{train}", "{out}"]}}]'
    (model,) = overlaid(by_command, base=base).config.models
    assert model.train.model_dump(exclude_unset=True) == {"command": ("sh", "t.sh", "{train}", "{out}")}
    (model,) = overlaid(by_command, "models: [{name: m, train: {num_gpus: 0}}]", base=base).config.models
    assert model.train.num_gpus == 0
    assert model.train.command is not None


def test_what_a_fit_writes(overlaid: Overlaid) -> None:
    run = overlaid(
        "models: [{name: llama3, weight: 0.25}]",
        "models: [{name: gemma2, weight: 0.75}]\nensemble: {method: geometric_mean}\ndata: {id_column: key}",
        sets=("models.llama3.weight=1",),
    ).config
    assert [(model.name, model.weight) for model in run.models] == [("gemma2", 0.75), ("llama3", 1)]
    assert run.ensemble.method == "geometric_mean"
    assert (run.data.id_column, run.data.path, run.data.label_column) == ("key", Path("test.csv"), "label")
    assert run.models[0].model_name_or_path == "models/gemma-2-9b"


def test_sections_go_key_by_key_and_values_as_a_whole(overlaid: Overlaid) -> None:
    base = WHOLE.replace(
        "max_length: 2048", "label_map: {x: winner_tie}\n    model_kwargs: {a: {b: 1}, c: 2}"
    )
    over = """\
labels: [a, b]
defaults: {max_length: 7}
submission: {columns: {x: a}}
models:
  - {name: gemma2, label_map: {y: a}, model_kwargs: {a: {d: 3}}}
  - {name: third, model_name_or_path: models/c, weight: 2}
"""
    run = overlaid(over, base=base).config
    assert run.labels == ("a", "b")
    assert [(model.name, model.max_length, model.prompt_template[:3]) for model in run.models] == [
        ("gemma2", 7, "<pr"),
        ("llama3", 7, "{{ "),
        ("third", 7, "{{ "),
    ]
    assert (run.models[0].label_map, run.models[0].model_kwargs) == ({"y": "a"}, {"a": {"d": 3}})
    assert run.submission is not None
    assert (run.submission.sample, run.submission.columns) == (Path("sample_submission.csv"), {"x": "a"})


def test_null_takes_a_key_away(overlaid: Overlaid) -> None:
    over = "submission: null\nmodels: [{name: gemma2, weight: null, max_length:}]\ndata: {label_column: null}"
    loaded = overlaid(over)
    assert loaded.config.submission is None
    assert loaded.config.data.label_column is None
    assert [(model.weight, model.max_length) for model in loaded.config.models] == [(1.0, None), (0.4, 1024)]
    again = overlaid(over, "submission: {sample: s.csv}\nmodels: [{name: gemma2, max_length: 3}]").config
    assert again.submission is not None
    assert overlaid(over, "submission: {columns: {x: a}}").config.submission is None, "its columns alone"
    assert again.models[0].max_length == 3
    without = problems(overlaid, "data: {path: null}\nmodels: [{name: gemma2, model_name_or_path: null}]")
    assert begin(
        without,
        "data.path (1.yaml, line 1): required",
        "models[0].model_name_or_path (1.yaml, line 2): required",
    )
    away = "models: [{name: gemma2, prompt_template: null}]"
    assert begin(
        problems(overlaid, away, base=WHOLE.replace('prompt_template: "{{ text }}", ', "")),
        "models[0] (base.yaml, line 4): prompt_template or",
        "models[1] (base.yaml, line 9): prompt_template or",
    )


def test_null_in_an_override_takes_a_key_away(overlaid: Overlaid, tmp_path: Path) -> None:
    sets = (
        "models.gemma2.weight=null",
        "models.gemma2.max_length=null",
        "defaults.dtype=null",
        "data.path=null",
    )
    base = WHOLE.replace("defaults: {", "defaults: {dtype: bfloat16, ")
    loaded = overlaid(base=base, sets=(*sets, "data.path=other.csv"))
    first, second = loaded.config.models
    assert (first.weight, first.max_length, first.dtype, loaded.config.data.path) == (
        1.0,
        None,
        "auto",
        Path("other.csv"),
    )
    assert (second.max_length, second.dtype) == (1024, "auto")
    kept = overlaid(base=base, sets=("models.gemma2.dtype=null",))
    assert [model.dtype for model in kept.config.models] == ["auto", "bfloat16"]
    whole = tmp_path / "whole.yaml"
    for item in (loaded, kept):
        whole.write_text(item.whole)
        assert load_config(whole).config == item.config
    kwargs = overlaid(sets=("models.gemma2.model_kwargs.device_map=null",)).config.models[0].model_kwargs
    assert kwargs == {"device_map": None}
    (problem,) = problems(overlaid, sets=("models.gemma2.model_name_or_path=null",))
    assert problem.startswith("--set models.gemma2.model_name_or_path=null: required, for example")


def test_null_takes_away_whatever_comes_first(overlaid: Overlaid) -> None:
    """Of a default and of what a model says in its place; and in a section that no earlier file has."""
    base = WHOLE.replace("defaults: {", "defaults: {dtype: bfloat16, ")
    model, default = "models: [{name: gemma2, dtype: null}]", "defaults: {dtype: null}"
    for files in ((f"{model}\n{default}",), (f"{default}\n{model}",), (model, default), (default, model)):
        assert [model.dtype for model in overlaid(*files, base=base).config.models] == ["auto", "auto"]
    bare = "\n".join(line for line in WHOLE.splitlines() if not line.startswith("ensemble: "))
    assert overlaid("ensemble: {method: null}", base=bare).config.ensemble.method == "mean"
    own = bare.replace("defaults: {", "defaults: {}\nseed: 3 # {").replace("weight: 0.4", "text_column: t")
    assert overlaid("defaults: {dtype: null}", base=own).config.models[1].dtype == "auto"
    (problem,) = problems(overlaid, "defaults: {dtyp: null}", base=own)
    assert problem.startswith("defaults.dtyp (1.yaml, line 1): unknown key; ")


def test_a_new_model_says_what_it_is(overlaid: Overlaid) -> None:
    """Else a name that was mistyped would be one more member, of what the defaults say."""
    base = WHOLE.replace("defaults: {", "defaults: {model_name_or_path: models/base, ")
    base = base.replace("    model_name_or_path: models/llama-3-8b\n", "")
    over = "models: [{name: lama3, dtype: bfloat16}]"
    assert problems(overlaid, over, base=base) == (
        "models[2].model_name_or_path (1.yaml, line 1): required, for example model_name_or_path: "
        "models/gemma-2-9b; no earlier file has a model named 'lama3' (did you mean 'llama3'?)",
    )
    added = overlaid("models: [{name: lama3, model_name_or_path: models/base}]", base=base).config.models
    assert [item.name for item in added] == ["gemma2", "llama3", "lama3"]


def test_null_for_a_key_that_there_is_not_is_refused(overlaid: Overlaid) -> None:
    over = (
        "dat: null\ndata: {pth: null}\nsubmission: {smple: null}\nensemble: {mthod: null}\n"
        "defaults: {dtyp: null, seed: null}\nmodels: [{name: gemma2, weigth: null, replicas: null}]\nrules: null"
    )
    messages = problems(overlaid, over, sets=("models.llama3.dtyp=null",))
    assert [problem.split(":")[0] for problem in messages] == [
        "dat (1.yaml, line 1)",
        "data.pth (1.yaml, line 2)",
        "submission.smple (1.yaml, line 3)",
        "ensemble.mthod (1.yaml, line 4)",
        "defaults.dtyp (1.yaml, line 5)",
        "defaults.seed (1.yaml, line 5)",
        "models[0].weigth (1.yaml, line 6)",
        "--set models.llama3.dtyp=null",
    ]
    assert all("unknown key; " in problem for problem in messages)


def test_null_in_a_single_file_is_as_if_the_key_were_left_out(overlaid: Overlaid) -> None:
    base = WHOLE.replace("weight: 0.4", "weight: null\n    max_length: null")
    run = overlaid(base=f"{base}seed: null\ndevices:\n").config
    assert (run.models[1].weight, run.models[1].max_length, run.seed) == (1.0, None, 0)


def test_what_a_later_file_shuts_out_is_left_out(overlaid: Overlaid, tmp_path: Path) -> None:
    """As far as the earlier file is concerned: what one file says must go together by itself."""
    columns = "data: {label_columns: [winner_model_a, winner_model_b, winner_tie]}"
    csv = "models: [{name: gemma2, task_type: csv, path: old.csv}, {name: llama3, text_column: text}]"
    loaded = overlaid(columns, csv, "defaults: {text_column: other}")
    first, second = loaded.config.models
    assert (first.task_type, first.weight) == ("csv", 0.6)
    assert (second.text_column, second.prompt_template) == ("text", None)
    assert loaded.config.data.label_column is None
    kept = yaml.safe_load(loaded.whole)
    assert kept["defaults"] == {"text_column": "other", "max_length": 1024}
    assert [*kept["models"][0]] == ["name", "weight", "task_type", "path"]
    first = overlaid("defaults: {text_column: t}", sets=("models.gemma2.text_column=u",)).config.models[0]
    assert (first.text_column, first.prompt_template) == ("u", None)
    both = "models: [{name: llama3, text_column: t, prompt_template: x}]"
    (problem,) = problems(overlaid, both)
    assert problem.endswith("or text_column, not both")
    (problem,) = problems(overlaid, csv, base=WHOLE.replace("max_length: 2048", "max_lenght: 2048"))
    assert problem.startswith(
        "models[0].max_lenght (base.yaml, line 7): unknown key; the keys here are name, "
    )


def test_keys_of_another_merge_method_are_left_out(overlaid: Overlaid) -> None:
    class Power(EnsembleConfig):
        strength: float = 1.0

    problems(overlaid, "ensemble: {method: power, strength: 2}", "ensemble: {method: mean}")  # writes them
    paths = [Path("base.yaml"), Path("1.yaml"), Path("2.yaml")]
    methods = {"mean": EnsembleConfig, "power": Power}
    kinds = {"seq_cls": KINDS.load("seq_cls").Settings}
    run = load_with(paths[:2], [], methods, kinds).config
    assert run.ensemble == Power(method="power", strength=2.0)
    for files, sets in ((paths, []), (paths[:2], ["ensemble.method=mean"])):
        assert load_with(files, sets, methods, kinds).config.ensemble == EnsembleConfig()


def test_each_problem_names_its_file_and_line(overlaid: Overlaid) -> None:
    weights = """\

models:
  - {name: lama3, weight: 0.4}
  - {name: gemma2, weight: -1, wieght: 1}
  - {name: gemma2, weight: 2}
"""
    assert begin(
        problems(overlaid, weights, "sed: 1\nlimit: 1\nlimit: ${NO}", sets=("seed=x",)),
        "limit (2.yaml, line 2): given twice",
    )
    assert begin(
        problems(overlaid, weights, "sed: 1\nlimit: 1", sets=("seed=x",)),
        "models[2].model_name_or_path (1.yaml, line 3): required",
        "models[0].weight (1.yaml, line 4): must be a number",
        "models[0].wieght (1.yaml, line 4): unknown key",
        "models[3].model_name_or_path (1.yaml, line 5): required",
        "models[3].name (1.yaml, line 5): the same as models[0].name",
        "sed (2.yaml, line 1): unknown key",
        "--set seed=x: must be a whole",
    )
    syntax, empty = problems(overlaid, "a: [", "")
    assert syntax.startswith("1.yaml (line 1, column 5): not valid YAML: ")
    assert empty == "2.yaml: empty; a config is a mapping of keys to values"
    assert problems(overlaid, "models: {name: gemma2}")[0].startswith(
        "models (1.yaml, line 1): must be a list"
    )


def test_each_key_keeps_its_line_through_aliases_merge_keys_and_overlays(overlaid: Overlaid) -> None:
    base = """\
data: {path: t.csv, label_column: label}
labels: [a, b]
output_dir: out
models:
  - &first
    name: m
    text_column: t
    weight: -1
    train:
      base_model: base
      methd: lora
  - <<: *first
    name: n
"""
    over = "models:\n- name: m\n  train:\n    num_gpus: -1\n- {name: n, weight: 1}\n"
    assert begin(
        problems(overlaid, over, base=base, sets=("models.n.train.command=[a, 1]",)),
        "models[0].weight (base.yaml, line 8): must be a number",
        "models[0].train.methd (base.yaml, line 11): unknown key; did you mean method?",
        "models[1].train.methd (base.yaml, line 11): unknown key; did you mean method?",
        "models[0].train.num_gpus (1.yaml, line 4): must be a whole",
        "--set models.n.train.command=[a, 1]: models[1].train.command[1]: must be text",
    )


def test_variables_and_folders_are_those_of_each_file(overlaid: Overlaid, tmp_path: Path) -> None:
    folder = tmp_path / "of ${x} overlays"
    folder.mkdir()
    over = folder / "over.yaml"
    over.write_text(
        "submission: {path: '${CONFIG_DIR}/s.csv'}\nmodels: [{name: gemma2, weight: 3, max_length: null}]"
    )
    base = WHOLE.replace("test.csv", "'${CONFIG_DIR}/test.csv'").replace("models/llama", "${M}/llama")
    overlaid(base=base, M="models", CONFIG_DIR="elsewhere")
    environ = {"M": "models"}
    loaded = load_config([Path("base.yaml"), over], ["output_dir=${CONFIG_DIR}/x"], environ=environ)
    run = loaded.config
    assert (run.data.path, run.output_dir) == (tmp_path / "test.csv", tmp_path / "x")
    assert run.submission is not None
    assert run.submission.path == folder / "s.csv"
    assert [model.weight for model in run.models] == [3, 0.4]
    # In one file that stands anywhere, without what the environment says.
    (tmp_path / "there").mkdir()
    whole = tmp_path / "there" / "whole.yaml"
    whole.write_text(loaded.whole)
    assert "${M}" in loaded.whole
    assert load_config(whole, environ=environ).config == run


def test_one_file_by_itself_is_kept_as_it_is(overlaid: Overlaid) -> None:
    assert overlaid().whole == overlaid().text == WHOLE
    named = overlaid(base=WHOLE.replace("test.csv", "'${CONFIG_DIR}/test.csv'"))
    assert named.text == named.whole, "elsewhere its folder would be another one"
    assert "${CONFIG_DIR}" not in named.text
    changed = overlaid(sets=("limit=3",))
    assert changed.text == WHOLE
    assert yaml.safe_load(changed.whole) == yaml.safe_load(WHOLE) | {"limit": 3}
    secret = WHOLE.replace("max_length: 1024", "tokenizer_kwargs: {token: planted-secret}")
    both = overlaid("limit: 3", base=secret)
    assert "planted" not in both.whole == both.text
    assert overlaid(base=both.text).config.models[0].tokenizer_kwargs == {"token": "***"}


WORDS = st.sampled_from(
    [
        "1e-5",
        "0o17",
        "yes",
        "~",
        "null",
        ".5",
        "12e3",
        "0x1f",
        "<<",
        "- a",
        "a: b",
        "#",
        "a\nb\n",
        " a\n b",
        "'",
    ]
)


READABLE = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=5)
NUMBERS = st.none() | st.booleans() | st.integers() | st.floats()
NESTED = st.lists(WORDS | NUMBERS) | st.dictionaries(WORDS, READABLE | NUMBERS, max_size=2)


@settings(max_examples=200, deadline=None, database=None, derandomize=True)  # type: ignore[untyped-decorator, unused-ignore]
@given(value=st.dictionaries(WORDS | READABLE, WORDS | READABLE | NUMBERS | NESTED, min_size=1, max_size=4))  # type: ignore[untyped-decorator, unused-ignore]
def test_what_is_dumped_is_read_again(value: dict[str, Any]) -> None:
    assert repr(parse(dump(value), FILE).data) == repr(value)
