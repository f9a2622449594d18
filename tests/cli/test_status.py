"""What ``status`` tells of a run directory, in every state that a run can leave it in."""

from __future__ import annotations

import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ensemble.cli.status import RunStatus
from ensemble.common.errors import DataError
from ensemble.common.gpus import Device
from ensemble.common.shards import shard_name
from ensemble.jobs.causes import Causes
from ensemble.jobs.work import find_work, write_manifest
from ensemble.merging.scoring import Gain, Interval, Score
from ensemble.pipeline.run_dir import RunDir, hold
from ensemble.pipeline.run_report import MemoryForecast, RunReport
from ensemble.scheduling.records import Failure, FaultRecord, Gap
from tests.cli import reports
from tests.cli.reports import member, report, worker

DONE = Causes({"max_length": "a" * 64}, {"weights": "b" * 64, "tokenizer": "c" * 64}, "d" * 64)
HALF = Causes({"max_length": "1" * 64}, {"weights": "b" * 64, "tokenizer": "c" * 64}, "d" * 64)
LATER = Causes({"max_length": "2" * 64}, {"weights": "b" * 64, "tokenizer": "c" * 64}, "d" * 64)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    """A run of three members over 1,000 rows: one done, one a quarter done, one not begun."""
    made = RunDir(tmp_path / "a run")
    made.create()
    made.tidy()
    made.predictions("done").write_text("id,a\n")
    write_manifest(made, find_work(made, "done", DONE, 1000, False), "f" * 64)
    shards = made.shards_dir("half", HALF.digest)
    shards.mkdir()
    (shards / shard_name(0, 200, b"x")).write_bytes(b"x")
    (shards / shard_name(950, 1000, b"y")).write_bytes(b"y")
    (made.logs_dir / "half-0.log").write_text("")
    return made


def write_run_json(rundir: RunDir, status: str, **half: Any) -> None:
    report(
        member("done", fingerprint=DONE.digest),
        member("half", **{"fingerprint": HALF.digest, "phase": "predicting", **half}),
        member("later", fingerprint=LATER.digest, phase="waiting"),
        status=status,
        pid=os.getpid(),
    ).write(rundir.run_json)


def shown(rundir: RunDir) -> str:
    return " ".join(" ".join(reports.shown("status.status", RunStatus.of(rundir.root), 200)).split())


def test_a_run_that_goes_on(rundir: RunDir) -> None:
    write_run_json(rundir, "running")
    with hold(rundir):
        text = shown(rundir)
    assert "done done 1,000 1,000 100%" in text
    assert "half predicting 250 1,000 25%" in text
    assert "later waiting 0 1,000 0%" in text
    assert "a run: running for " in text
    assert "(process " in text


def test_a_command_that_has_not_begun_its_run_does_not_run_for_as_long_as_the_last_one_is_ago(
    rundir: RunDir,
) -> None:
    """It checks the config, or has just trained members, while the report of an earlier run is there."""
    report(member("done", fingerprint=DONE.digest), pid=os.getpid() + 1).write(rundir.run_json)
    with hold(rundir):
        assert (
            shown(rundir)
            == f"{rundir.root}: process {os.getpid()} on {socket.gethostname()} is about to start a run here"
        )
        assert RunStatus.of(rundir.root).state == "starting"
    assert "complete, after 1:00 min" in shown(rundir)


def test_a_file_of_predictions_that_lacks_rows_is_not_all_of_the_table(rundir: RunDir) -> None:
    given = member("done", fingerprint=DONE.digest, replicas=0, rows=750)
    report(given, merged_rows={"done": 750}).write(rundir.run_json)
    assert "done done 750 1,000 75%" in shown(rundir)


def test_a_run_that_was_killed(rundir: RunDir) -> None:
    write_run_json(rundir, "running")
    text = shown(rundir)
    assert "half unfinished 250 1,000 25%" in text
    assert "was killed, after 1:00 min or more; the same command resumes where it stopped" in text


