"""Runs of members whose views have checkpoints of their own, held against runs of each checkpoint alone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.members.huggingface.spec import LANGUAGE_MODEL
from ensemble.pipeline.load import load
from ensemble.pipeline.prediction_files import changed_members
from tests.checkpoints import WORDS, make_checkpoint, make_language_model, prime, reference
from tests.members.huggingface.loading.test_averaged_weights import by_hand
from tests.members.pooled_cls.test_pooled_cls import linear, make_backbone, save_head
from tests.nvml.sim import Gpu, NvmlSim, gpu_uuid
from tests.project import GEMMA_LABELS, LABELS, Project

pytestmark = pytest.mark.usefixtures("warm")
ROWS = 24
SWAP = {"columns": ["a", "b"], "labels": ["winner_a", "winner_b"]}


@pytest.fixture
def folds(project: Project) -> Project:
    """A table of two texts a row, and the checkpoints of two folds, with their labels in different orders."""
    project.write_pairs(ROWS)
    for number, labels in enumerate((GEMMA_LABELS, LABELS)):
        make_checkpoint(project.folder / f"fold{number}", "llama", labels, seed=number)
    return project


def run(
    project: Project,
    *views: dict[str, Any],
    command: Sequence[str] = ("run", "config.yaml"),
    code: int = 0,
    output_dir: str = "runs/first",
    environment: Mapping[str, str] | None = None,
    **keys: Any,
) -> str:
    member = {
        "name": "member",
        "model_name_or_path": "fold0",
        "prompt_template": "one {{ a }} other {{ b }}",
        "max_length": 128,
        "views": [*views] or None,
        **keys,
    }
    top = {"data": {"path": "test.csv"}, "models": [member], "defaults": None, "submission": None}
    project.write_config(project.config(**top, output_dir=output_dir))
    done = project.ensemble(*command, environment=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def predictions(project: Project, view: str = "", run_name: str = "first") -> bytes:
    name = f"member@{view}" if view else "member"
    return (project.folder / f"runs/{run_name}/predictions/{name}.csv").read_bytes()


def values(project: Project, view: str = "", run_name: str = "first") -> np.ndarray:
    name = f"member@{view}" if view else "member"
    path = f"runs/{run_name}/predictions/{name}.csv"
    assert project.read(path)[0] == ["id", *LABELS]
    return project.values(path)


def rows_of_workers(project: Project) -> list[int]:
    return rows_of_workers_of(project, "first")


def rows_of_workers_of(project: Project, run_name: str) -> list[int]:
    (member,) = project.run_json(f"runs/{run_name}")["members"]
    return sorted(worker["counters"]["rows"] for worker in member["workers"])


def test_views_with_a_checkpoint_share_its_worker(folds: Project) -> None:
    views: list[dict[str, Any]] = [
        {"name": "fold0"},
        {"name": "fold1", "model_name_or_path": "fold1", "weight": 3.0},
        {"name": "swapped", "swap": SWAP},
    ]
    run(folds, *views)
    assert rows_of_workers(folds) == [ROWS, 2 * ROWS]
    manifest = json.loads((folds.folder / "runs/first/predictions/member.json").read_text())
    (member,) = folds.run_json()["members"]
    assert [computed["seconds"] for computed in manifest["computed"]] == [member["computed"]["seconds"]], (
        "by all models"
    )
    config = load(folds.folder / "config.yaml").config
    assert changed_members(config, ["member"], folds.folder / "runs/first") == {}
    run(folds, model_name_or_path="fold1", output_dir="runs/alone")
    assert predictions(folds, "fold1") == predictions(folds, run_name="alone")
    parts = [values(folds, name) for name in ("fold0", "fold1", "swapped")]
    np.testing.assert_allclose(values(folds), np.average(parts, axis=0, weights=[1, 3, 1]), atol=1e-15)
    texts = [f"one {a} other {b}" for a, b in zip(folds.texts[:ROWS], folds.texts[ROWS:], strict=True)]
    plain = reference(folds.folder / "fold0", texts, max_length=128)
    plain = plain[:, [GEMMA_LABELS.index(label) for label in LABELS]]
    np.testing.assert_allclose(parts[0], plain, atol=2e-5)


def test_a_checkpoint_that_is_missing_or_gives_other_values_is_named_with_its_key(folds: Project) -> None:
    validate = ("validate", "config.yaml")
    views = [{"name": "own"}, {"name": "lost", "model_name_or_path": "fold9"}]
    output = run(folds, *views, command=validate, code=2)
    assert "models[0] (member): views[1].model_name_or_path: fold9: no such folder" in output
    views[1] = {"name": "any", "model_name_or_path": "sigmoid"}
    make_checkpoint(folds.folder / "sigmoid", "llama", LABELS, problem_type="multi_label_classification")
    output = run(folds, *views, command=validate, code=2)
    assert "views[1].model_name_or_path: gives sigmoid values, others softmax, which have no mean" in output
    output = run(folds, {"name": "a", "revision": "main"}, command=validate, code=2)
    assert "views[0].revision (line 14): is that of the view's model_name_or_path; name it, too" in output
    view = {"name": "hub", "model_name_or_path": "org/name"}
    output = run(folds, view, command=validate, code=2, trust_remote_code=True)
    assert "views[0].revision (line 13): required with trust_remote_code: true" in output


def make_average(project: Project) -> list[Path]:
    average = [project.folder / f"averaged {number}" for number in range(3)]
    for number, folder in enumerate(average):
        make_checkpoint(folder, "llama", LABELS, seed=number, dtype="bfloat16" if number else "float32")
    return average


def is_as_by_hand(project: Project, average: Sequence[Path], run_name: str, view: str = "") -> bool:
    by_hand(average, project.folder / "mean")
    command = ("run", "config.yaml", "--fresh")
    run(project, output_dir="runs/hand", command=command, model_name_or_path="mean")
    shutil.rmtree(project.folder / "mean")
    return predictions(project, run_name="hand") == predictions(project, view, run_name)


def test_checkpoints_are_averaged(folds: Project) -> None:
    average = make_average(folds)
    mean: dict[str, Any] = {"checkpoints": {"average": [folder.name for folder in average]}}
    run(folds, model_name_or_path=None, **mean)
    assert is_as_by_hand(folds, average, "first")
    assert "mean of 3 checkpoints" in folds.run_json()["members"][0]["workers"][0]["ready"]["notes"]


@pytest.mark.long
def test_an_average_as_a_view_and_after_a_change(folds: Project) -> None:
    average = make_average(folds)
    mean: dict[str, Any] = {"checkpoints": {"average": [folder.name for folder in average]}}
    run(folds, {"name": "one"}, {"name": "soup", **mean}, output_dir="runs/views")
    assert is_as_by_hand(folds, average, "views", "soup")
    assert rows_of_workers_of(folds, "views") == [ROWS, ROWS]
    run(folds, model_name_or_path=None, **mean)
    make_checkpoint(average[2], "llama", LABELS, seed=9)
    assert "weights changed" in run(folds, model_name_or_path=None, **mean)
    assert is_as_by_hand(folds, average, "first")
    make_checkpoint(folds.folder / "other", "llama", GEMMA_LABELS)
    mean["checkpoints"]["average"].append("other")
    output = run(folds, {"name": "soup", **mean}, command=("validate", "config.yaml"), code=2)
    assert "views[0].checkpoints: checkpoints.average: id2label of config.json is {'0': " in output


@pytest.mark.long
def test_validate_and_plan_tell_of_each_model(folds: Project) -> None:
    make_checkpoint(folds.folder / "wide", "llama", LABELS, width=128)
    views = [{"name": name, "model_name_or_path": name} for name in ("fold1", "wide")]
    output = run(folds, *views, command=("validate", "config.yaml"))
    assert output.count("chunk of 1 view") == 2
    plan = ("plan", "config.yaml", "--json")
    sizes = {}
    for name in ("fold1", "wide", ""):
        run(folds, *([] if name else views), command=plan, model_name_or_path=name or "fold1")
        done = folds.ensemble(*plan)
        sizes[name] = {model["name"]: model["peak_bytes"] for model in json.loads(done.stdout)["members"]}
    (narrow,), (wide,) = sizes["fold1"].values(), sizes["wide"].values()
    assert list(sizes[""].values()) == [narrow, wide]
    assert narrow < wide
    assert [name.partition("@")[2] for name in sizes[""]] == ["fold1", "wide"]


@pytest.mark.long
def test_heads_and_language_models(folds: Project) -> None:
    """A view's head on the member's own backbone, and on another; label tokens by two language models."""
    pytest.importorskip("safetensors")
    for number in range(2):
        make_backbone(folds.folder / f"backbone{number}", "llama", seed=number)
        save_head(folds.folder / f"head{number}.safetensors", linear(seed=number))
        prime(make_language_model(folds.folder / f"lm{number}", "llama", seed=number), LANGUAGE_MODEL)
    kinds: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
        "pooled": (
            {
                **{"task_type": "pooled_cls", "pooling_mode": "mean"},
                **{"model_name_or_path": "backbone0", "head": "head0.safetensors"},
            },
            [{"head": "head1.safetensors"}, {"head": "head1.safetensors", "model_name_or_path": "backbone1"}],
        ),
        "causal": (
            {
                **{"task_type": "causal_lm", "model_name_or_path": "lm0"},
                "label_tokens": {label: f" {word}" for label, word in zip(LABELS, WORDS, strict=False)},
            },
            [{"model_name_or_path": "lm1"}],
        ),
    }
    for kind, (member, changes) in kinds.items():
        views = [{"name": "own"}, *({"name": f"view{n}", **change} for n, change in enumerate(changes))]
        run(folds, *views, output_dir=f"runs/{kind}", **member)
        workers = folds.run_json(f"runs/{kind}")["members"][0]["workers"]
        # Two heads of one backbone share a worker.
        assert [worker["counters"]["rows"] for worker in workers] == [(len(views) - 1) * ROWS, ROWS]
        for view in views:
            alone = {key: value for key, value in view.items() if key != "name"}
            run(folds, output_dir="runs/alone", command=("run", "config.yaml", "--fresh"), **member | alone)
            assert predictions(folds, str(view["name"]), kind) == predictions(folds, run_name="alone")


@pytest.mark.long
def test_rows_are_taken_over_from_a_run_of_a_checkpoint_alone(folds: Project) -> None:
    run(folds, model_name_or_path="fold1", output_dir="runs/alone")
    views = [{"name": "fold0"}, {"name": "fold1", "model_name_or_path": "fold1"}]
    run(folds, *views, command=("run", "config.yaml", "--reuse", "runs/alone"))
    assert rows_of_workers(folds) == [ROWS]
    assert predictions(folds, "fold1") == predictions(folds, run_name="alone")
    make_checkpoint(folds.folder / "fold1", "llama", LABELS, seed=7)
    run(folds, *views)
    assert rows_of_workers(folds) == [ROWS], "only the view with the checkpoint that changed"


@pytest.mark.long
def test_two_gpus_have_a_checkpoint_each(folds: Project, nvml_sim: NvmlSim) -> None:
    nvml_sim.write([Gpu(gpu_uuid(1)), Gpu(gpu_uuid(2), pci=(0, 2, 0))])
    views = [{"name": "fold0"}, {"name": "fold1", "model_name_or_path": "fold1"}]
    run(folds, *views)
    expected = [predictions(folds), predictions(folds, "fold1")]
    for limit in (None, "1h"):
        run(
            folds,
            *views,
            command=("run", "config.yaml", "--fresh", *(["--set", f"time_limit={limit}"] if limit else [])),
            environment=nvml_sim.environment(),
        )
        workers = folds.run_json()["members"][0]["workers"]
        assert [worker["counters"]["rows"] for worker in workers] == [ROWS, ROWS]
        assert len({device for worker in workers for device in worker["devices"]}) == 2
        assert [predictions(folds), predictions(folds, "fold1")] == expected
