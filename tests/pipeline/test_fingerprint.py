"""The identity of a member's work: what changes it, what does not, and what is said of a change."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common.digests import FileDigests
from ensemble.common.errors import CheckpointError, MergeError
from ensemble.common.files import file_state
from ensemble.config import RunConfig
from ensemble.data.predictions_csv import read_predictions
from ensemble.jobs.causes import Causes
from ensemble.jobs.work import write_shards
from ensemble.members.registry import member_kind
from ensemble.members.seq_cls.parent import SequenceClassifierSettings
from ensemble.pipeline.load import load as load_config
from ensemble.pipeline.prediction_files import changed_members
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.results import ResultWriter
from ensemble.pipeline.resume import demand_unchanged, find_works
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import Results
from ensemble.pipeline.selection import Selections
from ensemble.planning.plan import ModelPlan
from tests.checkpoints import make_adapter, make_checkpoint
from tests.project import LABELS, Project
from tests.sampling import one_in

# Keys of a member that change its numbers, with a value that is not the usual one.
NUMBERS: dict[str, dict[str, Any]] = {
    "prompt_template": {"prompt_template": "{{ text }}!", "text_column": None},
    "text_column": {"text_column": "label"},
    "max_length": {"max_length": 64},
    "truncation_side": {"truncation_side": "left"},
    "truncation": {
        "prompt_template": "{{ text }}",
        "text_column": None,
        "truncation": {"fields": {"text": {"keep": "tail"}}},
    },
    "add_special_tokens": {"add_special_tokens": False},
    "problem_type": {"problem_type": "multi_label_classification"},
    "label_map": {"label_map": {"winner_a": "tie", "tie": "winner_a"}},
    "dtype": {"dtype": "bfloat16"},
    "quantization_config": {"quantization_config": {"load_in_8bit": True}},
    "attn_implementation": {"attn_implementation": "eager"},
    "allow_tf32": {"allow_tf32": True},
    "trust_remote_code": {"trust_remote_code": True},
    "model_kwargs": {"model_kwargs": {"attention_dropout": 0.5}},
    "tokenizer_kwargs": {"tokenizer_kwargs": {"use_fast": False}},
}
# What is told of a change of these, beside the key itself or in its place.
NAMED = {
    "prompt_template": ("prompt_template", "text_columns"),
    "text_column": ("text_columns", "rows"),
    "truncation": ("prompt_template", "truncation", "text_columns"),
    "problem_type": ("activation",),
    "label_map": ("label_order",),
    "trust_remote_code": ("trust_remote_code", "attn_implementation"),
}
# Tested by themselves, because they need files: the adapter's, the hub's cache, a compiler; and a head
# of one output (test_choice_members.py).
NUMBERS_WITH_FILES = {
    *("model_name_or_path", "checkpoints", "adapter_name_or_path", "adapters", "merge_adapter", "revision"),
    *("torch_compile", "choices"),
}
HARMLESS: dict[str, dict[str, Any]] = {
    "name": {"name": "other"},
    "weight": {"weight": 0.1},
    "calibration": {"calibration": {"temperature": 1.3}},
    "task_type": {"task_type": "seq_cls"},
    "batch_size": {"batch_size": 3},
    "compile_timeout": {"compile_timeout": 5},
    "max_num_batched_tokens": {"max_num_batched_tokens": 333},
    "expandable_segments": {"expandable_segments": False},
    "max_split_size_mb": {"max_split_size_mb": 128, "expandable_segments": False},
    "num_gpus": {"num_gpus": 0},
    "replicas": {"replicas": 2},
    "device_map": {"device_map": "auto"},
    "max_memory": {"max_memory": {"cpu": "8GiB"}},
    "offload_folder": {"offload_folder": "offload"},
    "how files are fetched": {"model_kwargs": {"token": "hf_1"}, "tokenizer_kwargs": {"token": "hf_1"}},
    "one column in a list": {"text_column": "text"},
}
HARMLESS_TO_COME = {"allow_pickle"}
# Tested in test_cascade.py, because it needs a member before this one; and in test_views.py: each view has its own.
# And in tests/training: a trained member is what the same checkpoints are without it.
HARMLESS_ELSEWHERE = {"when", "views", "train"}
# Of the keys that change numbers: values that they have anyway, for the tiny Llama on a CPU, spelt out.
SPELT_OUT: dict[str, list[dict[str, Any]]] = {
    "max_length": [{"max_length": 1024}],
    "add_special_tokens": [{"add_special_tokens": True}],
    "problem_type": [{"problem_type": "single_label_classification"}],
    "label_map": [{"label_map": {}}, {"label_map": {"tie": "tie"}}],
    "dtype": [{"dtype": "auto"}, {"dtype": "float32"}],
    "torch_compile": [{"torch_compile": False}],
    "allow_tf32": [{"allow_tf32": False}],
    "attn_implementation": [{"attn_implementation": "sdpa"}],
    "merge_adapter": [{"merge_adapter": False}],
    "trust_remote_code": [{"trust_remote_code": False}],
    "text_column": [{"text_column": "text"}],
    "model_kwargs": [{"model_kwargs": {}}],
    "tokenizer_kwargs": [{"tokenizer_kwargs": {}}],
}
# Tested by itself, because a quantization must be there to have defaults; the hub's cache.
SPELT_OUT_ELSEWHERE = {"quantization_config", "revision"}
# They have no value that they would have anyway.
ALWAYS_GIVEN = {
    *("model_name_or_path", "checkpoints", "adapter_name_or_path", "adapters", "prompt_template"),
    *("truncation", "choices"),
}
# Their usual value is the tokenizer's, and its files count.
TOKENIZERS_OWN = {"truncation_side"}
HARMLESS_OF_RUN: dict[str, dict[str, Any]] = {
    "report": {"report": False},
    "fitted_on": {
        "fitted_on": {"rows": 1, "sha256": "0" * 64, "metric": "auc", "value": 0.5, "interval": None}
    },
    "tuned_on": {
        "tuned_on": {
            "devices": ["x"],
            "versions": {"torch": "2"},
            "rows": 1,
            "tolerance": 0.1,
            "date": "today",
        }
    },
    "rules": {"rules": [{"when": "{{ id == 'a' }}", "mask": [LABELS[0]]}]},
    "submission": {"submission": None},
    "launcher": {"launcher": "local"},
    "output_dir": {"output_dir": "elsewhere"},
    "copy_to": {"copy_to": "s3://bucket/elsewhere"},
    "report_to": {"report_to": "mlflow"},
    "metrics": {"metrics": [{"name": "macro_f1"}]},
    "devices": {"devices": None},
    "max_workers_per_gpu": {"max_workers_per_gpu": 2},
    "cpu_workers": {"cpu_workers": 2},
    "wait_for_gpu": {"wait_for_gpu": "1m"},
    "retries": {"retries": 0},
    "on_bad_row": {"on_bad_row": "uniform"},
    "on_member_failure": {"on_member_failure": "continue"},
    "time_limit": {"time_limit": "8h"},
    "fill": {"fill": "prior"},
    "hang_timeout": {"hang_timeout": "1m"},
    "standby": {"standby": False},
    "release_timeout": {"release_timeout": "1m"},
    "ensemble": {"ensemble": {"method": "mean"}},
}

Make = Callable[..., Prepared]


@pytest.fixture
def make(project: Project, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Prepares a run of one member, the keys of which may be changed, in the project's folder."""
    monkeypatch.chdir(project.folder)

    def made(model: Mapping[str, Any] | None = None, **changes: Any) -> Prepared:
        member = {"name": "llama", "model_name_or_path": str(project.models / "llama"), "text_column": "text"}
        member = {key: value for key, value in {**member, **(model or {})}.items() if value is not None}
        config = {"models": [member], "defaults": {"max_length": 128}, **changes}
        project.write_config(project.config(**config))
        return prepare(load_config(project.folder / "config.yaml"))

    return made


