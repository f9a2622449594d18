"""The documentation site, built strictly: broken links and anchors and pages outside the navigation are errors."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import ensemble
from ensemble.cli.app import app
from tests.project import ROOT
from tests.waiting import PATIENCE_SECONDS


def build(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a checkout as ``make docs`` does."""
    pytest.importorskip("mkdocs")
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    options = re.findall(r"/mkdocs (build.*)$", makefile, re.MULTILINE)[0].split()
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", *options, "--site-dir", str(site)],
        cwd=root,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


def test_a_page_outside_the_navigation_and_broken_links_fail(tmp_path: Path) -> None:
    root = tmp_path / "a checkout"
    root.mkdir()
    for path in ROOT.iterdir():
        if path.name in ("docs", "scripts"):
            shutil.copytree(path, root / path.name)
        elif not path.name.startswith("."):
            (root / path.name).symlink_to(path)
    (root / "docs/how-to/lost.md").write_text(
        "# Lost\n\n[page](nowhere.md) [heading](views.md#nowhere) [file](../../configs/nowhere.yaml)\n",
        encoding="utf-8",
    )
    done = build(root, tmp_path / "site")
    assert done.returncode == 1, done.stdout
    for text in ("- how-to/lost.md", "'nowhere.md'", "'#nowhere'", "'../../configs/nowhere.yaml'"):
        assert text in done.stdout, done.stdout


def test_the_site_has_every_page_command_and_function(tmp_path: Path) -> None:
    site = tmp_path / "a site"
    done = build(ROOT, site)
    assert done.returncode == 0, done.stdout
    pages = {
        path.relative_to(site).as_posix(): path.read_text(encoding="utf-8") for path in site.rglob("*.html")
    }
    written = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    assert {path.as_posix() for path in written} <= set(pages)
    assert {"index.html", "project/changelog.html", "project/security.html"} <= set(pages)
    for command in typer.main.get_group(app).commands:
        assert f'id="ensemble-{command}"' in pages["reference/cli.html"], command
    for name in ensemble.__all__:
        assert re.search(rf'\.{name}"|<code>{name}</code>', pages["reference/api.html"]), name
    links = re.findall(r"\]\((.+?)\)", (site / "llms.txt").read_text(encoding="utf-8"))
    assert links
    assert set(links) <= set(pages)
    for name, page in pages.items():
        assert not re.search(r'(src|rel="stylesheet" href)="?https?:', page), f"{name} asks another server"
