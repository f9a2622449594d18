"""``report_to``: what MLflow, Trackio and Weights & Biases have of a run, read back from their local stores."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ensemble import api
from ensemble.common.errors import ConfigError
from ensemble.pipeline.load import load
from ensemble.pipeline.run_report import RunReport
from ensemble.pipeline.trackers import missing_trackers, tell_trackers
from ensemble.training.command import check_trainings
from tests.project import ROOT, Project, python_path
from tests.waiting import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.usefixtures("warm")
SECRET = "s3cr3t-of-this-test"
OF_MLFLOW = """
import json, mlflow
client, runs = mlflow.MlflowClient(), []
for experiment in client.search_experiments():
    for run in client.search_runs([experiment.experiment_id], order_by=["start_time"]):
        files = [item.path for item in client.list_artifacts(run.info.run_id)]
        facts = {"status": run.info.status, "config": run.data.params, "metrics": run.data.metrics}
        runs.append({"project": experiment.name, "name": run.info.run_name, "files": files, **facts})
print(json.dumps(runs))
"""
OF_TRACKIO = """
import json, trackio
from trackio.sqlite_storage import SQLiteStorage
runs = []
for project in SQLiteStorage.get_projects():
    for run in trackio.Api().runs(project):
        (metrics,) = SQLiteStorage.get_logs(project, run.name, run_id=run.id)
        files = [item["name"] for item in SQLiteStorage.list_artifacts(project)]
        facts = {"config": run.config, "metrics": metrics}
        runs.append({"project": project, "name": run.name, "files": files, **facts})
print(json.dumps(runs))
"""


@pytest.fixture
def csv_run(project: Project) -> Project:
    """A run of two members that need no worker."""
    for name, row in {"mate": ["0.5", "0.3", "0.2"], "other": ["0.2", "0.5", "0.3"]}.items():
        header = ["id", "tie", "winner_a", "winner_b"]
        project.write_csv(f"{name}.csv", header, [[row_id, *row] for row_id in project.ids])
    return project


def write_config(project: Project, trackers: str | list[str], **changes: Any) -> None:
    models = [
        {"name": "mate", "task_type": "csv", "path": "mate.csv", "weight": 0.75},
        {"name": "other", "task_type": "csv", "path": "other.csv", "weight": 0.25},
    ]
    project.write_config(
        project.config(**{"models": models, "defaults": None, "report_to": trackers, **changes})
    )


def environment(project: Project, **variables: str) -> dict[str, str]:
    """Nothing of a tracker leaves the machine, or the project's folder."""
    stores = {"TRACKIO_DIR": str(project.folder / "trackio"), "WANDB_DIR": str(project.folder)}
    home = {"HOME": str(project.folder / "home")}
    return {"MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_MODE": "offline", **stores, **home, **variables}


def run(project: Project, *arguments: str, **variables: str) -> str:
    """Run the config, and return what was printed."""
    done = project.ensemble("run", "config.yaml", *arguments, environment=environment(project, **variables))
    assert done.returncode == 0, done.stdout + done.stderr
    return " ".join(done.stdout.split())


