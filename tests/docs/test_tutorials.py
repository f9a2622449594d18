"""The tutorials, README and the skill for agents, followed from top to bottom as they stand in their pages."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml

from tests.checkpoints import make_base, make_checkpoint, make_texts
from tests.docs.pages import blocks
from tests.docs.walk import Walk
from tests.kaggle import NOTEBOOK
from tests.project import ROOT
from tests.ray.nodes import Nodes

TUTORIALS = ROOT / "docs" / "tutorials"
CONTEST = ["winner_model_a", "winner_model_b", "winner_tie"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """The folder in which a reader starts."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def follow(name: str, home: Path, **environment: str) -> None:
    Walk(home, home.parent / "tools", environment).follow(TUTORIALS / f"{name}.md")


@pytest.mark.long
def test_first_ensemble(home: Path) -> None:
    follow("first-ensemble", home)
    folder = home / "ensemble-demo" / "runs"
    assert (folder / "demo" / "report.html").is_file()
    gemma2, llama, ensemble = (
        pd.read_csv(folder / "demo" / name, index_col="id")
        for name in ("predictions/gemma2.csv", "predictions/llama.csv", "ensemble.csv")
    )
    pd.testing.assert_frame_equal(ensemble, (2 * gemma2 + llama) / 3, atol=1e-9)
    assert not llama.equals(pd.read_csv(folder / "longer/predictions/llama.csv", index_col="id"))


@pytest.mark.long
def test_labels_to_weights(home: Path) -> None:
    follow("labels-to-weights", home)
    folder = home / "weights-demo"
    document = yaml.safe_load((folder / "weights.yaml").read_text(encoding="utf-8"))
    weights = {model["name"]: model["weight"] for model in document["models"]}
    members = {
        name: pd.read_csv(folder / f"runs/new/predictions/{name}.csv", index_col="id") for name in weights
    }
    expected = sum(weights[name] * member for name, member in members.items()) / sum(weights.values())
    ensemble = pd.read_csv(folder / "runs/new/ensemble.csv", index_col="id")
    pd.testing.assert_frame_equal(ensemble, expected, atol=1e-9)
    assert len(ensemble) == 500


@pytest.mark.long
def test_your_models(home: Path) -> None:
    make_checkpoint(home / "models" / "gemma-2-9b", "gemma2", [CONTEST[2], *CONTEST[:2]], seed=1)
    make_checkpoint(
        home / "models" / "llama-3-8b", "llama", ["LABEL_0", "LABEL_1", "LABEL_2"], seed=2, pad=None
    )
    texts = make_texts(360, seed=5)
    rows = [
        (str(136060 + row), *(json.dumps([text, text]) for text in texts[3 * row : 3 * row + 3]))
        for row in range(120)
    ]
    table = pd.DataFrame(rows, columns=["id", "prompt", "response_a", "response_b"])
    table.to_csv(home / "test.csv", index=False)
    sample = pd.DataFrame(1 / 3, index=pd.Index(table["id"][::-1], name="id"), columns=CONTEST)
    sample.to_csv(home / "sample_submission.csv")
    follow("your-models", home)
    submission, ensemble, gemma2, llama3 = (
        pd.read_csv(home / name, index_col="id", dtype={"id": str})
        for name in (
            "submission.csv",
            *(f"runs/first/{name}.csv" for name in ("ensemble", "predictions/gemma2", "predictions/llama3")),
        )
    )
    assert [*submission.index] == [*sample.index]
    pd.testing.assert_frame_equal(submission, ensemble.loc[sample.index], atol=1e-6)
    mean = 0.6 * gemma2[CONTEST] + 0.4 * llama3[CONTEST]
    pd.testing.assert_frame_equal(ensemble, mean, atol=1e-9)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_training_by_folds(home: Path) -> None:
    pytest.importorskip("peft")
    make_checkpoint(home / "models" / "deberta-v3-base", "deberta-v2", ["LABEL_0", "LABEL_1"], seed=1)
    make_base(home / "models" / "Qwen3-4B", "qwen3", seed=2)
    texts = make_texts(300, seed=7, longest=20)
    table = pd.DataFrame({"id": range(300), "text": [text or "of" for text in texts]})
    table["label"] = ["toxic" if "animal" in text or "act" in text else "fine" for text in texts]
    table[:200].to_csv(home / "train.csv", index=False)
    table.loc[200:, ["id", "text"]].to_csv(home / "test.csv", index=False)
    sample = pd.DataFrame({"id": range(200, 300), "toxic": 0.5, "fine": 0.5})
    sample.to_csv(home / "sample_submission.csv", index=False)
    follow("training-by-folds", home)
    for name in ("deberta", "qwen"):
        predictions = pd.read_csv(home / "runs" / "first" / "oof" / f"{name}.csv")
        assert [*predictions["id"]] == [*range(200)]
    submission = pd.read_csv(home / "runs" / "first" / "submission.csv")
    assert [*submission["id"]] == [*range(200, 300)]
    assert list(submission) == list(sample)


