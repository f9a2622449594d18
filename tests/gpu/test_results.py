"""What the checks on a GPU leave, whatever ends them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench.gpu.place import Failed, Place, remove_leftovers
from bench.gpu.results import Results
from tests.project import ROOT
from tests.waiting import wait_until

ROWS = "id,text\n1,a\n2,b\n"


def files_of(results: Path, run: str) -> dict[str, str]:
    """What was kept of a run that has ended."""
    with (
        tarfile.open(results / "runs.tar") as runs,
        tarfile.open(fileobj=runs.extractfile(f"{run}.tar.gz")) as archive,
    ):
        return {name: archive.extractfile(name).read().decode() for name in archive.getnames()}  # type: ignore[union-attr]


@pytest.mark.long
def test_checks_that_are_killed_leave_what_was_finished(tmp_path: Path) -> None:
    results, temporary = tmp_path / "it's results", tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-m", "tests.gpu", "--rehearse", "--only", "same bytes"]
    with subprocess.Popen(
        [*command, "--results", str(results), "--models", str(tmp_path / "models")],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as process:
        wait_until(lambda: (results / "twice.tar.gz").exists(), "the second run of the check")
        os.killpg(process.pid, signal.SIGKILL)
    lines = [json.loads(line) for line in (results / "results.jsonl").read_text().splitlines()]
    assert lines[0]["check"] == "same bytes"
    assert lines[0]["verdict"] == "ok"
    kept = files_of(results, "once")
    assert {"plan.txt", "printed.txt", "run.json", "logs/m-0.log"} <= kept.keys()
    assert "1 replica on the CPU" in kept["plan.txt"]
    assert tarfile.is_tarfile(results / "twice.tar.gz"), "of the run that was cut off"
    assert len(list(results.iterdir())) <= 8
    (left,) = temporary.glob("ensemble gpu *")
    (model,) = (tmp_path / "models").iterdir()
    remove_leftovers(temporary)
    assert not left.exists()
    assert model.exists(), "for the next time"


@pytest.mark.long
def test_a_failed_run_leaves_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text(ROWS, encoding="utf-8")
    (tmp_path / "broken.py").write_text(
        "def predict(rows, context):\n    raise ZeroDivisionError('planted')\n"
    )
    place = Place(tmp_path, (), True, 300, results=Results(tmp_path / "results"))
    function = f"{tmp_path / 'broken.py'}:predict"
    member = {"name": "m", "task_type": "python", "predict": function, "columns": ["text"]}
    with pytest.raises(Failed, match="exit code"):
        place.run("broken", member, table="rows", rows=2)
    kept = files_of(tmp_path / "results", "broken")
    assert "ZeroDivisionError: planted" in kept["logs/m-0.log"]
    assert "exit code" in kept["error.txt"]


def test_a_kept_model_is_taken_again_if_it_has_the_shape(tmp_path: Path) -> None:
    from bench.gpu.place import CAPPED, UNCAPPED

    place = Place(tmp_path, (), True, 60, models=tmp_path / "models")
    folder = place.model(CAPPED)
    written = (folder / "config.json").stat().st_mtime_ns
    assert place.model(CAPPED) == folder
    assert (folder / "config.json").stat().st_mtime_ns == written
    assert place.model(UNCAPPED) != folder
