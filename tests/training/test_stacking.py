"""A second stage on real data: no leak from labels that nobody can know, and a gain where there is one to have."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import roc_auc_score
from sklearn.neighbors import KNeighborsClassifier

from tests.project import Project

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.long]

_Values = npt.NDArray[np.float64]
LABELS = ["no", "yes"]

# Nearest neighbours know the label of each row that they have seen, so that any leak shows.
SCRIPT = """
import pickle
import sys
from pathlib import Path

import pandas as pd


def predict(frame, context):
    model, columns = pickle.loads((Path(context.model) / "model.pkl").read_bytes())
    return model.predict_proba(frame[columns].to_numpy(dtype=float))


if __name__ == "__main__":
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.neighbors import KNeighborsClassifier

    train, out, name, columns = sys.argv[1:]
    columns, table = columns.split(","), pd.read_csv(train)
    neighbors = KNeighborsClassifier(int(name)) if name != "gbm" else None
    model = neighbors or HistGradientBoostingClassifier(max_iter=40, min_samples_leaf=10, random_state=0)
    model.fit(table[columns].to_numpy(dtype=float), table["label"])
    (Path(out) / "model.pkl").write_bytes(pickle.dumps((model, columns)))
"""


@pytest.fixture
def project(tmp_path: Path) -> Project:
    (tmp_path / "model.py").write_text(SCRIPT, encoding="utf-8")
    return Project(tmp_path, tmp_path)


def member(name: str, model: str, *columns: str, **changes: Any) -> dict[str, Any]:
    command = [sys.executable, "model.py", "{train}", "{out}", model, ",".join(columns)]
    keys = {"name": name, "task_type": "python", "predict": "${CONFIG_DIR}/model.py:predict"}
    own = [column for column in columns if "/" not in column]
    return {
        **keys,
        **({"columns": own} if own else {}),
        "train": {"command": command, "num_gpus": 0},
        **changes,
    }


def out_of_fold(project: Project, table: pd.DataFrame, *models: dict[str, Any]) -> dict[str, pd.DataFrame]:
    """What ``train`` predicts of rows that no model has seen, by member, in the table's order."""
    table.to_csv(project.folder / "train.csv", index=False)
    training = {"data": {"path": "train.csv", "label_column": "label"}, "folds": {"n_splits": 3}}
    config = {"data": {"path": "train.csv"}, "labels": LABELS, "models": list(models), "training": training}
    project.write_config({**config, "output_dir": "runs/first", "report": False})
    done = project.ensemble("train", "config.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    files = {
        path.stem: pd.read_csv(path, index_col="id") for path in project.folder.glob("runs/first/oof/*.csv")
    }
    return {name: frame.loc[table["id"]] for name, frame in files.items()}


def losses(table: pd.DataFrame, probabilities: _Values) -> _Values:
    """The log loss of each row, of a probability of "yes"."""
    is_yes = (table["label"] == "yes").to_numpy()
    return np.asarray(-np.log(np.clip(np.where(is_yes, probabilities, 1 - probabilities), 1e-15, 1)))


def lead(losses: _Values, others: _Values) -> float:
    """How many standard errors the first losses are below the others, of the same rows."""
    differences = others - losses
    return float(differences.mean() / (differences.std() / np.sqrt(len(differences))))


def test_labels_that_are_noise_teach_the_second_stage_nothing(project: Project) -> None:
    rng, rows = np.random.default_rng(0), 600
    table = pd.DataFrame({"id": np.arange(rows), "a": rng.normal(size=rows), "b": rng.normal(size=rows)})
    table["label"] = rng.choice(LABELS, rows)
    is_yes = table["label"] == "yes"
    noise = 0.5 / np.sqrt(rows / 3)  # more than the standard deviation of the area under the curve
    prior = losses(table, np.full(rows, is_yes.mean()))
    models = [member("one", "1", "a", "b"), member("three", "3", "a", "b")]
    reader = member("gbm", "gbm", "one/yes", "three/yes", inputs=["one", "three"])
    honest = out_of_fold(project, table, *models, reader)["gbm"]["yes"].to_numpy()
    assert abs(roc_auc_score(is_yes, honest) - 0.5) < 3 * noise
    assert lead(losses(table, honest), prior) < 2

    # A leak is planted: the first stage is given, by models that have seen the rows.
    for path in (project.folder / "runs/first/oof").glob("*.csv"):
        path.unlink()
    features = table[["a", "b"]].to_numpy()
    for model in models:
        neighbors = KNeighborsClassifier(int(model["train"]["command"][4])).fit(features, table["label"])
        leaked = pd.DataFrame(neighbors.predict_proba(features), columns=LABELS, index=table["id"])
        leaked.to_csv(project.folder / f"runs/first/oof/{model['name']}.csv")
    shutil.rmtree(project.folder / "runs/first/training")
    files = [
        {"name": model["name"], "task_type": "csv", "path": "runs/first/oof/one.csv"} for model in models
    ]
    leaking = out_of_fold(project, table, *files, reader)["gbm"]["yes"].to_numpy()
    assert abs(roc_auc_score(is_yes, leaking) - 0.5) > 10 * noise
    assert lead(losses(table, leaking), prior) > 10


def test_an_interaction_is_found_that_no_weights_have(project: Project) -> None:
    """Member a is right about short rows alone, member b about long ones."""
    rng, rows = np.random.default_rng(1), 900
    is_yes, is_short = rng.random(rows) < 0.5, rng.random(rows) < 0.5
    table = pd.DataFrame({"id": [f"r{n}" for n in range(rows)], "size": np.where(is_short, 10, 100)})
    for name, is_known in (("a", is_short), ("b", ~is_short)):
        table[name] = np.where(is_known, np.where(is_yes, 1.0, -1.0), 0) + rng.normal(size=rows)
    table["label"] = np.where(is_yes, "yes", "no")
    models = [member("a", "25", "a"), member("b", "25", "b")]
    reader = member("gbm", "gbm", "a/yes", "b/yes", "size", inputs=["a", "b"])
    oof = out_of_fold(project, table, *models, reader)
    a, b, second = (losses_of["yes"].to_numpy() for losses_of in (oof["a"], oof["b"], oof["gbm"]))
    weighted = [losses(table, weight * a + (1 - weight) * b) for weight in np.linspace(0, 1, 101)]
    simplex = min(weighted, key=np.mean)  # the best weights even of these rows
    assert lead(losses(table, second), simplex) > 3

    # By hand, with scikit-learn alone: the same numbers.
    fold_of = pd.read_csv(project.folder / "runs/first/training/folds.csv", index_col="id")["fold"]
    fold = fold_of.loc[table["id"]].to_numpy()
    features = np.column_stack([a, b, table["size"]])
    expected = np.zeros(rows)
    for number in range(3):
        model = HistGradientBoostingClassifier(max_iter=40, min_samples_leaf=10, random_state=0)
        model.fit(features[fold != number], table["label"][fold != number])
        expected[fold == number] = model.predict_proba(features[fold == number])[:, 1]
    np.testing.assert_allclose(second, expected, rtol=0, atol=1e-12)
