"""The lines of docs/reference/faults.md and the tests' markers say the same."""

from __future__ import annotations

import ast
import re

from tests.project import ROOT

PAGE = ROOT / "docs" / "reference" / "faults.md"
FAULTS = range(1, 49)


def marked() -> set[int]:
    """The rows that tests' markers name."""
    return {
        row
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        for row in _rows(node)
    }


def _rows(function: ast.FunctionDef) -> list[int]:
    return [
        ast.literal_eval(argument)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault"
        for argument in decorator.args
    ]


def test_every_fault_has_a_test_and_no_other_is_marked() -> None:
    assert sorted(marked()) == list(FAULTS)


def test_every_fault_has_one_line_that_says_what_happens() -> None:
    lines = re.findall(r"^- \*\*(\d+)\. [^*]+\*\*:\s[^*]+\.$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(int(number) for number in lines) == list(FAULTS)
