"""Adds to the documentation site what lies outside docs/: see ``hooks`` in mkdocs.yml.

The home page is README.md, and the changelog and other pages of the root have their places in the site. Typer makes
the reference of the commands from their help. Files that a page links to, such as configs, are copied, so that all
links work on disk and in the site.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]

# Pages outside docs/, and where the site has them.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "project/changelog.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "demo/README.md": "project/demo.md",
}
COMMANDS = "reference/cli.md"
# The target of a Markdown link or picture, without its anchor.
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, the commands' reference, and the files that pages link to."""
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text(encoding="utf-8")))
    files.append(File.generated(config, COMMANDS, content=commands_page()))
    texts = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    for path in (ROOT / "docs").rglob("*.md"):
        texts[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    for target in sorted({target for page, text in texts.items() for target in outside_files(page, text)}):
        files.append(File.generated(config, f"files/{target}", abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside docs/ to their places in the site."""
    place = page.file.src_uri
    origin = next((name for name, mapped in PAGES.items() if mapped == place), f"docs/{place}")

    def in_site(link: re.Match[str]) -> str:
        target = resolved(origin, link[1])
        if target in PAGES:
            found = PAGES[target]
        elif target.startswith("docs/"):
            found = target.removeprefix("docs/")
        elif (ROOT / target).is_file():
            found = f"files/{target}"
        else:
            return link[1]  # the strict build names it
        return os.path.relpath(found, PurePosixPath(place).parent)

    return _LINK.sub(in_site, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Lead the links of the index for agents to the pages of the site."""
    index = Path(config.site_dir) / "llms.txt"
    index.write_text(index.read_text(encoding="utf-8").replace(".md)", ".html)"), encoding="utf-8")


def outside_files(page: str, text: str) -> Iterator[str]:
    """Yield the files outside docs/ that a page links to, by their paths from the root."""
    for link in _LINK.finditer(text):
        target = resolved(page, link[1])
        if target not in PAGES and not target.startswith("docs/") and (ROOT / target).is_file():
            yield target


def resolved(page: str, link: str) -> str:
    """Return a link's target as a path from the root."""
    return os.path.normpath(PurePosixPath(page).parent / link)


def commands_page() -> str:
    """Return the reference of the commands, as Typer writes it from their help."""
    program = [sys.executable, "-m", "typer", "ensemble.cli.app", "utils", "docs", "--name", "ensemble"]
    done = subprocess.run(program, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.replace("# `ensemble`\n", "# Commands\n", 1)