@pytest.fixture
def own_llama(project: Project) -> Path:
    """A copy of the checkpoint that a test may change."""
    return shutil.copytree(project.models / "llama", project.folder / "own llama")


def of_model(prepared: Prepared, plan: ModelPlan, files: FileDigests | None = None) -> Causes:
    """Of the first job of a model."""
    return prepared.causes(plan, plan.jobs[0], files or FileDigests(prepared.config.hash_weights))


def first(prepared: Prepared) -> Causes:
    return of_model(prepared, prepared.plan.models[0])


def last_job(prepared: Prepared) -> Causes:
    """Of the last job of the first model."""
    plan = prepared.plan.models[0]
    return prepared.causes(plan, plan.jobs[-1], FileDigests(prepared.config.hash_weights))


@pytest.mark.parametrize("key", NUMBERS)
@pytest.mark.fault(18)
def test_keys_that_change_numbers_are_named(make: Make, key: str) -> None:
    assert first(make(NUMBERS[key])).changed_from(first(make())) == NAMED.get(key, (key,))


@pytest.mark.parametrize("key", one_in(3, HARMLESS))
@pytest.mark.fault(18)
def test_keys_that_change_no_number_change_nothing(make: Make, key: str) -> None:
    assert first(make(HARMLESS[key])) == first(make())