def asked(project: Project, code: str) -> list[dict[str, Any]]:
    """The runs that a tracker has, by its own API."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=project.folder,
        env={**os.environ, **environment(project)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    runs: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return runs


def skip_without(tracker: str) -> None:
    """Importing a tracker would take seconds, and leave folders behind."""
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")


def files_with(folder: Path, text: str) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.parametrize(
    ("tracker", "code"),
    [pytest.param("mlflow", OF_MLFLOW, marks=pytest.mark.long), ("trackio", OF_TRACKIO)],
)
def test_a_tracker_has_scores_settings_and_report_and_no_secret(
    csv_run: Project, tracker: str, code: str
) -> None:
    skip_without(tracker)
    submission = {"sample": "sample.csv", "path": f"out/{SECRET}.csv"}
    write_config(csv_run, tracker, report=True, submission=submission)
    assert "was not told" not in run(csv_run, MY_API_KEY=SECRET)
    (found,) = asked(csv_run, code)
    assert (found["project"], found["name"]) == ("ensemble", "first")
    scores = csv_run.run_json()["scores"]
    for name in ("mate", "other", "ensemble"):
        assert found["metrics"][f"{name}/log_loss"] == pytest.approx(scores[name]["log_loss"])
    assert found["metrics"]["gain"] == pytest.approx(csv_run.run_json()["gain"]["gain"])
    assert found["metrics"]["total_seconds"] > 0
    config = found["config"]
    assert (config["status"], str(config["rows"])) == ("complete", "300")
    assert (str(config["models.mate.weight"]), config["submission.path"]) == ("0.75", "out/***.csv")
    assert any("report" in name for name in found["files"])
    kept = {"test.csv", "config.yaml"}  # the project's own
    assert not [path for path in files_with(csv_run.folder, SECRET) if path.name not in kept]
    assert files_with(csv_run.folder, "models.mate.weight"), "what is compressed cannot be searched so"


@pytest.mark.long
def test_a_run_that_changes_nothing_is_not_told_again(csv_run: Project) -> None:
    skip_without("trackio")
    write_config(csv_run, ["trackio"])
    for _ in range(2):
        run(csv_run, TRACKIO_PROJECT="mine")
    run(csv_run, "--set", "models.mate.weight=0.5", TRACKIO_PROJECT="mine")
    found = asked(csv_run, OF_TRACKIO)
    assert [item["project"] for item in found] == ["mine", "mine"]
    assert [item["config"]["models.mate.weight"] for item in found] == [0.75, 0.5]
    assert found[0]["metrics"]["ensemble/log_loss"] != found[1]["metrics"]["ensemble/log_loss"]


@pytest.mark.long
def test_the_config_of_the_page(csv_run: Project) -> None:
    for tracker in ("mlflow", "trackio", "wandb"):
        skip_without(tracker)
    page = (ROOT / "docs/how-to/trackers.md").read_text(encoding="utf-8")
    block = page.split("```yaml\n")[1].split("```")[0]
    (csv_run.folder / "trackers.yaml").write_text(block, encoding="utf-8")
    write_config(csv_run, [])
    assert "was not told" not in run(csv_run, "trackers.yaml")
    for code in (OF_MLFLOW, OF_TRACKIO):
        (found,) = asked(csv_run, code)
        assert found["metrics"]["gain"] == pytest.approx(csv_run.run_json()["gain"]["gain"])
    assert len([*csv_run.folder.glob("wandb/offline-run-*/*.wandb")]) == 1


@pytest.mark.long
def test_seconds_and_memory_of_workers(project: Project) -> None:
    skip_without("trackio")
    project.write_config(project.config(report_to="trackio", limit=40))
    run(project)
    (found,) = asked(project, OF_TRACKIO)
    for name in ("gemma", "llama"):
        assert found["metrics"][f"{name}/seconds"] > 0
        assert found["metrics"][f"{name}/peak_memory_bytes"] > 2**20


@pytest.mark.long
def test_a_server_that_is_down_is_a_warning_and_the_same_command_tries_again(csv_run: Project) -> None:
    skip_without("mlflow")
    write_config(csv_run, "mlflow")
    down = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9"}
    printed = run(csv_run, **down)
    assert "mlflow was not told of this run: MlflowException: API request to http://127.0.0.1:9" in printed
    assert (csv_run.folder / "out/submission.csv").exists()
    assert "mlflow was not told" in (csv_run.folder / "runs/first/logs/run.log").read_text(encoding="utf-8")
    assert "was not told" not in run(csv_run, MLFLOW_EXPERIMENT_NAME="second try")
    assert [item["project"] for item in asked(csv_run, OF_MLFLOW)] == ["second try"]


def test_a_tracker_has_no_more_time_than_the_time_limit_leaves(
    csv_run: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without("mlflow")
    write_config(csv_run, [], time_limit="1h")
    run(csv_run)
    write_config(csv_run, "mlflow", time_limit="1h")
    monkeypatch.chdir(csv_run.folder)
    report = RunReport.read(Path("runs/first/run.json"))
    (text,) = tell_trackers(load(Path("config.yaml")), report, 1.5, lambda: False)
    assert text.startswith("mlflow was not told of this run: time_limit leaves no time for it. ")
    assert not (csv_run.folder / "mlflow.db").exists()


TRACKER = """
import os, signal, time

if os.environ["TRACKER"] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if os.environ["TRACKER"] == "failing":
    raise RuntimeError("no login with " + os.environ["MY_API_KEY"] + "\\nsee a page")
