"""What is published: a source distribution that can run its own tests, and a wheel that needs nothing beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.project import ROOT, Project
from tests.waiting import PATIENCE_SECONDS

# Only for those who work on the project.
_LEFT_OUT = (".ci/", ".gitignore")
_BUILD = "import sys; from setuptools.build_meta import *; to = sys.argv[1]; build_sdist(to); build_wheel(to)"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two distributions, made of the files that git tracks."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout")
    pytest.importorskip("setuptools", minversion="77")
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked():
        if (ROOT / name).is_file():  # else it was removed a moment ago
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-c", _BUILD, str(folder)],
        cwd=source,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def tracked() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    return [name for name in done.stdout.split("\0") if name and not name.startswith(_LEFT_OUT)]


def test_the_source_distribution_holds_what_its_tests_need(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {name for name in tracked() if (ROOT / name).is_file()} <= inside
    assert not [name for name in inside if name.endswith(".pyc")]


def test_the_wheel_works_in_an_empty_folder(built: Path, project: Project, tmp_path: Path) -> None:
    (archive,) = built.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    with zipfile.ZipFile(archive) as opened:
        assert not [name for name in opened.namelist() if name.startswith(("tests", "bench", "demo"))]
        assert any(
            name.endswith("data/share/ensemble-runner/config.schema.json") for name in opened.namelist()
        )
        opened.extractall(site)
    empty.mkdir()
    project.write_config(project.config(output_dir=str(empty / "runs")))

    def ensemble(folder: Path, *arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ensemble", *arguments],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(site)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    where = subprocess.run(
        [sys.executable, "-c", "import ensemble; print(ensemble.__file__)"],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(where.stdout.strip()).is_relative_to(site)
    assert ensemble(empty, "--version").startswith("ensemble ")
    assert "All checks passed" in ensemble(project.folder, "validate", "config.yaml")
