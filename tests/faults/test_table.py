"""The table in docs/reliability.md and the tests' markers say the same, both ways."""

from __future__ import annotations

import ast
import re

from tests.project import ROOT

TABLE = ROOT / "docs" / "reliability.md"
FAULTS = range(1, 49)
# Of these the table says that nothing is done yet.
NOT_YET: set[int] = set()


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
    assert sorted({row for row, _ in marked()}) == sorted({*FAULTS} - NOT_YET)


def test_what_is_not_done_is_said() -> None:
    sentences = re.findall(
        r"^\| (\d+) \| [^|]+ \| not yet: ", TABLE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert {int(number) for number in sentences} == NOT_YET


def test_the_table_names_the_tests_that_are_marked_and_no_others() -> None:
    assert sorted(named()) == sorted(marked())


def test_the_tables_rows_are_numbered() -> None:
    numbers = re.findall(r"^\| (\d+) \|", TABLE.read_text(encoding="utf-8"), re.MULTILINE)
    assert [int(number) for number in numbers] == list(FAULTS)


def test_this_test_can_tell() -> None:
    code = "@pytest.mark.fault(3, 7)\n@pytest.mark.timeout(9)\ndef test_x(): ...\ndef test_y(): ..."
    functions = [node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)]
    assert [_rows(function) for function in functions] == [[3, 7], []]
