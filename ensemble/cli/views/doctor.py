"""What ``doctor`` shows of a finding."""

from __future__ import annotations

from ensemble.cli.layout import wrapped
from ensemble.commands.doctor import Finding

_MAX_WIDTH = 100
_INDENT = " " * 9


def finding_lines(finding: Finding, width: int | None) -> list[str]:
    """Return a finding in lines of at most 100 columns, its advice on lines of its own."""
    width = min(width or _MAX_WIDTH, _MAX_WIDTH)
    lines = wrapped(finding.text, width, f"{finding.mark:<{len(_INDENT)}}", _INDENT)
    if finding.advice:
        lines += wrapped(finding.advice, width, f"{_INDENT}-> ", f"{_INDENT}   ")
    return lines
