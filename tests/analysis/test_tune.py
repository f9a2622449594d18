"""Settings that are found by trying them: with real workers, and checkpoints that some types of numbers break."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ensemble
from ensemble.analysis import tune
from ensemble.analysis.tune import (
    MemberTrials,
    MemberTuning,
    Trial,
    Tuning,
    distances,
    overrides_beside,
)
from ensemble.cli import layout
from ensemble.common.gpus import Device
from ensemble.config import TuningConfig
from ensemble.members.huggingface import parent
from ensemble.pipeline import prediction_files
from ensemble.pipeline.load import load
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.run_dir import RunDir
from tests.checkpoints import make_checkpoint
from tests.cli import reports
from tests.faults.chunky import chunky_config, ids_of, write_chunky_table
from tests.faults.inject import Fault, Injected
from tests.project import LABELS, Project
from tests.waiting import PATIENCE_SECONDS

ROWS = 48

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture(autouse=True)
def however_speeds_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample of a few rows is computed in a moment, which may be twice as long the next time."""
    monkeypatch.setattr(tune, "_MOVED", float("inf"))


def test_a_rows_distance_is_its_largest_whatever_the_number_of_labels() -> None:
    expected = np.array([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]])
    values = np.array([[0.4, 0.4, 0.2], [0.2, 0.2, 0.6]])
    assert distances(expected, values, "softmax") == pytest.approx((0.05, 0.1, 0.0))
    none = np.zeros((2, 11))
    wide, other = (np.hstack([item, none]) for item in (expected, values))
    assert distances(wide, other, "softmax") == pytest.approx((0.05, 0.1, 0.0))
    assert distances(expected, values + np.array([0, 1, 0]), "softmax")[2] == 1
    assert distances(expected, values + np.array([0.2, 0, 0]), "sigmoid")[2] == 0.5
    assert "took 2 times as long when it was measured again" in lines(noisy(2.0))
    assert "again" not in lines(noisy(1.2))
    assert ["measure again" in noisy(again).overlay() for again in (1.2, 2.0, 0.5)] == [False, True, True]
    faster = replace(noisy(1.0), members=(MemberTuning("a", (), "float32", "bfloat16"),))
    assert "# a: bfloat16, compared with float32\n" in faster.overlay()
    raw = np.array([[0.0], [100.0]])
    assert distances(raw, raw + 5, "none") == pytest.approx((0.1, 0.1, 0.0)), "in standard deviations"


def test_overrides_go_on_beside_what_is_written_unless_it_sets_their_keys(project: Project) -> None:
    sets = [
        "output_dir=x",
        "models.0.dtype=float32",
        "models[1].dtype=float32",
        "models.llama.text_column=text",
    ]
    sets += ["models.llama.quantization_config.load_in_8bit=true", "defaults.dtype=auto", "cpu_workers=1"]
    project.write_config(project.config())
    loaded = load([project.folder / "config.yaml"], sets)
    name = loaded.config.models[1].name
    member = MemberTuning(name, (), keys={"dtype": "bfloat16", "quantization_config": None})
    tuning = replace(noisy(1.0), members=(member,))
    assert overrides_beside(loaded, tuning) == [*sets[:2], sets[3], *sets[5:]]


def noisy(again: float) -> Tuning:
    given = {"devices": ["x"], "versions": {}, "rows": 9, "tolerance": 0.1, "date": "today"}
    tuned_on = TuningConfig.model_validate(given)
    member = MemberTuning("a", (), "float32", "float32", again=again)
    return Tuning((member,), (), 9, 0.1, 1.0, tuned_on)


def lines(tuning: Tuning) -> str:
    return " ".join(" ".join(layout.lines("analyses.tune", tuning)).split())


def make_biased(folder: Path, bias: float, spread: float) -> str:
    """A classifier whose logits are ``bias`` and some ``spread`` of it, so that rounding takes the spread away."""
    import torch
    from safetensors.torch import load_file, save_file

    make_checkpoint(folder, "bert", LABELS, seed=3)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    head = tensors["classifier.weight"]
    tensors["classifier.weight"] = head * (spread / float(head.norm(dim=1).mean()))
    tensors["classifier.bias"] = torch.full((len(LABELS),), bias)
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder)


