"""What ``make test`` and ``make test-all`` run is, together, all there is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.project import ROOT
from tests.sampling import SHARE, SHARES, Part, chosen_share, one_in

FILES = (
    "tests/pipeline/test_run.py",
    "tests/faults/test_copied.py",
    "tests/properties/test_csv.py",
)


def collected(part: Part, share: int | None = None) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q"]
    options = ["-o", "addopts=--import-mode=importlib", f"--part={part}"]  # or it would be too quiet
    environment = {**os.environ, SHARE: "" if share is None else str(share)}
    done = subprocess.run(
        [*command, *options, *FILES], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return {line for line in done.stdout.splitlines() if "::" in line}


@pytest.mark.long
def test_the_usual_part_and_eight_shares_of_the_rest_are_all_tests() -> None:
    with ThreadPoolExecutor(2) as pool:
        shares = list(pool.map(lambda share: collected("rest", share), range(SHARES)))
    usual, whole = collected("usual"), collected("all")
    assert usual.union(*shares) == whole
    assert usual < whole
    assert len(set(map(frozenset, shares))) == SHARES
    run, copied, csv = FILES
    counts = Counter(name for share in shares for name in share)
    # A long test is in one share, and so is a property, which the usual part tries on fewer examples.
    assert {counts[name] for name in whole - usual} == {1}
    assert counts[f"{csv}::test_any_bytes_as_csv"] == 1
    # Warm modules: `fresh` tests are usual; of a module without any, every share has a test.
    assert not any(name.startswith(run) and name in usual for share in shares for name in share)
    assert all(any(name.startswith(copied) for name in share) for share in shares)


def test_a_share_is_chosen_by_hand_or_by_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARE, raising=False)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert chosen_share() == (int(head.stdout, 16) % SHARES if head.returncode == 0 else 0)
    monkeypatch.setenv(SHARE, "5")
    assert chosen_share() == 5
    monkeypatch.setenv(SHARE, "8")
    with pytest.raises(ValueError, match="shares 0 to 7"):
        chosen_share()


def test_the_first_of_so_many_is_usual() -> None:
    cases = one_in(3, ["a", ("b", 1), "c", "d"])
    assert [cases[0], cases[3]] == ["a", "d"]
    assert [case.values for case in cases[1:3]] == [("b", 1), ("c",)]
    assert [[mark.name for mark in case.marks] for case in cases[1:3]] == [["long"]] * 2
