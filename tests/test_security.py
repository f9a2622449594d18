"""What a config, a checkpoint or a run directory from somebody else must not be able to do, and secrets kept in.

SECURITY.md says what is defended; the names here follow its order.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import pytest

from ensemble.common.errors import CheckpointError, ConfigError, OutputError
from ensemble.common.files import atomic_path, open_log, write_text
from ensemble.common.redact import MASK, RedactingFormatter, Redactor
from ensemble.data.json_cells import TemplateProblem
from ensemble.data.template import compile_template
from ensemble.members.huggingface.checkpoint.adapter_files import inspect_adapter
from ensemble.pipeline.load import load as load_config
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.run_dir import RunDir, hold, holder, logging_to
from tests.checkpoints import inspect_folder, make_adapter, make_base
from tests.project import LABELS, ROOT, Project

# ---- the config


@pytest.mark.parametrize(
    ("source", "words"),
    [
        # attributes, by every way there is to one
        ("{{ ''.__class__.__mro__ }}", "'__class__' of 'str' object is unsafe"),
        ("{{ row.__init__ }}", "'__init__' of 'str' object is unsafe"),
        ("{{ row|attr(key) }}", "'__class__' of 'str' object is unsafe"),
        ("{{ row|attr('_' ~ '_class__') }}", "'__class__' of 'str' object is unsafe"),
        ("{{ row[key] }}", "'__class__' of 'str' object is unsafe"),
        ("{{ [row]|map('attr', key)|join }}", "'__class__' of 'str' object is unsafe"),
        ("{{ [row]|map(attribute='__class__')|join }}", "'__class__' of 'str' object is unsafe"),
        ("{{ '{0.__class__}'.format(row) }}", "'__class__' of 'str' object is unsafe"),
        ("{{ ('{0.__class__}'|attr('format'))(row) }}", "'__class__' of 'str' object is unsafe"),
        ("{{ '{0.__class__}'['format'](row) }}", "'__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "'__init__' of 'type' object is unsafe"),
        ("{{ dict.mro() }}", "'mro' of 'type' object is unsafe"),
        (
            "{% for x in [1] %}{{ loop._iterable }}{% endfor %}",
            "'_iterable' of 'LoopContext' object is unsafe",
        ),
        ("{{ [1].append(2) }}", "'append' of 'list' object is unsafe"),
        ("{{ {}.update(a=1) }}", "'update' of 'dict' object is unsafe"),
        # what is no text, and would show addresses that differ from run to run
        ("{{ cycler }}", "a value of type type cannot be put into the text"),
        ("{{ range }}", "a value of type function cannot be put into the text"),
        ("{{ self }}", "a value of type TemplateReference cannot be put into the text"),
        ("{{ [1]|map('string') }}", "add | list or | join"),
        # files and other templates
        ("{% include 'c.yaml' %}", "cannot include"),
        ("{% include key ignore missing %}", "cannot include"),
        ("{% import 'x' as x %}", "cannot include"),
        ("{% from 'x' import y %}", "cannot include"),
        ("{% extends key %}", "cannot include"),
        ("{{ lipsum }}", "no column 'lipsum'"),
        ("{{ environment }}", "no column 'environment'"),
        ("{% debug %}", "unknown tag 'debug'"),
        # what would not end
        ("{{ range(10**9)|list }}", "Range too big"),
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
    ],
)
def test_templates_are_kept_in_their_sandbox(source: str, words: str) -> None:
    with pytest.raises(TemplateProblem) as caught:
        compile_template(source).render({"row": "text", "key": "__class__"})
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{% for x in l %}{{ loop.index }}/{{ loop.length }}{{ x }}{{ ',' if not loop.last }}{% endfor %}",
            "1/2a,2/2b",
        ),
        ("{% for x in l if x != 'a' %}{{ x }}{% else %}none{% endfor %}", "b"),
        ("{% for k, v in o|dictsort %}{{ k ~ v }}{% endfor %}{{ o.get('z', 0) }}{{ o.k }}", "k101"),
        ("{{ ', '.join(l) }} {{ l|join(d=';') }} {{ 'a-b'.split('-')[1] }}", "a, b a;b b"),
        ("{{ '%-3s|%.2f' | format('a', 1.5) }} {{ '%s' % 1 }}", "a  |1.50 1"),
        ("{{ 2 ** 10 }} {{ 7 % 3 }} {{ 'ab' * 2 }} {{ [1] + [2] }} {{ 'a' + 'b' }}", "1024 1 abab [1, 2] ab"),
        ("{% for g in [{'k': 1}]|groupby('k') %}{{ g.grouper }}{{ g.list }}{% endfor %}", "1[{'k': 1}]"),
        (
            "{{ l|map('upper')|list }} {{ [{'k': 1}]|map(attribute='k')|first }} {{ [1, 2, 3]|batch(2)|list }}",
            "['A', 'B'] 1 [[1, 2], [3]]",
        ),
        (
            "{% set n = namespace(x=0) %}{% for i in range(3) %}{% set n.x = n.x + i %}{% endfor %}{{ n.x }}",
            "3",
        ),
        ("{% macro m(obj, context) %}{{ obj }}{{ context }}{% endmacro %}{{ m(context=2, obj=1) }}", "12"),
        (
            "{{ 'x\ny'|indent(2) }} {{ 'abc'|replace('b', '-', count=1) }} {{ l|tojson }}",
            'x\n  y a-c ["a", "b"]',
        ),
        (
            "{{ l[1:] }}{{ 'abc'[::-1] }}{% set x, y = 1, 2 %}{{ x }}{{ y }}{{ {'k': 3}['k'] }}{{ l.index('b') }}",
            "['b']cba1231",
        ),
        (
            "{{ [[1], [2]]|sum(start=[]) }} {{ [1, 2]|sum }} {{ 2.345|round(1) }} {{ 7 // 2 }}",
            "[1, 2] 3 2.3 3",
        ),
        (
            "{{ '%(k)03d' % {'k': 7} }}{{ 'a'.split() }}{{ o.copy() }}{{ dict(o, z=2) }}",
            "007['a']{'k': 1}{'k': 1, 'z': 2}",
        ),
        (
            "{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{% set j = joiner() %}{{ j() }}{{ j() }}",
            "ab, ",
        ),
    ],
)
def test_what_templates_are_written_with_still_works(source: str, text: str) -> None:
    assert compile_template(source).render({"l": ["a", "b"], "o": {"k": 1}}) == text


# ---- names


NO_NAMES = [
    *(
        "..",
        ".",
        "../x",
        "a/b",
        "/x",
        "a\\b",
        ".hidden",
        "-rf",
        "~",
        "$HOME",
        "a b",
        "a\tb",
        "a\x00b",
        "a:b",
        "*",
    ),
    *(
        "con",
        "NUL",
        "aux.csv",
        "COM1",
        "lpt9.x",
        "name.",
        "name ",
        "ensemble",
        "Ensemble",
        "x?",
        "|",
        "a" * 101,
    ),
    *("é", "e\u0301", "\uff0e\uff0e", "a\u202egpj", "\u200b", "\u0131", "\ufb01", "a\n"),
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_names_that_are_no_safe_file_names_are_refused(name: str, project: Project) -> None:
    models = [{"name": name, "model_name_or_path": "m", "text_column": "text"}]
    (project.folder / "c.yaml").write_text(json.dumps(project.config(models=models)))
    with pytest.raises(ConfigError, match=r"models\[0\].name \(line 1\): must be made of|NUL"):
        load_config(project.folder / "c.yaml")


def test_good_names_have_files_of_their_own(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    names = [
        "run",
        "table",
        "submission",
        "work",
        "logs",
        "a",
        "a-0",
        "a-0-0",
        "a.csv",
        "a.json",
        "A_",
        "run-0.log",
    ]
    own = [rundir.run_log, rundir.table, rundir.config, rundir.run_json, rundir.ensemble, rundir.submission]
    own += [rundir.report_page, rundir.report_log]
    results = [path for name in names for path in (rundir.predictions(name), rundir.manifest(name))]
    results += [rundir.log(name, replica) for name in names for replica in (0, 10)]
    results += [rundir.shards_dir(name, fingerprint * 64) for name in names for fingerprint in "01"]
    everything = [str(path).lower() for path in (*own, *results)]
    assert len(set(everything)) == len(everything)
    assert {path.parent for path in results} == {rundir.predictions_dir, rundir.logs_dir, rundir.work_dir}


# ---- links


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    folder = tmp_path / "precious"
    folder.mkdir()
    for name in ("file", "other"):
        (folder / name).write_text("precious")
    return folder


def untouched(folder: Path) -> bool:
    return {path.name: path.read_text() for path in folder.iterdir()} == {
        "file": "precious",
        "other": "precious",
    }


def link(path: Path, target: Path, how: str) -> None:
    path.parent.mkdir(exist_ok=True, parents=True)
    path.symlink_to(target) if how == "symlink" else path.hardlink_to(target)


@pytest.mark.parametrize("how", ["symlink", "hard link"])
def test_files_are_not_written_through_links(how: str, tmp_path: Path, precious: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    for path in (rundir.config, rundir.run_json, rundir.ensemble, rundir.predictions("m")):
        link(path, precious / "file", how)
        write_text(path, "new")
        assert path.read_text() == "new"
        assert not path.is_symlink()
    log = rundir.log("m", 0)
    link(log, precious / "file", how)
    with open_log(log) as file:
        file.write(b"new")
    with open_log(log) as file:
        file.write(b"er")
    assert log.read_bytes() == b"newer"
    assert untouched(precious)


@pytest.mark.parametrize("how", ["symlink", "hard link"])
def test_a_lock_that_is_a_link_is_refused(how: str, tmp_path: Path, precious: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    link(rundir.lock, precious / "file", how)
    with pytest.raises(OutputError, match=r"\.lock is a link to another file; remove it"), hold(rundir):
        pass
    assert holder(rundir) is None
    assert untouched(precious)


def test_links_that_wait_for_a_temporary_file_are_removed(
    tmp_path: Path, precious: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda size: "ab" * size)  # as if it could be guessed
    rundir = RunDir(tmp_path / "run")
    link(rundir.root / f".probe.tmp-{os.getpid()}", precious / "file", "symlink")
    link(rundir.root / f".run.json.tmp-{os.getpid()}-abababab", precious / "file", "symlink")
    rundir.create()
    with atomic_path(rundir.run_json) as temporary:
        assert not temporary.is_symlink()
        temporary.write_text("new")
    assert untouched(precious)


@pytest.mark.parametrize("fresh", [False, True])
def test_folders_that_are_links_are_replaced(fresh: bool, tmp_path: Path, precious: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    shards_dir = rundir.shards_dir("m", "0" * 64)
    for folder in (rundir.predictions_dir, rundir.logs_dir):
        link(folder, precious, "symlink")
    link(shards_dir, precious, "symlink")
    rundir.clear() if fresh else rundir.tidy()
    link(rundir.run_log, precious / "file", "symlink")
    link(rundir.log("m", 1), precious / "other", "hard link")
    rundir.tidy()
    assert not shards_dir.exists()
    assert not any(path.is_symlink() for path in rundir.root.rglob("*"))
    assert list(rundir.logs_dir.iterdir()) == []
    rundir.remove_work([shards_dir])
    assert untouched(precious)


def test_work_that_became_a_link_is_not_removed_through_it(tmp_path: Path, precious: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    link(rundir.work_dir, precious, "symlink")
    rundir.remove_work([rundir.shards_dir("m", "0" * 64)])
    assert untouched(precious)


# ---- code and pickles in checkpoints

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def refusals(folder: Path, **keys: Any) -> tuple[str, ...]:
    try:
        inspect_folder(folder, LABELS, **keys)
    except CheckpointError as error:
        return error.problems
    return ()


@pytest.fixture
def llama(tmp_path: Path, tiny_models: Path) -> Path:
    return Path(shutil.copytree(tiny_models / "llama", tmp_path / "a llama"))


def with_code(folder: Path, model_type: str, **auto_map: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": model_type, "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT[:12], COMMIT + "0", "g" * 40])
def test_code_from_the_hub_needs_a_commit(revision: str, project: Project) -> None:
    model = {"name": "m", "model_name_or_path": "org/m", "text_column": "text", "trust_remote_code": True}

    def load(**more: str) -> None:
        (project.folder / "c.yaml").write_text(json.dumps(project.config(models=[{**model, **more}])))
        load_config(project.folder / "c.yaml")

    with pytest.raises(ConfigError, match=r"models\[0\].revision .*a commit's whole hash .*can be moved"):
        load(revision=revision)
    with pytest.raises(ConfigError, match=r"models\[0\].revision .*required with trust_remote_code"):
        load()
    load(revision=COMMIT)


def test_code_in_a_checkpoint_is_not_run_unless_trusted(llama: Path) -> None:
    code = {
        "AutoConfig": "configuration_x.XConfig",
        "AutoModelForSequenceClassification": "modeling_x.XModel",
    }
    # transformers has a class of its own for these, and takes it.
    assert refusals(with_code(llama, "llama", **code)) == ()
    (problem,) = refusals(with_code(llama, "x-llama", **code))
    assert "needs Python code of its own (configuration_x.XConfig)" in problem
    assert "trust_remote_code: true" in problem
    assert refusals(llama, trust_remote_code=True) == ()
    # Known to transformers, but not as a classifier.
    (problem,) = refusals(with_code(llama, "clip", **code))
    assert "(modeling_x.XModel)" in problem


def test_code_of_a_tokenizer_counts_too(llama: Path) -> None:
    with_code(llama, "llama")
    path = llama / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps({**settings, "auto_map": {"AutoTokenizer": ["tokenization_x.X", None]}}))
    assert refusals(llama) == (), "transformers has a tokenizer for llama"
    path.write_text(
        json.dumps({"tokenizer_class": "XTokenizer", "auto_map": {"AutoTokenizer": ["t.X", None]}})
    )
    with_code(llama, "vit")
    (problem,) = refusals(llama)
    assert "(t.X)" in problem
    assert "no such tokenizer" in problem


def test_code_from_a_second_repository_needs_its_own_commit(llama: Path) -> None:
    with_code(llama, "x-llama", AutoConfig="org/other--configuration_x.XConfig")
    (problem,) = refusals(llama, trust_remote_code=True)
    assert "from another repository (org/other--configuration_x.XConfig)" in problem
    assert "model_kwargs: {code_revision: 40 hexadecimal digits}" in problem
    assert refusals(llama, trust_remote_code=True, model_kwargs={"code_revision": "main"}) != ()
    assert refusals(llama, trust_remote_code=True, model_kwargs={"code_revision": COMMIT}) == ()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
def test_the_commit_of_a_base_pins_no_code_that_an_adapters_folder_takes_from_the_bases_repository(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("peft")
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    adapter = make_adapter(tmp_path / "adapter", llama, 3)
    settings = json.loads((llama / "tokenizer_config.json").read_text())
    settings["auto_map"] = {"AutoTokenizer": [None, "org/m--tokenization_own.Own"]}
    (llama / "tokenizer_config.json").write_text(json.dumps(settings))
    shutil.copytree(llama, tmp_path / "cache" / "models--org--m" / "snapshots" / COMMIT)
    keys: dict[str, Any] = {"trust_remote_code": True, "revision": COMMIT}
    assert refusals(Path("org/m"), **keys) == (), "the code is of the file's own commit"
    keys["adapter_name_or_path"] = str(adapter)
    assert refusals(Path("org/m"), **keys) == ()
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / file, adapter)
    (problem,) = refusals(Path("org/m"), **keys)
    assert "(org/m--tokenization_own.Own)" in problem
    assert "tokenizer_kwargs: {code_revision: " in problem
    assert refusals(Path("org/m"), **keys, tokenizer_kwargs={"code_revision": COMMIT}) == ()


@pytest.mark.parametrize(
    ("kwargs", "words"),
    [
        ({"model_kwargs": {"use_safetensors": False}}, "use_safetensors .*allow_pickle"),
        ({"model_kwargs": {"weights_only": False}}, "weights_only .*allow_pickle"),
        ({"model_kwargs": {"allow_all_kernels": True}}, "compiled code from the hub"),
        ({"model_kwargs": {"kernel_config": {}}}, "compiled code from the hub"),
        ({"tokenizer_kwargs": {"trust_remote_code": True}}, "the model's own key"),
        ({"tokenizer_kwargs": {"revision": "x"}}, "the model's own key"),
    ],
)
def test_no_way_around_by_kwargs(kwargs: dict[str, Any], words: str, project: Project) -> None:
    model = {"name": "m", "model_name_or_path": "m", "text_column": "text", **kwargs}
    (project.folder / "c.yaml").write_text(json.dumps(project.config(models=[model])))
    with pytest.raises(ConfigError, match=words):
        load_config(project.folder / "c.yaml")


def as_pickle(folder: Path, name: str = "pytorch_model.bin") -> Path:
    """The folder's safetensors as a pickle, without running anything but torch."""
    import torch
    from safetensors.torch import load_file

    weights = folder / ("adapter_model" if name.startswith("adapter") else "model")
    tensors = load_file(weights.with_suffix(".safetensors"))
    torch.save(tensors, folder / name)
    weights.with_suffix(".safetensors").unlink()
    return folder / name


