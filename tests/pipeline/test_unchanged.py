"""What reads a run's predictions: refuses those that were edited, and those that were made by other settings."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ensemble
from ensemble.common.errors import DataError
from tests.project import Project
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("warm")
_ROWS = 300


def _write_members(project: Project, config: dict[str, Any]) -> None:
    """CSVs m0 (good), m1 (worse) and other (noise) of the usual table, and a config of m0 and m1."""
    chooser = np.random.default_rng(1)
    for name, share in (("m0", 0.6), ("m1", 0.4), ("other", 0.0)):
        rows = []
        for row_id, label in zip(project.ids, project.truth, strict=True):
            values = chooser.dirichlet([1, 1, 1]) * (1 - share)
            values[config["labels"].index(label)] += share
            rows.append([row_id, *map(repr, values.tolist())])
        project.write_csv(f"{name}.csv", ["id", *config["labels"]], rows)
    config["models"] = [{"name": name, "task_type": "csv", "path": f"{name}.csv"} for name in ("m0", "m1")]
    del config["defaults"]
    project.write_config(config)


@pytest.fixture
def csv_run(project: Project) -> Project:
    _write_members(project, project.config())
    done = project.ensemble("run", "config.yaml", "-q")
    assert done.returncode == 0, done.stderr
    return project


def _printed(project: Project, *command: str, code: int = 2) -> str:
    done = project.ensemble(*command)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join(done.stderr.split() if code else done.stdout.split())


def _edit(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    cells = lines[1].split(",")
    lines[1] = ",".join([cells[0], *cells[:0:-1]])
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


_EDITED = (
    "predictions/m0.csv: is not the file that its run wrote, as m0.json beside it has another SHA-256; run the "
    "config again, which computes it anew, or copy the file to another folder to use it as it is"
)


@pytest.mark.parametrize(
    "command",
    one_in(
        2,
        [
            ["fit", "config.yaml"],
            ["report", "runs/first"],
            ["merge", "runs/first/predictions/m0.csv", "m1.csv", "-o", "merged.csv"],
            ["compare", "runs/first/predictions/m0.csv", "m1.csv"],
            ["validate", "config.yaml", "--set", "models.m1.path=runs/first/predictions/m0.csv"],
            ["fit", "runs/first/predictions/m0.csv", "m1.csv", "--labels", "test.csv"],
            ["compare", "runs/first", "runs/first"],
        ],
    ),
)
def test_edited_predictions_are_refused_by_name(csv_run: Project, command: list[str]) -> None:
    path = csv_run.folder / "runs/first/predictions/m0.csv"
    _edit(path)
    if command[0] == "validate":
        command = [*command, "--set", "output_dir=runs/second"]
    assert _EDITED in _printed(csv_run, *command)
    # A copy elsewhere is anybody's file.
    shutil.copy(path, csv_run.folder / "mine.csv")
    _printed(csv_run, "merge", "mine.csv", "m1.csv", "-o", "merged.csv", code=0)


def test_a_notebook_refuses_edited_predictions(csv_run: Project) -> None:
    run = ensemble.open_run(csv_run.folder / "runs/first")
    assert len(run.predictions("m0")) == _ROWS
    _edit(csv_run.folder / "runs/first/predictions/m0.csv")
    with pytest.raises(DataError, match=r"m0\.json beside it"):
        run.predictions("m0")


def test_a_run_makes_edited_predictions_anew(csv_run: Project) -> None:
    path = csv_run.folder / "runs/first/predictions/m0.csv"
    before = path.read_bytes()
    _edit(path)
    message = _printed(csv_run, "run", "config.yaml", code=0)
    assert "predictions/m0.csv has been changed; it runs again" in message
    assert path.read_bytes() == before
    _printed(csv_run, "fit", "config.yaml", code=0)


def test_the_report_of_a_run_says_in_a_sentence_that_predictions_were_edited(project: Project) -> None:
    """In the moment between the run's last file and the process that makes the page."""
    config = project.config(report=True)
    _write_members(project, config)
    assert project.ensemble("run", "config.yaml", "-q", "--set", "report=false").returncode == 0
    _edit(project.folder / "runs/first/predictions/m0.csv")
    from ensemble.pipeline.report_page import write_page
    from ensemble.pipeline.run_dir import RunDir
    from ensemble.pipeline.run_report import RunReport

    rundir, message = RunDir(project.folder / "runs/first"), list[str]()
    page = write_page(rundir, RunReport.read(rundir.run_json), True, 500, lambda: False, message.append)
    assert page is None
    assert _EDITED in message[-1]
    assert "Traceback" not in rundir.report_log.read_text(encoding="utf-8")


