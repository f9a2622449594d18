"""What workers side by side are worth on this machine: measured once, kept, and no run fails by it."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ensemble.common import host
from ensemble.pipeline.load import load
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.run_report import RunReport, ScalingReport
from ensemble.planning.forecast import ASSUMED, Scaling
from ensemble.scheduling.launchers import cores, cpu_scaling
from ensemble.scheduling.launchers.cpu_scaling import known_scaling, measured_scaling
from tests.cli.reports import report
from tests.faults.chunky import chunky_config, ids_of, write_chunky_table
from tests.faults.inject import Fault, Injected
from tests.project import Project

FEW_CORES = min(len(os.sched_getaffinity(0)), host.own_groups("cpu").cpu_limit() or 2) <= 1
# In place of the program that has torch: with one thread it computes 2 layers a second, with two 3.
PROGRAM = """
import os, sys
open({log!r}, "a").write(os.environ["OMP_NUM_THREADS"] + "\\n")
print("what a sitecustomize says")
print({mark!r}, "ready", flush=True)
for line in sys.stdin:
    print({mark!r}, 1.0 + int(os.environ["OMP_NUM_THREADS"]), flush=True)
"""


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    """Threads of the processes that were started; on a quiet machine with 2 cores and a limit on their time."""
    log = tmp_path / "started"
    log.touch()
    program = [sys.executable, "-S", "-c", PROGRAM.format(log=str(log), mark=cpu_scaling._MARK)]
    monkeypatch.setattr(cpu_scaling, "python_command", lambda module: program)
    monkeypatch.setattr(cpu_scaling, "_NAME", f"\0ensemble-test-{os.getpid()}")  # others may test, too
    monkeypatch.setattr(host, "_STAT", str(tmp_path / "stat"))  # a system that tells the load alone
    monkeypatch.setattr(host, "_LOOK_SECONDS", 0.0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(cores, "own_groups", lambda _: type("Groups", (), {"cpu_limit": lambda self: 2.0})())
    monkeypatch.setattr(host, "own_groups", lambda _: host.Groups(True, ()))
    monkeypatch.setattr(cpu_scaling, "available_memory_bytes", lambda: None)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: log.read_text().split()


@pytest.mark.long
def test_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch, on real cores, as far as there are two."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setattr(cpu_scaling, "_TIMEOUT_SECONDS", 500.0)
    monkeypatch.setattr(cpu_scaling, "_ROUNDS", 1)
    monkeypatch.setattr(cpu_scaling, "_TURN_SECONDS", 0.01)
    before = os.sched_getaffinity(0)
    found = measured_scaling([2])
    assert found.problem == ""
    assert found.slowdowns.keys() == {2}
    assert 0 < found.slowdowns[2] < math.inf
    assert os.sched_getaffinity(0) == before


def test_it_is_measured_once(started: Callable[[], list[str]], tmp_path: Path) -> None:
    assert not known_scaling().is_measured
    with ThreadPoolExecutor(2) as pool:  # as two runs that start together
        found = list(pool.map(measured_scaling, [[2], [2]]))
    assert sorted(started()) == ["1", "1", "2"]
    assert found[0] == found[1] == known_scaling() == measured_scaling([2])
    assert found[0].slowdowns == {2: 1.5}
    assert len(started()) == 3
    assert measured_scaling([2, 4]).slowdowns == {2: 1.5, 4: 1.5}, (
        "threads of two cores, twice as many workers"
    )
    assert len(started()) == 3 + 5, "one, and the four that were not measured"
    assert measured_scaling([2]).slowdowns == {2: 1.5, 4: 1.5}
    (file,) = (tmp_path / "cache" / "ensemble").iterdir()
    assert json.loads(file.read_text())["slowdowns"] == {"2": 1.5, "4": 1.5}


@pytest.mark.parametrize(
    "changes",
    [
        None,
        {"machine": "another"},
        {"slowdowns": {"2": math.nan}},
        {"slowdowns": {"2": -1.0}},
        {"slowdowns": {"0": 1.0}},
        {"slowdowns": {"two": 1.0}},
        {"slowdowns": [1]},
        {"slowdowns": None},
    ],
)
def test_a_broken_file_is_none(
    started: Callable[[], list[str]], tmp_path: Path, changes: dict[str, Any] | None
) -> None:
    machine = known_scaling().machine
    file = tmp_path / "cache" / "ensemble" / f"cpu-scaling-{machine[:16]}.json"
    file.parent.mkdir(parents=True)
    good = {"machine": machine, "slowdowns": {"2": 1.7}}
    file.write_text(json.dumps(good))
    assert known_scaling().slowdowns == {2: 1.7}
    file.write_text("{" if changes is None else json.dumps({**good, **changes}))
    assert known_scaling() == replace(ASSUMED, machine=machine)
    assert measured_scaling([2]).slowdowns == {2: 1.5}
    assert known_scaling().slowdowns == {2: 1.5}


def test_what_cannot_or_should_not_be_kept_counts_once(
    started: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert measured_scaling([2]).slowdowns == {2: 1.5}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    assert measured_scaling([2]).slowdowns == {2: 1.5}
    assert not known_scaling().is_measured, "what others' programs take of it, they do not always take"
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")  # by the specification a relative one is none
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert measured_scaling([2]).is_measured
    assert (tmp_path / "home" / ".cache" / "ensemble").is_dir()


def test_who_comes_while_it_is_measured_counts(
    started: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = iter((0.0, 9.0))
    monkeypatch.setattr(os, "getloadavg", lambda: (next(loads), 0.0, 0.0))
    assert measured_scaling([2]).slowdowns == {2: 1.5}
    assert not known_scaling().is_measured
    assert next(loads, None) is None


def test_what_time_and_memory_allow_is_measured(
    started: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = (1 + 2) * cpu_scaling._PROCESS_BYTES
    with monkeypatch.context() as small:
        small.setattr(cpu_scaling, "available_memory_bytes", lambda: room)
        assert measured_scaling([2, 4]).slowdowns == known_scaling().slowdowns == {2: 1.5}
        again = measured_scaling([2, 4])
        assert again.slowdowns == {2: 1.5}, "what is known stays known"
        assert str(again).startswith("measured on this machine; more could not be (that takes")
    # Four at a time never get ready.
    gate = tmp_path / "gate"
    program = PROGRAM.format(log=str(tmp_path / "started"), mark=cpu_scaling._MARK)
    waits = f"import os, time\nopen({str(gate)!r}, 'a').write('x')\n"
    waits += f"while os.path.getsize({str(gate)!r}) > 1 + 3: time.sleep(9)\n"
    (tmp_path / "cache" / "ensemble").rename(tmp_path / "cache" / "other")
    monkeypatch.setattr(
        cpu_scaling, "python_command", lambda _: [sys.executable, "-S", "-c", waits + program]
    )
    monkeypatch.setattr(cpu_scaling, "_TIMEOUT_SECONDS", 8.0)
    found = measured_scaling([4, 3])
    assert (found.slowdowns, found.problem) == (
        {3: 1.5},
        "4 side by side could not be (it took more than 8 s)",
    )
    assert known_scaling().slowdowns == {3: 1.5}


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        ("raise SystemExit", "a test process ended"),
        ("print({mark!r}, 'quick', flush=True)", "could not convert"),
        ("print({mark!r}, 0.0, flush=True)", "division by zero"),
        ("print({mark!r}, 1e-320, flush=True)", "it came out as inf"),
    ],
)
def test_what_goes_wrong_with_many_keeps_the_few(
    started: Callable[[], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    says: str,
    problem: str,
) -> None:
    """Of the third and the fourth beside the first two and the one."""
    counter = tmp_path / "counter"
    odd = "import os, sys\n" + f"open({str(counter)!r}, 'a').write('x')\n"
    odd += (
        f"number = os.path.getsize({str(counter)!r})\n"
        + f"print({cpu_scaling._MARK!r}, 'ready', flush=True)\n"
    )
    odd += "for line in sys.stdin:\n    if number > 3:\n        " + says.format(mark=cpu_scaling._MARK)
    odd += f"\n    else:\n        print({cpu_scaling._MARK!r}, 3.0, flush=True)\n"
    monkeypatch.setattr(cpu_scaling, "python_command", lambda _: [sys.executable, "-S", "-c", odd])
    found = measured_scaling([2, 4])
    assert found.slowdowns == known_scaling().slowdowns == {2: 1.0}
    assert "4 side by side could not be" in found.problem
    assert problem in found.problem


def test_what_goes_wrong_is_said(
    started: Callable[[], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*arguments: str) -> str:
        monkeypatch.setattr(cpu_scaling, "python_command", lambda module: list(arguments))
        found = measured_scaling([2])
        assert not found.is_measured
        return found.problem

    assert "No such file" in said(str(tmp_path / "nothing"))
    assert "a test process ended" in said(sys.executable, "-S", "-c", "raise SystemExit(3)")
    assert "could not convert" in said(
        sys.executable, "-S", "-c", f"print('{cpu_scaling._MARK} a'); print('{cpu_scaling._MARK} b'); input()"
    )
    monkeypatch.setattr(cpu_scaling, "_TIMEOUT_SECONDS", 0.5)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(cpu_scaling._NAME)
        assert "another process measures it" in said(sys.executable)
    assert "it took more than" in said(sys.executable, "-S", "-c", "input()")
    monkeypatch.setattr(cpu_scaling, "available_memory_bytes", lambda: 1 << 30)
    assert "1.0 GiB are free" in said(sys.executable)
    assert not (tmp_path / "cache").exists()


def test_a_signal_ends_it(started: Callable[[], list[str]]) -> None:
    def check() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measured_scaling([2], check)
    assert measured_scaling([2]).is_measured


def test_a_run_that_goes_on_shares_the_cpu_as_it_did(
    started: Callable[[], list[str]], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    write_chunky_table(project)
    project.write_config(chunky_config(project))
    run_json = project.folder / "runs/first/run.json"
    run_json.parent.mkdir(parents=True)

    def planned(changes: dict[str, Any]) -> Scaling:
        report(**changes).write(run_json)
        return prepare(load([Path("config.yaml")], [])).plan.scaling

    measured = measured_scaling([2])
    assumed, other = ScalingReport(measured.machine, {}), ScalingReport("another machine", {2: 1.1})
    was_kept = ScalingReport(measured.machine, {2: 1.9})
    assert planned({"status": "interrupted", "cpu_scaling": assumed}).slowdowns == {}
    assert planned({"status": "running", "cpu_scaling": was_kept}).slowdowns == {2: 1.9}
    assert RunReport.read(run_json).cpu_scaling == was_kept
    assert planned({"status": "complete", "cpu_scaling": was_kept}) == measured
    assert planned({"status": "failed", "cpu_scaling": other}) == measured
    assert planned({"status": "failed"}) == measured, "of a version that told nothing"


def test_it_is_looked_up_where_a_plan_depends_on_it(
    started: Callable[[], list[str]], project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small table leaves no choice, and every command that plans is to answer at once."""
    monkeypatch.chdir(project.folder)

    def machine(**changes: Any) -> str:
        project.write_config(project.config(**changes))
        return prepare(load([Path("config.yaml")], [])).plan.scaling.machine

    models = project.config()["models"]
    known = known_scaling().machine
    assert machine() == known, "two members, side by side or not"
    assert machine(models=models[:1]) == ""
    assert machine(cpu_workers=1) == ""
    assert machine(models=[{**models[0], "replicas": 2}]) == "", "one chunk makes one worker with all cores"
    write_chunky_table(project)
    assert machine(models=[{**models[0], "replicas": 2}]) == known, "the forecast is of half the cores"