def test_pickles_are_refused_unless_allowed(
    llama: Path, project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    path = as_pickle(llama)
    (problem,) = refusals(llama)
    assert problem.startswith(f"{path} is a pickle, and loading one can run code")
    assert problem.endswith("or set allow_pickle: true")
    assert refusals(llama, allow_pickle=True) == ()
    model = {"name": "m", "model_name_or_path": str(llama)}
    for allowed in (False, True):
        project.write_config(project.config(models=[{**model, "allow_pickle": allowed}]))
        if allowed:
            prepare(load_config(project.folder / "config.yaml"))
        else:
            with pytest.raises(CheckpointError, match=r"models\[0\] \(m\): .*pytorch_model\.bin is a pickle"):
                prepare(load_config(project.folder / "config.yaml"))


@pytest.mark.parametrize("name", ["model.pt", "model.pth"])
def test_pickles_that_transformers_does_not_read(name: str, llama: Path) -> None:
    as_pickle(llama, name)
    for allow_pickle in (False, True):
        (problem,) = refusals(llama, allow_pickle=allow_pickle)
        assert f"{name} is a pickle of a kind that transformers does not read" in problem


def test_what_a_trainer_leaves_is_no_weights(llama: Path) -> None:
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state_0.pth"):
        (llama / name).write_bytes(b"")
    assert refusals(llama) == ()
    (llama / "model.safetensors").unlink()
    (problem,) = refusals(llama)
    assert "no weights" in problem


def test_pickles_by_a_side_door(llama: Path) -> None:
    whole = (llama / "model.safetensors").rename(llama / "model-1.safetensors")  # else no index is read
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {"w": "pytorch_model.bin"}}')
    (llama / "pytorch_model.bin").write_bytes(b"")
    assert ["pytorch_model.bin is a pickle" in problem for problem in refusals(llama)] == [True]
    (llama / "model.safetensors.index.json").unlink()
    whole.rename(llama / "model.safetensors")
    (llama / "adapter_config.json").write_text("{}")
    (llama / "adapter_model.bin").write_bytes(b"")
    assert ["adapter_model.bin is a pickle" in problem for problem in refusals(llama)] == [True]
    (llama / "adapter_config.json").unlink()
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "transformers_weights": "adapter_model.bin"}))
    assert ["adapter_model.bin is a pickle" in problem for problem in refusals(llama)] == [True]
    assert refusals(llama, allow_pickle=True) == ()


