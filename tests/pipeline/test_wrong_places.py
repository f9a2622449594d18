"""What a run says of a place that is no place for its files, and of an error that no file is to blame for."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import ensemble
from ensemble.common.errors import ConfigError
from ensemble.pipeline.run_dir import RunDir
from tests.project import ROOT, Project, python_path

pytestmark = pytest.mark.usefixtures("warm")
BROKEN = """
import socket

from ensemble.scheduling.launchers.local import LocalLauncher


class Broken(LocalLauncher):
    def begin(self, members):
        ours, theirs = socket.socketpair()
        theirs.close()
        ours.sendall(b"x")
"""


def refused(project: Project, *arguments: str, **environment: str) -> str:
    """What a command says that ends with exit code 2, in one line."""
    done = project.ensemble(*arguments, environment=environment)
    text = " ".join(done.stderr.split())
    assert done.returncode == 2, done.stdout + text
    assert "Traceback" not in text
    return text


@pytest.mark.long
@pytest.mark.fault(15)
def test_a_file_system_without_locks(project: Project, tmp_path: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is needed to build a library in which flock fails")
    library = tmp_path / "no_locks.so"
    source = Path(__file__).with_name("no_locks.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)
    project.write_config(project.config())
    message = refused(project, "run", "config.yaml", LD_PRELOAD=str(library))
    assert "output_dir: the file system of" in message
    assert "has no file locks (flock: No locks available)" in message
    assert "choose an output_dir on another disk" in message


@pytest.mark.fault(15)
def test_a_folder_in_place_of_a_file(project: Project) -> None:
    root = project.folder / "runs/first"
    names = "run.json ensemble.csv config.yaml .lock report.html predictions/gemma.csv logs/gemma-0.log"
    for name in names.split():
        (root / name).mkdir(parents=True)
    project.write_config(project.config())
    message = refused(project, "run", "config.yaml")
    for name in names.split():
        assert (
            f"output_dir: runs/first/{name} is a folder, and the run writes a file there; remove" in message
        )
    # What reads a run, and what writes a report.
    for command in ("status", "report", "compare", "fit"):
        arguments = ["runs/first"] * (2 if command == "compare" else 1)
        if command == "fit":
            arguments = ["config.yaml", "--labels", "test.csv"]
        assert "runs/first" in refused(project, command, *arguments), command


@pytest.mark.fault(15)
def test_folders_in_place_of_files_that_are_written_by_name(project: Project) -> None:
    (project.folder / "there.csv").mkdir()
    (project.folder / "there.yaml").mkdir()
    project.write_csv("m.csv", ["id", "a", "b"], [["1", "0.5", "0.5"]])
    project.write_config(project.config())
    for arguments in (
        ["merge", "m.csv", "-o", "there.csv"],
        ["run", "config.yaml", "--set", "submission.path=there.csv"],
        ["tune", "config.yaml", "--write", "there.yaml"],
        ["init", "test.csv", "m.csv", "-o", "there.yaml", "--force"],
        ["fit", "m.csv", "--labels", "test.csv", "-o", "there.yaml", "--force"],
    ):
        message = refused(project, *arguments)
        assert "there." in message, message
        assert "is a directory" in message or "is a folder" in message, message


@pytest.mark.fault(15)
def test_a_file_in_place_of_a_folder(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path)
    (tmp_path / "predictions").touch()
    (problem,) = rundir.endangered((), None)
    assert "predictions is a file, and the run makes a folder there" in problem


@pytest.mark.parametrize("output_dir", ["circle", "circle/below", "away"])
def test_a_link_to_no_folder_in_place_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output_dir: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("circle").symlink_to("circle")
    Path("away").symlink_to("not mounted/runs")
    Path("m.csv").write_text("id,a,b\n1,0.5,0.5\n")
    config = {
        "data": {"path": "m.csv"},
        "labels": ["a", "b"],
        "models": [{"name": "m", "task_type": "csv", "path": "m.csv"}],
        "output_dir": output_dir,
    }
    target = "circle" if output_dir != "away" else "not mounted/runs"
    message = f"output_dir: {output_dir[:6].strip('/')} is a link to {target}, which leads to no directory"
    for command in (ensemble.validate, ensemble.run):
        with pytest.raises(ConfigError) as caught:
            command(config)
        assert caught.value.problems[0].startswith(message)


def test_an_error_that_is_of_no_file(project: Project, tmp_path: Path) -> None:
    """A broken socket is not taken for the disk."""
    site = tmp_path / "site"
    (site / "broken-1.dist-info").mkdir(parents=True)
    (site / "broken-1.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (site / "broken-1.dist-info/entry_points.txt").write_text(
        "[ensemble.launchers]\nbroken = broken:Broken\n"
    )
    (site / "broken.py").write_text(BROKEN)
    project.write_config(project.config(launcher="broken"))
    done = project.ensemble("run", "config.yaml", environment={"PYTHONPATH": python_path(site, ROOT)})
    text = " ".join(done.stderr.split())
    assert done.returncode == 1, text
    assert "cannot write" not in text
    assert "the run ended with an error of the system (BrokenPipeError: [Errno 32] Broken pipe)" in text
    assert "the same command resumes" in text
