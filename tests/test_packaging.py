"""What is published: a source distribution that can run its own tests, and a wheel that needs nothing beside it."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import site
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
import yaml

from ensemble import __version__
from ensemble.commands.demo import ARCHIVE, checkout_files
from tests.project import ROOT, Project
from tests.waiting import PATIENCE_SECONDS

# Only for those who work on the project.
_LEFT_OUT = (".ci/", ".gitignore")
_IMPORT = "import sys; from setuptools.build_meta import *"
_BUILD = f"{_IMPORT}; to = sys.argv[1]; build_sdist(to); build_wheel(to)"
_TEXTS = (".ipynb", ".j2", ".json", ".md", ".py", ".toml", ".txt", ".yaml")


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


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment into which pip has installed the wheel, and nothing else.

    The packages that ensemble needs are this environment's. Its own ensemble is not seen: in a folder that a .pth
    file names, Python reads no .pth files, such as the one of a package that is installed to be edited.
    """
    pytest.importorskip("pip", minversion="22.3")
    folder = tmp_path_factory.mktemp("an environment") / "venv"
    venv.create(folder, symlinks=True)
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin/python"), "install", "--quiet"]
    subprocess.run([*pip, "--no-index", "--no-deps", str(wheel)], check=True, timeout=PATIENCE_SECONDS)
    (own,) = folder.glob("lib/python*/site-packages")
    (own / "needed.pth").write_text("\n".join(site.getsitepackages()), encoding="utf-8")
    return folder / "bin/ensemble"


def run(command: Sequence[str | Path], folder: Path) -> str:
    """What a command prints that succeeds in a folder."""
    done = subprocess.run(
        [*map(str, command)],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def wheel_contents(folder: Path) -> dict[str, bytes]:
    """The files of the wheel in a folder, with the version cut from their names."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as opened:
        files = {name: opened.read(name) for name in opened.namelist()}
    return {name.replace(f"ensemble_runner-{__version__}.", ""): data for name, data in files.items()}


@pytest.mark.long
def test_the_source_distribution_holds_what_its_tests_need(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {member.name.partition("/")[2] for member in opened if member.isfile()}
    made = {name for name in inside if name.startswith("ensemble_runner.egg-info/")} | {
        "PKG-INFO",
        "setup.cfg",
    }
    assert inside - made == {name for name in tracked() if (ROOT / name).is_file()}


@pytest.mark.long
def test_the_wheel_holds_the_package_and_the_demo(built: Path) -> None:
    inside = wheel_contents(built)
    described = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE"}
    assert set(inside) == {
        *(name for name in tracked() if name.startswith("ensemble/") and (ROOT / name).is_file()),
        ARCHIVE,
        "data/data/share/ensemble-runner/config.schema.json",
        *(f"dist-info/{name}" for name in described),
    }
    assert len(inside[ARCHIVE]) < 6 << 20
    with tarfile.open(fileobj=io.BytesIO(inside[ARCHIVE])) as opened:
        members = {member: opened.extractfile(member) for member in opened}
        files = {member.name: file.read() for member, file in members.items() if file is not None}
    assert files == checkout_files(ROOT)
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}


@pytest.mark.long
def test_the_source_distribution_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    run([sys.executable, "-c", f"{_IMPORT}; build_wheel({str(tmp_path)!r})"], source)
    assert wheel_contents(tmp_path) == wheel_contents(built)


@pytest.mark.long
def test_the_wheel_works_in_an_empty_folder(installed: Path, project: Project, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    project.write_config(project.config(output_dir=str(empty / "runs")))
    where = run([installed.with_name("python"), "-c", "import ensemble; print(ensemble.__file__)"], empty)
    assert Path(where.strip()).is_relative_to(installed.parents[1])
    assert run([installed, "--version"], empty) == f"ensemble {__version__}\n"
    assert "All checks passed" in run([installed, "validate", "config.yaml"], project.folder)


@pytest.mark.long
def test_the_demo_of_the_wheel_is_the_demo_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    empty, other = tmp_path / "an empty folder", tmp_path / "other"
    empty.mkdir()
    other.mkdir()
    printed = run([installed, "demo"], empty)
    run([sys.executable, "-m", "ensemble", "run", ROOT / "configs/demo.yaml"], other)
    here, there = empty / "ensemble-demo/runs/demo", other / "runs/demo"
    for name in ("predictions/gemma2.csv", "predictions/llama.csv", "ensemble.csv", "submission.csv"):
        assert (here / name).read_bytes() == (there / name).read_bytes()
    scores = json.loads((there / "run.json").read_text(encoding="utf-8"))["scores"]
    assert json.loads((here / "run.json").read_text(encoding="utf-8"))["scores"] == scores
    for score in scores.values():
        assert f"{score['log_loss']:.4f}" in printed
    assert (here / "report.html").is_file()
    assert "\nOpen ensemble-demo/runs/demo/report.html in a browser.\n" in printed
    again = run([installed, "demo"], empty)
    assert "llama: done by an earlier run, reused" in again


def test_the_citation_file_names_this_version() -> None:
    """With what the schema of version 1.2.0 demands."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    assert {"cff-version", "message", "title", "authors", "abstract"} <= cited.keys()
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == __version__
    assert cited["license"] == project["license"]
    assert project["name"] in cited["title"]


def test_no_text_installs_the_project_by_its_name() -> None:
    """Nobody has published it, so it is installed from a checkout."""
    by_name = re.compile(r"pip install [^\n]*ensemble[-_]runner(?!-\S*\.whl)")
    names = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "Makefile", "pyproject.toml")
    texts = [ROOT / name for name in names]
    for folder in ("bench", "configs", "demo", "docs", "ensemble", "scripts", "tests"):
        texts += [path for path in (ROOT / folder).rglob("*") if path.suffix in _TEXTS]
    lines = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in texts
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        if by_name.search(line)
    ]
    assert not lines, "write pip install '.[EXTRA]', from a checkout"


def test_the_docs_list_every_extra_with_what_it_installs() -> None:
    with (ROOT / "pyproject.toml").open("rb") as file:
        extras: dict[str, list[str]] = tomllib.load(file)["project"]["optional-dependencies"]
    section = (ROOT / "docs/how-to/install.md").read_text(encoding="utf-8").partition("## Extras\n")[2]
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section.partition("\n## ")[0], re.MULTILINE))
    assert set(table) == set(extras)
    for extra in set(extras) - {"bench", "dev", "docs"}:  # what developers need has no list in the docs
        assert table[extra] == ", ".join(re.split(r"\W*[<>=]", package)[0] for package in extras[extra])