class Touch:
    """What a pickle can do: a call of any function, here one that makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_an_allowed_pickle_still_runs_nothing(llama: Path, tmp_path: Path) -> None:
    import torch

    from ensemble.members.huggingface.loading.load import load
    from tests.members.huggingface.scoring.test_predict import worker_spec

    expected = load(worker_spec(llama)).model.state_dict()
    path = as_pickle(llama)
    with pytest.raises(ValueError, match=r"no safetensors weights .* allow_pickle: true"):
        load(worker_spec(llama))
    loaded = load(worker_spec(llama, allow_pickle=True)).model.state_dict()
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    touched = tmp_path / "touched"
    torch.save({**torch.load(path), "x": Touch(touched)}, path)
    with pytest.raises(UnpicklingError, match="Weights only load failed"):
        load(worker_spec(llama, allow_pickle=True))
    assert not touched.exists()


def test_code_that_transformers_does_not_need_is_not_run(llama: Path, tmp_path: Path) -> None:
    from ensemble.members.huggingface.loading.load import load
    from tests.members.huggingface.scoring.test_predict import worker_spec

    (llama / "modeling_x.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')")
    (llama / "tokenization_x.py").write_text(f"open({str(tmp_path / 'touched')!r}, 'w')")
    with_code(
        llama,
        "llama",
        AutoConfig="modeling_x.XConfig",
        AutoModelForSequenceClassification="modeling_x.XModel",
        AutoTokenizer=["tokenization_x.X", None],
    )
    assert refusals(llama) == ()
    assert load(worker_spec(llama)).model.config.model_type == "llama"
    assert not (tmp_path / "touched").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # peft's
def test_adapters_in_pickles_are_refused_unless_allowed(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    import torch

    from ensemble.members.huggingface.loading.adapter import open_adapter

    base = make_base(tmp_path / "base", "llama")
    adapter = make_adapter(tmp_path / "adapter", base, 3)
    names = open_adapter(str(adapter)).tensors
    path = as_pickle(adapter, "adapter_model.bin")
    label_map = {f"LABEL_{index}": label for index, label in enumerate(LABELS)}
    keys = {"adapter_name_or_path": str(adapter)}
    with pytest.raises(CheckpointError, match=r"adapter_model\.bin is a pickle.*allow_pickle: true"):
        inspect_folder(base, LABELS, label_map, **keys)
    allowed = inspect_folder(base, LABELS, label_map, allow_pickle=True, **keys)
    assert allowed.label_order == (0, 1, 2)
    with pytest.raises(ValueError, match=r"has no adapter_model\.safetensors.*allow_pickle: true"):
        open_adapter(str(adapter))
    assert open_adapter(str(adapter), allow_pickle=True).tensors == names
    torch.save({"x": Touch(tmp_path / "touched")}, path)
    with pytest.raises(
        ValueError, match=r"adapter_model\.bin is cut short or broken \(Weights only load failed"
    ):
        open_adapter(str(adapter), allow_pickle=True)
    assert not (tmp_path / "touched").exists()


def test_an_adapter_cannot_name_a_module_to_import(tmp_path: Path) -> None:
    path = tmp_path / "adapter_config.json"
    path.write_text('{"peft_type": "LORA", "megatron_config": {"a": 1}, "megatron_core": "antigravity"}')
    with pytest.raises(CheckpointError, match="made for Megatron"):
        inspect_adapter(str(tmp_path))


# ---- secrets

TOKEN = 'pl4nted"quoted\\token'
ENVIRONMENT = {
    "HF_TOKEN": "hf_plantedplantedplanted",
    "HUGGING_FACE_HUB_TOKEN": "planted-hub-token",
    "AWS_SECRET_ACCESS_KEY": "planted/aws+secret",
    "AWS_ACCESS_KEY_ID": "PLANTEDAWSKEYID",
    "SOME_TOKEN": TOKEN,
    "MY_SECRETS": "planted first line\nplanted second line",
    "DB_PASSWORD": "planted password",
    "WANDB_API_KEY": "planted-api-key",
    "KAGGLE_KEY": "planted-kaggle-key",
}
ORDINARY = {
    "HOME": "/home/somebody",
    "PWD": "/home/somebody/work",
    "TOKENIZERS_PARALLELISM": "falsefalse",
    "HF_TOKEN_PATH": "/home/somebody/token",
    "AWS_SHARED_CREDENTIALS_FILE": "/home/somebody/.aws/credentials",
    "SHORT_TOKEN": "true",
    "KEYBOARD": "qwertyuiop",
}


def test_what_counts_as_a_secret() -> None:
    redact = Redactor({**ENVIRONMENT, **ORDINARY})
    for value in ENVIRONMENT.values():
        assert redact(f"<{value}>") == f"<{MASK}>"
    for value in ORDINARY.values():
        assert redact(f"<{value}>") == f"<{value}>"
    assert redact("planted second line") == MASK, "logs are read by the line"
    assert redact("hf_" + "Ab1" * 10) == MASK, "a token of the hub is known by its looks"
    assert redact("http://me:pa55@proxy:80/x") == f"http://{MASK}@proxy:80/x"


@pytest.mark.parametrize("written", [str, repr, json.dumps])
def test_a_secret_is_known_in_the_forms_it_is_written_in(written: Callable[[str], str]) -> None:
    redacted = Redactor({"SOME_TOKEN": TOKEN, "OTHER_TOKEN": TOKEN + "and more"})(written(TOKEN))
    assert "quoted" not in redacted
    assert Redactor({"A_TOKEN": "a/b c+defgh"})("x?t=a%2Fb%20c%2Bdefgh&") == f"x?t={MASK}&"


def test_a_key_of_the_config_can_say_that_its_value_is_secret() -> None:
    settings = {
        "models": [
            {"model_kwargs": {"token": "planted-literal", "inner": {"api_key": "planted-inner"}}},
            {"tokenizer_kwargs": {"pad_token": "<|a_pad_token|>", "max_tokens": "many-many"}},
        ]
    }
    redact = Redactor({}, settings)
    assert redact.document(settings) == {
        "models": [
            {"model_kwargs": {"token": MASK, "inner": {"api_key": MASK}}},
            {"tokenizer_kwargs": {"pad_token": "<|a_pad_token|>", "max_tokens": "many-many"}},
        ]
    }


def test_a_logs_tracebacks_are_redacted() -> None:
    formatter = RedactingFormatter("%(levelname)s %(message)s", Redactor({"SOME_TOKEN": TOKEN}))
    try:
        raise ValueError(TOKEN)
    except ValueError:
        info = sys.exc_info()
    record = logging.LogRecord("x", logging.ERROR, "", 0, "with %s", (TOKEN,), info)
    text = formatter.format(record)
    assert "ValueError" in text
    assert TOKEN not in text


def test_a_secret_that_is_known_later_is_redacted_where_libraries_log() -> None:
    code = """
