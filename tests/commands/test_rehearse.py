"""What a run would take, by a run of a sample: its rows, its arithmetic, and the command with real workers."""

from __future__ import annotations

import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import ensemble
from ensemble.cli import layout
from ensemble.commands.rehearse import (
    MemberRehearsal,
    Rehearsal,
    forecast_seconds,
    reached_fraction,
    sample_rows_of,
    with_speeds,
)
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import Plan
from tests.faults.inject import Fault, Injected
from tests.nvml import sim
from tests.planning.test_plan import config, facts, gpus, make_plan
from tests.project import Project

ROWS = 4000

pytestmark = pytest.mark.usefixtures("warm")


def test_a_sample_is_of_all_lengths_and_has_the_longest_row() -> None:
    chooser = random.Random(3)
    lengths = np.array([int(chooser.lognormvariate(6, 1)) for _ in range(25_000)])
    chosen = sample_rows_of(lengths, 384)
    assert len(np.unique(chosen)) == 384
    assert (np.diff(chosen) > 0).all(), "in the table's order"
    assert lengths[chosen].max() == lengths.max()
    for share in (0.1, 0.5, 0.9):
        assert np.quantile(lengths[chosen], share) == pytest.approx(np.quantile(lengths, share), rel=0.1)
    assert sample_rows_of(lengths, 30_000).tolist() == list(range(25_000))
    assert len(sample_rows_of(lengths[:100], 37)) == 37


def planned(*names: str, devices: int = 0) -> Plan:
    """Members over equally long rows, on the CPU or on GPUs; each takes 10 s to start and 100 s for all rows."""
    made = config(*({"name": name} for name in names), time_limit=3600)
    known = {name: replace(facts(np.full(ROWS, 400)), name=name) for name in names}
    plan = make_plan(made, known, gpus(devices))
    speeds = {member.name: Speed(10.0, 100.0 / member.work, True, True) for member in plan.models}
    return with_speeds(plan, speeds)


def test_the_forecast_and_what_is_reached_at_the_limit_by_given_speeds() -> None:
    plan = planned("a", "b")
    assert forecast_seconds(plan) == pytest.approx(220)
    assert reached_fraction(plan, 221) == 1
    assert reached_fraction(plan, 120) == pytest.approx(0.5, abs=0.01)  # two starts, and 100 s for both
    assert reached_fraction(plan, 15) == reached_fraction(plan, -1) == 0
    two = planned("a", "b", devices=2)
    assert forecast_seconds(two) == pytest.approx(110), "at the same time, a replica on each"
    assert reached_fraction(two, 70) == pytest.approx(0.6, abs=0.01)


def test_what_would_go_wrong_is_said_by_given_figures() -> None:
    members = tuple(
        MemberRehearsal(name, 1, 10.0, 30.0, 2**30, None, 9, rows) for name, rows in (("a", 9), ("b", 7))
    )
    fits = Rehearsal(9, 3, 90.0, 10.0, 100.0, 10.0, members, 2**30, 2**31, {"table": 50}, 50, Path("out"))
    assert fits.problems == fits.warnings == ()
    assert lines(fits)[-1] == "It would end in time, 10.0 s before the limit."
    assert replace(fits, time_limit_seconds=None, seconds=1e9).problems == ()
    (late,) = replace(fits, seconds=91.0).problems
    assert late.endswith("missing at the limit: b 2 of 9 rows")
    (full,) = replace(fits, disk_free_bytes=49).problems
    assert "disk" in full
    crowded = replace(fits, host_free_bytes=2**29)
    assert crowded.problems == ()
    assert any(line.startswith("! it may run out of memory") for line in lines(crowded))


def lines(rehearsal: Rehearsal) -> list[str]:
    return [*layout.lines("plans.rehearse", rehearsal)]


@pytest.mark.long
def test_of_a_member_that_fails_the_logs_are_kept(project: Project, tmp_path: Path) -> None:
    project.write_config(project.config(retries=0))
    injected = Injected(tmp_path, Fault("raise", text="no such luck"))
    with tempfile.TemporaryDirectory() as folder:
        environment = {**injected.environment, "TMPDIR": folder}
        done = project.ensemble("rehearse", "config.yaml", "--sample-rows", "20", environment=environment)
        (kept,) = Path(folder).glob("ensemble-rehearsal-*/20")
        assert (kept / "logs" / "gemma-0.log").exists()
    assert done.returncode == 1
    assert "no such luck" in done.stderr
    assert str(kept) in " ".join(done.stderr.split())


def test_a_limit_that_is_too_short_is_exit_code_1_and_nothing_of_a_run_is_touched(
    project: Project, nvml_sim: sim.NvmlSim
) -> None:
    nvml_sim.write(sim.gpus(2))
    rows = [[f"t{index}", f"{text} again", "tie"] for index, text in enumerate(project.texts)]
    project.write_csv("train.csv", ["id", "text", "winner"], rows)
    project.write_config(project.config(time_limit=0.1))
    before = sorted(project.folder.rglob("*"))
    command = "rehearse config.yaml --rows 700 --sample-rows 40 --lengths-from train.csv"
    done = project.ensemble(*command.split(), environment=nvml_sim.environment())
    assert done.returncode == 1, done.stderr
    assert "a run of 40 of 700 rows like those of train.csv" in done.stdout
    assert "would not end within time_limit" in done.stdout
    assert "missing at the limit: gemma 700 of 700 rows, llama 700 of 700 rows" in done.stdout
    assert sorted(project.folder.rglob("*")) == before


def test_too_few_different_rows_are_an_error_that_says_where_to_take_others(project: Project) -> None:
    rows = [["a", "same text", "tie"], ["b", "same text", "tie"], ["c", "another", "tie"]]
    project.write_csv("few.csv", ["id", "text", "label"], rows)
    config = project.config()
    data = {**config["data"], "path": "few.csv"}
    project.write_config({**config, "data": data, "submission": None})
    done = project.ensemble("rehearse", "config.yaml", "--rows", "50", "--sample-rows", "3")
    assert done.returncode == 2, done.stdout + done.stderr
    text = " ".join(done.stderr.split())
    assert "2 different rows are too few for a sample of 3 of 50 rows" in text
    assert "--lengths-from train.csv" in text


def test_without_a_limit_it_predicts(project: Project) -> None:
    given = [[row, "0.2", "0.3", "0.5"] for row in project.ids]
    project.write_csv("given.csv", ["id", *project.config()["labels"]], given)
    models = [*project.config()["models"], {"name": "mate", "task_type": "csv", "path": "given.csv"}]
    project.write_config(project.config(models=models))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.folder)
        result = ensemble.rehearse(
            "config.yaml", {"data.label_column": None}, rows=100, sample=20, quiet=True
        )
    assert (result.rows, result.sample_rows, result.problems) == (100, 20, ())
    assert [member.name for member in result.members] == ["gemma", "llama"]
    assert all(member.startup_seconds > 0 and member.compute_seconds > 0 for member in result.members)
    assert result.seconds == pytest.approx(
        result.other_seconds
        + sum(member.startup_seconds + member.compute_seconds for member in result.members)
    )
    assert all(member.rows_at_limit is None for member in result.members)
    assert result.disk_bytes["submission"] == 2 * result.disk_bytes["ensemble"] > 0
    assert result.host_bytes is not None
    assert not (project.folder / "runs").exists()
