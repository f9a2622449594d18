"""``ensemble demo``: what it writes, what it leaves as it is, and what it refuses.

tests/test_packaging.py runs the whole demo from a wheel.
"""

from __future__ import annotations

import resource
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ensemble.commands.demo import ARCHIVE, checkout_files
from ensemble.common.files import files_below
from tests.project import ROOT, Project, python_path
from tests.waiting import PATIENCE_SECONDS

pytestmark = pytest.mark.usefixtures("warm")
WRITTEN = "wrote a config, a table and two small models"


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_below(folder)}


def refused(project: Project, *arguments: str) -> str:
    """The one sentence with which the command ends."""
    done = project.ensemble("demo", *arguments)
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_a_copy_is_the_demo_of_the_checkout(project: Project) -> None:
    done = project.ensemble("demo", "--copy", "a new/folder")
    assert done.returncode == 0, done.stderr
    first, following = done.stdout.splitlines()
    assert first == f"a new/folder: {WRITTEN}"
    copied = contents(project.folder / "a new/folder")
    own = {name: copied.pop(name) for name in ("README.md", "config.yaml")}
    assert copied == {name: (ROOT / "demo" / name).read_bytes() for name in copied}
    assert {"LICENSE.WordNet", "test.csv", "sample_submission.csv"} <= copied.keys()
    ours = (ROOT / "configs/demo.yaml").read_text(encoding="utf-8").splitlines()
    theirs = own["config.yaml"].decode().splitlines()
    assert [line for line in theirs if line not in ours] == [
        "  path: ${CONFIG_DIR}/test.csv",
        "    model_name_or_path: ${CONFIG_DIR}/models/gemma2",
        "    model_name_or_path: ${CONFIG_DIR}/models/llama",
        'submission: {sample: "${CONFIG_DIR}/sample_submission.csv"}',
        "output_dir: ${CONFIG_DIR}/runs/demo",
    ]
    assert len(theirs) == len(ours) - 1, "the line with the schema, which lies elsewhere"
    program, *arguments = shlex.split(following.removeprefix("next: "))
    assert (program, arguments) == ("ensemble", ["run", "a new/folder/config.yaml"])
    checked = project.ensemble("validate", *arguments[1:])
    assert "All checks passed" in checked.stdout, checked.stderr


def test_an_empty_folder_gets_the_demo(project: Project) -> None:
    (project.folder / "empty").mkdir()
    assert project.ensemble("demo", "--copy", "empty").stdout.startswith(f"empty: {WRITTEN}")
    assert contents(project.folder / "empty") == checkout_files(ROOT)


def test_edited_files_stay_and_are_run(project: Project) -> None:
    assert project.ensemble("demo", "--copy", "ensemble-demo").returncode == 0
    folder = project.folder / "ensemble-demo"
    config = folder / "config.yaml"
    config.write_text(config.read_text(encoding="utf-8") + "limit: 16\nreport: false\n", encoding="utf-8")
    (folder / "notes.txt").write_text("mine")
    (folder / "test.csv").unlink()
    before = contents(folder)
    done = project.ensemble("demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("ensemble-demo: wrote test.csv\n")
    after = contents(folder)
    assert {name: after[name] for name in before} == before
    assert after["test.csv"] == (ROOT / "demo/test.csv").read_bytes()
    assert len(project.read("ensemble-demo/runs/demo/submission.csv")[1]) == 16
    assert "Open " not in done.stdout, "there is no report"

    again = project.ensemble("demo")
    assert again.returncode == 0, again.stderr
    assert again.stdout.startswith("ensemble-demo is there already; its files stay as they are\n")
    assert "gemma2: done by an earlier run, reused" in again.stdout
    assert again.stdout.splitlines()[-2:] == [
        "To change something, edit ensemble-demo/config.yaml, then: ensemble run ensemble-demo/config.yaml",
        "For your own table and models: ensemble init TABLE MODEL...",
    ]

    config.write_text("nonsense: true\n", encoding="utf-8")
    wrong = project.ensemble("demo")
    assert (wrong.returncode, config.read_text(encoding="utf-8")) == (2, "nonsense: true\n")
    assert "nonsense" in wrong.stderr


def test_other_files_are_in_the_way(project: Project) -> None:
    before = contents(project.folder)
    assert refused(project, "--copy", ".") == (
        "error: .: holds other files, such as 'sample.csv'; name a new folder with --copy FOLDER\n"
    )
    (project.folder / "ensemble-demo").mkdir()
    (project.folder / "ensemble-demo/config.yaml").write_text("mine")
    assert "ensemble-demo: holds other files, such as 'config.yaml'; name a new folder" in refused(project)
    assert contents(project.folder) == {**before, "ensemble-demo/config.yaml": b"mine"}


@pytest.mark.parametrize("name", ["test.csv", "test.csv/folder", "/proc/folder"])
def test_a_place_that_cannot_be_written(project: Project, name: str) -> None:
    before = contents(project.folder)
    error = refused(project, "--copy", name)
    assert error.startswith("error: ensemble demo: ")
    assert name in error
    assert "choose another directory" in error
    assert contents(project.folder) == before


def test_a_full_disk_and_a_kill_leave_what_the_next_command_completes(project: Project) -> None:
    """Each at the first file of more than a megabyte."""
    program = (
        "import os, resource, signal, sys; from ensemble.cli.app import main; "
        "signal.signal(signal.SIGXFSZ, getattr(signal, sys.argv.pop(1))); main()"
    )

    def limited(action: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program, action, "demo", "--copy", "new"],
            cwd=project.folder,
            env={"PYTHONPATH": python_path(ROOT)},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)),
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )

    full = limited("SIG_IGN")
    assert full.returncode == 2, full.stdout + full.stderr
    assert full.stderr == (
        "error: cannot write new/models/gemma2/model.safetensors (File too large); make room there or choose "
        "another place\n"
    )
    assert set(files_below(project.folder / "new")) < set(checkout_files(ROOT))
    assert limited("SIG_DFL").returncode == -signal.SIGXFSZ
    assert set(files_below(project.folder / "new")) - set(checkout_files(ROOT)), "a temporary file"
    done = project.ensemble("demo", "--copy", "new")
    assert done.returncode == 0, done.stderr
    assert contents(project.folder / "new") == checkout_files(ROOT)


@pytest.mark.fresh
def test_an_installation_without_a_demo_and_with_a_damaged_one(tmp_path: Path) -> None:
    site, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    shutil.copytree(ROOT / "ensemble", site / "ensemble", ignore=shutil.ignore_patterns("__pycache__"))

    def refused_there() -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ensemble", "demo"],
            cwd=empty,
            env={"PYTHONPATH": python_path(site)},
            capture_output=True,
            text=True,
            timeout=PATIENCE_SECONDS,
        )
        assert (done.returncode, done.stdout, [*empty.iterdir()]) == (2, "", []), done.stderr
        return done.stderr

    assert refused_there() == (
        "error: this installation has no demo (ensemble/demo.tar.xz); install a wheel that was built from a whole "
        "checkout\n"
    )
    (site / ARCHIVE).write_bytes(b"\xfd7zXZ\x00 and no more")
    error = refused_there()
    assert f"{site / ARCHIVE} cannot be read" in error
    assert error.endswith("; install ensemble again\n")