def test_a_run_with_a_failed_member(rundir: RunDir) -> None:
    failure = Failure("half", "out of luck", log_path="logs/half-0.log")
    write_run_json(rundir, "failed", failure=failure, bad_rows={"16": "too long", "17": "too long"})
    text = shown(rundir)
    assert "half failed 250" in text
    assert "member half failed: out of luck; its log: logs/half-0.log" in text
    assert "half: 2 bad rows, the first is row 17: too long" in text


def test_a_member_that_there_was_no_time_to_train_is_left_out(rundir: RunDir) -> None:
    failure = Failure("half", "there was no time to train fold 1", is_out_of_time=True)
    write_run_json(rundir, "time_limit", failure=failure)
    assert "half left out 250" in shown(rundir)


def test_predictions_of_other_work_are_not_done(rundir: RunDir) -> None:
    rundir.predictions("later").write_text("id,a\n")
    write_manifest(rundir, find_work(rundir, "later", DONE, 1000, False), "f" * 64)
    write_run_json(rundir, "interrupted")
    assert "later unfinished 0 1,000" in shown(rundir)


def test_a_folder_that_is_no_runs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no run\.json"):
        RunStatus.of(tmp_path)


def test_a_report_comes_back_as_it_was_written(tmp_path: Path) -> None:
    full = report(
        member(
            workers=(worker(rows=5, notes=("a", "b"), devices=("GPU-1", "GPU-2")), worker(exit_code=None)),
            faults=(FaultRecord("m", 0, "death", "it died", "", (0, 5), "tried again", 1.5),),
            failure=Failure("m", "out of luck", is_dropped=True),
            forecast=MemoryForecast(1, 2, 3, 4, 5, 6),
            rows_done=5,
            fraction=0.5,
            tokens_done=10,
            seconds=1.5,
            seconds_left=2.0,
        ),
        devices=(Device("GPU-1", "T4", (7, 5), 16, 1),),
        idle_gaps=(Gap("GPU-1", "a", "b", 1.5),),
        scores={"m": Score(0.4, 0.9, 500, 1.0, False, above_prior=Interval(-0.6, -0.7, -0.5))},
    )
    full.write(tmp_path / "run.json")
    assert RunReport.read(tmp_path / "run.json") == full
    assert RunDir(tmp_path).is_made_by_runs(), "it is the proof that a run has made the directory"


def test_a_number_that_json_has_not_spoils_neither_the_file_nor_the_report(tmp_path: Path) -> None:
    """Such as the error of values that are too large to be squared."""
    above = Interval(math.nan, math.nan, math.nan)
    score = Score(None, None, 500, None, False, rmse=math.inf, above_prior=above)
    odd = report(member(), scores={"m": score}, gain=Gain("m", -math.inf, None, None, 1000, "squared error"))
    odd.write(tmp_path / "run.json")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    document = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert document["scores"]["m"]["rmse"] == "Infinity"
    again = RunReport.read(tmp_path / "run.json")
    assert (again.scores["m"].rmse, again.gain) == (math.inf, odd.gain)
    assert again.scores["m"].above_prior is not None
    assert math.isnan(again.scores["m"].above_prior.low)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text[:-9], "(the file: Invalid JSON"),
        (lambda text: "[1]", "(the file: "),
        (lambda text: "[" * 99_999, "(the file: Invalid JSON"),
        (lambda text: text.replace('"running"', '"asleep"'), "(status: Input should be 'running', "),
        (lambda text: text.replace('"members"', '"models"'), "(members: Field required)"),
        (lambda text: text.replace("ensemble run 1", "ensemble run 0"), "(schema: Input should be 'ensemble"),
    ],
)
def test_a_report_that_cannot_be_read(rundir: RunDir, change: Callable[[str], str], words: str) -> None:
    write_run_json(rundir, "running")
    rundir.run_json.write_text(change(rundir.run_json.read_text()))
    with pytest.raises(DataError) as caught:
        RunStatus.of(rundir.root)
    assert words in str(caught.value)
    assert "is damaged or of another version of ensemble" in str(caught.value)
    assert "run the config again" in str(caught.value)
    with hold(rundir):
        assert "is about to start a run here" in shown(rundir)
