"""Members with ``method: head``: trained fold by fold, then an ordinary member with a head for each fold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import PredefinedSplit, cross_val_predict

from ensemble.cli.progress import QuietDisplay
from ensemble.common.clock import boot_seconds
from ensemble.data.table import TableNeeds, read_table
from ensemble.data.trained_rows import TrainedRows, write_trained_rows
from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.pooled_cls.training import train
from ensemble.members.registry import member_kind
from ensemble.pipeline.trained_members import with_trained
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.training.command import predict_held_out, raise_unless_trained
from ensemble.training.command import trained as trained_by
from tests.members.pooled_cls.test_pooled_cls import make_backbone, pooled_reference, softmax
from tests.project import LABELS, Project
from tests.training import folds
from tests.training.folds import FOLD_OF_ROW, FOLDS, ROWS, loaded

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def trained(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    monkeypatch.chdir(project.folder)
    folds.write_tables(project)
    make_backbone(project.folder / "base", "bert")
    return project


def config(project: Project, **keys: Any) -> dict[str, Any]:
    train = {"base_model": "base", "method": "head", "C": 0.5, "pooling_mode": "cls", **keys}
    member = {
        "name": "head",
        "text_column": "a",
        "label_map": {"x": "tie"},
        "max_length": 128,
        "train": train,
    }
    training = {"data": {"path": "train.csv", "label_column": "label"}, "folds": {"n_splits": FOLDS}}
    return project.config(
        data={"path": "test.csv"}, models=[member], defaults=None, submission=None, training=training
    )


def finish(keys: dict[str, Any]) -> TrainingDir:
    """Train the head of each fold, and one of all rows, with what the parent would write for each."""
    given = loaded(keys)
    (model,) = given.config.models
    kind = member_kind(model)
    assert model.training is not None
    assert isinstance(kind, TextCheckpoint)
    folder = TrainingDir(given.config.output_dir)
    table = read_table(Path("train.csv"), TableNeeds("id", None, tuple(LABELS), ("a",), (), (), None))
    folder.root.mkdir(parents=True)
    table.publish(folder.root / "table.arrow")
    for part in (*map(Part, range(FOLDS)), Part(None)):
        rows = np.flatnonzero(part.fold != FOLD_OF_ROW)
        targets = np.eye(len(LABELS))[rows % len(LABELS)]
        file, out = folder.root / f"{part.name}.npz", folder.checkpoint("head", part)
        np.savez(file, rows=rows, targets=targets, weights=np.ones(len(rows)))
        out.mkdir(parents=True)
        folder.seal("head", part).write_text("{}")
        train(
            {
                "table": str(folder.root / "table.arrow"),
                "rows": str(file),
                "out": str(out),
                "labels": LABELS,
                "seed": 0,
                "settings": kind.training_settings(LABELS),
                "train": model.training.model_dump(),
                "features": str(folder.root / "features"),
            }
        )
    trained_rows = TrainedRows(table.row_digests(("a",)), FOLD_OF_ROW)
    write_trained_rows(folder.trained_rows("head"), trained_rows)
    return folder


def test_a_trained_head_becomes_a_member_with_a_head_for_each_fold(trained: Project) -> None:
    keys = config(trained)
    folder = finish(keys)
    (member,) = with_trained(loaded(keys)).config.models
    assert member.task_type == "pooled_cls"
    assert [view.name for view in member.all_views] == ["fold-0", "fold-1", "fold-2"]
    heads = [member.as_view(view).model_dump()["head"] for view in member.all_views]
    assert heads == [folder.checkpoint("head", Part(fold)) / "head.safetensors" for fold in range(FOLDS)]
    (refit,) = with_trained(loaded(config(trained, predict_with="refit"))).config.models
    assert refit.model_dump()["head"] == folder.checkpoint("head", Part(None)) / "head.safetensors"
    assert not refit.all_views


def train_whole(keys: dict[str, Any]) -> None:
    with trained_by(loaded(keys), QuietDisplay(), boot_seconds(), owns_process=False) as (report, _):
        raise_unless_trained(report)


@pytest.mark.long
def test_the_command_trains_heads_by_features_that_are_computed_once(trained: Project) -> None:
    keys = config(trained, predict_with="refit", base_model=str(trained.folder / "base"))
    train_whole(keys)
    folder = TrainingDir(Path("runs/first"))
    tokens = []
    for part in (*map(Part, range(FOLDS)), Part(None)):
        left = folder.checkpoint("head", part)
        tokens.append(json.loads((left / "progress.json").read_text())["tokens"])
        assert {path.name for path in left.iterdir()} == {"head.safetensors", "progress.json"}
    assert sorted(tokens)[:FOLDS] == [0] * FOLDS
    assert max(tokens) > 0
    (member,) = with_trained(loaded(keys)).config.models
    assert member.task_type == "pooled_cls"
    states = {path: path.stat().st_mtime_ns for path in folder.root.rglob("*.safetensors")}
    train_whole(keys)
    assert {path: path.stat().st_mtime_ns for path in folder.root.rglob("*.safetensors")} == states


@pytest.mark.long
def test_out_of_fold_predictions_equal_cross_val_predict(trained: Project) -> None:
    from torch import nn

    keys = config(trained)
    folder = finish(keys)
    report = predict_held_out(loaded(keys), QuietDisplay(), boot_seconds(), owns_process=False)
    assert report.status == "complete"
    assert report.members[0].counters.rows == ROWS
    header, rows = trained.read("runs/first/oof/head.csv")
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == trained.ids[:ROWS]
    actual = np.array([[float(cell) for cell in row[1:]] for row in rows])

    texts = trained.texts[:ROWS]
    features = pooled_reference(trained.folder / "base", nn.Identity(), "cls", texts, max_length=128)
    model = LogisticRegression(C=0.5, tol=1e-8, max_iter=10_000)
    truth = np.arange(ROWS) % len(LABELS)
    expected = cross_val_predict(
        model, features, truth, cv=PredefinedSplit(FOLD_OF_ROW), method="predict_proba"
    )
    np.testing.assert_allclose(actual, expected, atol=1e-4)

    trained.write_config(keys)
    run = trained.ensemble("run", "config.yaml")
    assert run.returncode == 0, run.stderr
    _, rows = trained.read("runs/first/predictions/head.csv")
    new = [
        number for number in range(ROWS, len(trained.ids)) if trained.ids[number] in [row[0] for row in rows]
    ]
    features = pooled_reference(
        trained.folder / "base", nn.Identity(), "cls", [trained.texts[row] for row in new], max_length=128
    )
    values = {row[0]: [float(cell) for cell in row[1:]] for row in rows}
    of_folds = []
    for fold in range(FOLDS):
        tensors = load_file(folder.checkpoint("head", Part(fold)) / "head.safetensors")
        of_folds.append(softmax(features @ tensors["weight"].T + tensors["bias"]))
    actual = np.array([values[trained.ids[row]] for row in new])
    np.testing.assert_allclose(actual, np.mean(of_folds, axis=0), atol=2e-5)


@pytest.mark.long
def test_soft_labels_and_weights_make_the_heads_of_scikit_learn_with_the_same_sample_weights(
    trained: Project,
) -> None:
    from torch import nn

    new = slice(ROWS, len(trained.ids))
    random = np.random.default_rng(6)
    targets = random.dirichlet(np.full(len(LABELS), 0.5), len(trained.ids)).round(4)
    targets[:, -1] = 1 - targets[:, :-1].sum(axis=1)
    targets[[2, 5]] = np.eye(len(LABELS))[[0, 2]]  # certain ones among them
    weights = np.where(np.arange(len(targets)) < ROWS, 1.0, 0.25)
    of_rows = [[name, *values] for name, values in zip(trained.ids, targets.tolist(), strict=True)]
    trained.write_csv("soft.csv", ["id", *LABELS], of_rows[:ROWS])
    trained.write_csv("pseudo.csv", ["id", *LABELS], of_rows[new])
    texts = [[name, text] for name, text in zip(trained.ids[new], trained.texts[new], strict=False)]
    trained.write_csv("more.csv", ["id", "a"], texts)
    keys = config(trained)
    keys["training"] |= {
        "folds": {"column": "fold"},
        "labels": "soft.csv",
        "extra": [{"path": "more.csv", "weight": 0.25, "labels": "pseudo.csv"}],
    }
    trained.write_config(keys)
    training = trained.ensemble("train", "config.yaml")
    assert training.returncode == 0, training.stderr
    header, rows = trained.read("runs/first/oof/head.csv")
    assert header == ["id", *LABELS]
    predicted = np.array([[float(cell) for cell in row[1:]] for row in rows])

    read = trained.texts[: len(trained.ids)]
    features = pooled_reference(trained.folder / "base", nn.Identity(), "cls", read, max_length=128)
    expected = np.zeros_like(predicted)
    fold_of_row = np.append(FOLD_OF_ROW, [-1] * (len(targets) - ROWS))
    for fold in range(FOLDS):
        part = fold_of_row != fold
        model = LogisticRegression(C=0.5, tol=1e-8, max_iter=10_000)
        model.fit(
            np.repeat(features[part], len(LABELS), axis=0),
            np.tile(np.arange(len(LABELS)), int(part.sum())),
            sample_weight=(targets * weights[:, None])[part].ravel(),
        )
        held_out = fold == FOLD_OF_ROW
        expected[held_out] = model.predict_proba(features[:ROWS][held_out])
    assert expected.std(axis=0).min() > 0.01, "the features must tell rows apart"
    np.testing.assert_allclose(predicted, expected, atol=1e-4)