def test_fit_wants_the_predictions_of_the_csv_that_the_config_names(csv_run: Project) -> None:
    message = _printed(csv_run, "fit", "config.yaml", "--set", "models.m0.path=other.csv")
    assert (
        "runs/first: the settings of m0 (file) have changed since the predictions there were made; run the config "
        "with these settings first, then fit"
    ) in message
    assert not (csv_run.folder / "weights.yaml").exists()
    # What its file holds counts, and not where it is.
    shutil.copy(csv_run.folder / "m0.csv", csv_run.folder / "moved.csv")
    _printed(csv_run, "fit", "config.yaml", "--set", "models.m0.path=moved.csv", code=0)
    (csv_run.folder / "m0.csv").unlink()
    _printed(csv_run, "fit", "config.yaml", "--force", code=0)
    shutil.copy(csv_run.folder / "other.csv", csv_run.folder / "m0.csv")
    assert "m0 (file)" in _printed(csv_run, "fit", "config.yaml", "--force")
    _printed(csv_run, "run", "config.yaml", "-q", code=0)
    _printed(csv_run, "fit", "config.yaml", "--force", code=0)
    first, second = yaml.safe_load((csv_run.folder / "weights.yaml").read_text())["models"]
    assert first["weight"] < second["weight"]


@pytest.mark.long
def test_weights_are_fitted_whatever_changes_no_predictions(csv_run: Project) -> None:
    _printed(csv_run, "fit", "config.yaml", "--calibration", "temperature", code=0)
    for sets in (
        ["models.m0.weight=0.2", "ensemble.method=geometric_mean"],
        ["models.m0.calibration={temperature: 2}"],
        ["devices=[0]", "time_limit=60", "report=true", "submission=null"],
        ["models.m0.partial=true"],
    ):
        options = [part for keys in sets for part in ("--set", keys)]
        _printed(csv_run, "fit", "config.yaml", *options, "--force", code=0)
    _printed(csv_run, "fit", "config.yaml", "weights.yaml", "-o", "again.yaml", code=0)
    _printed(csv_run, "run", "config.yaml", "weights.yaml", "-q", code=0)
    _printed(csv_run, "fit", "config.yaml", "--force", code=0)


@pytest.mark.long
def test_fit_and_plan_want_predictions_by_the_settings_of_the_config(project: Project) -> None:
    """Of models: max_length, which no file tells; batches and devices change nothing."""
    config = project.config(time_limit=None)
    config["models"][1]["when"] = {"margin_below": 0.1}
    project.write_config(config)
    assert project.ensemble("run", "config.yaml", "-q", "--set", "models.llama.when=null").returncode == 0
    other = ("--set", "models.gemma.max_length=3")
    assert "runs/first: the settings of gemma (max_length) have changed" in _printed(
        project, "fit", "config.yaml", "--set", "models.llama.when=null", *other
    )
    named = ("--predictions-from", "runs/first", "--set", "output_dir=runs/second")
    assert (
        "--predictions-from: runs/first: the settings of gemma (max_length) have changed since the predictions "
        "there were made; run the config there with these settings first, or leave the option out"
    ) in _printed(project, "plan", "config.yaml", *named, *other)
    # A run here would compute gemma again, so its old predictions tell a plan nothing.
    assert "there are no predictions of gemma" in _printed(project, "plan", "config.yaml", *other, code=0)
    same = (
        "--set",
        "models.gemma.batch_size=4",
        "--set",
        "models.gemma.replicas=1",
        "--set",
        "models.gemma.num_gpus=0",
    )
    assert "by the predictions of 300 rows" in _printed(project, "plan", "config.yaml", *named, *same, code=0)
    _printed(project, "fit", "config.yaml", "--set", "models.llama.when=null", *same, code=0)
    _edit(project.folder / "runs/first/predictions/gemma.csv")
    assert "gemma.json beside it" in _printed(project, "plan", "config.yaml", *named)
    assert "there are no predictions of gemma" in _printed(project, "plan", "config.yaml", code=0)