@pytest.mark.parametrize("key", one_in(3, HARMLESS_OF_RUN))
def test_keys_of_the_run_that_change_no_number_change_nothing(make: Make, key: str) -> None:
    assert first(make(**HARMLESS_OF_RUN[key])) == first(make())


@pytest.mark.parametrize("key", one_in(3, SPELT_OUT))
@pytest.mark.fault(18)
def test_a_key_set_to_what_it_is_anyway_changes_nothing(make: Make, key: str) -> None:
    usual = make(defaults={})
    for spelt_out in SPELT_OUT[key]:
        assert first(make(spelt_out, defaults={})) == first(usual), spelt_out


@pytest.mark.fault(18)
def test_the_tokenizers_own_settings_spelt_out(make: Make, own_llama: Path) -> None:
    model = {"model_name_or_path": str(own_llama)}

    def same(**keys: Any) -> bool:
        return first(make({**model, **keys}, defaults={})) == first(make(model, defaults={}))

    def settings(**changes: Any) -> None:
        path = own_llama / "tokenizer_config.json"
        config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
        path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))

    settings(model_max_length=64)
    assert same(max_length=64)
    assert not same(max_length=1024)
    settings(model_max_length=4096.0)
    assert same(max_length=1024)
    settings(model_max_length=None)  # then the tokenizer's class says
    assert same(max_length=1024)
    settings(model_max_length=64)
    assert not same(max_length=64, tokenizer_kwargs={"model_max_length": 32})


@pytest.mark.fault(27)
def test_files_that_change_while_the_run_starts(make: Make, own_llama: Path) -> None:
    """After something was read of them, and before they were digested."""
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        prepared = make({"model_name_or_path": str(own_llama)})
        shutil.copy(own_llama / name, own_llama / "copy")
        (own_llama / "copy").replace(own_llama / name)
        files = FileDigests(False, prepared.file_states)
        with pytest.raises(CheckpointError, match=rf"{name} changed while"):
            of_model(prepared, prepared.plan.models[0], files)


@pytest.mark.fault(27)
def test_a_change_that_no_time_tells_voids_all_shards(make: Make, own_llama: Path) -> None:
    """As on a file system without times of its own: the content is looked at before anything is complete."""
    views = [{"name": "one"}, {"name": "two", "prompt_template": "{{ text }}?"}]
    template = {"text_column": None, "prompt_template": "{{ text }}", "views": views}
    prepared = make({"model_name_or_path": str(own_llama), **template})
    rundir = RunDir(prepared.config.output_dir)
    rundir.create()
    rundir.tidy()
    (work,) = find_works(prepared, rundir, lambda text: None).values()
    (plan,) = prepared.plan.models
    rows = np.arange(prepared.table.rows)
    for job in work.jobs:
        job.make_shards_dir()
        write_shards(job.shards_dir, rows, np.full((len(rows), len(LABELS)), 1 / 3))
    demand_unchanged(prepared, plan.loaded, work.jobs)
    make_checkpoint(own_llama, "llama", LABELS, seed=9, pad=None)
    files = work.jobs[0].files
    for path, seen in files.items():
        state = file_state(path)
        assert state is not None
        files[path] = dataclasses.replace(seen, state=state)
    works = {work.name: work}
    writer = ResultWriter(prepared, rundir, works, Selections(prepared, rundir, works), Results())
    with pytest.raises(MergeError, match=r"model\.safetensors changed during the run"):
        writer.write_predictions(plan.loaded)
    assert not any(job.shards_dir.exists() for job in work.jobs), "those of the second view as well"


