"""The kinds of docs/how-to/new-member-kind.md: installed as they stand, and run in real processes."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint, reference
from tests.packages import pip_install
from tests.page import blocks, lay_out_package
from tests.project import LABELS, ROOT, Project, python_path


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the page's package, and the one that it names."""
    source, site = tmp_path_factory.mktemp("packages"), tmp_path_factory.mktemp("site")
    ordinal = shutil.copytree(ROOT / "configs/ensemble-ordinal", source / "ensemble-ordinal")
    pip_install(site, lay_out_package(source, "ensemble-bytes"), ordinal)
    return site


@pytest.mark.long
def test_a_run_with_a_kind_of_another_package(project: Project, site: Path) -> None:
    weights = np.random.default_rng(0).normal(size=(256, len(LABELS))) * 5
    np.save(project.folder / "small.npy", weights)
    mate = [[row_id, "0.2", "0.3", "0.5"] for row_id in sorted(project.ids)]
    project.write_csv("mate.csv", ["id", *LABELS], mate)
    (project.folder / "config.yaml").write_text(blocks()["bytes.yaml"])
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    validated = project.ensemble("validate", "config.yaml", environment=environment)
    assert validated.returncode == 0, validated.stderr
    assert "small: a classifier of bytes, weight 0.2, CPU, " in validated.stdout
    done = project.ensemble("run", "config.yaml", "--set", "report=false", environment=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    counts = np.array(
        [np.bincount(np.frombuffer(text.encode(), np.uint8), minlength=256) for text in project.texts]
    )
    scores = counts @ weights / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    _, rows = project.read("runs/first/predictions/small.csv")
    assert [row[0] for row in rows] == project.ids
    np.testing.assert_allclose([[float(cell) for cell in row[1:]] for row in rows], expected, rtol=1e-9)
    _, rows = project.read("runs/first/ensemble.csv")
    merged = (0.2 * expected + np.array([0.2, 0.3, 0.5])) / 1.2
    np.testing.assert_allclose([[float(cell) for cell in row[1:]] for row in rows], merged, rtol=1e-9)
    report = project.run_json()
    assert report["members"][0]["workers"][0]["ready"]["dtype"] == "float64"
    assert "torch" not in report["versions"]
    again = project.ensemble("run", "config.yaml", "--set", "report=false", environment=environment)
    assert "small: done by" in again.stdout
    np.save(project.folder / "small.npy", -weights)
    again = project.ensemble("run", "config.yaml", "--set", "report=false", environment=environment)
    assert "small: weights changed since" in again.stdout


@pytest.mark.long
def test_its_keys_are_checked_with_the_others(project: Project, site: Path) -> None:
    np.save(project.folder / "small.npy", np.zeros((256, 2)))
    text = blocks()["bytes.yaml"].replace(
        "{name: mate, task_type: csv, path: mate.csv}", "{name: b, task_type: byts}"
    )
    text = text.replace("replicas: 2", "replicsa: 2").replace("max_length: 512", "wieghts: x")
    (project.folder / "config.yaml").write_text(text)
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    done = project.ensemble("validate", "config.yaml", environment=environment)
    assert done.returncode == 2
    for words in (
        "models[0].replicsa (line 4): unknown key; did you mean replicas?",
        "models[1].task_type (line 5): unknown task_type; did you mean bytes?",
        "defaults.wieghts (line 6): unknown key; did you mean weights?",
    ):
        assert words in done.stderr
    (project.folder / "config.yaml").write_text(
        blocks()["bytes.yaml"].replace("  - {name: mate, task_type: csv, path: mate.csv}\n", "")
    )
    done = project.ensemble("validate", "config.yaml", environment=environment)
    assert "models[0] (small): weights: small.npy has the shape (256, 2), not (256, 3)" in done.stderr
    without = project.ensemble("validate", "config.yaml")
    assert (
        "models[0].task_type (line 4): unknown task_type; the task_types here are seq_cls, pooled_cls, causal_lm, "
        "image_cls, "
        "csv, python" in without.stderr
    )


@pytest.mark.long
def test_a_run_with_a_kind_of_checkpoint_of_another_package(project: Project, site: Path) -> None:
    """Against the formula, from the scores of plain transformers."""
    folder = make_checkpoint(
        project.folder / "scored", "llama", ["score"], problem_type="regression", pad=None
    )
    project.write_table(60)
    (project.folder / "config.yaml").write_text(blocks()["ordinal.yaml"])
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    done = project.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 0, done.stderr + done.stdout
    scores = reference(folder, project.texts, 64, "none")
    below = 1 / (1 + np.exp(scores - np.array([[-0.5, 0.5]])))
    expected = np.stack([below[:, 0], below[:, 1] - below[:, 0], 1 - below[:, 1]], axis=1)
    header, rows = project.read("runs/first/predictions/rated.csv")
    assert header == ["id", "winner_a", "tie", "winner_b"]
    assert [row[0] for row in rows] == project.ids
    np.testing.assert_allclose([[float(cell) for cell in row[1:]] for row in rows], expected, atol=1e-5)
    for change, reused in (("max_num_batched_tokens=100", 60), ("cut_points=[-0.5,0.6]", 0)):
        again = project.ensemble(
            "run", "config.yaml", "--set", f"models.rated.{change}", environment=environment
        )
        assert again.returncode == 0, again.stderr
        assert project.run_json()["members"][0]["reused_rows"] == reused, change
    wrong = project.ensemble(
        "validate", "config.yaml", "--set", "models.rated.cut_points=[1]", environment=environment
    )
    assert "models[0] (rated): cut_points: must be 2 ascending numbers for 3 labels" in wrong.stderr
