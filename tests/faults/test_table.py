"""The table in docs/reliability.md and the tests' markers say the same, both ways."""

from __future__ import annotations

import ast
import re

from tests.project import ROOT

TABLE = ROOT / "docs" / "reliability.md"
FAULTS = range(1, 49)


def named() -> list[tuple[int, str]]:
    """Fault and test, as the table has them."""
    results = []
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if row := re.match(r"\| (\d+) \|.*\| ([^|]+) \|$", line):
            results += [(int(row[1]), test) for test in re.findall(r"`([\w/.]+::\w+)`", row[2])]
    return results


def marked() -> list[tuple[int, str]]:
    """Fault and test, as the markers have them."""
    results = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        name = path.relative_to(ROOT / "tests").as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                results += [(row, f"{name}::{node.name}") for row in _rows(node)]
    return results


def _rows(function: ast.FunctionDef) -> list[int]:
    return [
        ast.literal_eval(argument)
        for decorator in function.decorator_list
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault"
        for argument in decorator.args
    ]


def test_every_fault_has_a_test() -> None:
    assert sorted({row for row, _ in marked()}) == list(FAULTS)


def test_the_table_names_the_tests_that_are_marked_and_no_others() -> None:
    assert sorted(named()) == sorted(marked())


def test_the_tables_rows_are_numbered() -> None:
    numbers = re.findall(r"^\| (\d+) \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number in numbers] == list(FAULTS)
