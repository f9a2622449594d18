"""Functions of other packages that are called when a run ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.packages import lay_out
from tests.page import blocks
from tests.project import ROOT, Project, python_path

pytestmark = pytest.mark.usefixtures("warm")
GROUP = "ensemble.run_end"
# What a tracker's module must have of the real one's, written to a file.
RECORDER = """
import json, pathlib

def _write(*call):
    with open("{file}", "a") as file:
        file.write(json.dumps(call) + "\\n")

{functions}
"""


@pytest.fixture
def csv_run(project: Project) -> Project:
    """A run whose only member needs no worker."""
    project.write_csv(
        "mate.csv", ["id", "tie", "winner_a", "winner_b"], [[i, "0.5", "0.3", "0.2"] for i in project.ids]
    )
    project.write_config(
        project.config(models=[{"name": "mate", "task_type": "csv", "path": "mate.csv"}], defaults=None)
    )
    return project


def calls(path: Path) -> list[list[object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_trackers_of_the_page(csv_run: Project, tmp_path: Path) -> None:
    site, file = tmp_path / "site", tmp_path / "calls.jsonl"
    package = "ensemble-trackers/ensemble_trackers"
    names = {"mlflow": "to_mlflow", "trackio": "to_trackio"}
    lay_out(
        site,
        "ensemble-trackers",
        GROUP,
        {name: f"ensemble_trackers.{module}:log_run" for name, module in names.items()},
        mlflow=RECORDER.format(
            file=file,
            functions="import contextlib\n"
            "def start_run(*, run_name=None): _write('start_run', run_name); return contextlib.nullcontext()\n"
            "def log_params(params): _write('log_params', params)\n"
            "def log_metrics(metrics): _write('log_metrics', metrics)\n"
            "def log_artifacts(local_dir, artifact_path=None): _write('log_artifacts', local_dir, artifact_path)\n",
        ),
        trackio=RECORDER.format(
            file=file,
            functions="def init(project, name=None, config=None): _write('init', project, name, config)\n"
            "def log(metrics, step=None): _write('log', metrics)\n"
            "def finish(): _write('finish')\n",
        ),
    )
    (site / "ensemble_trackers").mkdir()
    for module in names.values():
        (site / "ensemble_trackers" / f"{module}.py").write_text(blocks()[f"{package}/{module}.py"])
    done = csv_run.ensemble("run", "config.yaml", environment={"PYTHONPATH": python_path(ROOT, site)})
    assert (done.returncode, "hook" in done.stdout + done.stderr) == (0, False), done.stdout + done.stderr
    loss = csv_run.run_json()["scores"]["ensemble"]["log_loss"]
    by_name = {call[0]: call[1:] for call in calls(file)}
    assert by_name["start_run"] == ["first"]
    assert by_name["log_params"] == [{"status": "complete", "rows": 300, "method": "mean"}]
    assert by_name["log_metrics"][0]["ensemble.log_loss"] == loss  # type: ignore[index]
    assert by_name["log_artifacts"] == [str(csv_run.folder / "runs/first/predictions"), "predictions"]
    assert by_name["init"][:2] == ["ensemble", "first"]
    assert by_name["log"][0]["ensemble/log_loss"] == loss  # type: ignore[index]
    assert [call[0] for call in calls(file)][-1] == "finish"


def test_a_hook_that_fails_is_a_warning(csv_run: Project, tmp_path: Path) -> None:
    site = tmp_path / "site"
    lay_out(
        site,
        "bad-hooks",
        GROUP,
        {"a": "bad_hooks:fail", "b": "bad_hooks:missing", "c": "bad_hooks:show", "d": "bad_hooks:leave"},
        bad_hooks="def fail(path): raise OSError('no network')\n"
        "def leave(path): raise SystemExit(7)\n"
        "def show(path): print('STATUS', __import__('json').loads(path.read_text())['status'])\n",
    )
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    done = csv_run.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 0, done.stderr
    start = "the hook a = bad_hooks:fail of the package bad-hooks failed (OSError: no network)"
    assert start in " ".join(done.stdout.split())
    assert "the hook b = bad_hooks:missing of the package bad-hooks failed (AttributeError" in " ".join(
        done.stdout.split()
    )
    assert "the hook d = bad_hooks:leave of the package bad-hooks failed (SystemExit: 7)" in " ".join(
        done.stdout.split()
    )
    assert "STATUS complete" in done.stdout
    assert start in (csv_run.folder / "runs/first/logs/run.log").read_text(encoding="utf-8")


@pytest.mark.long
def test_hooks_are_called_of_a_run_that_fails_and_not_by_a_rehearsal(
    project: Project, tmp_path: Path
) -> None:
    site = tmp_path / "site"
    show = "def show(path): print('STATUS', __import__('json').loads(path.read_text())['status'])\n"
    lay_out(site, "hooks", GROUP, {"show": "some_hooks:show"}, some_hooks=show)
    environment = {"PYTHONPATH": python_path(ROOT, site)}
    code = "def predict(frame, context): return {}\n"
    models = [{"name": "mine", "task_type": "python", "predict": "mine.py:predict", "columns": ["text"]}]
    project.write_config(project.config(models=models, defaults=None))
    (project.folder / "mine.py").write_text(code.format("[[0.2, 0.3, 0.5]] * len(frame)"))
    done = project.ensemble("rehearse", "config.yaml", environment=environment)
    assert (done.returncode, "STATUS" in done.stdout) == (0, False), done.stderr
    (project.folder / "mine.py").write_text(code.format("'nothing'"))
    done = project.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 1
    assert done.stdout.count("STATUS failed") == 1
