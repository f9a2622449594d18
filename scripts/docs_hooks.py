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
FILES = "files/"  # the folder of other files in the site
# The target of a Markdown link or picture, without its anchor.
_LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)\s#]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, the commands' reference, and the files that pages link to."""
    texts = {name: (ROOT / name).read_text(encoding="utf-8") for name in PAGES}
    for name, place in PAGES.items():
        files.append(File.generated(config, place, content=texts[name]))
    files.append(File.generated(config, COMMANDS, content=commands_page()))
    for path in (ROOT / "docs").rglob("*.md"):
        texts[path.relative_to(ROOT).as_posix()] = path.read_text(encoding="utf-8")
    targets = {resolved(page, link[1]) for page, text in texts.items() for link in _LINK.finditer(text)}
    for target in sorted(targets):
        copy = place_in_site(target)
        if copy is not None and copy.startswith(FILES):
            files.append(File.generated(config, copy, abs_src_path=str(ROOT / target)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to files outside docs/ to their places in the site."""
    place = page.file.src_uri
    origin = next((name for name, mapped in PAGES.items() if mapped == place), f"docs/{place}")

    def in_site(link: re.Match[str]) -> str:
        target = place_in_site(resolved(origin, link[1]))
        # A link that leads nowhere stays, and the strict build names it.
        return link[1] if target is None else os.path.relpath(target, PurePosixPath(place).parent)

    return _LINK.sub(in_site, markdown)


def on_post_build(config: MkDocsConfig) -> None:
    """Lead the links of the index for agents to the pages of the site."""
    index = Path(config.site_dir) / "llms.txt"
    index.write_text(index.read_text(encoding="utf-8").replace(".md)", ".html)"), encoding="utf-8")


def resolved(page: str, link: str) -> str:
    """Return a link's target as a path from the root."""
    return os.path.normpath(PurePosixPath(page).parent / link)


def place_in_site(target: str) -> str | None:
    """Return where the site has a file, given by its path from the root; None if there is no such file."""
    if target in PAGES:
        return PAGES[target]
    if target.startswith("docs/"):
        return target.removeprefix("docs/")
    return f"{FILES}{target}" if (ROOT / target).is_file() else None


def commands_page() -> str:
    """Return the reference of the commands, as Typer writes it from their help."""
    program = [sys.executable, "-m", "typer", "ensemble.cli.app", "utils", "docs", "--name", "ensemble"]
    done = subprocess.run(program, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.replace("# `ensemble`\n", "# Commands\n", 1)
