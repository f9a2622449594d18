"""A submission as Parquet: what pandas reads of it is what pandas reads of the CSV, with ids as text."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")
LABELS = ["tie", "winner_a", "winner_b"]


@pytest.mark.parametrize("name", ["out/submission.parquet", "out/s.pq"])
def test_probabilities_and_answers(project: Project, name: str) -> None:
    values = np.random.default_rng(0).dirichlet(np.ones(3), len(project.ids))
    member = pd.DataFrame(values, columns=LABELS)
    member.insert(0, "id", project.ids)
    member.to_csv(project.folder / "member.csv", index=False)
    sample = pd.DataFrame({"b": 0.5, "id": sorted(project.ids), "winner": "?", "score": 0, "best": "?"})
    sample.to_csv(project.folder / "sample.csv", index=False)
    columns = {
        "b": "winner_b",
        "winner": {"answer": "label"},
        "score": {"answer": {"expected": [1, 2, 3], "thresholds": [1.6, 2.4]}},
        "best": {"answer": {"top": 2, "separator": " "}},
    }
    models = [{"name": "member", "task_type": "csv", "path": "member.csv"}]
    submission = {"sample": "sample.csv", "path": name, "columns": columns}
    project.write_config(project.config(models=models, defaults=None, submission=submission))
    done = project.ensemble("run", "config.yaml")
    assert done.returncode == 0, done.stderr
    frame = pd.read_parquet(project.folder / name)
    assert frame.columns.tolist() == sample.columns.tolist()
    csv = pd.read_csv(project.folder / "runs/first/submission.csv", dtype={"id": str})
    pd.testing.assert_frame_equal(frame, csv, check_exact=True)
    assert (frame["b"].dtype, frame["score"].dtype) == (np.float64, np.int64)
    by_id = member.set_index("id").loc[frame["id"]]
    np.testing.assert_array_equal(frame["b"], by_id["winner_b"])
    assert frame["winner"].tolist() == by_id[LABELS].idxmax(axis=1).tolist()
