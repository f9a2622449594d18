"""What can happen to a worker, in real ones: they are killed, crash, hang, and run into errors."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.chunky import chunky_config, ids_of, results
from tests.faults.inject import Fault, Injected
from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")

ENDINGS = (
    "was killed by signal 9 (SIGKILL)",
    "was killed by signal 11 (SIGSEGV)",
    "ended with exit code 0, before its work was done",
)
POISON = "CUDA error: an illegal memory access was encountered"


def run(project: Project, injected: Injected, *options: str) -> tuple[int, str]:
    """The exit code and all that was printed."""
    environment = {**injected.environment, "OMP_NUM_THREADS": "1"}
    done = project.ensemble("run", "config.yaml", *options, environment=environment)
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stdout + done.stderr


def is_gone(pid: int) -> bool:
    """Whether a process has ended; orphans that have are zombies until this test has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def faults_of(project: Project) -> list[tuple[str, list[int] | None, str]]:
    """Kind, places in the order, and remedy of each fault, by run.json."""
    (member,) = project.run_json()["members"]
    return [(fault["kind"], fault["rows"], fault["remedy"]) for fault in member["faults"]]


def workers_of(project: Project) -> list[dict[str, Any]]:
    (member,) = project.run_json()["members"]
    workers: list[dict[str, Any]] = member["workers"]
    return workers


def log_of(project: Project, replica: int) -> str:
    return (project.folder / f"runs/first/logs/llama-{replica}.log").read_text()


@pytest.mark.fault(1, 2, 3)
def test_workers_that_end_without_a_word(
    chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    """Killed, crashed, and gone with exit code 0, each in the midst of another chunk."""
    injected = Injected(
        tmp_path,
        Fault("kill", ids_of(chunky, 2), times=1),
        Fault("segfault", ids_of(chunky, 5), times=1),
        Fault("exit", ids_of(chunky, 11), times=1),
    )
    code, printed = run(chunky, injected)
    assert code == 0, printed
    assert results(chunky) == undisturbed
    pids = [int(worker["process"]) for worker in workers_of(chunky)]
    assert [injected.pids(number) for number in range(3)] == [[pid] for pid in pids[:3]]
    for pid, ending in zip(pids, ENDINGS, strict=False):
        assert f"(process {pid}) {ending} with 4 rows in hand; they are tried again" in printed
    assert faults_of(chunky) == [("death", [start, start + 4], "again") for start in (0, 4, 8)]
    assert [worker["exit_code"] for worker in workers_of(chunky)] == [-9, -11, 0, 0]
    # Nor is a finished chunk repeated.  The worker that died while one was being written leaves it to the next.
    assert sum(worker["counters"]["rows"] for worker in workers_of(chunky)) == 16
    assert "Segmentation fault" in log_of(chunky, 1)
    assert "in predict" in log_of(chunky, 1), "the Python stack"


@pytest.mark.fault(5)
@pytest.mark.long
def test_workers_that_hang(chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """One whose main thread does not come back, and one that is stopped altogether."""
    injected = Injected(
        tmp_path,
        Fault("start a process", ids_of(chunky, 3), times=1),
        Fault("sleep", ids_of(chunky, 3), times=1),
        Fault("freeze", ids_of(chunky, 14), times=1),
    )
    code, printed = run(chunky, injected, "--set", "hang_timeout=8s")
    assert code == 0, printed
    assert results(chunky) == undisturbed
    assert "finished no batch for 8 s (hang_timeout); its log shows where" in printed
    assert "has not responded for 8 s" in printed
    assert faults_of(chunky) == [("hang", [start, start + 4], "again") for start in (0, 12)]
    assert [worker["exit_code"] for worker in workers_of(chunky)] == [-signal.SIGABRT, -signal.SIGKILL, 0]
    assert "Fatal Python error: Aborted" in log_of(chunky, 0)
    assert "in predict" in log_of(chunky, 0)
    (child,) = injected.started()
    assert is_gone(child), "the whole group is ended"


@pytest.mark.fault(4, 6, 7, 9, 10)
def test_errors_in_a_worker(chunky: Project, tmp_path: Path, undisturbed: dict[str, bytes]) -> None:
    """Rows that cannot be computed for three reasons, and an error that only a fresh process gets over."""
    injected = Injected(
        tmp_path,
        Fault("raise", ids_of(chunky, 2), error="LookupError", text="an odd row"),
        Fault("raise", ids_of(chunky, 7), error="torch.OutOfMemoryError", text="CUDA out of memory."),
        Fault("nan", ids_of(chunky, 9)),
        Fault("raise", ids_of(chunky, 13), times=1, text=POISON),
    )
    chunky.write_config(chunky_config(chunky, on_bad_row="uniform"))
    code, printed = run(chunky, injected)
    assert code == 0, printed
    first, second = (int(worker["process"]) for worker in workers_of(chunky))
    assert set(injected.pids(0)) == {first}, "another process would not help"
    assert (len(injected.pids(0)), injected.pids(3)) == (3, [first])
    assert faults_of(chunky) == [
        ("error", [0, 4], "in halves"),
        ("error", [2, 4], "in halves"),
        ("error", [2, 3], "row set aside"),
        ("death", [12, 16], "again"),
    ]
    (member,) = chunky.run_json()["members"]
    assert member["faults"][2]["message"] == "LookupError: an odd row"
    assert "in predict" in member["faults"][2]["traceback"]
    assert POISON in member["faults"][3]["message"]
    reasons = member["bad_rows"]
    assert list(reasons) == ["2", "7", "9"]
    assert reasons["2"] == "LookupError: an odd row"
    assert "memory of cpu even alone" in reasons["7"]
    assert "NaN" in reasons["9"]
    for row in (3, 8, 10):
        assert f"row {row}" in printed
    assert second in {int(worker["process"]) for worker in workers_of(chunky) if worker["exit_code"] == 0}
    _check_the_other_rows(chunky, undisturbed, {2, 7, 9})


def _check_the_other_rows(project: Project, undisturbed: dict[str, bytes], bad: set[int]) -> None:
    got = [row[1:] for row in project.read("runs/first/predictions/llama.csv")[1]]
    lines = undisturbed["predictions/llama.csv"].decode().splitlines()[1:]
    for row, (cells, line) in enumerate(zip(got, lines, strict=True)):
        values = np.array(cells, dtype=float)
        expected = np.full(3, 1 / 3) if row in bad else np.array(line.split(",")[1:], dtype=float)
        np.testing.assert_allclose(values, expected, atol=1e-5, err_msg=f"row {row}")
