"""Rounds with real processes: they are measured, compared, and what fails stops nobody else."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.agreement import Disagreement, check
from bench.checkpoints import LABELS
from bench.contests import OURS, ROOT, Ground, Target, Work
from bench.data import Words, Writer
from bench.processes import measure
from bench.rounds import MIB, Found, hold_rounds
from bench.table import targets_table
from tests.checkpoints import WORDS, make_checkpoint

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
WRITER_WORDS = Words(tuple(WORDS), (1,) * len(WORDS))


@pytest.mark.long
def test_memory_is_that_of_all_processes_together(tmp_path: Path) -> None:
    hold = "data = bytes(range(256)) * (300 << 12); time.sleep(1.2)"
    inner = f"import time; {hold}"
    outer = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {inner!r}])"
    measured = measure([[sys.executable, "-c", outer]] * 2, tmp_path, ENVIRONMENT, tmp_path / "log")
    assert 300 * MIB < measured.peak_bytes < 500 * MIB
    assert measured.seconds > 0


@pytest.mark.long
def test_a_round_runs_everybody_and_compares(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "checkpoints" / "m", "gemma2", LABELS)
    work = Work("repeated", "repeated", ("m",), 30, 1, ("notebook_loop",))
    ground, result = Ground(tmp_path, ENVIRONMENT), Found()
    ground.prepare(work, 30, Writer(WRITER_WORDS, 0))
    hold_rounds(ground, [work], {"repeated": work.contestants}, 1, result)
    assert result.problems == {}
    assert 0 < result.apart["repeated"] < 1e-4
    (pair,) = result.pairs(Target("loop", "repeated", "notebook_loop", 0.25))
    assert all(sample.measured.seconds > 0 and sample.measured.peak_bytes > 100 * MIB for sample in pair)
    assert pair[0].phase_seconds is not None
    assert len(ground.probabilities(work, OURS, "m")) == 30

    output = tmp_path / "repeated" / "notebook_loop" / "m.npy"
    np.save(output, np.load(output)[::-1])
    with pytest.raises(Disagreement, match="notebook_loop and this project, m: up to"):
        check(ground, work, "notebook_loop", 0)


@pytest.mark.long
def test_who_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    works = [Work(name, "single", ("missing",), 4, 1, ()) for name in ("two", "three")]
    ground, result = Ground(tmp_path, ENVIRONMENT), Found()
    for work in works:
        ground.prepare(work, 4, Writer(WRITER_WORDS, 0))
    hold_rounds(ground, works, {"two": (), "three": ()}, 2, result)
    assert set(result.problems) == {("two", OURS), ("three", OURS)}
    target = Target("loop", "two", "notebook_loop", 0.25)
    assert "FAILED" in targets_table([target], {"two": 4}, result, judged=True)
