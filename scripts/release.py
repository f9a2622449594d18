"""Builds a release of the last commit into dist/: ``python scripts/release.py v0.1.0``.

Refuses a tag other than ``ensemble.__version__``, a checkout with changes, a project without an address and a
changelog without a date.  The README's links lead to the tag's files, since relative ones lead nowhere on an index.
Needs git, and setuptools 77 or newer.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RELATIVE_LINK = re.compile(r"\]\((?!https?:|#)([^)]+)\)")
# As a build front end does it, in the folder of the sources.
BUILD = "import sys; from setuptools.build_meta import *; to = sys.argv[1]; build_sdist(to); build_wheel(to)"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("tag", help="the tag to be made of the last commit, such as v0.1.0")
    tag = parser.parse_args().tag
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder)
        archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        problems = [*changed_files(), *problems_of(source, tag)]
        if problems:
            sys.stderr.writelines(f"error: {problem}\n" for problem in problems)
            sys.exit(2)
        readme = source / "README.md"
        readme.write_text(with_absolute_links(readme.read_text("utf-8"), home(source), tag), encoding="utf-8")
        dist = ROOT / "dist"
        dist.mkdir(exist_ok=True)
        subprocess.run([sys.executable, "-c", BUILD, str(dist)], cwd=source, check=True)
    print(f"built into dist/; next: git tag {tag}, push it, and upload the two files")


def changed_files() -> Iterator[str]:
    """A sentence for each tracked file that differs from the last commit."""
    status = subprocess.run(
        ["git", "diff", "--name-only", "HEAD"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    for name in status.stdout.splitlines():
        yield f"{name} differs from HEAD; commit the change or undo it"


def problems_of(source: Path, tag: str) -> Iterator[str]:
    """What keeps the sources from being released under a tag."""
    module = (source / "ensemble/common/version.py").read_text(encoding="utf-8")
    version = re.findall(r'^__version__ = "(.+)"$', module, re.MULTILINE)[0]
    if tag != f"v{version}":
        yield (
            f"the tag {tag} is not v{version}, of ensemble.__version__; set __version__ in "
            f"ensemble/common/version.py, or release v{version}"
        )
    if not home(source):
        yield "pyproject.toml: [project.urls] has no Source; add the table with the repository's address"
    changelog = (source / "CHANGELOG.md").read_text(encoding="utf-8")
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        yield f"CHANGELOG.md has no heading '## {version} - YYYY-MM-DD'; date the one of this release"


def home(source: Path) -> str:
    """Return the repository's address, or an empty text before there is one."""
    with (source / "pyproject.toml").open("rb") as file:
        urls: dict[str, str] = tomllib.load(file)["project"].get("urls", {})
    return urls.get("Source", "")


def with_absolute_links(text: str, home: str, tag: str) -> str:
    """The README with links to the tag's files, by the addresses that GitHub, GitLab and Forgejo know."""

    def absolute(link: re.Match[str]) -> str:
        view = "raw" if link[1].endswith((".png", ".svg")) else "blob"
        return f"]({home}/{view}/{tag}/{link[1]})"

    return RELATIVE_LINK.sub(absolute, text)


if __name__ == "__main__":
    main()
