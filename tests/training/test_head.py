"""Heads that a logistic regression makes, against scikit-learn on features by plain transformers."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.optimize import minimize
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict

from ensemble.common.python_process import python_command
from ensemble.members.huggingface.spec import HEAD_FILE, ModelSettings
from ensemble.members.pooled_cls import training as features_module
from ensemble.members.pooled_cls.training import fit_head, train
from tests.checkpoints import make_texts
from tests.members.huggingface.scoring.test_predict import worker_spec
from tests.members.pooled_cls.test_pooled_cls import make_backbone, member, pooled_reference, predict
from tests.worker.test_session import publish

pytestmark = pytest.mark.usefixtures("one_thread")
LABELS = ("yes", "no", "tie")
Floats = npt.NDArray[np.float64]


def make_spec(
    where: Path, base: Path, texts: Sequence[str], labels: Sequence[str], **train: Any
) -> dict[str, Any]:
    """What the parent writes for each part, but for ``rows`` and ``out``."""
    plain = worker_spec(base)
    settings = {field.name: getattr(plain, field.name) for field in fields(ModelSettings)}
    return {
        "table": publish(where / "data", {"text": list(texts)})["table_path"],
        "labels": list(labels),
        "seed": 0,
        "settings": {"member": json.loads(json.dumps(settings))},
        "train": {"C": 1.0, "pooling_mode": "mean", "method": "head", **train},
        "features": str(where / "features"),
    }


def part_of(
    where: Path, spec: dict[str, Any], rows: npt.NDArray[np.int64], targets: Floats, name: str
) -> dict[str, Any]:
    """The spec of a part; ``targets`` are those of all rows."""
    out = where / name
    out.mkdir()
    file = where / f"{name}.npz"
    np.savez(file, rows=rows, targets=targets[rows], weights=np.ones(len(rows)))
    return {**spec, "rows": str(file), "out": str(out)}


def progress(part: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads((Path(part["out"]) / "progress.json").read_text()))


@pytest.mark.parametrize(
    ("architecture", "pooling_mode", "labels", "options"),
    [
        ("bert", "mean", LABELS, {}),
        pytest.param("llama", "lasttoken", LABELS[:2], {"side": "left"}, marks=pytest.mark.long),
        pytest.param("deberta-v2", "cls", LABELS, {}, marks=pytest.mark.long),
    ],
)
def test_predictions_of_held_out_rows_equal_cross_val_predict(
    architecture: str, pooling_mode: str, labels: Sequence[str], options: dict[str, Any], tmp_path: Path
) -> None:
    from torch import nn

    base, texts = make_backbone(tmp_path / "a model", architecture, **options), make_texts(60, longest=30)
    random = np.random.default_rng(0)
    truth, folds = random.integers(len(labels), size=len(texts)), np.arange(len(texts)) % 3
    features = pooled_reference(base, nn.Identity(), pooling_mode, texts)
    model = LogisticRegression(C=0.5, tol=1e-8, max_iter=10_000)
    expected = cross_val_predict(model, features, truth, cv=PredefinedSplit(folds), method="predict_proba")
    assert expected.std(axis=0).min() > 0.01, "the features must tell rows apart"

    spec = make_spec(tmp_path, base, texts, labels, C=0.5, pooling_mode=pooling_mode)
    result = np.full_like(expected, np.nan)
    for fold in range(3):
        rows = np.flatnonzero(folds != fold)
        part = part_of(tmp_path, spec, rows, np.eye(len(labels))[truth], f"fold-{fold}")
        train(part)
        assert (progress(part)["tokens"] > 0) == (fold == 0), "features are computed once"
        head = Path(part["out"]) / HEAD_FILE
        made = member(tmp_path, base, head, {"text": texts}, labels, pooling_mode=pooling_mode)
        result[folds == fold] = predict(made, len(texts)).values[folds == fold]
    np.testing.assert_allclose(result, expected, atol=1e-4)


@pytest.mark.parametrize("labels", [2, 3])
def test_soft_labels_and_weights_minimize_their_cross_entropy(labels: int) -> None:
    random = np.random.default_rng(1)
    features = random.normal(size=(80, 4)).astype(np.float32)
    targets = random.dirichlet(np.ones(labels), size=80) * random.choice([0.5, 1.0], size=(80, 1))
    weight, bias = fit_head(features, targets, 0.7, 0)

    def scores(numbers: Floats) -> Floats:
        table = numbers.reshape(labels, 5)
        logits = features @ table[:, :4].T + table[:, 4]
        return np.asarray(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True))

    def loss(numbers: Floats) -> float:
        # The two rows of two labels stand for one of twice their size (b - a), which scikit-learn penalizes.
        penalty = (numbers.reshape(labels, 5)[:, :4] ** 2).sum() * (2 if labels == 2 else 1)
        return float(0.5 * penalty - 0.7 * (targets * scores(numbers)).sum())

    best = minimize(loss, np.zeros(labels * 5), method="BFGS", options={"gtol": 1e-7})
    result = np.column_stack([weight, bias]).ravel()
    np.testing.assert_allclose(scores(result), scores(best.x), atol=1e-4)
    np.testing.assert_allclose(weight.sum(axis=0), 0, atol=1e-5)


def test_a_training_that_was_killed_computes_what_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(features_module, "_ROWS_OF_BLOCK", 8)
    base, texts = make_backbone(tmp_path / "model", "bert"), make_texts(20, longest=20)
    spec = make_spec(tmp_path, base, texts, LABELS)
    targets = np.eye(3)[np.arange(20) % 3]
    first = part_of(tmp_path, spec, np.arange(20), targets, "all")
    train(first)
    paths = sorted((tmp_path / "features").glob("*/*.npz"))
    assert len(paths) == 3
    before = {path: path.read_bytes() for path in paths}
    paths[0].unlink()
    again = part_of(tmp_path, spec, np.arange(20), targets, "again")
    train(again)
    assert sorted((tmp_path / "features").glob("*/*.npz")) == paths
    assert 0 < progress(again)["tokens"] < progress(first)["tokens"] / 2
    for path, content in before.items():
        with np.load(path) as new:
            path.write_bytes(content)
            np.testing.assert_allclose(new["values"], np.load(path)["values"], atol=1e-6)
    changed = {**again, "train": {**again["train"], "pooling_mode": "cls"}}
    train(changed)
    assert len([*(tmp_path / "features").iterdir()]) == 2, "other features have another folder"


@pytest.mark.long
def test_two_processes_share_the_rows_and_say_what_lacks(tmp_path: Path) -> None:
    base, texts = make_backbone(tmp_path / "model", "bert"), make_texts(9_000, longest=3)
    spec = make_spec(tmp_path, base, texts, LABELS)
    targets = np.eye(3)[np.arange(9_000) % 3]
    parts = [
        part_of(tmp_path, spec, np.arange(0, 9_000, 2), targets, "fold-0"),
        part_of(tmp_path, spec, np.arange(0, 9_000, 3), targets, "fold-1"),
    ]
    running = []
    for part in parts:
        file = Path(part["out"]).with_suffix(".json")
        file.write_text(json.dumps(part))
        running.append(subprocess.Popen([*python_command("ensemble.members.pooled_cls.training"), str(file)]))
    assert [process.wait(timeout=300) for process in running] == [0, 1]
    assert (Path(parts[0]["out"]) / HEAD_FILE).is_file()
    problem = json.loads((Path(parts[1]["out"]) / "problem.json").read_text())
    assert problem == {
        "text": "no row to train on has the label 'no'; give it rows in every fold",
        "is_out_of_memory": False,
    }
    tokens = sum(progress(part)["tokens"] for part in parts)
    alone = part_of(
        tmp_path, {**spec, "features": str(tmp_path / "other")}, np.arange(9_000), targets, "alone"
    )
    train(alone)
    assert tokens == progress(alone)["tokens"], "no row is computed twice"