import logging, sys
from ensemble.common.redact import Redactor, guard_output
guard_output(Redactor({}))
logging.getLogger().addHandler(logging.StreamHandler())
guard_output(Redactor({"SOME_TOKEN": "not-known-at-first"}))
logging.error("not-known-at-first")
print("not-known-at-first")
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert (done.stderr, done.stdout) == ("***\n", "***\n")


def test_whatever_python_prints_is_redacted() -> None:
    code = """
import logging, os, sys, warnings
from ensemble.common.redact import Redactor, guard_output
guard_output(Redactor(os.environ))
token = os.environ["SOME_TOKEN"]
print(token, repr(token))
sys.stdout.buffer.write(token.encode() + b"\\n")
sys.stderr.write(token + " \\u00e9\\n")
warnings.warn(token)
logging.getLogger("x").error(token)
raise ValueError(token)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, "SOME_TOKEN": TOKEN, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
    )
    printed = done.stdout + done.stderr
    assert printed.count(MASK) == 7, printed
    assert "\u00e9" in printed
    assert "quoted" not in printed


LEAK = """
import logging, os, sys, warnings
from pathlib import Path
from transformers import LlamaConfig

SECRETS = [os.environ[name] for name in ("HF_TOKEN", "SOME_TOKEN", "AWS_SECRET_ACCESS_KEY", "ORDINARY")]
Path(os.environ["COMMAND_LINE"]).write_bytes(Path("/proc/self/cmdline").read_bytes())
for secret in SECRETS:
    print("printed", secret)
    print("printed", repr(secret), file=sys.stderr)
    logging.getLogger("transformers").error("logged %s", secret)
    warnings.warn("warned of " + secret)

