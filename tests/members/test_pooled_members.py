"""Runs with a backbone and a head of its own among the members, and what is said of heads that do not fit."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import log_loss

from tests.checkpoints import make_checkpoint, make_texts, reference
from tests.members.pooled_cls.test_pooled_cls import (
    linear,
    make_backbone,
    pooled_reference,
    save_head,
    softmax,
)
from tests.project import LABELS, Project
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("warm")


def member(project: Project, **keys: Any) -> dict[str, Any]:
    return {
        "name": "pooled",
        "task_type": "pooled_cls",
        "model_name_or_path": str(project.folder / "backbone"),
        "text_column": "text",
        "head": "head.safetensors",
        "pooling_mode": "mean",
        **keys,
    }


@pytest.mark.long
def test_a_run_with_a_head_from_a_file_and_a_classifier(project: Project) -> None:
    folder, head = make_backbone(project.folder / "backbone", "bert"), linear()
    path = save_head(project.folder / "head.safetensors", head)
    project.write_table(60)
    config = project.config()
    project.write_config({**config, "models": [member(project, replicas=2), config["models"][0]]})
    plan = project.ensemble("plan", "config.yaml")
    assert plan.returncode == 0, plan.stderr
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    header, rows = project.read("runs/first/predictions/pooled.csv")
    assert header == ["id", *LABELS]
    texts = dict(zip(project.ids, project.texts, strict=True))
    expected = softmax(
        pooled_reference(folder, head, "mean", [texts[row[0]] for row in rows], max_length=128)
    )
    actual = np.array([[float(cell) for cell in row[1:]] for row in rows])
    np.testing.assert_allclose(actual, expected, atol=2e-5)

    def reused(*changes: str) -> int:
        sets = [word for change in changes for word in ("--set", f"models.pooled.{change}")]
        again = project.ensemble("run", "config.yaml", *sets)
        assert again.returncode == 0, again.stderr
        (item,) = [entry for entry in project.run_json()["members"] if entry["name"] == "pooled"]
        return int(item["reused_rows"])

    assert reused("head_layers=[fc]", "problem_type=single_label_classification") == 60, (
        "it comes to the same"
    )
    assert reused("pooling_mode=cls") == 0
    save_head(path, linear(seed=5))
    assert reused("pooling_mode=cls") == 0, "the head's file has changed"


def test_heads_that_do_not_fit_are_named_before_anything_loads(project: Project) -> None:
    import torch
    from torch import nn

    make_backbone(project.folder / "backbone", "bert")
    project.write_table(5)
    where = project.folder

    def problems(head: str | nn.Module, **keys: Any) -> str:
        if isinstance(head, nn.Module):
            save_head(where / "head.safetensors", head)
        name = head if isinstance(head, str) else "head.safetensors"
        project.write_config(project.config(models=[member(project, head=name, **keys)]))
        done = project.ensemble("validate", "config.yaml")
        assert done.returncode == 2
        return " ".join(done.stderr.split())

    backbone = project.folder / "backbone"
    assert (
        f"models[0] (pooled): head: head.safetensors: its layer fc is made for 32 numbers, and {backbone} has "
        "hidden states of 64"
    ) in problems(linear(32))
    assert "head: head.safetensors has 5 outputs" in problems(linear(64, 5))
    mlp = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 3))
    assert (
        "head_layers: head.safetensors has 2 layers (fc.0: 64 -> 16, fc.2: 16 -> 3), and does not say in which "
        "order they come and what stands between; write it down, for example head_layers: [fc.0, ACTIVATION, fc.2] "
        "with relu, gelu, tanh, silu or whatever it was"
    ) in problems(mlp)
    messages = problems(mlp, head_layers=["fc.0", "rellu"])
    assert "head_layers: 'rellu' is neither a layer of head.safetensors (fc.0: 64 -> 16, fc.2" in messages
    assert "head.safetensors has layers that are not in this list: fc.2: 16 -> 3" in messages
    assert "its layer fc.2 is made for 16 numbers, and" in problems(mlp, head_layers=["fc.2", "relu", "fc.0"])
    norm = nn.Sequential(nn.BatchNorm1d(64), nn.Linear(64, 3))
    assert "fc.0 has a I64 num_batches_tracked [] and a bias [64] and a running_mean [64]" in problems(norm)
    assert "fc has a bias [3] and a weight [3, 64, 1], and is neither" in problems(nn.Conv1d(64, 3, 1))
    assert "head: hed.safetensors: no such file" in problems("hed.safetensors")
    assert f"head: {backbone} is a folder; name the file in it" in problems(str(backbone))
    (where / "junk.safetensors").write_bytes(b"no head")
    assert "head: junk.safetensors is cut short or not a safetensors file" in problems("junk.safetensors")
    torch.save(linear().state_dict(), where / "head.pth")
    assert "head: head.pth is a pickle" in problems("head.pth")
    assert "holds a whole model (" in problems(str(backbone / "model.safetensors"))
    messages = problems(linear(), head_labels=["winner_a", "tie", "tie"])
    assert "head_labels (line" in messages
    assert "must name each of the 3 labels once" in messages
    assert "must be 'mean', 'cls' or 'lasttoken', not 'max'" in problems(linear(), pooling_mode="max")


@pytest.mark.parametrize("labels", one_in(2, [["toxic", "threat", "insult"], ["relevant"]]), ids=len)
def test_pairs_and_labels_that_do_not_exclude_each_other(labels: list[str], project: Project) -> None:
    where, count = project.folder, len(labels)
    kind = None if count == 1 else "multi_label_classification"
    plain = make_checkpoint(where / "plain", "bert", labels, problem_type=kind)
    if count == 1:  # a CrossEncoder, whose single score goes through a sigmoid
        settings = {"model_type": "CrossEncoder", "activation_fn": "torch.nn.modules.activation.Sigmoid"}
        (plain / "config_sentence_transformers.json").write_text(json.dumps(settings), encoding="utf-8")
    backbone, head = make_backbone(where / "backbone", "bert", seed=4), linear(outputs=count)
    save_head(where / "head.safetensors", head)
    pairs = list(zip(make_texts(40, seed=1), make_texts(40, seed=2), strict=True))
    truth = np.random.default_rng(0).integers(0, 2, size=(len(pairs), count))
    rows = [[str(row), *pairs[row], *map(str, truth[row])] for row in range(len(pairs))]
    project.write_csv("test.csv", ["id", "first", "second", *labels], rows)
    keys = {"text_column": ["first", "second"], "max_length": 40}
    models: list[dict[str, Any]] = [
        {"name": "plain", "model_name_or_path": str(plain), **keys},
        member(project, problem_type="multi_label_classification", **keys),
    ]
    data = {"path": "test.csv", "label_columns": labels}
    project.write_config(
        project.config(data=data, labels=labels, models=models, submission=None, defaults=None)
    )
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    expected = {
        "plain": reference(plain, pairs, 40, "sigmoid"),
        "pooled": 1 / (1 + np.exp(-pooled_reference(backbone, head, "mean", pairs, max_length=40))),
    }
    expected["ensemble"] = (expected["plain"] + expected["pooled"]) / 2
    for name, values in expected.items():
        path = "ensemble.csv" if name == "ensemble" else f"predictions/{name}.csv"
        results = [[float(cell) for cell in row[1:]] for row in project.read(f"runs/first/{path}")[1]]
        np.testing.assert_allclose(results, values, atol=2e-5)
        losses = [log_loss(truth[:, label], values[:, label]) for label in range(count)]
        assert project.run_json()["scores"][name]["log_loss"] == pytest.approx(np.mean(losses), abs=1e-4)
