"""A worker process that begins before its member is known: real ones, and the runs that take them."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from ensemble.common.gpus import Device, has_driver
from ensemble.common.protocol import CommonSpec, Event, Failed, Load, Start, WorkerSpec
from ensemble.pipeline import early_worker
from ensemble.pipeline.load import load
from ensemble.scheduling.launchers import early
from ensemble.scheduling.launchers.base import WorkerStart
from ensemble.scheduling.launchers.local import LocalLauncher, LocalWorker
from tests.faults.forked import client
from tests.faults.test_workers import is_gone
from tests.project import ROOT, Project, python_path
from tests.waiting import wait_until
from tests.worker import told
from tests.worker.test_session import publish


@pytest.fixture
def launcher() -> Iterator[LocalLauncher]:
    made = LocalLauncher({})
    yield made
    made.close()


def worker_start(folder: Path, kind: str, **changes: Any) -> WorkerStart:
    common = CommonSpec(
        labels=("a", "b"),
        activation="softmax",
        gpus=0,
        memory_limit_bytes=None,
        seed=0,
        **cast(Any, publish(folder, {"text": ["x"]})),
    )
    start: dict[str, Any] = {
        "command": Start(WorkerSpec(common, kind, {})),
        "devices": (),
        "environment": {"OWN": "its own"},
        "log": folder / "w.log",
        **changes,
    }
    return WorkerStart(**start)


def begun_process() -> int:
    assert early._begun is not None
    return early._begun.process.pid


def failure(launcher: LocalLauncher, start: WorkerStart) -> tuple[Failed, int]:
    """How the worker fails that becomes of it, and the number of its process."""
    handle = launcher.start(start)
    assert isinstance(handle, LocalWorker)
    assert handle._cores is not None
    own = handle._cores.numbers or os.sched_getaffinity(0)  # those that others hold are theirs
    try:
        handle.send(Load())
        events: list[Event] = []
        while handle.is_open:
            launcher.wait([handle], 60.0)
            events += handle.receive()
    finally:
        handle.close()
    assert isinstance(events[-1], Failed), events
    if "CPUs: " in events[-1].message:
        assert f"; CPUs: {sorted(own)};" in events[-1].message
    return events[-1], handle.pid


def test_it_becomes_the_first_worker_on_the_cpu(launcher: LocalLauncher, tmp_path: Path) -> None:
    start = worker_start(tmp_path, "tests.worker.told", cpu_share=0.5)
    with early.begun_early("tests.worker.told"):
        pid = begun_process()
        found, became = failure(launcher, start)
    assert became == pid
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert f"threads: ({threads}, '{threads}')" in found.message
    assert "its own" in found.message
    log = (tmp_path / "w.log").read_text()
    assert "imported with" in log
    assert "and what a library in C says" in log
    assert told.SECRET not in log
    fresh, other = failure(launcher, start)
    assert other != pid
    assert fresh.message.partition("; CPUs")[0] == found.message.partition("; CPUs")[0]


def test_one_that_has_ended_is_not_taken(launcher: LocalLauncher, tmp_path: Path) -> None:
    with early.begun_early("tests.worker.told"):
        pid = begun_process()
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z", "its end")
        assert failure(launcher, worker_start(tmp_path, "tests.worker.told"))[1] != pid
    assert is_gone(pid)


def test_what_it_printed_is_kept_if_it_ends_before_it_has_its_log(
    launcher: LocalLauncher, tmp_path: Path
) -> None:
    with early.begun_early("tests.worker.told"):
        pid = begun_process()
        assert early._begun is not None
        printed = early._begun.printed
        assert printed is not None
        wait_until(lambda: b"in C says" in os.pread(printed.fileno(), 1000, 0), "what it prints")
        os.kill(pid, signal.SIGSTOP)
        handle = launcher.start(worker_start(tmp_path, "tests.worker.told"))
        assert handle.began_before_seconds > 0
        os.kill(pid, signal.SIGKILL)
        assert handle.close().code == -signal.SIGKILL
    assert "and what a library in C says" in (tmp_path / "w.log").read_text()


def test_a_worker_of_another_kind_is_fresh(launcher: LocalLauncher, tmp_path: Path) -> None:
    with early.begun_early("tests.worker.told"):
        pid = begun_process()
        assert failure(launcher, worker_start(tmp_path, "tests.worker.missing"))[1] != pid
        assert begun_process() == pid, "it still waits for its own"


def test_workers_with_gpus_are_fresh(launcher: LocalLauncher, tmp_path: Path) -> None:
    gpu = Device("GPU-1", "a GPU", (7, 5), 1 << 30, 0)
    with early.begun_early("tests.worker.told"):
        pid = begun_process()
        assert failure(launcher, worker_start(tmp_path, "tests.worker.told", devices=(gpu,)))[1] != pid
    assert is_gone(pid), "it does not outlive what it was begun for"


def test_what_it_cannot_import_is_the_members_failure(launcher: LocalLauncher, tmp_path: Path) -> None:
    with early.begun_early("tests.worker.missing"):
        pid = begun_process()
        found, became = failure(launcher, worker_start(tmp_path, "tests.worker.missing"))
    assert became == pid
    assert found.error_type == "ModuleNotFoundError"
    assert "a_library_that_nobody_has" in found.message


def test_a_log_that_cannot_be_written(launcher: LocalLauncher, tmp_path: Path) -> None:
    with early.begun_early("tests.worker.told"):
        pid = begun_process()
        with pytest.raises(FileNotFoundError):
            launcher.start(worker_start(tmp_path, "tests.worker.told", log=tmp_path / "nowhere" / "w.log"))
        assert is_gone(pid)


def test_which_runs_have_one(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project.folder)
    monkeypatch.setattr(early_worker, "usable_cpus", lambda: 2)
    monkeypatch.setattr(early_worker, "has_driver", lambda: False)
    monkeypatch.setattr(early_worker, "available_memory_bytes", lambda: 16 << 30)

    def has_one(fresh: bool = False, **changes: Any) -> bool:
        project.write_config(project.config(**changes))
        with early_worker.early_worker(load(Path("config.yaml"), []), fresh):
            return early._begun is not None

    assert has_one()
    for name, value in (("usable_cpus", 1), ("has_driver", True), ("available_memory_bytes", 4 << 30)):
        with monkeypatch.context() as patch:
            patch.setattr(early_worker, name, lambda value=value: value)
            assert not has_one(), name
    assert not has_one(models=[{"name": "a", "task_type": "csv", "path": "test.csv"}])
    (project.folder / "runs" / "first").mkdir(parents=True)
    (project.folder / "runs" / "first" / "run.json").touch()
    assert not has_one()
    assert has_one(fresh=True)
    assert has_one(output_dir="n" * 300), "what is wrong with it is said later"


@pytest.mark.skipif(has_driver(), reason="runs on GPUs begin none")
def test_a_run_takes_it_and_one_that_is_refused_leaves_nothing(project: Project, tmp_path: Path) -> None:
    workers = tmp_path / "workers"
    environment = {
        "PYTHONPATH": python_path(ROOT, client.SITE),
        "TEST_WORKERS": str(workers),
        "OMP_NUM_THREADS": "2",
    }
    settings = project.config()
    settings["models"] = settings["models"][:1]
    project.write_config(settings | {"defaults": {"text_column": "nowhere"}})
    assert project.ensemble("run", "config.yaml", environment=environment).returncode == 2
    project.write_config(settings)
    done = project.ensemble("run", "config.yaml", environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (record,) = project.run_json()["members"][0]["workers"]
    *refused, pid = [json.loads(line)["pid"] for line in workers.read_text().splitlines()]
    assert record["process"] == str(pid)
    assert record["started_after_seconds"] < 0, "before workers could begin"
    assert len(refused) <= 1  # it may have been ended before it could write its number
    assert all(map(is_gone, refused))