open("began", "w").close()
time.sleep(600)
"""


def with_tracker(project: Project, how: str) -> dict[str, str]:
    """The environment with a package mlflow that behaves so."""
    (project.folder / "site/mlflow").mkdir(parents=True, exist_ok=True)
    (project.folder / "site/mlflow/__init__.py").write_text(TRACKER, encoding="utf-8")
    path = python_path(project.folder / "site", ROOT)
    return environment(project, PYTHONPATH=path, MY_API_KEY=SECRET, TRACKER=how)


@pytest.mark.fresh
def test_why_a_tracker_failed_is_told(csv_run: Project) -> None:
    write_config(csv_run, ["mlflow", "mlflow"])
    for how, why in {
        "failing": "RuntimeError: no login with *** see a page",
        "killed": "its process was killed by SIGKILL",
    }.items():
        done = csv_run.ensemble("run", "config.yaml", environment=with_tracker(csv_run, how))
        printed = " ".join(done.stdout.split())
        assert (
            printed.count(f"mlflow was not told of this run: {why}; runs/first/logs/mlflow.log says more. ")
            == 1
        )
        assert done.returncode == 0


@pytest.mark.fresh
def test_a_signal_ends_the_telling_and_not_the_run(csv_run: Project) -> None:
    write_config(csv_run, "mlflow")
    process = subprocess.Popen(
        [sys.executable, "-m", "ensemble", "run", "config.yaml"],
        cwd=csv_run.folder,
        env={**os.environ, **with_tracker(csv_run, "hanging")},
        stdout=subprocess.PIPE,
        text=True,
    )
    wait_until((csv_run.folder / "began").exists, "the tracker")
    process.terminate()
    printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert "mlflow was not told of this run: a signal stopped it. " in " ".join(printed.split())
    assert process.returncode == 0
    assert csv_run.run_json()["status"] == "complete"


@pytest.mark.long
def test_wandb_has_the_run_offline(csv_run: Project) -> None:
    skip_without("wandb")
    write_config(csv_run, "wandb", submission={"sample": "sample.csv", "path": f"out/{SECRET}.csv"})
    run(csv_run, MY_API_KEY=SECRET)
    (stored,) = csv_run.folder.glob("wandb/offline-run-*/*.wandb")
    content = stored.read_bytes()
    for text in ("ensemble/log_loss", "models.mate.weight", "first"):
        assert text.encode() in content
    assert SECRET.encode() not in content


@pytest.mark.long
def test_a_failed_run_and_a_rehearsal_tell_nobody(project: Project) -> None:
    skip_without("trackio")
    (project.folder / "mine.py").write_text("def predict(frame, context): return 'nothing'\n")
    models = [{"name": "mine", "task_type": "python", "predict": "mine.py:predict", "columns": ["text"]}]
    write_config(project, "trackio", models=models, retries=0)
    done = project.ensemble("run", "config.yaml", environment=environment(project))
    assert done.returncode == 1
    (project.folder / "mine.py").write_text(
        "def predict(frame, context): return [[0.2, 0.3, 0.5]] * len(frame)\n"
    )
    done = project.ensemble("rehearse", "config.yaml", environment=environment(project))
    assert done.returncode == 0, done.stderr
    assert not (project.folder / "trackio").exists()
    run(project)
    assert len(asked(project, OF_TRACKIO)) == 1


def test_a_missing_package_is_named_before_the_run(csv_run: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(csv_run, ["mlflow", "wandb"])
    monkeypatch.chdir(csv_run.folder)
    (csv_run.folder / "wandb").mkdir()  # where offline runs are kept
    loaded = load(Path("config.yaml"))
    with monkeypatch.context() as patch:
        patch.setattr(sys, "path", [str(csv_run.folder)])
        for name in ("mlflow", "wandb"):
            patch.delitem(sys.modules, name, raising=False)
        texts = [*missing_trackers(loaded)]
        with pytest.raises(ConfigError, match="pip install wandb"):  # before anything is trained
            check_trainings(loaded)
    assert [text.partition(": ")[2] for text in texts] == [
        f"the package {name} is not installed; pip install {name}, or leave {name} out"
        for name in ("mlflow", "wandb")
    ]
    assert all(text.startswith("report_to (line ") for text in texts)
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="pip install wandb"):
        api.validate("config.yaml")


def test_an_unknown_tracker_is_named(csv_run: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(csv_run, ["mlfow"])
    monkeypatch.chdir(csv_run.folder)
    with pytest.raises(ConfigError, match="must be mlflow, trackio or wandb, or a list of these"):
        load(Path("config.yaml"))
