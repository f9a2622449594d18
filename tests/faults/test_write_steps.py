"""A run that is killed, or finds the disk full, at each of its writes in turn; the same command again finishes it.

The steps are those of all processes of a run together, as the kernel sees them.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.faults.chunky import RESULTS, ROWS_PER_CHUNK, chunky_config, results, write_chunky_table
from tests.faults.forked.runs import ForkedRuns
from tests.faults.steps import Judge, Step, Verdict
from tests.project import Project
from tests.sampling import shares

ROWS = 2 * ROWS_PER_CHUNK
FINAL = {**{name: f"runs/first/{name}" for name in RESULTS}, "out/submission.csv": "out/submission.csv"}
SUBMISSION = "out/.submission.csv"  # while it is being written
# Of a sweep, one share is usual.
SHARES = 18


@pytest.fixture
def small(project: Project) -> Project:
    """A project of two chunks."""
    write_chunky_table(project, ROWS)
    project.write_config(chunky_config(project))
    return project


def start_over(project: Project) -> None:
    for name in ("runs", "out"):
        shutil.rmtree(project.folder / name, ignore_errors=True)


def kill_at(number: int, counts: Callable[[Step], bool]) -> Judge:
    """Kills the run at the n-th, from 0, of the steps that count."""
    seen = 0

    def judge(step: Step) -> Verdict:
        nonlocal seen
        if not counts(step):
            return Verdict.GO
        seen += 1
        return Verdict.KILL if seen > number else Verdict.GO

    return judge


def changes_something(step: Step) -> bool:
    """A kill before the others leaves what a kill before the next of these leaves."""
    return not step.is_sync


def rows_on_disk(project: Project) -> int:
    """Rows that need not be computed again, by the names of the files there are."""
    folder = project.folder / "runs/first"
    if (folder / "predictions/llama.json").exists():
        return ROWS
    parts = [re.match(r"(\d+)-(\d+)\.\w+\.csv$", path.name) for path in folder.glob("work/llama.*/*")]
    return sum(int(part[2]) - int(part[1]) for part in parts if part)


def check_names(project: Project, *versions: Mapping[str, bytes]) -> None:
    """Whatever has its final name is whole: as it was before, or as it will be."""
    for key, name in FINAL.items():
        path = project.folder / name
        assert not path.exists() or path.read_bytes() in [version[key] for version in versions], name
    for path in (project.folder / "runs").rglob("*.json"):
        json.loads(path.read_text(encoding="utf-8"))


def check_finished(project: Project, expected: Mapping[str, bytes]) -> None:
    assert results(project) == expected
    assert project.run_json()["status"] == "complete"
    left = sorted(path.name for path in (project.folder / "runs/first").iterdir())
    assert left == [
        ".lock",
        "config.yaml",
        "ensemble.csv",
        "logs",
        "predictions",
        "run.json",
        "submission.csv",
    ]
    assert not half_files(project)


def half_files(project: Project) -> list[Path]:
    return [path for path in project.folder.rglob("*") if ".tmp-" in path.name]


@pytest.mark.fault(12, 16, 21)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", shares(SHARES))
def test_killed_at_every_write(share: int, small: Project, forked: ForkedRuns) -> None:
    """All processes of the run are gone at once, before the step takes effect; nothing is repaired by hand."""
    assert forked.run(small.folder) == 0, forked.printed
    expected, count = results(small), sum(map(changes_something, forked.steps))
    assert count > 60
    for number in range(share, 2 * count, SHARES):
        start_over(small)
        code = forked.run(small.folder, judge=kill_at(number, changes_something))
        if code == 0:  # there were no more steps
            break
        last = forked.steps[-1]
        assert code == -9, f"{last}: {forked.printed}"
        check_names(small, expected)
        kept = rows_on_disk(small)
        assert forked.run(small.folder) == 0, f"{last}: {forked.printed}"
        check_finished(small, expected)
        (member,) = small.run_json()["members"]
        assert member["reused_rows"] == kept, f"{last}: no finished chunk is repeated"
    assert count - 5 < number < count + 5 + SHARES


@pytest.mark.fault(1)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", shares(2))
def test_a_worker_killed_at_each_write_of_a_part(share: int, small: Project, forked: ForkedRuns) -> None:
    """The part may be half written, or whole and not told of: a fresh worker does the chunk, and that is all."""
    assert forked.run(small.folder) == 0, forked.printed
    expected = results(small)

    parent = forked.steps[0].pid
    (worker,) = {step.pid for step in forked.steps} - {parent}
    count = sum(step.pid == worker and is_about_parts(step) for step in forked.steps) // 2
    assert count > 2
    for number in range(share, count + 1, 2):  # the last one is the first of the other part
        start_over(small)
        assert forked.run(small.folder, judge=kill_a_worker_at(number)) == 0, forked.printed
        check_finished(small, expected)
        (member,) = small.run_json()["members"]
        assert [worker["exit_code"] for worker in member["workers"]] == [-9, 0]
        assert [fault["remedy"] for fault in member["faults"]] == ["again"]
        rows = [worker["counters"]["rows"] for worker in member["workers"]]
        assert rows == ([0, ROWS] if number < count else [ROWS_PER_CHUNK, ROWS_PER_CHUNK])


def is_about_parts(step: Step) -> bool:
    return "/work/" in step.paths[-1] and changes_something(step)


def kill_a_worker_at(number: int) -> Judge:
    """Kills the first worker at its n-th step, from 0, that is about parts."""
    pids: list[int] = []
    seen = 0

    def judge(step: Step) -> Verdict:
        nonlocal seen
        if step.pid not in pids:
            pids.append(step.pid)  # the parent's is the first one
        if pids.index(step.pid) != 1 or not is_about_parts(step):
            return Verdict.GO
        seen += 1
        return Verdict.KILL_IT if seen > number else Verdict.GO

    return judge


@pytest.mark.fault(16, 18)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", shares(8))
def test_killed_while_it_replaces_older_results(
    share: int, small: Project, forked: ForkedRuns, tmp_path: Path
) -> None:
    """At each step that gives or takes a name; the files are those of the one config or of the other."""
    assert forked.run(small.folder) == 0, forked.printed
    old = results(small)
    shutil.copytree(small.folder, tmp_path / "before", symlinks=True)
    small.write_config(chunky_config(small, defaults={"text_column": "text", "max_length": 12}))

    def names(step: Step) -> bool:
        inside = not any(folder in step.paths[-1] for folder in ("/work/", "/logs/"))
        return inside and step.call.startswith(("rename", "unlink"))

    new: dict[str, bytes] = {}
    for number in [-1, *range(share, 100, 8)]:
        judge = kill_at(number, names) if new else None
        for name in ("runs", "out"):
            shutil.rmtree(small.folder / name)
            shutil.copytree(tmp_path / "before" / name, small.folder / name)
        code = forked.run(small.folder, judge=judge)
        if not new:
            assert code == 0, forked.printed
            new = results(small)
            assert all(old[name] != new[name] for name in FINAL)
            continue
        if code == 0:
            break
        last = forked.steps[-1]
        check_names(small, old, new)
        assert forked.run(small.folder) == 0, f"{last}: {forked.printed}"
        check_finished(small, new)
    assert number > 8


@pytest.mark.fault(14)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("share", shares(10))
def test_a_full_disk_at_the_end_of_every_file(share: int, small: Project, forked: ForkedRuns) -> None:
    """From the last write of a file on, nothing more fits; then there is room again."""
    assert forked.run(small.folder) == 0, forked.printed
    expected = results(small)
    steps = takers(forked.steps)
    names = list(dict.fromkeys(map(name_of, steps)))
    assert len(names) > 12, names
    for name in names[share::10]:
        start_over(small)
        assert forked.run(small.folder, judge=full_from_last_write(name, steps)) in (1, 2), name
        assert "No space left on device" in forked.printed, f"{name}: {forked.printed}"
        assert "Traceback" not in forked.printed, f"{name}: {forked.printed}"
        assert not half_files(small), name
        check_names(small, expected)
        kept = rows_on_disk(small)
        assert forked.run(small.folder) == 0, f"{name}: {forked.printed}"
        check_finished(small, expected)
        assert small.run_json()["members"][0]["reused_rows"] == kept


def takers(steps: list[Step]) -> list[Step]:
    return [step for step in steps if step.takes_space]


def full_from_last_write(name: str, steps: list[Step]) -> Judge:
    """The disk is full from the step on that is the file's last one among these steps.

    The count of a file's writes is the same in each run, but for run.json: it is written now and then while the run
    goes on, and for the last time when the submission is there. So its steps are counted from there on.
    """
    is_run_json = name.endswith("/.run.json")
    names = [name_of(step) for step in steps]
    start = names.index(SUBMISSION) if is_run_json else 0
    last = names[start:].count(name)
    counting = not is_run_json
    seen = 0

    def judge(step: Step) -> Verdict:
        nonlocal counting, seen
        if not step.takes_space:
            return Verdict.GO
        counting = counting or name_of(step) == SUBMISSION
        seen += counting and name_of(step) == name
        return Verdict.NO_SPACE if seen >= last else Verdict.GO

    return judge


def name_of(step: Step) -> str:
    """The file that is being written, without what differs between runs."""
    return re.sub(r"\.tmp-[\w-]+$", "", step.paths[0])


@pytest.mark.fault(16)
def test_a_power_cut_finds_what_a_name_stands_for_on_the_disk(small: Project, forked: ForkedRuns) -> None:
    """Content goes to the disk before the rename, the rename before anything goes on."""
    assert forked.run(small.folder) == 0, forked.printed
    steps = forked.steps
    renames = [step for step in steps if step.call.startswith("rename")]
    assert len(renames) > 8
    for step in renames:
        half, final = step.paths
        its_own = [other for other in steps if other.thread == step.thread]
        place = its_own.index(step)
        before = [other for other in its_own[:place] if other.paths[0] == half]
        assert before[-1].call == "fsync", step
        assert its_own[place + 1].call == "fsync", step
        assert its_own[place + 1].paths == (str(Path(final).parent),), step
