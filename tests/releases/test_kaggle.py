"""configs/kaggle.ipynb in a folder laid out like Kaggle's: offline, read-only inputs, the project not installed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from scripts import make_notebook
from tests.kaggle import (
    COMPETITION,
    LABELS,
    NOTEBOOK,
    OUTPUT,
    attach_checkout,
    lay_out,
    make_image,
    run_notebook,
)

# Other releases deprecate other things.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def kaggle(tmp_path: Path) -> Path:
    """What stands for /kaggle."""
    for module in ("bitsandbytes", "nbconvert", "ipykernel"):
        pytest.importorskip(module)
    root = tmp_path / "it's kaggle"
    lay_out(root)
    return root


def test_the_notebook_is_made_of_the_config() -> None:
    assert NOTEBOOK.read_text(encoding="utf-8") == make_notebook.notebook_text()
    page = OUTPUT.read_text(encoding="utf-8")
    missing = [
        cell["source"] for cell in make_notebook.cells() if "".join(cell["source"]).lstrip("# ") not in page
    ]
    assert not missing, "run python -m tests.kaggle"


def test_the_notebook_ends_with_a_submission(kaggle: Path, tmp_path: Path) -> None:
    attach_checkout(kaggle)
    inputs = _state(kaggle / "input")
    done, notebook = run_notebook(make_image(tmp_path), kaggle)
    assert done.returncode == 0, done.stdout
    check_submission(kaggle)
    said = {
        cell["id"]: "".join("".join(one["text"]) for one in cell.get("outputs", ()))
        for cell in notebook["cells"]
    }
    assert "A run can start." in said["doctor"]
    assert "All checks passed." in said["validate"]
    assert "nf4 weights" in said["plan"]
    assert "submission: submission.csv" in said["run"]
    assert "136060" in said["look"]
    assert _state(kaggle / "input") == inputs


def test_a_bad_exit_code_stops_the_notebook(kaggle: Path, tmp_path: Path) -> None:
    attach_checkout(kaggle)
    table = kaggle / "input" / COMPETITION / "test.csv"
    table.write_text(table.read_text(encoding="utf-8").replace("[", "", 1), encoding="utf-8")
    without_doctor = {
        r"ensemble(\"doctor\", \"config.yaml\")": "pass"
    }  # which would find it, too, but takes longer
    done, _ = run_notebook(make_image(tmp_path), kaggle, without_doctor)
    assert done.returncode == 1
    assert "row 1 (id '136060')" in done.stdout
    assert "ensemble validate ended with exit code 2" in done.stdout
    assert not (kaggle / "working" / "submission.csv").exists()


def check_submission(kaggle: Path) -> None:
    with (kaggle / "working" / "submission.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == [str(136060 + index) for index in range(40)]
    assert all(abs(sum(map(float, row[1:])) - 1) < 1e-8 for row in rows)


def _state(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
