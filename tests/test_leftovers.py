"""The check around every test finds what a test leaves behind, and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.project import ROOT

CONFTEST = """
from tests import leftovers
from tests.leftovers import nothing_is_left, temporary_directory
leftovers.GRACE_SECONDS = 0.5
"""
TESTS = """
import os, subprocess, tempfile, pytest
kept = []

def background(seconds):
    subprocess.run(["sh", "-c", f"sleep {seconds} > /dev/null 2>&1 &"], check=True)

@pytest.fixture
def ended():
    with subprocess.Popen(["sleep", "100"]) as process:
        yield
        process.kill()

@pytest.fixture(scope="module")
def for_all():
    with subprocess.Popen(["sleep", "100"]) as process:
        yield
        process.kill()

def test_tidy(ended, for_all, tmp_path):
    (tmp_path / "result.csv").touch()
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["true"], check=True)

def test_orphan():
    background(99)

def test_orphan_that_ends():
    background(0.1)

def test_child():
    kept.append(subprocess.Popen(["sleep", "98"]))

def test_zombie():
    kept.append(subprocess.Popen(["true"]))
    os.waitid(os.P_PID, kept[-1].pid, os.WEXITED | os.WNOWAIT)

def test_temporary():
    kept.append(tempfile.mkdtemp())

def test_half_written(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / ".run.json.tmp-12").touch()
    (tmp_path / ".probe-x").touch()

def test_tidy_after_all(for_all):
    assert [process.returncode for process in kept[:2]] == [-9, 0]
    assert os.listdir(tempfile.gettempdir()) == []
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of each test in a file where most leave something, by the test's name."""
    folder = tmp_path_factory.mktemp("untidy")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_untidy.py").write_text(TESTS)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", folder / "t", folder],
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert "8 passed, 5 errors" in done.stdout, done.stdout
    pieces = re.split(r"_+ ERROR at teardown of (\w+) _+\n", done.stdout.split("short test summary")[0])
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


@pytest.mark.long
@pytest.mark.parametrize(
    ("test", "pattern"),
    [
        ("test_orphan", r"process \d+ is an orphan that still runs \(state S\): sleep 99"),
        ("test_child", r"process \d+ was started here and still runs \(state S\): sleep 98"),
        ("test_zombie", r"process \d+ \(true\) has ended, and nobody waited for it"),
        ("test_temporary", r"TMPDIR0/\w+, in the temporary directory"),
        ("test_half_written", r"a/\.run\.json\.tmp-12, a file half written"),
        ("test_half_written", r"/\.probe-x, a file half written"),
    ],
)
def test_what_a_test_leaves_is_named(test: str, pattern: str, report: dict[str, str]) -> None:
    assert re.search(pattern, report[test]), report[test]


def test_who_leaves_nothing_is_left_alone(report: dict[str, str]) -> None:
    assert set(report) == {"test_orphan", "test_child", "test_zombie", "test_temporary", "test_half_written"}


def test_this_very_test_has_a_temporary_directory_of_its_own(temporary_directory: Path) -> None:
    code = "import tempfile; print(tempfile.gettempdir())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(temporary_directory)