def test_a_member_for_which_time_was_left_in_its_first_view_alone(make: Make, project: Project) -> None:
    """It is the mean of the views that each row has, and another run goes on with it."""
    views = [{"name": "one"}, {"name": "two", "prompt_template": "{{ text }}?"}]
    plain = {"model_name_or_path": str(project.models / "llama"), "prompt_template": "{{ text }}"}
    timed = {**plain, "name": "timed", "views": views, "when": {"share": "as_time_allows"}}
    prepared = make(models=[{**plain, "name": "plain"}, timed], time_limit="1h")
    rundir = RunDir(prepared.config.output_dir)
    rundir.create()
    rundir.tidy()
    works = find_works(prepared, rundir, lambda text: None)
    rows, first, second = np.arange(prepared.table.rows), [0.2, 0.2, 0.6], [0.6, 0.2, 0.2]
    for work, values, count in zip(works["timed"].jobs, (first, second), (len(rows), 5), strict=True):
        work.make_shards_dir()
        write_shards(work.shards_dir, rows[:count], np.tile(values, (count, 1)))
    selections = Selections(prepared, rundir, works)
    writer = ResultWriter(prepared, rundir, works, selections, Results())
    selections.begin()
    selections.end("plain")
    selections.keep_computed("timed")
    writer.write_predictions(prepared.models[1])
    assert writer.results.partial_rows == {"timed": len(rows) - 5}, "complete, and in one view only"
    expected = np.where(rows[:, None] < 5, [0.4, 0.2, 0.4], first)
    np.testing.assert_allclose(read_predictions(rundir.predictions("timed")).values, expected)
    again = find_works(prepared, rundir, lambda text: None)["timed"]
    assert not again.is_complete
    assert [int(job.is_done.sum()) for job in again.jobs] == [len(rows), 5]


def test_a_member_that_gets_or_loses_views_is_said_to_have_changed_in_its_views(
    make: Make, project: Project
) -> None:
    views = [{"name": "one"}, {"name": "two", "prompt_template": "{{ text }}?"}]
    plain = {"text_column": None, "prompt_template": "{{ text }}"}
    with_views = make({**plain, "views": views})
    rundir = RunDir(with_views.config.output_dir)
    rundir.predictions_dir.mkdir(parents=True)
    (member,) = find_works(with_views, rundir, lambda text: None).values()
    for work in (member.predictions, *member.jobs):
        rundir.manifest(work.name).write_text(json.dumps({"fingerprint": work.causes.to_dict()}))
    without = make(plain)
    texts: list[str] = []
    find_works(without, rundir, texts.append)
    assert texts == ["llama: views changed since its predictions were made; it runs again"]
    changed = changed_members(without.config, ["llama"], rundir.root)
    assert changed == {"llama": ["views"]}
    rundir.manifest("llama").write_text(json.dumps({"fingerprint": first(without).to_dict()}))
    changed = changed_members(make({**plain, "views": views}).config, ["llama"], rundir.root)
    assert changed == {"llama": ["views"]}


def test_a_member_that_is_not_trained_has_jobs_of_which_nothing_is_done(make: Make) -> None:
    views = [{"name": "one"}, {"name": "two", "prompt_template": "{{ text }}?"}]
    prepared = make({"text_column": None, "prompt_template": "{{ text }}", "views": views})
    loaded = dataclasses.replace(prepared.loaded, untrained={"llama": "there was no time"})
    prepared = dataclasses.replace(prepared, loaded=loaded)
    (work,) = find_works(prepared, RunDir(prepared.config.output_dir), lambda text: None).values()
    assert [job.name for job in work.jobs] == ["llama@one", "llama@two"]
    assert not work.has_any_rows


