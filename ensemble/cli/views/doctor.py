"""What ``doctor`` shows of a finding."""

from __future__ import annotations

from dataclasses import replace

from ensemble.cli.layout import Page
from ensemble.commands.doctor import Finding

_MAX_WIDTH = 100
_INDENT = " " * 9


def finding_lines(finding: Finding, page: Page) -> list[str]:
    """Return a finding in lines of at most 100 columns, its advice on lines of its own."""
    page = replace(page, width=min(page.width or _MAX_WIDTH, _MAX_WIDTH))
    lines = page.wrapped(finding.text, f"{finding.mark:<{len(_INDENT)}}")
    if finding.advice:
        lines += page.wrapped(finding.advice, f"{_INDENT}-> ")
    return lines
