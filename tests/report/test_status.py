"""What ``status`` tells of a run directory, in every state that a run can leave it in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ensemble.cli.layout import Page
from ensemble.cli.status import status_report
from ensemble.common.errors import DataError
from ensemble.common.shards import part_name
from ensemble.pipeline.fingerprint import Fingerprint
from ensemble.pipeline.resume import find_work, seal
from ensemble.pipeline.run_dir import RunDir, hold

DONE = Fingerprint("a" * 64, {"weights": "b" * 64, "tokenizer": "c" * 64}, "d" * 64)
HALF = Fingerprint("1" * 64, {"weights": "b" * 64, "tokenizer": "c" * 64}, "d" * 64)
LATER = Fingerprint("2" * 64, {"weights": "b" * 64, "tokenizer": "c" * 64}, "d" * 64)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """A run of three members over 1,000 rows: one done, one a quarter done, one not begun."""
    made = RunDir(tmp_path / "a run")
    made.create()
    made.tidy()
    made.predictions("done").write_text("id,a\n")
    seal(made, find_work(made, "done", DONE, 1000, False), "f" * 64, {}, [], 1.0)
    parts = made.parts_dir("half", HALF.digest)
    parts.mkdir()
    (parts / part_name(0, 200, b"x")).write_bytes(b"x")
    (parts / part_name(950, 1000, b"y")).write_bytes(b"y")
    (made.logs_dir / "half-0.log").write_text("")
    return made


def write_run_json(rundir: RunDir, status: str, **half: Any) -> None:
    members: list[dict[str, Any]] = [
        {"name": name, "fingerprint": made_of.digest, "phase": phase, "failure": None, "bad_rows": {}}
        for name, made_of, phase in (
            ("done", DONE, "done"),
            ("half", HALF, "predicting"),
            ("later", LATER, "waiting"),
        )
    ]
    members[1].update(half)
    rundir.run_json.write_text(json.dumps({"status": status, "rows": 1000, "members": members}))


def shown(rundir: RunDir) -> str:
    report = status_report(rundir.root)
    assert report.table is not None
    return " ".join(" ".join([*report.table.lines(Page(200)), *report.lines]).split())


def test_a_run_that_goes_on(rundir: RunDir) -> None:
    write_run_json(rundir, "running")
    with hold(rundir):
        text = shown(rundir)
    assert "done done 1,000 1,000 100%" in text
    assert "half predicting 250 1,000 25%" in text
    assert "later waiting 0 1,000 0%" in text
    assert "a run: running (process" in text


def test_a_run_that_was_killed(rundir: RunDir) -> None:
    write_run_json(rundir, "running")
    text = shown(rundir)
    assert "half unfinished 250 1,000 25%" in text
    assert "was killed, after an unknown time or more; the same command resumes where it stopped" in text


def test_a_run_with_a_failed_member(rundir: RunDir) -> None:
    failure = {"message": "out of luck", "log_path": "logs/half-0.log"}
    write_run_json(rundir, "failed", failure=failure, bad_rows={"16": "too long", "17": "too long"})
    text = shown(rundir)
    assert "half failed 250" in text
    assert "member half failed: out of luck; its log: logs/half-0.log" in text
    assert "half: 2 bad rows, the first is row 17: too long" in text


def test_predictions_of_other_work_are_not_done(rundir: RunDir) -> None:
    rundir.predictions("later").write_text("id,a\n")
    seal(rundir, find_work(rundir, "later", DONE, 1000, False), "f" * 64, {}, [], 1.0)
    write_run_json(rundir, "interrupted")
    assert "later unfinished 0 1,000" in shown(rundir)


def test_a_folder_that_is_no_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no run\.json that can be read"):
        status_report(tmp_path)
    (tmp_path / "run.json").write_text("[")
    with pytest.raises(DataError, match=r"there is no run\.json that can be read"):
        status_report(tmp_path)
