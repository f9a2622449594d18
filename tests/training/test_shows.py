"""What people and programs read of trainings: status, progress, plan, doctor, the report, and what to do next."""

from __future__ import annotations

import html
import io
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ensemble import api
from ensemble.analysis.report.base import ReportData
from ensemble.analysis.report.page import SECTIONS
from ensemble.cli import app
from ensemble.cli.plans import document
from ensemble.cli.progress import PlainDisplay, describe
from ensemble.commands.doctor import Finding, examine
from ensemble.data.trained_rows import TrainedRows, write_trained_rows
from ensemble.pipeline.reporting import members_of, progress_of
from ensemble.pipeline.run_dir import RunDir, hold
from ensemble.pipeline.run_report import RunReport
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.planning.plan import plan_trainings
from ensemble.scheduling.records import FaultRecord, WorkerRecord
from ensemble.scheduling.state import ModelState
from ensemble.training.command import _trainings
from ensemble.training.data import read_training_data
from ensemble.training.records import MemberRecord, PartRecord, Seal, TrainingReport, write_record
from tests.cli import reports
from tests.planning.test_trainings import trained_config
from tests.project import Project
from tests.training import folds

NOTE = "the head is new: the base has other labels"
HALFWAY = {"step": 40, "steps": 100, "first_step": 10, "seconds": 15.0, "epoch": 0.8, "loss": 0.5}


def part(number: int, **changes: Any) -> PartRecord:
    done = PartRecord(
        fold=number,
        status="done",
        seconds=20.0 + 2 * number,
        attempts=1,
        devices=("cpu",),
        progress={"step": 100, "steps": 100, "epoch": 2.0, "loss": 0.25, "rung": "8 rows", "notes": [NOTE]},
    )
    return replace(done, **changes)


def in_progress(number: int) -> PartRecord:
    return part(number, status="training", seconds=None, attempts=2, devices=(), progress=HALFWAY)


def waiting(number: int) -> PartRecord:
    return part(number, status="waiting", seconds=None, attempts=0, devices=(), progress={})


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    made = RunDir(tmp_path / "a run")
    made.create()
    return made


def write(rundir: RunDir, status: Any, *members: MemberRecord) -> None:
    records = TrainingDir(rundir.root).records
    records.parent.mkdir(exist_ok=True)
    write_record(records, TrainingReport(status, 42.0, members))