@pytest.mark.long
@pytest.mark.skipif(FEW_CORES, reason="workers side by side need two cores")
def test_a_long_run_measures_before_it_starts(project: Project, tmp_path: Path) -> None:
    """And one that goes on does not."""
    write_chunky_table(project)
    project.write_config(chunky_config(project, retries=0))
    injected = Injected(tmp_path, Fault("kill", ids_of(project, 13)))

    def run(worth_seconds: float, *options: str, **environment: str) -> tuple[int, str, ScalingReport | None]:
        code = (
            f"from ensemble.pipeline import run; run._WORTH_MEASURING_SECONDS = {worth_seconds}\n"
            "from ensemble.scheduling.launchers import cpu_scaling; cpu_scaling._TIMEOUT_SECONDS = 500.0\n"
            "from ensemble.cli.app import main; main()"
        )
        cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "OMP_NUM_THREADS": "2"}
        done = subprocess.run(
            [sys.executable, "-c", code, "run", "config.yaml", *options],
            cwd=project.folder,
            env={**os.environ, **cache, **environment},
            capture_output=True,
            text=True,
        )
        found = RunReport.read(project.folder / "runs/first/run.json").cpu_scaling
        return done.returncode, done.stdout + done.stderr, found

    code, printed, found = run(1e9, **injected.environment)
    assert code == 1, printed
    assert found is not None
    code, printed, kept = run(0.0)
    assert code == 0, printed
    assert kept == found
    assert "measuring" not in printed
    code, printed, found = run(0.0, "--fresh")
    assert code == 0, printed
    assert "measuring 1, 2 workers side by side on this CPU" in printed
    assert "is measured on this machine)" in printed
    assert found is not None
    assert found.slowdowns.keys() == {2}
