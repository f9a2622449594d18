"""configs/kaggle.ipynb in a folder laid out like Kaggle's: offline, read-only inputs, the project not installed."""

from __future__ import annotations

import csv
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.kaggle import (
    COMPETITION,
    LABELS,
    NOTEBOOK,
    OUTPUT,
    attach_checkout,
    is_shown,
    lasting,
    lay_out,
    lay_out_options,
    make_image,
    offline,
    page,
    run_notebook,
)
from tests.project import ROOT
from tests.waiting import PATIENCE_SECONDS

SPEC = importlib.util.spec_from_file_location("make_notebook", ROOT / "scripts/make_notebook.py")
assert SPEC is not None
assert SPEC.loader is not None
make_notebook = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(make_notebook)
# Other releases deprecate other things.
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture
def kaggle(tmp_path: Path) -> Path:
    """What stands for /kaggle."""
    for module in ("bitsandbytes", "nbconvert", "ipykernel", "peft"):
        pytest.importorskip(module)
    root = tmp_path / "it's kaggle"
    lay_out(root)
    lay_out_options(root)
    return root


def test_the_notebook_is_made_of_the_config() -> None:
    assert NOTEBOOK.read_text(encoding="utf-8") == make_notebook.notebook_text()
    stored = OUTPUT.read_text(encoding="utf-8")
    missing = [
        cell["source"]
        for cell in make_notebook.cells()
        if cell["id"] != "chosen"
        and is_shown("".join(cell["source"]))
        and "".join(cell["source"]).lstrip("# ") not in stored
    ]
    assert not missing, "run python -m tests.kaggle"


@pytest.mark.long
def test_the_notebook_ends_with_a_submission(kaggle: Path, tmp_path: Path) -> None:
    attach_checkout(kaggle)
    inputs = _state(kaggle / "input")
    done, notebook = run_notebook(make_image(tmp_path), kaggle)
    assert done.returncode == 0, done.stdout
    check_submission(kaggle)
    message = {
        cell["id"]: "".join("".join(item["text"]) for item in cell.get("outputs", ()))
        for cell in notebook["cells"]
    }
    assert "A run can start." in message["doctor"]
    assert "All checks passed." in message["validate"]
    assert "nf4 weights" in message["plan"]
    assert "the whole run would take" in message["rehearse"]
    assert "LoRA adapter" in message["run"]
    assert (kaggle / "working/run/predictions/gemma2@swapped.csv").is_file()
    assert "submission: submission.csv" in message["run"]
    assert "136060" in message["look"]
    assert _state(kaggle / "input") == inputs
    stored = OUTPUT.read_text(encoding="utf-8")
    assert lasting(page(notebook, kaggle)) == lasting(stored), "it is out of date: run python -m tests.kaggle"


@pytest.mark.long
def test_a_bad_exit_code_stops_the_notebook(kaggle: Path, tmp_path: Path) -> None:
    attach_checkout(kaggle)
    table = kaggle / "input" / COMPETITION / "test.csv"
    table.write_text(table.read_text(encoding="utf-8").replace("[", "", 1), encoding="utf-8")
    without_doctor = {r"ensemble(\"doctor\", *CONFIG)": "pass"}  # which would find it, too, but takes longer
    done, _ = run_notebook(make_image(tmp_path), kaggle, without_doctor)
    assert done.returncode == 1
    assert "row 1 (id '136060')" in done.stdout
    assert "ensemble validate ended with exit code 2" in done.stdout
    assert not (kaggle / "working" / "submission.csv").exists()


def make_kit(python: Path, folder: Path, *changes: tuple[str, str]) -> subprocess.CompletedProcess[str]:
    """Make a kit for an image; ``changes`` to what pip says is in it."""
    frozen = run(python, "-m", "pip", "freeze", "--all").stdout
    for old, new in changes:
        assert len(re.findall(old, frozen, re.MULTILINE)) == 1, frozen
        frozen = re.sub(old, new, frozen, flags=re.MULTILINE)
    (folder.parent / "image.txt").write_text(frozen, encoding="utf-8")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    options = ("--image", str(folder.parent / "image.txt"), "--python", version)
    return run(Path(sys.executable), str(ROOT / "scripts/kaggle_kit.py"), str(folder), *options)


def run(python: Path, *arguments: str, offline: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*offline, str(python), *arguments],
        cwd=python.parent,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.mark.long
def test_a_kit_for_an_image_that_lacks_nothing_else(tmp_path: Path) -> None:
    """It needs no index: neither to be made nor to be installed."""
    pytest.importorskip("setuptools", minversion="77")
    python, kit = make_image(tmp_path), tmp_path / "it's a kit"
    done = make_kit(python, kit, (r"^typer==.*$", "typer==0.18.0"))
    assert done.returncode == 1
    assert "ensemble-runner needs typer>=0.19, and there is 0.18.0: take a newer image" in done.stdout
    done = make_kit(python, kit)
    assert done.returncode == 0, done.stdout
    (wheel,) = kit.glob("*.whl")
    assert {path.name for path in kit.iterdir()} == {wheel.name, "README.md", "requirements.lock"}
    assert "No module named ensemble" in run(python, "-m", "ensemble", "--version").stdout
    install = ("-m", "pip", "install", "--no-index", "--find-links", str(kit), "--require-hashes", "-r")
    whole = wheel.read_bytes()
    wheel.write_bytes(whole + b"\0")
    done = run(python, *install, str(kit / "requirements.lock"), offline=offline(kit))
    assert done.returncode == 1
    assert "DO NOT MATCH THE HASHES" in done.stdout
    wheel.write_bytes(whole)
    done = run(python, *install, str(kit / "requirements.lock"), offline=offline(kit))
    assert done.returncode == 0, done.stdout
    assert run(python, "-m", "ensemble", "--version").stdout.startswith("ensemble ")


@pytest.mark.long  # needs a package index, and takes 43 MB from it
def test_the_notebook_with_a_kit_that_brings_bitsandbytes(kaggle: Path, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", minversion="77")  # torch 2.13 asks for it, and pip looks at that, too
    python = make_image(tmp_path, without=["bitsandbytes"])
    kit = kaggle / "input" / "ensemble-kit"
    done = make_kit(python, kit)
    assert done.returncode == 0, done.stdout
    assert sorted(path.name.partition("-")[0] for path in kit.glob("*.whl")) == [
        "bitsandbytes",
        "ensemble_runner",
    ]
    done, _ = run_notebook(python, kaggle)
    assert done.returncode == 0, done.stdout
    check_submission(kaggle)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    assert (site / "ensemble" / "__main__.py").is_file()
    assert (site / "bitsandbytes" / "__init__.py").is_file()


def check_submission(kaggle: Path) -> None:
    with (kaggle / "working" / "submission.csv").open(newline="", encoding="utf-8") as file:
        header, *rows = csv.reader(file)
    assert header == ["id", *LABELS]
    assert [row[0] for row in rows] == [str(136060 + index) for index in range(40)]
    assert all(abs(sum(map(float, row[1:])) - 1) < 1e-8 for row in rows)


def _state(folder: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in sorted(folder.rglob("*"))}
