"""A run that is killed and goes on in other circumstances has the threads that it began with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.faults.chunky import RESULTS, chunky_config, ids_of
from tests.faults.inject import Fault, Injected
from tests.project import Project

ALONE = ("--set", "cpu_workers=1")


def threads_of(pid: int) -> int:
    """The threads that a worker was started with."""
    variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return int(
        dict(variable.split(b"=", 1) for variable in variables if b"=" in variable)[b"OMP_NUM_THREADS"]
    )


def run(
    project: Project, folder: Path, row: int, *options: str, cores: int = 2, is_killed: bool = False
) -> tuple[int, str]:
    """Run the config, and kill the run at a row if asked; the threads of the row's worker, and what was printed."""
    folder.mkdir()
    injected = Injected(folder, Fault("wait", ids_of(project, row), times=1))
    own = {"OMP_NUM_THREADS": str(cores), "TEST_FORK_SERVER": ""}  # a fork has the server's variables
    environment = {**injected.environment, **own}
    with project.start("run", "config.yaml", *options, environment=environment) as process:
        injected.wait_for()
        threads = threads_of(injected.pids()[0])
        if is_killed:
            process.kill()
        injected.let_go()
        printed = process.communicate()[0]
    assert process.returncode == (-9 if is_killed else 0), printed
    return threads, printed


def kept(project: Project) -> object:
    """What stands in the member's work folder."""
    (path,) = project.folder.glob("runs/first/work/llama.*/choices.json")
    return json.loads(path.read_text())["cpu"]


@pytest.fixture
def begun(chunky: Project, tmp_path: Path) -> Project:
    """A run by one worker with two threads that was killed when a part was done."""
    chunky.write_config(chunky_config(chunky))
    assert run(chunky, tmp_path / "begun", 9, *ALONE, is_killed=True)[0] == 2
    assert kept(chunky) == {"threads": 2, "workers": 1}
    return chunky


@pytest.mark.long
@pytest.mark.fault(42)
def test_a_run_that_goes_on_is_the_same_run(begun: Project, tmp_path: Path) -> None:
    """By itself it would take two workers with a thread each."""
    threads, printed = run(begun, tmp_path / "resumed", 13)
    assert threads == 2
    assert "go on with" not in printed
    (member,) = begun.run_json()["members"]
    assert member["reused_rows"] > 0
    first, second = (begun.folder / f"runs/{name}" for name in ("first", "second"))
    assert run(begun, tmp_path / "undisturbed", 13, *ALONE, "--set", f"output_dir={second}")[0] == 2
    assert all((first / name).read_bytes() == (second / name).read_bytes() for name in RESULTS)


@pytest.mark.long
@pytest.mark.fault(42)
@pytest.mark.parametrize(
    ("options", "cores"), [(["--set", "cpu_workers=2"], 2), ([], 1)], ids=["by the user", "by the machine"]
)
def test_what_the_user_sets_wins_and_what_the_machine_cannot_hold_is_chosen_anew(
    begun: Project, tmp_path: Path, options: list[str], cores: int
) -> None:
    threads, printed = run(begun, tmp_path / "resumed", 13, *options, cores=cores)
    assert threads == 1
    expected = "llama: its workers began with 2 threads each and go on with 1: last digits of its rows"
    assert expected in " ".join(printed.split())