@pytest.mark.fault(27)
def test_all_files_are_watched_of_which_a_member_is_made(make: Make, project: Project) -> None:
    folder = shutil.copytree(project.models / "llama", project.folder / "own")
    (folder / "modeling_own.py").write_text("x = 1")
    adapter = project.folder / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    (adapter / "adapter_model.safetensors").write_bytes(bytes(8))
    vocabulary = project.folder / "vocabulary.txt"
    vocabulary.write_text("a")
    keys = {
        "model_name_or_path": str(folder),
        "adapter_name_or_path": str(adapter),
        "trust_remote_code": True,
        "tokenizer_kwargs": {"extra": str(vocabulary)},
    }
    prepared = make()
    inspected: Any = prepared.inspected["llama"]
    inspected = dataclasses.replace(inspected, folder=folder)
    files = FileDigests(whole=False)
    model = prepared.config.models[0].model_copy(update=keys)
    member_kind(model).content(inspected, files)
    names = {str(Path(path).relative_to(project.folder)) for path in files.seen}
    assert names == {
        *("own/config.json", "own/modeling_own.py", "own/tokenizer.json", "own/tokenizer_config.json"),
        *("adapter/adapter_config.json", "adapter/adapter_model.safetensors", "vocabulary.txt"),
        "own/model.safetensors",
    }


def test_no_key_has_been_forgotten() -> None:
    numbers = {*NUMBERS, *NUMBERS_WITH_FILES}
    assert numbers == {*SPELT_OUT, *SPELT_OUT_ELSEWHERE, *ALWAYS_GIVEN, *TOKENIZERS_OWN}, (
        "what is this key where nobody sets it?"
    )
    known = {*NUMBERS, *NUMBERS_WITH_FILES, *HARMLESS, *HARMLESS_TO_COME, *HARMLESS_ELSEWHERE}
    assert set(SequenceClassifierSettings.model_fields) <= known
    others = {"data", "labels", "models", "limit", "seed", "hash_weights", "training"}
    assert set(RunConfig.model_fields) <= {*HARMLESS_OF_RUN, *others}


def test_keys_of_the_run_that_change_numbers(make: Make) -> None:
    before = first(make())
    assert first(make(seed=1)).changed_from(before) == ("seed",)
    assert first(make(limit=10, submission=None)).changed_from(before) == ("rows",)
    assert first(make(labels=[LABELS[1], LABELS[0], LABELS[2]])).changed_from(before) == (
        "label_order",
        "labels",
    )


def test_names_of_the_columns_in_the_csv_count(make: Make, project: Project) -> None:
    rows = [list(row) for row in zip(project.ids, project.texts, strict=True)]
    project.write_csv("id.csv", ["id", "text"], rows)
    project.write_csv("key.csv", ["key", "text"], rows)
    before = first(make(data={"path": "id.csv"}, submission=None))
    renamed = make(data={"path": "key.csv", "id_column": "key"}, submission=None)
    assert first(renamed).changed_from(before) == ("data.id_column",)
    other_labels = make(
        {"label_map": {"winner_a": "a"}},
        data={"path": "id.csv"},
        labels=["a", *LABELS[1:]],
        submission=None,
    )
    assert first(other_labels).changed_from(before) == ("labels",)


def test_settings_count_by_value_and_kind_in_any_order(make: Make) -> None:
    def settings(kwargs: dict[Any, Any]) -> str:
        return first(make({"model_kwargs": kwargs})).digest

    assert settings({"a": 1, "b": {"c": 2, "d": 3}}) == settings({"b": {"d": 3, "c": 2}, "a": 1})
    odd: list[Any] = [1, "1", 1.5, True, "true", None, [1], [[1]], [], {}, {"1": 2}, float("nan"), "nan"]
    assert len({settings({"key": value}) for value in odd}) == len(odd)


def test_the_type_that_auto_means_counts(make: Make) -> None:
    prepared, float32 = make(), make({"dtype": "float32"})
    assert first(prepared) == first(float32)  # on a CPU
    bfloat16 = first(make({"dtype": "bfloat16"}))
    member = prepared.plan.models[0]
    for dtype, same_as in (("float32", first(float32)), ("bfloat16", bfloat16)):
        placement = dataclasses.replace(member.placement, gpus=1, dtype=dtype)
        on_gpu = dataclasses.replace(member, placement=placement, replicas=4, first_replicas=1)
        assert of_model(prepared, on_gpu) == same_as
        spread = dataclasses.replace(on_gpu, placement=dataclasses.replace(placement, gpus=2))
        assert of_model(prepared, spread) == same_as


