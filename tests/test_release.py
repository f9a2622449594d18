"""The release step: what it refuses, and what a package index would show of the distributions that it builds."""

from __future__ import annotations

import email
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ensemble import __version__
from tests.project import ROOT
from tests.test_packaging import tracked
from tests.waiting import PATIENCE_SECONDS

HOME = "https://code.example.org/ensemble-runner"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of this project's files, with a dated changelog."""
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a checkout")
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path / "a checkout"
    for name in tracked():
        if (ROOT / name).is_file() and not name.startswith("demo/pictures/"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, folder / name)
    git(folder, "init", "--quiet")
    date_changelog(folder, "2026-11-24")
    return folder


def git(folder: Path, *arguments: str) -> None:
    author = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *author, *arguments], cwd=folder, check=True, capture_output=True)


def set_home(folder: Path) -> None:
    """Add the table of project URLs, which waits for the repository's address."""
    path = folder / "pyproject.toml"
    urls = f'[project.urls]\nSource = "{HOME}"\nIssues = "{HOME}/issues"\n\n'
    text = path.read_text(encoding="utf-8")
    assert "[project.urls]" not in text
    path.write_text(text.replace("[project.scripts]", f"{urls}[project.scripts]"), encoding="utf-8")


def date_changelog(folder: Path, date: str) -> None:
    path = folder / "CHANGELOG.md"
    heading = rf"^## {re.escape(__version__)} - .*$"
    text, count = re.subn(heading, f"## {__version__} - {date}", path.read_text("utf-8"), flags=re.MULTILINE)
    assert count == 1
    path.write_text(text, encoding="utf-8")


def commit(folder: Path) -> None:
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", "Release")


def release(folder: Path, tag: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/release.py", tag],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.mark.long
def test_a_tag_other_than_the_version_is_refused(checkout: Path) -> None:
    set_home(checkout)
    commit(checkout)
    done = release(checkout, "v99.0")
    assert done.returncode == 2
    assert done.stderr == (
        f"error: the tag v99.0 is not v{__version__}, of ensemble.__version__; set __version__ in "
        f"ensemble/common/version.py, or release v{__version__}\n"
    )
    assert not (checkout / "dist").exists()


def test_what_is_not_ready_is_refused_at_once(checkout: Path) -> None:
    date_changelog(checkout, "unreleased")
    commit(checkout)
    (checkout / "README.md").write_text("Not committed.\n", encoding="utf-8")
    done = release(checkout, f"v{__version__}")
    assert done.returncode == 2
    changed, address, changelog = done.stderr.splitlines()
    assert changed == "error: README.md differs from HEAD; commit the change or undo it"
    assert address.startswith("error: pyproject.toml: [project.urls] has no Source; add the table")
    assert changelog.startswith(f"error: CHANGELOG.md has no heading '## {__version__} - YYYY-MM-DD'; date")
    assert not (checkout / "dist").exists()


@pytest.mark.long
def test_every_link_of_the_index_page_leads_to_the_tag(checkout: Path) -> None:
    set_home(checkout)
    commit(checkout)
    done = release(checkout, f"v{__version__}")
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (checkout / "dist").glob("*.whl")
    name = f"ensemble_runner-{__version__}.tar.gz"
    assert [path.name for path in (checkout / "dist").glob("*.tar.gz")] == [name]
    with zipfile.ZipFile(wheel) as opened:
        (name,) = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = email.message_from_string(opened.read(name).decode("utf-8"))
    assert metadata["Version"] == __version__
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL", []))
    assert set(urls) == {"Source", "Issues"}
    assert all(url.startswith(HOME) for url in urls.values())
    page = str(metadata.get_payload())
    links = [
        link for link in re.findall(r"\]\(([^)]*)\)", page) if not link.startswith("https://github.com/")
    ]
    assert len(links) > 25
    for link in links:
        view, _, place = link.removeprefix(f"{HOME}/").partition(f"/v{__version__}/")
        path, _, anchor = place.partition("#")
        assert link.startswith(f"{HOME}/"), link
        assert view == ("raw" if path.endswith((".png", ".svg")) else "blob"), link
        assert (checkout / path).is_file(), link
        assert not anchor or anchor in anchors(checkout / path), link
    git(checkout, "diff", "--quiet", "HEAD")  # fails where the build has changed a file


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "AGENTS.md"])
def test_pages_for_contributors_name_what_there_is(name: str) -> None:
    page = (ROOT / name).read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for path in re.findall(r"\]\(([^)#]+)", page) + re.findall(r"\b(?:tests|scripts)/[\w/]+\.py", page):
        assert (ROOT / path).is_file(), path
    targets = set(re.findall(r"\bmake ([a-z-]+)", page))
    assert {"test", "lint"} <= targets
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def anchors(path: Path) -> set[str]:
    """What headings of a Markdown file are linked by."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
