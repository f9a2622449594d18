"""What ``make test`` and ``make test-all`` run is, together, all there is."""

from __future__ import annotations

import subprocess
import sys
from typing import get_args

import pytest

from tests.project import ROOT
from tests.sampling import Part, one_in

FILES = (
    "tests/faults/test_copied.py",
    "tests/pipeline/test_run.py",
    "tests/faults/test_endings.py",
    "tests/properties/test_csv.py",
)


def collected(part: Part) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    options = ["-o", "addopts=--import-mode=importlib", f"--part={part}"]  # or it would be too quiet
    done = subprocess.run([*command, *options, *FILES], cwd=ROOT, capture_output=True, text=True, check=True)
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.long
def test_no_test_is_in_neither_part() -> None:
    usual, rest, whole = map(collected, get_args(Part))
    assert usual | rest == whole
    assert usual < whole
    copied, run, endings, csv = FILES
    kinds = {
        "long": (copied, rest - usual),
        "fresh": (run, usual - rest),
        "first forked, then with fresh processes": (endings, usual & rest),
        "on fewer examples, then on all": (csv, usual & rest),
    }
    for kind, (file, names) in kinds.items():
        assert any(name.startswith(file) for name in names), kind


def test_the_first_of_so_many_is_usual() -> None:
    cases = one_in(3, ["a", ("b", 1), "c", "d"])
    assert [cases[0], cases[3]] == ["a", "d"]
    assert [case.values for case in cases[1:3]] == [("b", 1), ("c",)]
    assert [[mark.name for mark in case.marks] for case in cases[1:3]] == [["long"]] * 2
