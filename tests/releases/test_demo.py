"""The demo, as a user runs it: on every release the numbers of plain transformers with eager attention."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from tests.checkpoints import reference
from tests.project import ROOT, Project

ROWS = 60
DEMO = ROOT / "demo"


@pytest.mark.long
@pytest.mark.fault(30)
@pytest.mark.filterwarnings("default")  # other releases deprecate other things
def test_the_demo_has_the_numbers_of_plain_transformers(project: Project) -> None:
    done = project.ensemble("run", str(ROOT / "configs" / "demo.yaml"), "--limit", str(ROWS))
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    with (DEMO / "test.csv").open(newline="", encoding="utf-8") as file:
        glosses = [row["gloss"] for row in csv.DictReader(file)][:ROWS]
    for member in ("gemma2", "llama"):
        folder = DEMO / "models" / member
        names = json.loads((folder / "config.json").read_text(encoding="utf-8"))["id2label"]
        (_, *labels), rows = project.read(f"runs/demo/predictions/{member}.csv")
        columns = [[*names.values()].index(label) for label in labels]
        expected = reference(folder, glosses, max_length=128)[:, columns]
        got = np.array([row[1:] for row in rows], dtype=float)
        np.testing.assert_allclose(got, expected, atol=1e-5, err_msg=member)