@pytest.mark.long
def test_settings_that_change_probabilities_or_labels_are_refused_however_fast(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bfloat16 has steps of 4 above 512, and of 1/16 above 8; the first trial of all is told to crash."""
    given = [[row, "0.2", "0.3", "0.5"] for row in project.ids]
    project.write_csv("given.csv", ["id", *LABELS], given)
    models = [
        {"name": "far", "model_name_or_path": make_biased(tmp_path / "far", 1000.0, 1.0)},
        {"name": "near", "model_name_or_path": make_biased(tmp_path / "near", 15.0, 0.01)},
        {"name": "mate", "task_type": "csv", "path": "given.csv"},
    ]
    # Which bfloat16 has no number for.
    huge = [{"name": "huge", "model_name_or_path": make_biased(tmp_path / "huge", 3.4e38, 0.0)}]
    defaults = {
        "text_column": "text",
        "max_length": 128,
        "batch_size": 16,
    }  # which leaves out tokens of a batch
    config = project.config(models=models, defaults=defaults)
    project.write_config(config)
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    injected = Injected(tmp_path, Fault("raise", times=1, text="no such luck"))
    for name, value in injected.environment.items():
        monkeypatch.setenv(name, value)
    project.write_config({**config, "models": models[:1], "output_dir": "runs/crash"}, "crash.yaml")
    tuning = ensemble.tune("crash.yaml", rows=6, quiet=True)
    (crashed,) = tuning.members
    assert "! far: float32 gave no result, so all is compared with bfloat16" in lines(tuning)
    rows = sum(bool(trial.failure) and not trial.rows_per_second for trial in crashed.trials)
    assert lines(tuning).count("no result") == 1 + rows, "and the sentence of the reference"
    assert "far: float32: " in lines(tuning), "and why"
    assert "no such luck" in crashed.trials[0].failure
    assert crashed.reference == "bfloat16", "the widest that gave a result"

    told = "gave no result, so all is compared with"
    measured = MemberTrials._measured

    def planted(self: MemberTrials, trial: Trial, *others: Any) -> Trial:
        """What is wrong is the fastest by far, as it is on a CPU with such products."""
        measurement = measured(self, trial, *others)
        if measurement.failure or not trial.name.startswith("bfloat16"):
            return measurement
        assert measurement.whole_seconds is not None
        return replace(measurement, whole_seconds=measurement.whole_seconds / 100)

    monkeypatch.setattr(MemberTrials, "_measured", planted)
    trials = ensemble.tune("config.yaml", rows=ROWS, write="tuned.yaml", quiet=True)
    assert told not in lines(trials)
    far, near = trials.members
    assert (trials.rows, trials.skipped, far.reference, near.reference) == (
        ROWS,
        ("mate",),
        "float32",
        "float32",
    )
    project.write_config(
        {**config, "models": huge, "output_dir": "runs/huge", "on_bad_row": "uniform"}, "huge.yaml"
    )
    (without,) = ensemble.tune("huge.yaml", rows=6, quiet=True).members
    assert without.best.startswith("float32")
    assert "6 of 6 rows of the sample" in without.trials[1].failure
    read = prediction_files.read_as_written

    def without_one(path: Path) -> Any:
        file = read(path)
        if "float16" in str(path):
            file.values[:1] = np.nan
        return file

    with monkeypatch.context() as patched:
        patched.setattr(tune, "read_as_written", without_one)
        (lacking,) = ensemble.tune("crash.yaml", rows=6, quiet=True).members
    assert lacking.best.startswith("float32")
    assert [trial.failure for trial in lacking.trials[1:3]] == ["some values are not numbers"] * 2
    for member in trials.members:
        by_name = {trial.name: trial for trial in member.trials}
        assert {"float32", "bfloat16", "float16", "int8", "int8, threshold 0", "nf4"} <= by_name.keys()
        assert not by_name["bfloat16"].is_within
        assert by_name["bfloat16"].changed > 0.1
        assert not member.best.startswith("bfloat16")
        assert [*by_name["bfloat16"].metrics] == ["log_loss", "accuracy"]
    assert {trial.name: trial for trial in far.trials}["bfloat16"].mean > 0.05
    assert {trial.name: trial for trial in near.trials}["bfloat16"].mean < trials.tolerance, (
        "labels alone tell"
    )
    written = yaml.safe_load((project.folder / "tuned.yaml").read_text())
    assert "bfloat16" not in str(written.get("models"))
    assert written["tuned_on"]["rows"] == ROWS
    assert {"torch", "transformers"} == written["tuned_on"]["versions"].keys()
    assert "too far" in lines(trials)
    assert "mate: has no settings to choose" in lines(trials)


@pytest.mark.long
def test_what_takes_twice_as_long_as_the_best_is_stopped(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if nothing might take any time but the first."""
    defaults = {"text_column": "text", "max_length": 32, "batch_size": 16}
    project.write_config(project.config(models=project.config()["models"][1:], defaults=defaults))
    monkeypatch.chdir(project.folder)
    for name in ("_MIN_SECONDS", "_TOO_SLOW"):
        monkeypatch.setattr(tune, name, 0.0)
    injected = Injected(tmp_path, Fault("sleep", seconds=0.2))
    for name, value in injected.environment.items():
        monkeypatch.setenv(name, value)
    (result,) = ensemble.tune("config.yaml", rows=16, quiet=True).members
    first, *others = result.trials
    assert (first.failure, result.best) == ("", "float32")
    assert all("more than twice as long" in trial.failure for trial in others)


class Faked(MemberTrials):
    """Whose trials take so many seconds, and are so far from what is right."""

    took: dict[str, float]
    off = 0.0

    def _run(self, trial: Trial, best_seconds: float | None) -> Trial:
        took = self.took.get(trial.name, 20.0)
        values = np.full((self.rows, len(LABELS)), 1 / len(LABELS))
        values[:, 0] += self.off if trial.name.startswith("bfloat16") else 0.0
        trial = replace(trial, rows_per_second=self.rows / took)
        return replace(trial, seconds=took, whole_seconds=took, values=values)


def test_a_worker_that_died_before_it_was_ready_spoils_no_trial(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    project.write_config(project.config(models=project.config()["models"][1:]))
    prepared = prepare(load([Path("config.yaml")], []))
    rows = prepared.table.rows
    target = RunDir(prepared.config.output_dir).predictions("llama")
    target.parent.mkdir(parents=True)
    cells = "".join(f"{row_id},{','.join(['0.2'] * len(LABELS))}\n" for row_id in project.ids)
    target.write_text(f"id,{','.join(LABELS)}\n{cells}")
    trials = MemberTrials(prepared, 0, rows, project.folder / "x", 0.02, lambda _: None, owns_process=False)
    dead = replace(reports.worker(exit_code=-9), ready=None)
    good = reports.worker(rows=rows, predict_seconds=2.0)
    member = reports.member("llama", workers=(dead, good))
    measured = trials._measured(Trial("float32", {}), prepared, member)
    assert (measured.failure, measured.rows_per_second) == ("", rows / 2.0)


@pytest.mark.parametrize(("off", "tolerance", "best"), [(0.1, 0.02, "float32"), (0.1, 0.2, "bfloat16")])
def test_the_fastest_is_taken_where_it_is_right(
    project: Project, monkeypatch: pytest.MonkeyPatch, off: float, tolerance: float, best: str
) -> None:
    monkeypatch.chdir(project.folder)
    project.write_config(project.config(models=project.config()["models"][1:]))
    prepared = prepare(load([Path("config.yaml")], []))
    member = Faked(prepared, 0, 64, project.folder / "x", tolerance, lambda _: None, owns_process=False)
    member.took, member.off = {"float32": 5.0, "float32, again": 5.0, "bfloat16": 0.1}, off
    trials = member.tune()
    assert trials.best == best


@pytest.mark.parametrize(
    ("again", "best"), [(2.4, ""), (2.6, "bfloat16"), (9.9, "bfloat16"), (10.1, "")], ids=str
)
def test_nothing_is_chosen_where_the_reference_moved_by_more_than_twice(
    project: Project, monkeypatch: pytest.MonkeyPatch, again: float, best: str
) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(tune, "_MOVED", 2.0)
    project.write_config(project.config(models=project.config()["models"][1:]))
    prepared = prepare(load([Path("config.yaml")], []))
    member = Faked(prepared, 0, 64, project.folder / "x", 0.02, lambda _: None, owns_process=False)
    member.took = {"float32": 5.0, "bfloat16": 0.1, "float32, again": again}
    trials = member.tune()
    assert (trials.best, trials.keys) == (best, {"dtype": "bfloat16"} if best else {})
    tuning = replace(noisy(1.0), members=(trials,))
    times = f"{again / 5:.2g} times as long"
    message = f"! llama: nothing is chosen, as float32 took {times} when it was measured again at the end"
    assert tuning.has_result == bool(best)
    assert (message in lines(tuning)) == (not best)
    assert ("<- fastest" in lines(tuning)) == bool(best)
    assert (f"# llama: nothing chosen, as the reference took {times} at the end" in tuning.overlay()) == (
        not best
    )
    # Another member's settings are written all the same.
    both = replace(
        tuning, members=(MemberTuning("a", (), "float32", "float16", {"dtype": "float16"}), trials)
    )
    assert both.has_result
    assert yaml.safe_load(both.overlay())["models"][0] == {"name": "a", "dtype": "float16"}
    assert len(yaml.safe_load(both.overlay())["models"]) == 1 + bool(best)


@pytest.mark.long
def test_the_command_fails_where_nothing_could_be_chosen_of_any_member(
    project: Project, tmp_path: Path
) -> None:
    """Something holds up the first trial alone."""
    write_chunky_table(project)
    models = [{**project.config()["models"][1], "max_length": 32}]
    project.write_config(project.config(models=models, defaults={"text_column": "text", "batch_size": 16}))
    injected = Injected(tmp_path, Fault("sleep", ids_of(project, 3), times=1, seconds=30.0))
    (project.folder / "tuned.yaml").write_text("mine: 1\n")
    command = ["tune", "config.yaml", "--rows", str(len(project.ids)), "--write", "tuned.yaml", "--force"]
    done = project.ensemble(*command, environment={**injected.environment, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 1, done.stdout + done.stderr
    text = " ".join(done.stdout.split())
    assert "! llama: nothing is chosen, as float32 took 0." in text
    assert "written" not in text
    assert (project.folder / "tuned.yaml").read_text() == "mine: 1\n"


def test_on_gpus_the_whole_table_is_for_all_replicas_that_a_run_has(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    write_chunky_table(project)
    project.write_config(chunky_config(project))
    prepared = prepare(load([Path("config.yaml")], []))
    gpus = [Device(f"GPU-{number}", "Tesla T4", (7, 5), 15 << 30, 0) for number in range(2)]
    prepared = replace(prepared, plan=prepared.plan.again(gpus))
    member = MemberTrials(prepared, 0, 64, project.folder / "x", 0.02, lambda _: None, owns_process=False)
    table = member._sample()
    for keys, replicas in (({}, 2), ({"replicas": 1}, 1), ({"num_gpus": 2}, 1)):
        trial = Trial("float16", keys)
        made = member._prepare(keys, table, project.folder / "x")
        assert made.plan.models[0].replicas == 1, "of which there is one"
        assert member._whole(trial, made)[1] == replicas


def test_a_trial_is_planned_by_what_its_own_settings_make_of_the_checkpoint(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    write_chunky_table(project)
    project.write_config(chunky_config(project))
    prepared = prepare(load([Path("config.yaml")], []))
    member = MemberTrials(prepared, 0, 64, project.folder / "x", 0.02, lambda _: None, owns_process=False)
    keys = {"problem_type": "multi_label_classification"}
    made = member._prepare(keys, member._sample(), project.folder / "x")
    assert [prepared.inspected["llama"].activation, made.inspected["llama"].activation] == [
        "softmax",
        "sigmoid",
    ]


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no g++")
@pytest.mark.parametrize("is_asked", [False, True])
def test_torch_compile_is_tried_where_there_is_time_for_it(
    project: Project, monkeypatch: pytest.MonkeyPatch, is_asked: bool
) -> None:
    """As if it always paid; also where the config has it, whose other settings are tried without."""
    defaults = {"text_column": "text", "max_length": 32, "batch_size": 16, "attn_implementation": "eager"}
    config = project.config(models=project.config()["models"][1:], defaults=defaults)
    project.write_config({**config, "defaults": {**defaults, "torch_compile": is_asked}})
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(parent, "_COMPILING_PAYS_FROM_SECONDS", 0.0)
    (result,) = ensemble.tune("config.yaml", rows=16, quiet=True).members
    (compiled,) = (trial for trial in result.trials if trial.name.endswith(", torch.compile"))
    before = next(trial for trial in result.trials if f"{trial.name}, torch.compile" == compiled.name)
    assert (compiled.failure, compiled.keys) == ("", {**before.keys, "torch_compile": True})
    assert compiled.is_within
    assert compiled.load_seconds is not None
    assert compiled.whole_seconds is not None
    assert before.load_seconds is not None
    assert compiled.whole_seconds > compiled.load_seconds > before.load_seconds, "compiling is loading"
    assert result.best != compiled.name, "a few rows do not pay for it"


@pytest.mark.long
def test_ctrl_c_keeps_what_is_tried_and_a_run_takes_what_is_written(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = project.config(models=project.config()["models"][1:])
    project.write_config(config)
    command = ["tune", "config.yaml", "--rows", str(ROWS), "--tolerance", "0", "--write", "tuned.yaml"]
    with subprocess.Popen(
        [sys.executable, "-m", "ensemble", *command],
        cwd=project.folder,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        printed = []
        for line in process.stdout:
            printed.append(line)
            if line.startswith("llama: bfloat16:"):
                process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_SECONDS) == 128 + signal.SIGINT, "".join(printed)
    assert "the same command resumes" in " ".join("".join(printed).split())
    assert not (project.folder / "tuned.yaml").exists()
    first = project.folder / "runs/first/tune/llama" / f"float32-{ROWS}" / "predictions/llama.csv"
    written_at = first.stat().st_mtime_ns

    with monkeypatch.context() as patched:
        patched.chdir(project.folder)
        ensemble.tune("config.yaml", rows=ROWS, tolerance=0, write="tuned.yaml")
    assert first.stat().st_mtime_ns == written_at, "computed once"
    text = " ".join(capsys.readouterr().out.split())
    assert "trials at most, each in a fresh worker, of 48 of 300 rows, about" in text
    assert re.search(r"rows, about [^;()]+ \(\d done already\); what is done is kept", text), text
    assert (first.parents[2] / f"float32--again-{ROWS}").is_dir(), "how far speeds may be off"
    assert "no other precision comes within 0 of float32; it is kept" in text

    again = project.ensemble(*command)
    assert (again.returncode, again.stderr.count("tuned.yaml is there already")) == (2, 1)
    overlay: dict[str, Any] = yaml.safe_load((project.folder / "tuned.yaml").read_text())
    assert "dtype" not in str(overlay.get("models"))
    now = project.ensemble("run", "config.yaml", "tuned.yaml")
    assert now.returncode == 0, now.stderr
    assert "settings of `tune` on " in now.stdout
    assert "tuned_on: " not in now.stdout, "the same machine and versions"
    overlay["tuned_on"] |= {"devices": ["Tesla T4"], "versions": {"torch": "2.0.1"}}
    project.write_config(overlay, "tuned.yaml")
    other = project.ensemble("run", "config.yaml", "tuned.yaml")
    text = " ".join(other.stdout.split())
    assert "tuned_on: tune has measured on Tesla T4, and this is" in text
    assert "tuned_on: tune has measured with torch 2.0.1, and this is" in text
    report = project.run_json()
    assert (report["tuned_on"]["devices"], len(report["warnings"])) == (["Tesla T4"], 2)
    assert report["members"][0]["reused_rows"] == 300, "where it was measured changes no numbers"
    assert all(
        worker["closed"]["peak_memory_bytes"] and worker["life_seconds"]
        for worker in report["members"][0]["workers"]
    )

    project.write_config({"models": [{"name": "lama", "dtype": "bfloat16"}]}, "tuned.yaml")
    unknown = project.ensemble("run", "config.yaml", "tuned.yaml")
    assert unknown.returncode == 2
    assert "named 'lama' (did you mean 'llama'?)" in " ".join(unknown.stderr.split())
    project.write_config({"models": [{"name": "llama", "dtipe": "bfloat16"}]}, "tuned.yaml")
    unknown = project.ensemble("run", "config.yaml", "tuned.yaml")
    assert (unknown.returncode, "dtipe" in unknown.stderr) == (2, True)


@pytest.mark.long
def test_only_whole_trials_are_kept_and_until_the_file_is_written(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that was killed is measured as a whole; and a disk that is full at the end costs no trial."""
    defaults = {"text_column": "text", "max_length": 32, "batch_size": 16}
    models = [{**project.config()["models"][1], "attn_implementation": "eager"}]
    project.write_config(project.config(models=models, defaults=defaults))
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    unwritable = "n" * 250  # its temporary name is longer than names may be
    with pytest.raises(ensemble.EnsembleError, match="cannot write") as raised:
        ensemble.tune("config.yaml", rows=16, tolerance=1, write=unwritable, quiet=True)
    assert raised.value.exit_code == 1
    trials = project.folder / "runs/first/tune/llama"
    first, second = (trials / f"{name}-16" for name in ("float32", "bfloat16"))
    kept, killed = ((item / "predictions/llama.csv").stat().st_mtime_ns for item in (first, second))
    (second / "run.json").unlink()  # as of one whose rows were all computed
    result = ensemble.tune("config.yaml", rows=16, tolerance=1, write="tuned.yaml", quiet=True)
    assert (first / "predictions/llama.csv").stat().st_mtime_ns == kept
    assert (second / "predictions/llama.csv").stat().st_mtime_ns > killed
    (member,) = result.members
    assert {trial.name: trial.failure for trial in member.trials}["bfloat16"] == ""
    assert all(trial.peak_bytes for trial in member.trials if not trial.failure), (
        "also of those that were kept"
    )
    for name in ("config.yaml", "tuned.yaml", "test.csv", f"{models[0]['model_name_or_path']}/config.json"):
        with pytest.raises(ensemble.OutputError, match="files that are read"):
            ensemble.tune(["config.yaml", "tuned.yaml"], write=name, force=True, quiet=True)
    for name in ("config.yaml", "run.json", "ensemble.csv", "tune/.tune.json", "tune/llama/x.yaml"):
        with pytest.raises(ensemble.OutputError, match=f"--write: runs write .*{name} themselves"):
            ensemble.tune("config.yaml", write=f"runs/first/{name}", force=True, quiet=True)


@pytest.mark.long
def test_nothing_is_kept_of_another_config(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds depend on more than numbers do; and what others keep beside the trials is theirs."""
    defaults = {"text_column": "text", "max_length": 32}
    project.write_config(project.config(models=project.config()["models"][1:], defaults=defaults))
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder = project.folder / "runs/first/tune"

    def interrupted(**overrides: object) -> int:
        with pytest.raises(ensemble.EnsembleError, match="cannot write"):
            ensemble.tune("config.yaml", overrides, rows=16, write="n" * 250, quiet=True)
        return (folder / "llama/float32-16/predictions/llama.csv").stat().st_mtime_ns

    first = interrupted()
    (folder / "mine").mkdir()
    (folder / "mine/notes.txt").write_text("mine")
    assert interrupted() == first
    other = interrupted(**{"models.llama.batch_size": 4})
    assert other > first
    write_chunky_table(project)
    assert interrupted(**{"models.llama.batch_size": 4}) > other, "another table"
    assert (folder / "mine/notes.txt").read_text() == "mine"


@pytest.mark.long
def test_a_row_that_cannot_be_computed_counts_for_nothing(
    project: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the reference, nor by others; and few rows make one batch."""
    write_chunky_table(project)
    models = [{**project.config()["models"][1], "max_length": 32}]
    project.write_config(
        project.config(models=models, defaults={"text_column": "text"}, on_bad_row="uniform")
    )
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    injected = Injected(tmp_path, Fault("nan", ids_of(project, 5)))
    for name, value in injected.environment.items():
        monkeypatch.setenv(name, value)
    trials = ensemble.tune("config.yaml", rows=len(project.ids), tolerance=1, quiet=True)
    (member,) = trials.members
    first, *others = member.trials
    assert first.lacking == 1
    assert f"1 of {len(project.ids)} rows of the sample could not be computed" in lines(trials)
    assert f"with id '{project.ids[5]}'" in lines(trials)
    assert all(other.mean < 0.1 for other in others if other.name in ("bfloat16", "float16")), (
        "of the other rows"
    )
    assert not [trial.name for trial in member.trials if "tokens a batch" in trial.name]


def test_what_cannot_be_tuned_is_said_at_once(project: Project) -> None:
    for options in (["--rows", "0"], ["--tolerance", "-1"]):
        project.write_config(project.config())
        done = project.ensemble("tune", "config.yaml", *options)
        assert done.returncode == 2
        assert options[0] in done.stderr
    for odd in ({"rows": 0}, {"tolerance": float("nan")}):
        with pytest.raises(ensemble.ConfigError, match=next(iter(odd))):
            ensemble.tune(project.folder / "config.yaml", {"output_dir": str(project.folder / "x")}, **odd)
    project.write_csv("given.csv", ["id", *LABELS], [[row, "0.2", "0.3", "0.5"] for row in project.ids])
    project.write_config(project.config(models=[{"name": "mate", "task_type": "csv", "path": "given.csv"}]))
    done = project.ensemble("tune", "config.yaml")
    assert (done.returncode, "no member has settings" in done.stderr) == (2, True)
    assert not (project.folder / "runs").exists()

    llama = {**project.config()["models"][1], "model_kwargs": {"no_such_key": 1}}
    project.write_config(project.config(models=[llama]))
    done = project.ensemble("tune", "config.yaml", "--rows", "4", "--write", "tuned.yaml")
    assert done.returncode == 1
    assert not (project.folder / "tuned.yaml").exists(), "nothing was found"
    assert "llama: float32; bfloat16; float16; int8; int8, threshold 0; nf4: " in done.stdout, (
        "one reason, said once"
    )
    assert "written" not in done.stdout


@pytest.mark.long
def test_agreement_is_that_of_the_possible_labels(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    project.write_table(rows=24)
    header, rows = project.read("test.csv")
    lists = [LABELS[:2], LABELS[1:], LABELS]
    possible = [lists[number % 3] for number in range(len(rows))]
    cells = [[*row, json.dumps(names)] for row, names in zip(rows, possible, strict=True)]
    project.write_csv("test.csv", [*header, "possible"], cells)
    config = project.config(data={"path": "test.csv", "allowed_labels": "possible"})
    project.write_config({**config, "models": config["models"][:1], "submission": None})
    monkeypatch.chdir(project.folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (member,) = ensemble.tune("config.yaml", rows=24, quiet=True).members
    by_name = {trial.name: trial for trial in member.trials}
    results = [by_name[name].values for name in ("float32", "nf4")]
    flags = np.array([[name in names for name in LABELS] for names in possible])
    kept = [np.where(flags, values, 0) for values in results if values is not None]
    first, second = (values / values.sum(axis=1, keepdims=True) for values in kept)
    assert by_name["nf4"].mean == pytest.approx(np.abs(first - second).max(axis=1).mean(), rel=1e-9)
    assert by_name["nf4"].mean > 0
