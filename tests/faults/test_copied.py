"""A run directory that was copied, zipped or moved is known by what is in it; other people's files are refused."""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from ensemble.pipeline.run_dir import RunDir
from tests.faults.chunky import ROWS, ROWS_PER_CHUNK, ids_of, kill_after_shards, results
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected
from tests.project import Project
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("warm")

FIRST, OTHER = "runs/first", "runs/other place"


def visible(source: Path, target: Path) -> None:
    """As datasets are copied: no hidden files, no empty folders, no times."""
    for path in sorted(source.rglob("*")):
        if path.is_file() and not path.name.startswith("."):
            place = target / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(path.read_bytes())
            os.utime(place, (0, 0))


def zipped(source: Path, target: Path) -> None:
    archive = target.with_suffix(".zip")
    with zipfile.ZipFile(archive, "w") as file:
        for path in sorted(source.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                file.write(path, path.relative_to(source))
    with zipfile.ZipFile(archive) as file:
        file.extractall(target)


def all_of_it(source: Path, target: Path) -> None:
    """With the lock that names the process that held it."""
    shutil.copytree(source, target)
    assert (target / ".lock").read_text().startswith("process ")


def moved(source: Path, target: Path) -> None:
    source.rename(target)


def read_only_for_a_while(source: Path, target: Path) -> None:
    shutil.copytree(source, target)
    everything = [target, *target.rglob("*")]
    modes = [path.stat().st_mode for path in everything]
    for path in everything:
        path.chmod(0o500 if path.is_dir() else 0o400)
    for path, mode in zip(everything, modes, strict=True):
        path.chmod(mode)


COPIES = (visible, zipped, all_of_it, moved, read_only_for_a_while)
Copy = Callable[[Path, Path], None]


def reused(project: Project, folder: str) -> tuple[int, int]:
    (member,) = project.run_json(folder)["members"]
    return member["reused_rows"], member["counters"]["rows"]


@pytest.mark.fault(35)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("copy", one_in(3, COPIES))
def test_an_unfinished_run_goes_on_in_its_copy(
    copy: Copy, chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder, judge=kill_after_shards(3)) == -9
    copy(chunky.folder / FIRST, chunky.folder / OTHER)
    assert forked.run(chunky.folder, "--set", f"output_dir={OTHER}") == 0, forked.printed
    assert reused(chunky, OTHER) == (3 * ROWS_PER_CHUNK, ROWS_PER_CHUNK)
    assert results(chunky, OTHER) == undisturbed


@pytest.mark.fault(19, 35)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("copy", one_in(5, COPIES))
def test_nothing_is_computed_in_the_copy_of_a_complete_run(
    copy: Copy, chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder) == 0, forked.printed
    copy(chunky.folder / FIRST, chunky.folder / OTHER)
    assert forked.run(chunky.folder, "--set", f"output_dir={OTHER}") == 0, forked.printed
    assert "llama: done by" in forked.printed
    assert len({step.pid for step in forked.steps}) == 1, "no worker is started"
    assert results(chunky, OTHER) == undisturbed


def without(*patterns: str) -> Copy:
    def copy(source: Path, target: Path) -> None:
        visible(source, target)
        for pattern in patterns:
            for path in list(target.glob(pattern)):
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    return copy


def cut(pattern: str) -> Copy:
    def copy(source: Path, target: Path) -> None:
        visible(source, target)
        for path in sorted(target.glob(pattern))[:1]:
            path.write_bytes(path.read_bytes()[: path.stat().st_size * 3 // 4])

    return copy


@pytest.mark.fault(35)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("copy", "kept"),
    one_in(
        4,
        [
            (without("run.json"), 12),
            (cut("run.json"), 12),
            (without("run.json", "logs"), 12),
            (without("run.json", "logs", "work/*/rows.bin", "config.yaml"), 12),
            (cut("work/*/rows.bin"), 12),
            (without("work/*/order.npy", "work/table.arrow"), 12),
            (cut("work/table.arrow"), 12),
            (cut("work/*/*.csv"), 8),
            (without("work/*/000000004-*.csv"), 8),
            (without("work"), 0),
        ],
    ),
)
def test_half_a_copy_of_an_unfinished_run(
    copy: Copy, kept: int, chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder, judge=kill_after_shards(3)) == -9
    copy(chunky.folder / FIRST, chunky.folder / OTHER)
    assert forked.run(chunky.folder, "--set", f"output_dir={OTHER}") == 0, forked.printed
    assert reused(chunky, OTHER) == (kept, ROWS - kept)
    assert results(chunky, OTHER) == undisturbed


@pytest.mark.fault(35)
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("copy", "kept"),
    one_in(
        3,
        [
            (without("run.json", "logs", "ensemble.csv", "submission.csv", "config.yaml"), ROWS),
            (without("predictions/*.rows"), ROWS),
            (cut("predictions/*.rows"), ROWS),
            (cut("predictions/*.csv"), 0),
            (cut("predictions/*.json"), 0),
            (without("predictions"), 0),
        ],
    ),
)
def test_half_a_copy_of_a_complete_run(
    copy: Copy, kept: int, chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder) == 0, forked.printed
    copy(chunky.folder / FIRST, chunky.folder / OTHER)
    assert forked.run(chunky.folder, "--set", f"output_dir={OTHER}") == 0, forked.printed
    assert reused(chunky, OTHER)[0] == kept
    assert results(chunky, OTHER) == undisturbed


@pytest.mark.fault(35)
@pytest.mark.timeout(300)
def test_a_copy_made_while_the_original_runs(
    chunky: Project, forked: ForkedRuns, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """Each is its own: the copy finishes while the original still waits, which then finishes, too."""
    injected = Injected(tmp_path, Fault("wait", ids_of(chunky, 5), times=1))
    codes: list[int] = []

    def act() -> None:
        injected.wait_for()
        try:
            shutil.copytree(chunky.folder / FIRST, chunky.folder / OTHER)
            done = chunky.ensemble("run", "config.yaml", "--set", f"output_dir={OTHER}")
            codes.append(done.returncode)
        finally:
            injected.let_go()

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    assert forked.run(chunky.folder, faults=injected) == 0, forked.printed
    thread.join(60)
    assert codes == [0]
    assert reused(chunky, OTHER) == (ROWS_PER_CHUNK, ROWS - ROWS_PER_CHUNK)
    assert results(chunky) == results(chunky, OTHER) == undisturbed


STRANGERS = {
    "predictions": ("predictions/llama.csv", "id,a\n1,0.5\n"),
    "predictions and another json": ("predictions/llama.json", '{"fingerprint": "x", "sha256": "y"}'),
    "work": ("work/thesis/chapter.csv", "1,2\n"),
    "logs": ("logs/train.log", "2024-01-01 00:00:00,000 INFO ensemble of models trained\n"),
    "logs/run.log": ("logs/run.log", "2024-01-01 00:00:00,000 INFO ensemble started\n"),
    "config.yaml": ("config.yaml", "a: 1\n"),
    "run.json": ("run.json", '{"status": "complete", "members": []}'),
    "ensemble.csv": ("ensemble.csv", "id,a\n"),
    "submission.csv": ("submission.csv", "id,a\n"),
}


@pytest.mark.fault(35)
@pytest.mark.parametrize("what", STRANGERS)
@pytest.mark.parametrize("with_lock", one_in(2, [False, True]))
def test_files_of_somebody_else_are_refused_by_name(what: str, with_lock: bool, project: Project) -> None:
    """Whether a file is called .lock there or not: many programs have one."""
    name, text = STRANGERS[what]
    place = project.folder / FIRST / name
    place.parent.mkdir(parents=True)
    place.write_text(text)
    if with_lock:
        (project.folder / FIRST / ".lock").touch()
    project.write_config(project.config())
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    told = " ".join(done.stderr.split())
    assert f"holds {name.split('/')[0]}, which no run has made and this one would replace" in told
    assert place.read_text() == text


def test_empty_files_and_folders_are_nothing_to_lose(tmp_path: Path, project: Project) -> None:
    folder = project.folder / FIRST
    for name in ("predictions", "work/deep", "logs"):
        (folder / name).mkdir(parents=True)
    (folder / "logs/run.log").touch()
    (folder / "ensemble.csv").symlink_to(tmp_path / "precious")
    assert not RunDir(folder).is_made_by_runs()
    assert RunDir(folder).foreign_names() == []
    (tmp_path / "precious").write_text("precious")
    assert RunDir(folder).foreign_names() == ["ensemble.csv"]
    project.write_config(project.config())
    assert project.ensemble("validate", "config.yaml").returncode == 2
    (tmp_path / "precious").unlink()
    done = project.ensemble("validate", "config.yaml")
    assert done.returncode == 0, done.stderr
