"""configs/slurm.sh, with a ``sbatch`` that runs the job at once, as if its turn had come."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.project import ROOT, Project, python_path
from tests.waiting import PATIENCE_SECONDS

# It is called with --export=ALL,NAME=VALUE SCRIPT ARGUMENTS, and the job gets a limit that is far away.
SBATCH = """#!/bin/bash
printf '%s\\n' "$*" >> {folder}/sbatch.log
rm -f {folder}/slow
export "${{1#--export=ALL,}}" SLURM_JOB_ID=2
export SLURM_JOB_END_TIME=$(($(date +%s) + 3600))
shift
exec bash "$@"
"""
SQUEUE = """#!/bin/bash
[ "$*" = "--noheader --jobs 1 --format %e" ] && date -d "@{end}" +%Y-%m-%dT%H:%M:%S
"""
# Slow as long as there is a file that says so, and each row once in all jobs.
MINE = """
import pathlib, time
here = pathlib.Path(__file__).parent

def predict(frame, context):
    for row_id in frame.index:
        while (here / "slow").exists() and (here / "rows.log").exists():
            time.sleep(0.1)
    with open(here / "rows.log", "a") as file:
        file.writelines(f"{row_id}\\n" for row_id in frame.index)
    return [[0.2, 0.3, 0.5]] * len(frame)
"""


def executable(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def job(project: Project, end: int, **variables: str) -> subprocess.CompletedProcess[str]:
    """The first job of a chain, whose limit only ``squeue`` knows, as with older releases of Slurm."""
    tools = project.folder / "tools"
    tools.mkdir(exist_ok=True)
    executable(tools / "sbatch", SBATCH.format(folder=shlex.quote(str(project.folder))))
    executable(tools / "squeue", SQUEUE.format(end=end))
    script = project.folder / "slurm_script"  # Slurm runs a copy
    script.write_bytes((ROOT / "configs" / "slurm.sh").read_bytes())
    return subprocess.run(
        ["bash", str(script), "config.yaml", "--set", "retries=0"],
        cwd=project.folder,
        env={
            **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
            "PATH": f"{tools}:{os.environ['PATH']}",
            "PYTHON": sys.executable,
            "PYTHONPATH": python_path(ROOT),
            "SLURM_JOB_ID": "1",
            **variables,
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )


@pytest.fixture
def slow(project: Project) -> Project:
    (project.folder / "mine.py").write_text(MINE)
    models = [{"name": "mine", "task_type": "python", "predict": "mine.py:predict", "columns": ["text"]}]
    models[0] |= {"batch_size": 16, "replicas": 1}  # type: ignore[dict-item]
    project.write_config(project.config(models=models, defaults=None))
    (project.folder / "slow").touch()
    return project


@pytest.mark.long
def test_a_run_that_does_not_end_in_time_goes_on_in_a_second_job(slow: Project) -> None:
    done = job(slow, int(time.time()) + 120 + 8)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "stopped at time_limit" in " ".join(done.stderr.split())
    (call,) = (slow.folder / "sbatch.log").read_text().splitlines()
    assert call == f"--export=ALL,ENSEMBLE_JOB=2 {slow.folder}/slurm_script config.yaml --set retries=0"
    assert slow.run_json()["status"] == "complete"
    rows = (slow.folder / "rows.log").read_text().splitlines()
    assert sorted(rows) == sorted(slow.ids), "the second job computes what the first one has not"
    _, submission = slow.read("out/submission.csv")
    np.testing.assert_array_equal([row[1:] for row in submission], [["0.5", "0.2", "0.3"]] * 300)


def test_other_exit_codes_and_the_last_job_end_the_chain(slow: Project) -> None:
    (slow.folder / "config.yaml").write_text("models: []\n")
    done = job(slow, int(time.time()) + 3600)
    assert (done.returncode, (slow.folder / "sbatch.log").exists()) == (2, False), done.stderr
    done = job(slow, int(time.time()) + 60)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "the job's limit leaves no time beside the 120 seconds at its end; raise --time",
    )


@pytest.mark.long
def test_a_chain_without_progress_ends(slow: Project) -> None:
    (slow.folder / "rows.log").touch()
    done = job(slow, int(time.time()) + 120 + 8, ENSEMBLE_JOB="50")
    assert (done.returncode, (slow.folder / "sbatch.log").exists()) == (4, False), done.stderr
