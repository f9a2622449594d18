"""The examples of docs/extending.md, which tests build, install and run as they stand there."""

from __future__ import annotations

import re

from tests.project import ROOT


def blocks() -> dict[str, str]:
    """What stands in the page's files, by their names."""
    page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
    result = re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE)
    assert len(result) == page.count("\n```") / 2, "a block without a title is not tested"
    assert len(result) == len(dict(result)), "two blocks have one title"
    return dict(result)
