"""Runs of members whose views have checkpoints of their own, held against runs of each checkpoint alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint, make_texts, prime
from tests.project import GEMMA_LABELS, LABELS, Project

pytestmark = pytest.mark.usefixtures("warm")
ROWS = 24
SWAP = {"columns": ["a", "b"], "labels": ["winner_a", "winner_b"]}


@pytest.fixture
def folds(project: Project) -> Project:
    """A table of two texts a row, and the checkpoints of two folds, with their labels in different orders."""
    project.ids = [f"{(7 * row) % 101:03d}" for row in range(ROWS)]
    project.texts = make_texts(2 * ROWS, seed=3)
    columns = (project.ids, project.texts[:ROWS], project.texts[ROWS:])
    project.write_csv("test.csv", ["id", "a", "b"], [list(row) for row in zip(*columns, strict=True)])
    for number, labels in enumerate((GEMMA_LABELS, LABELS)):
        prime(make_checkpoint(project.folder / f"fold{number}", "llama", labels, seed=number))
    return project


def run(
    project: Project,
    *views: dict[str, Any],
    command: Sequence[str] = ("run", "config.yaml"),
    code: int = 0,
    output_dir: str = "runs/first",
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
    done = project.ensemble(*command)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def predictions(project: Project, view: str = "", run_name: str = "first") -> bytes:
    name = f"member@{view}" if view else "member"
    return (project.folder / f"runs/{run_name}/predictions/{name}.csv").read_bytes()


def values(project: Project, view: str = "", run_name: str = "first") -> np.ndarray:
    name = f"member@{view}" if view else "member"
    header, rows = project.read(f"runs/{run_name}/predictions/{name}.csv")
    assert header == ["id", *LABELS]
    return np.array([[float(cell) for cell in row[1:]] for row in rows])


def rows_of_workers(project: Project) -> list[int]:
    return sorted(worker["rows"] for worker in project.run_json()["members"][0]["workers"])


def test_each_view_has_the_predictions_of_its_checkpoint_alone(folds: Project) -> None:
    views: list[dict[str, Any]] = [
        {"name": "fold0"},
        {"name": "fold1", "model_name_or_path": "fold1", "weight": 3.0},
        {"name": "swapped", "swap": SWAP},
    ]
    said = run(folds, *views)
    assert rows_of_workers(folds) == [ROWS, 2 * ROWS], "a worker for each checkpoint, which views share"
    for number in range(2):
        run(folds, model_name_or_path=f"fold{number}", output_dir=f"runs/alone{number}")
        alone = predictions(folds, run_name=f"alone{number}")
        assert predictions(folds, f"fold{number}") == alone, said
    run(folds, {"name": "swapped", "swap": SWAP}, output_dir="runs/swapped")
    assert predictions(folds, "swapped") == predictions(folds, run_name="swapped")
    parts = [values(folds, name) for name in ("fold0", "fold1", "swapped")]
    np.testing.assert_allclose(values(folds), np.average(parts, axis=0, weights=[1, 3, 1]), atol=1e-15)