def test_stored_float32_layers_that_compute_in_half_precision_are_others(make: Make, own_llama: Path) -> None:
    pytest.importorskip("bitsandbytes")
    config = json.loads((own_llama / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_compute_dtype": "float32",
    }
    (own_llama / "config.json").write_text(json.dumps(config))
    prepared = make({"model_name_or_path": str(own_llama)})
    member = prepared.plan.models[0]

    def on_gpu(dtype: str, capability: tuple[int, int] | None) -> Causes:
        placement = dataclasses.replace(member.placement, gpus=1, dtype=dtype, capability=capability)
        return of_model(prepared, dataclasses.replace(member, placement=placement))

    as_stored = on_gpu("bfloat16", None)
    assert on_gpu("bfloat16", (8, 0)).changed_from(as_stored) == ("compute_dtype",)
    assert on_gpu("float32", (8, 0)) == on_gpu("float32", None)


def test_compiled_models_are_others(make: Make) -> None:
    assert first(make({"torch_compile": True})).changed_from(first(make())) == ("torch_compile",)


@pytest.mark.fault(18)
def test_a_model_trained_again_in_the_same_folder(make: Make, own_llama: Path) -> None:
    model = {"model_name_or_path": str(own_llama)}
    before = first(make(model))
    assert before == first(make())  # a copy is the same
    shape = [(path.name, path.stat().st_size) for path in sorted(own_llama.iterdir())]
    make_checkpoint(own_llama, "llama", LABELS, seed=9, pad=None)
    assert [(path.name, path.stat().st_size) for path in sorted(own_llama.iterdir())] == shape
    assert first(make(model)).changed_from(before) == ("weights",)
    whole = first(make(model, hash_weights=True))
    assert whole == first(make(model, hash_weights=True))
    make_checkpoint(own_llama, "llama", LABELS, seed=10, pad=None)
    assert first(make(model, hash_weights=True)).changed_from(whole) == ("weights",)


def test_files_of_the_checkpoint(make: Make, own_llama: Path) -> None:
    def changes(name: str, text: str, **keys: Any) -> tuple[str, ...]:
        model = {"model_name_or_path": str(own_llama), **keys}
        before = first(make(model))
        (own_llama / name).write_text(text, encoding="utf-8")
        return first(make(model)).changed_from(before)

    config = json.loads((own_llama / "config.json").read_text(encoding="utf-8"))
    assert changes("config.json", json.dumps({**config, "rms_norm_eps": 0.1})) == ("weights",)
    tokenizer = (own_llama / "tokenizer.json").read_text(encoding="utf-8")
    assert changes("tokenizer.json", tokenizer.replace('"NFC"', '"NFD"') + " ") == ("tokenizer",)
    assert changes("added_tokens.json", "{}") == ("tokenizer",)
    assert changes("README.md", "A model.") == ()
    assert changes("trainer_state.json", "{}") == ()
    assert changes("modeling_own.py", "x = 1") == ()
    assert changes("modeling_own.py", "x = 2", trust_remote_code=True) == ("weights",)


@pytest.mark.fault(18)
def test_rows_of_the_table(make: Make, project: Project) -> None:
    before = first(make())
    names = ["id", "text", "label"]
    rows = [list(row) for row in zip(project.ids, project.texts, project.truth, strict=True)]

    def changes(changed: list[list[str]]) -> tuple[str, ...]:
        project.write_csv("test.csv", names, changed)
        return first(make()).changed_from(before)

    assert changes(rows) == ()
    assert changes([[*row[:2], LABELS[0]] for row in rows]) == ()  # the truth is not what is computed
    assert changes([*rows[:-1], [rows[-1][0], "other", rows[-1][2]]]) == ("rows",)
    assert changes(rows[::-1]) == ("rows",)
    moved = shutil.copy(project.write_csv("test.csv", names, rows), project.folder / "moved.csv")
    data = {"path": str(moved), "label_column": "label"}
    assert first(make(data=data)) == before


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft on transformers 5
def test_adapters(make: Make, project: Project) -> None:
    adapter = project.folder / "adapter"
    make_adapter(adapter, project.models / "llama", len(LABELS), seed=1)
    model = {"adapter_name_or_path": str(adapter)}
    plain, before = first(make()), first(make(model))
    assert before.changed_from(plain) == ("weights",)
    assert first(make({**model, "merge_adapter": True})).changed_from(before) == ("merge_adapter",)
    moved = shutil.copytree(adapter, project.folder / "moved adapter")
    assert first(make({"adapter_name_or_path": str(moved)})) == before
    config = json.loads((moved / "adapter_config.json").read_text(encoding="utf-8"))
    (moved / "adapter_config.json").write_text(json.dumps({**config, "lora_alpha": 99}), encoding="utf-8")
    assert first(make({"adapter_name_or_path": str(moved)})).changed_from(before) == ("weights",)
    make_adapter(adapter, project.models / "llama", len(LABELS), seed=2)
    assert first(make(model)).changed_from(before) == ("weights",)
    both = [str(adapter), str(moved)]
    mean = first(make({"adapters": {"average": both}}))
    assert mean.changed_from(before) == ("combination_type", "weights")
    assert first(make({"adapters": {"average": both, "combination_type": "cat"}})) == mean
    linear = first(make({"adapters": {"average": both, "combination_type": "linear"}}))
    assert linear.changed_from(mean) == ("combination_type",)
    assert first(make({"adapters": {"average": both[::-1]}})).changed_from(mean) == ("weights",)


def test_averaged_checkpoints(make: Make, project: Project) -> None:
    folds = [project.folder / f"fold{number}" for number in range(3)]
    for number, fold in enumerate(folds):
        make_checkpoint(fold, "llama", LABELS, seed=number)
    alone = first(make({"model_name_or_path": str(folds[0])}))

    def averaged(*names: Path) -> Any:
        return first(make({"model_name_or_path": None, "checkpoints": {"average": [*map(str, names)]}}))

    mean = averaged(*folds)
    assert mean.changed_from(alone) == ("weights",)
    assert averaged(*folds[:2]).changed_from(mean) == ("weights",)
    assert "weights" in averaged(*folds[::-1]).changed_from(mean)
    moved = [shutil.copytree(fold, project.folder / f"moved {fold.name}") for fold in folds]
    assert averaged(*moved) == mean
    make_checkpoint(moved[1], "llama", LABELS, seed=7)
    assert averaged(*moved).changed_from(mean) == ("weights",)


@pytest.fixture
def hub_cache(project: Project, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, which cannot be reached."""
    from huggingface_hub import constants

    cache = project.folder / "cache"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def commit_to(cache: Path, name: str, commit: str, files: Sequence[Path]) -> Path:
    """The hub's branch main moves to a commit, of which the cache gets these files."""
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "refs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for file in files:
        shutil.copy(file, snapshot)
    return snapshot


def test_names_on_the_hub_stand_for_a_commit(make: Make, project: Project, hub_cache: Path) -> None:
    folder, model = project.models / "llama", {"model_name_or_path": "people/llama"}
    snapshot = commit_to(hub_cache, "people/llama", "1" * 40, [folder / "config.json"])
    before = first(make(model))
    for file in folder.iterdir():  # the worker fetches the rest
        shutil.copy(file, snapshot)
    assert first(make(model)) == before
    assert first(make(model, hash_weights=True)) == before
    commit_to(hub_cache, "people/llama", "2" * 40, list(folder.iterdir()))
    assert first(make(model)).changed_from(before) == ("weights", "tokenizer")
    assert first(make({**model, "revision": "1" * 40})) == before
    assert first(make({**model, "revision": "main"})) == first(make(model))
    settings = {"tokenizer_kwargs": {"tokenizer_file": str(project.folder / "own.json")}}
    named = first(make({**model, **settings}))
    (project.folder / "own.json").write_text("{}")
    assert first(make({**model, **settings})).changed_from(named) == ("tokenizer",)


def test_an_adapter_on_the_hub_stands_for_a_commit(make: Make, project: Project, hub_cache: Path) -> None:
    config = project.folder / "adapter_config.json"
    config.write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "llama"}))
    snapshot = commit_to(hub_cache, "people/adapter", "1" * 40, [config])
    model = {"adapter_name_or_path": "people/adapter"}
    before = first(make(model))
    (snapshot / "adapter_model.safetensors").write_bytes(b"weights")
    assert first(make(model)) == before
    two = {"views": [{"name": "hub"}, {"name": "base", "adapter_name_or_path": "people/other"}]}
    commit_to(hub_cache, "people/other", "1" * 40, [config])
    both = first(make({**model, **two})), last_job(make({**model, **two}))
    kind = member_kind(make({**model, **two}).config.models[0])
    hub_files = [file.folder for file in kind.hub_files(make({**model, **two}).inspected["llama"])]
    assert hub_files == ["people/adapter", "people/other"]
    assert kind.sources()[1:] == ("people/adapter", "people/other")
    commit_to(hub_cache, "people/other", "2" * 40, [config])
    assert first(make({**model, **two})) == both[0]
    assert last_job(make({**model, **two})).changed_from(both[1]) == ("weights",)
    assert first(make(model)) == before
    commit_to(hub_cache, "people/adapter", "2" * 40, [config])
    assert first(make(model)).changed_from(before) == ("weights",)