class LeakyConfig(LlamaConfig):
    def __init__(self, **kwargs):
        raise RuntimeError("x" * 470 + " no entry with " + " and ".join(SECRETS))
"""


def test_a_run_keeps_its_secrets_and_follows_no_link(project: Project, precious: Path, llama: Path) -> None:
    """One run whose second member does all it can to tell what it knows, in a directory full of links."""
    with_code(llama, "leaky", AutoConfig="configuration_leaky.LeakyConfig")
    (llama / "configuration_leaky.py").write_text(LEAK)
    gemma = {"name": "gemma", "model_name_or_path": str(project.models / "gemma")}
    leaky = {
        **{"name": "leaky", "model_name_or_path": str(llama), "trust_remote_code": True},
        "model_kwargs": {"token": "${ORDINARY}", "api_key": "planted literal"},
    }
    project.write_config(
        project.config(models=[gemma, leaky], on_member_failure="continue", retries=0, limit=40)
    )
    rundir = RunDir(project.folder / "runs/first")
    rundir.root.mkdir(parents=True)
    rundir.logs_dir.mkdir()
    with logging_to(rundir.run_log, Redactor({})):  # which says that it is a run's
        pass
    for path in (rundir.config, rundir.run_json, rundir.ensemble, rundir.submission, rundir.report_page):
        link(path, precious / "file", "symlink")
    link(rundir.log("gemma", 0), precious / "other", "hard link")
    for folder in (rundir.predictions_dir, rundir.work_dir):
        link(folder, precious, "symlink")
    command_line = project.folder / "command line"
    environment = {
        **ENVIRONMENT,
        "ORDINARY": "planted by its key",
        "COMMAND_LINE": str(command_line),
        "HF_HOME": str(project.folder / "hub"),
    }
    override = "models.leaky.model_kwargs.password=planted override"
    done = project.ensemble("run", "config.yaml", "--set", override, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr

    assert untouched(precious)
    assert rundir.predictions("gemma").read_text().startswith("id,")
    assert not any(path.is_symlink() for path in rundir.root.rglob("*"))

    told = {str(path): path.read_bytes() for path in rundir.root.rglob("*") if path.is_file()}
    told |= {"printed": (done.stdout + done.stderr).encode(), "command line": command_line.read_bytes()}
    written = [*ENVIRONMENT.values(), "planted by its key", "planted literal", "planted override"]
    for name, content in told.items():
        # A piece is enough to tell: what was cut off must not have been cut out of a secret.
        results = [
            part for secret in written for part in (secret[:10], secret[-10:]) if part.encode() in content
        ]
        assert not results, f"{name} tells {results}"
    log = rundir.log("leaky", 0).read_text()
    assert log.count(f"printed {MASK}") == log.count(f"logged {MASK}") == len("HSAO")
    assert f"RuntimeError: {'x' * 470} no entry with {MASK}" in log
    report = project.run_json()
    (failure,) = [member["failure"] for member in report["members"] if member["name"] == "leaky"]
    assert MASK in failure["message"]
    assert MASK in failure["traceback"]
    assert MASK in report["config"]
    assert report["overrides"][0] == f"models.leaky.model_kwargs.password={MASK}"
    assert "${ORDINARY}" in rundir.config.read_text()
    assert MASK in rundir.config.read_text()