def test_kaggle(home: Path) -> None:
    """Its cells and config are those of the notebook, which tests/releases/test_kaggle.py runs."""
    cells = [
        "".join(cell["source"])
        for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
        if cell["cell_type"] == "code"
    ]
    lines = [line for cell in cells for line in cell.splitlines()]
    config = yaml.safe_load((ROOT / "configs" / "kaggle.yaml").read_text(encoding="utf-8"))
    found = [*blocks(TUTORIALS / "kaggle.md")]
    shown = [line for block in found if block.language == "python" for line in block.text.splitlines()]
    assert shown == [line for line in lines if line.startswith("ensemble(")], "the notebook calls others"
    parts = [block for block in found if block.language == "yaml"]
    for block in parts:
        assert is_part(yaml.safe_load(block.text), config), (
            f"{block.place}: configs/kaggle.yaml says otherwise"
        )
    kits = [line for block in found if block.language == "console" for line in block.text.splitlines()]
    assert parts
    assert kits
    (home / "kit").mkdir()
    (home / "kit" / "full").touch()
    (home / "scripts").symlink_to(ROOT / "scripts")
    (home / "image.txt").write_bytes((ROOT / "scripts" / "kaggle_image.txt").read_bytes())
    for line in kits:
        program, *arguments = shlex.split(line)
        assert program == "python"
        done = subprocess.run([sys.executable, *arguments], cwd=home, capture_output=True, text=True)
        assert done.stderr == "error: kit is not empty; name a new folder\n", (
            "it did not understand the command"
        )


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_cluster(home: Path, tmp_path: Path, nvml_libraries: Path) -> None:
    """On two nodes. The page's commands of ray are only parsed: they start, and stop, clusters of the machine."""
    pytest.importorskip("ray", reason="ray is not installed")
    (tmp_path / "nodes").mkdir()
    nodes = Nodes(tmp_path / "nodes", nvml_libraries)
    try:
        for name in ("head", "second"):
            nodes.add(name)
        follow("cluster", home, RAY_ADDRESS=nodes.address)
    finally:
        nodes.close()
    report = json.loads((home / "cluster-demo" / "runs" / "demo" / "run.json").read_text(encoding="utf-8"))
    assert {member["rows"] for member in report["members"]} == {2000}
    workers = [worker for member in report["members"] for worker in member["workers"]]
    assert len(workers) >= 2
    assert all(worker["node"] for worker in workers), "a worker ran on no node"


@pytest.mark.long
def test_readme(home: Path) -> None:
    """The script by hand, the same as two members, and the config that takes its place say the same."""
    make_checkpoint(home / "models" / "gemma-2-9b", "gemma2", ["yes", "no"], seed=1)
    make_checkpoint(home / "models" / "llama-3-8b", "llama", ["no", "yes"], seed=2)
    texts = [text or "of" for text in make_texts(120, seed=3)]
    pd.DataFrame({"id": range(120), "text": texts}).to_csv(home / "test.csv", index=False)
    Walk(home, home.parent / "tools").follow(ROOT / "README.md")
    scripts = pd.read_csv(home / "ensemble.csv", index_col="id")[["no", "yes"]]
    members, config = (
        pd.read_csv(home / "runs" / name / "ensemble.csv", index_col="id") for name in ("scripts", "first")
    )
    pd.testing.assert_frame_equal(members, scripts, atol=1e-6)  # they may have other threads
    pd.testing.assert_frame_equal(config, scripts, atol=1e-4)


@pytest.mark.long
def test_skill(home: Path) -> None:
    labels = ["winner_a", "winner_b", "tie"]
    make_checkpoint(home / "models" / "gemma", "gemma2", labels[::-1], seed=1)
    make_checkpoint(home / "models" / "llama", "llama", labels, seed=2)
    texts = [text or "of" for text in make_texts(200, seed=3)]
    table = pd.DataFrame({"id": range(200), "text": texts, "label": [labels[row % 3] for row in range(200)]})
    table.to_csv(home / "test.csv", index=False)
    sample = pd.DataFrame({"id": range(200), **dict.fromkeys(labels, 1 / 3)})
    sample.to_csv(home / "sample_submission.csv", index=False)
    (skill,) = (ROOT / "docs" / "skill").glob("*/SKILL.md")
    Walk(home, home.parent / "tools").follow(skill)
    assert [*pd.read_csv(home / "submission.csv")["id"]] == [*range(200)]
    assert (home / "weights.yaml").is_file()


def is_part(part: object, whole: object) -> bool:
    """Whether all that a part of a config says stands in the whole one, too."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(key in whole and is_part(value, whole[key]) for key, value in part.items())
    return part == whole