def test_the_tokenizer_in_a_folder_of_another_kind_of_checkpoint(make: Make) -> None:
    gemma = str(make().config.models[0].model_dump()["model_name_or_path"]).replace("llama", "gemma")
    result = first(make({"model_name_or_path": gemma})).changed_from(first(make()))
    # Its labels stand in another order, too.
    assert result == ("attn_implementation", "label_order", "weights", "tokenizer")


def test_members_share_what_they_read(make: Make, project: Project) -> None:
    member = {"model_name_or_path": str(project.models / "llama"), "text_column": "text"}
    models = [{"name": f"m{number}", "weight": number, **member} for number in range(1, 6)]
    models[4]["text_column"] = "label"
    prepared = make(models=models)
    files = FileDigests(whole=False)
    results = [of_model(prepared, member, files) for member in prepared.plan.models]
    assert len(set(results[:4])) == 1
    assert results[4].changed_from(results[0]) == ("text_columns", "rows")
    assert results == [of_model(prepared, member) for member in prepared.plan.models]


def test_a_fingerprint_goes_through_json_and_holds_only_digests(make: Make) -> None:
    secret = "hf_secret_of_mine"
    kwargs = {"model_kwargs": {"key": secret}, "tokenizer_kwargs": {"other": [secret]}}
    result = first(make({**kwargs, "prompt_template": f"{secret} {{{{ text }}}}", "text_column": None}))
    text = json.dumps(result.to_dict())
    assert secret not in text + repr(result)
    again = Causes.from_dict(json.loads(text))
    assert again == result
    assert again.digest == result.digest
    assert again.changed_from(result) == ()


