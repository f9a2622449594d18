"""What is published: a source distribution that can run its own tests, and a wheel that needs nothing beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.project import ROOT, Project
from tests.waiting import PATIENCE_SECONDS

# Only for those who work on the project.
_LEFT_OUT = (".ci/", ".gitignore")
_BUILD = "import sys; from setuptools.build_meta import *; to = sys.argv[1]; build_sdist(to); build_wheel(to)"
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


@pytest.mark.long
def test_the_source_distribution_holds_what_its_tests_need(built: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        inside = {name.partition("/")[2] for name in opened.getnames()}
    assert {name for name in tracked() if (ROOT / name).is_file()} <= inside
    assert not [name for name in inside if name.endswith(".pyc")]


@pytest.mark.long
def test_the_wheel_works_in_an_empty_folder(built: Path, project: Project, tmp_path: Path) -> None:
    (archive,) = built.glob("*.whl")
    site, empty = tmp_path / "site", tmp_path / "empty"
    with zipfile.ZipFile(archive) as opened:
        assert not [name for name in opened.namelist() if name.startswith(("tests", "bench", "demo"))]
        assert not {name for name in tracked() if name.startswith("ensemble/")} - {*opened.namelist()}
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
    program = (
        "import sys; from importlib.metadata import distributions; "
        f"(installed,) = distributions(path=[{str(site)!r}]); "
        "(command,) = installed.entry_points.select(group='console_scripts', name='ensemble'); "
        "sys.argv = ['ensemble', '--version']; command.load()()"
    )
    command = subprocess.run(
        [sys.executable, "-c", program],
        cwd=empty,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert command.stdout.startswith("ensemble "), command.stderr
    assert "All checks passed" in ensemble(project.folder, "validate", "config.yaml")


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
    section = (ROOT / "docs/running.md").read_text(encoding="utf-8").partition("## Installing\n")[2]
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", section.partition("\n## ")[0], re.MULTILINE))
    assert set(table) == set(extras)
    for extra in set(extras) - {"bench", "dev"}:  # what developers need has no list in the docs
        assert table[extra] == ", ".join(re.split(r"\W*[<>=]", package)[0] for package in extras[extra])


def test_links_between_pages_lead_somewhere() -> None:
    headings = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
    broken = []
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, anchor = target.partition("#")
            if ":" in name:  # on the web
                continue
            file = page.parent / name if name else page
            texts = headings.findall(file.read_text(encoding="utf-8")) if anchor and file.is_file() else []
            anchors = {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}
            if not file.exists() or (anchor and anchor not in anchors):
                broken.append(f"{page.name}: {target}")
    assert not broken