def status(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> str:
    app.status(rundir.root)
    return " ".join(capsys.readouterr().out.split())


def as_json(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    app.status(rundir.root, as_json=True)
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_the_status_of_trainings_before_there_is_a_run(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    write(rundir, "running", MemberRecord("a", "/models/a", (part(0), in_progress(1), waiting(2))))
    with hold(rundir):
        text, document = status(rundir, capsys), as_json(rundir, capsys)
    # 30 steps took 15 s, and 60 are left.
    assert "a 1/3 fold 1 40% (30.0 s left) 20.0 s 1 /models/a" in text
    assert "a run: 1 training done in 20.0 s, 2 not done; training for 42.0 s (process " in text
    assert (document["state"], document["problems"]) == ("training", [])
    assert "process" in document["holder"]
    trainings = document["trainings"]
    assert (trainings["state"], trainings["seconds"]) == ("running", 42.0)
    (member,) = trainings["members"]
    assert [part["seconds_left"] for part in member["parts"]] == [None, 30.0, None]
    assert "its process was killed; the same command resumes" in status(rundir, capsys)
    document = as_json(rundir, capsys)
    assert (document["state"], document["trainings"]["state"]) == ("not_started", "killed")


def test_the_status_of_trainings_that_have_ended(rundir: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    failed = MemberRecord(
        "b", "/models/b", (waiting(0), waiting(1)), failure="its command ended with exit code 3"
    )
    write(rundir, "failed", MemberRecord("a", "/models/a", (part(0), part(1))), failed)
    text = status(rundir, capsys)
    assert "a 2/2 21.0 s /models/a" in text
    assert "b failed: its command" in text
    assert "2 trainings done in 42.0 s, 2 not done; some failed; " in text
    write(rundir, "complete", MemberRecord("a", "/models/a", (part(0), part(1))))
    reports.report(reports.member("a")).write(rundir.run_json)
    text, document = status(rundir, capsys), as_json(rundir, capsys)
    assert "a run: 2 trainings done in 42.0 s" in text
    assert "a run: complete, after 1:00 min" in text, "the run comes after its trainings"
    assert (document["state"], document["trainings"]["state"]) == ("complete", "complete")
    oof = RunDir(TrainingDir(rundir.root).oof_run)
    oof.create()
    reports.report(reports.member("a")).write(oof.run_json)
    assert f"out-of-fold predictions: `ensemble status {oof.root}` shows their run" in status(rundir, capsys)
    with hold(rundir), hold(oof):
        assert "running for" not in status(rundir, capsys), "it is the run of the out-of-fold predictions"


def test_progress_says_nothing_twice_and_no_time_left_of_nothing() -> None:
    clock, file = [0.0], io.StringIO()
    names = ["fold 0", "fold 1"]
    config = trained_config(1)
    state = ModelState(plan_trainings(config, config.models[0], names, []), clock=lambda: clock[0])
    display = PlainDisplay(file, clock=lambda: clock[0])
    state.workers.append(WorkerRecord("m0", 0, ("cpu",), "7", "log", 0.0, 0.0))
    display.update(members_of([state]))
    state.predicting_since = 1.0
    state.chunks.done_cost = 0.5
    state.take(state.chunks.pending[0])
    for clock[0], share in ((2.0, 0.5), (8.0, 0.6)):
        state.follow_shares({0: share, 1: share})
        display.update(members_of([state]))
    state.follow_shares({0: 1.0, 1: 1.0})
    clock[0] = 14.0
    display.update(members_of([state]))
    lines = file.getvalue().splitlines()
    assert lines[0] == "m0: starting Python"
    assert sum("starting Python" in line for line in lines) == 1
    assert lines[-2].endswith("left")
    assert lines[-1].endswith("(100%)")


def test_the_time_left_of_trainings_that_tell_no_steps_counts_down() -> None:
    clock, config = [0.0], trained_config(1)
    names = [f"fold {number}" for number in range(4)]
    state = ModelState(plan_trainings(config, config.models[0], names, []), clock=lambda: clock[0])
    state.predicting_since = 0.0
    clock[0], state.chunks.done_cost = 60.0, 0.25
    shown = []
    for clock[0] in (60.0, 80.0, 100.0):
        state.follow_shares({})
        shown.append(describe(progress_of([state])))
    assert [text.rpartition(", ")[2] for text in shown] == ["3:00 min left", "2:40 min left", "2:20 min left"]
    # One that takes longer than the first has no time left to tell.
    clock[0] = 300.0
    state.follow_shares({})
    assert "left" not in describe(progress_of([state]))


def test_what_to_do_next(tmp_path: Path, project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    folds.write_tables(project)
    keys = folds.config(project)
    files = [Path("runs/first/oof/lora.csv"), Path("runs/first/oof/own.csv")]
    members = [reports.member("lora"), reports.member("own")]

    def last(report: RunReport, count: int) -> str:
        return reports.shown("runs.out_of_fold", (report, files[:count], folds.loaded(keys).config))[-1]

    def of_config(report: RunReport) -> RunReport:
        path = str(project.folder / "my config.yaml")
        return replace(report, config_files=(path,), overrides=("limit=3",))

    assert (
        last(of_config(reports.report(members[0])), 1) == "next: ensemble run 'my config.yaml' --set limit=3"
    )
    keys["models"] = [keys["models"][0], {**keys["models"][0], "name": "own"}]
    assert last(of_config(reports.report(*members)), 2) == (
        "next: ensemble fit runs/first/oof/lora.csv runs/first/oof/own.csv --labels train.csv && "
        "ensemble run 'my config.yaml' weights.yaml --set limit=3"
    )
    # One has failed: the weights would be those of another ensemble.
    assert last(reports.report(*members), 1) == "out-of-fold predictions: runs/first/oof/lora.csv"
    # ``fit`` takes several labels for exclusive ones.
    apart = [reports.member(name, activation="sigmoid") for name in ("lora", "own")]
    assert last(reports.report(*apart), 2).startswith("out-of-fold predictions: ")


def test_the_report_has_a_section(rundir: RunDir) -> None:
    fault = FaultRecord("a", 0, "death", "killed by SIGKILL", "", (1, 2), "started again", 8.0)
    write(
        rundir,
        "complete",
        MemberRecord("a", "/models/a", (part(0), part(1, attempts=2)), (fault,)),
        MemberRecord("z", "/models/z", ()),
    )
    oof = TrainingDir(rundir.root).oof_run
    section = SECTIONS.load("trainings")()
    for folder in (rundir.root, oof):
        made = section.html(ReportData(folder, reports.report(reports.member("a"))))
        text = " ".join(html.unescape(re.sub(r"<[^>]*>", " ", str(made))).split())
        assert "a fold 0 20.0 s 1 CPU 100 2 0.2500 8 rows a fold 1 22.0 s 2" in text
        assert text.count(f"a: {NOTE}") == 1
        assert "a 8.0 s killed by SIGKILL started again" in text
    # Another run below the folder, and members of another config.
    assert section.html(ReportData(rundir.root / "x" / "y", reports.report(reports.member("a")))) is None
    assert section.html(ReportData(rundir.root, reports.report(reports.member("other")))) is None


def test_plan_and_doctor_tell_what_is_trained_and_what_lacks(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    folds.write_tables(project)
    keys = folds.config(project, "refit")
    keys["models"][0]["train"]["command"] = [sys.executable, "train.py", "{train}", "{out}"]
    files = TrainingDir(Path(keys["output_dir"]))
    given = folds.loaded(keys)
    for training in _trainings(given.config, files, read_training_data(given)):
        if training.part in (Part(0), Part(2)):
            files.checkpoint("lora", training.part).mkdir(parents=True)
            record = PartRecord(training.part.fold, "done", 1, 1.0, ("cpu",))
            seal = Seal(made_of={**training.made_of}, record=record)
            write_record(files.seal("lora", training.part), seal)
    digests = folds.read("train.csv").row_digests(("a", "b"))
    write_trained_rows(files.trained_rows("lora"), TrainedRows(digests, folds.FOLD_OF_ROW))

    (facts,) = plan_facts(keys)
    assert facts["training"] == {
        "method": None,
        "base_model": None,
        "command": tuple(keys["models"][0]["train"]["command"]),
        "num_gpus": 0,
        "missing": ["fold-1", "all"],
        "outdated": {},
    }
    printed = "\n".join(reports.shown("plans.plan", api.plan(keys).prepared))
    assert "lora: not trained yet: 2 trainings to do (fold 1, all rows), by its command" in printed
    # Which folds there are is not known before the table is read.
    keys |= {"training": {**keys["training"], "folds": {"column": "a"}}, "output_dir": "runs/second"}
    printed = "\n".join(reports.shown("plans.plan", api.plan(keys).prepared))
    assert "each fold of its column, by its command" in printed
    assert plan_facts(keys)[0]["training"]["missing"] is None

    project.write_config(keys)
    seen: list[Finding] = []
    for finding in examine([Path("config.yaml")], (), api.checked_trainings):
        seen.append(finding)
        if "not trained yet" in finding.text:
            break
    assert (seen[-1].mark, seen[-1].text) == ("note", "lora is not trained yet")
    assert not any(finding.mark == "problem" for finding in seen)


def plan_facts(keys: dict[str, Any]) -> list[dict[str, Any]]:
    members: list[dict[str, Any]] = document(api.plan(keys).prepared)["members"]
    return members
