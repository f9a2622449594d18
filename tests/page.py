"""The examples of the pages on extending, which tests build, install and run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.project import ROOT

PAGES = ("new-member-kind", "new-merge-method", "new-launcher", "new-format")


def blocks() -> dict[str, str]:
    """What stands in the pages' files, by their names."""
    named: list[tuple[str, str]] = []
    for name in PAGES:
        page = (ROOT / f"docs/how-to/{name}.md").read_text(encoding="utf-8")
        in_page = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)
        assert in_page, f"{name}.md has no example"
        assert len(in_page) == page.count("\n```") / 2, f"{name}.md: a block without a title is not tested"
        named += in_page
    assert len(named) == len(dict(named)), "two blocks have one title"
    return dict(named)


def lay_out_package(folder: Path, package: str) -> Path:
    """Write the files of a package of the pages below a folder, and return where it can be installed from."""
    files = {name: text for name, text in blocks().items() if name.startswith(f"{package}/")}
    assert files, f"no page has a file of {package}"
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder / package