def test_every_part_counts_in_the_whole(make: Make) -> None:
    result = first(make())
    document: dict[str, Any] = result.to_dict()
    others = {"rows": {**document, "rows": "0" * 64}}
    for group, name in (("settings", "max_length"), ("content", "weights"), ("content", "tokenizer")):
        others[name] = {**document, group: {**document[group], name: "0" * 64}}
    for name, changed in others.items():
        other = Causes.from_dict(changed)
        assert other is not None
        assert other.digest != result.digest
        assert other.changed_from(result) == (name,)


def test_what_cannot_be_read_is_no_record_of_causes(make: Make) -> None:
    good: dict[str, Any] = first(make()).to_dict()
    broken: list[object] = [None, [], "text", 1, {}, {**good, "scheme": 0}, {**good, "scheme": None}]
    broken += [{**good, "rows": value} for value in (None, 3, "", "x" * 64, ["0" * 64])]
    for group in ("settings", "content"):
        broken += [{**good, group: value} for value in (None, 3, "x", ["0" * 64])]
        broken += [{**good, group: {**good[group], "name": value}} for value in (None, 3, "", "x" * 64)]
    broken += [{key: value for key, value in good.items() if key != name} for name in good]
    assert [Causes.from_dict(document) for document in broken] == [None] * len(broken)
