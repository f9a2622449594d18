"""Rows that were computed already are found again: a trial's, those of a table that changed, a renamed member's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.chunky import (
    ROWS,
    chunky_config,
    ids_of,
    kill_after_shards,
    kill_before_predictions,
    results,
    write_chunky_table,
)
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected
from tests.faults.steps import Step, Verdict
from tests.project import Project
from tests.sampling import one_in, shares

TRIAL = 6


def members(project: Project) -> dict[str, dict[str, Any]]:
    return {member["name"]: member for member in project.run_json()["members"]}


def counts(project: Project) -> dict[str, tuple[int, int]]:
    """Rows from earlier work, and rows computed, by member."""
    return {
        name: (member["reused_rows"], member["counters"]["rows"]) for name, member in members(project).items()
    }


def values(content: bytes) -> tuple[list[str], np.ndarray]:
    """Ids and numbers of a CSV."""
    lines = [line.split(",") for line in content.decode().splitlines()[1:]]
    return [line[0].strip('"') for line in lines], np.array([line[1:] for line in lines], dtype=float)


def check_close(got: dict[str, bytes], expected: dict[str, bytes]) -> None:
    assert got.keys() == expected.keys()
    for name in got:
        (ids, numbers), (expected_ids, expected_numbers) = values(got[name]), values(expected[name])
        assert ids == expected_ids, name
        np.testing.assert_allclose(numbers, expected_numbers, atol=1e-6)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_trials_rows_count(chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]) -> None:
    """In README's order of commands: run --limit, then run."""
    assert forked.run(chunky.folder, "--limit", str(TRIAL)) == 0, forked.printed
    trial = results_of_trial(chunky)
    assert forked.run(chunky.folder) == 0, forked.printed
    assert counts(chunky) == {"llama": (TRIAL, ROWS - TRIAL)}
    assert members(chunky)["llama"]["taken_over"] == {"predictions/llama.csv": TRIAL}
    assert ("llama: its predictions are of a table with other rows; equal rows are kept") in forked.printed
    assert f"llama: {TRIAL} of {ROWS} rows taken over from predictions/llama.csv" in forked.printed
    check_close(results(chunky), undisturbed)
    assert results(chunky)["predictions/llama.csv"].splitlines()[1 : 1 + TRIAL] == trial.splitlines()[1:]
    assert not (chunky.folder / "runs/first/work").exists()
    assert forked.run(chunky.folder) == 0, forked.printed
    assert counts(chunky) == {"llama": (ROWS, 0)}
    assert forked.run(chunky.folder, "--limit", str(TRIAL)) == 2, "it would destroy predictions of more rows"


def results_of_trial(project: Project) -> bytes:
    return (project.folder / "runs/first/predictions/llama.csv").read_bytes()


@pytest.mark.timeout(300)
def test_an_unfinished_trials_rows_count(
    chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder, "--limit", str(TRIAL), judge=kill_before_predictions) == -9
    assert forked.run(chunky.folder, judge=kill_before_predictions) == -9
    assert forked.run(chunky.folder) == 0, forked.printed
    assert counts(chunky) == {"llama": (ROWS, 0)}, "what was taken over counts as this table's own"
    check_close(results(chunky), undisturbed)


@pytest.mark.timeout(300)
def test_a_trial_leaves_an_unfinished_run_as_it_is(
    chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder, judge=kill_after_shards(3)) == -9
    assert forked.run(chunky.folder, "--limit", str(TRIAL)) == 0, forked.printed
    assert counts(chunky) == {"llama": (TRIAL, 0)}, "the rows of the full table count for the trial, too"
    assert (chunky.folder / "runs/first/work").exists()
    assert forked.run(chunky.folder) == 0, forked.printed
    assert counts(chunky) == {"llama": (12, 4)}
    assert results(chunky) == undisturbed, "byte for byte: no row of another batch was taken"


@pytest.mark.fault(18)
@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_table_that_changed(chunky: Project, forked: ForkedRuns) -> None:
    def run(names: list[str], rows: list[list[str]]) -> tuple[int, int]:
        chunky.write_csv("test.csv", names, rows)
        assert forked.run(chunky.folder) == 0, forked.printed
        numbers_counted = counts(chunky)["llama"]
        check_close(results_now(chunky), fresh_results(chunky, forked))
        return numbers_counted

    chunky.write_config(chunky_config(chunky, submission=None))
    names, rows = chunky.read("test.csv")
    text = names.index("text")
    assert run(names, rows[:12]) == (0, 12)
    assert run(names, rows) == (12, 4), "it grew"
    assert run(names, rows[::-1]) == (16, 0), "in another order"
    assert run(names, rows[3:9]) == (6, 0), "it shrank"
    renamed = [[f"new {row[0]}", *row[1:]] for row in rows[3:9]]
    assert run(names, renamed) == (6, 0), "the same texts under other ids: the ids are the new table's"
    swapped = [list(row) for row in renamed]
    swapped[0][text], swapped[1][text] = "another text", swapped[0][text]
    assert run(names, swapped) == (5, 1), "the texts decide, not the ids"
    emptied = [list(row) for row in swapped]
    emptied[2][text] = ""
    assert run(names, emptied) == (5, 1)


def fresh_results(project: Project, forked: ForkedRuns) -> dict[str, bytes]:
    """What a run makes that knows nothing of earlier ones."""
    options = ("--fresh", "--set", "output_dir=runs/fresh")
    assert forked.run(project.folder, *options) == 0, forked.printed
    return {"ensemble.csv": (project.folder / "runs/fresh/ensemble.csv").read_bytes()}


@pytest.mark.fault(18)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("is_complete", one_in(2, [False, True]))
def test_a_renamed_member(
    is_complete: bool, chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder, judge=None if is_complete else kill_after_shards(3)) == (
        0 if is_complete else -9
    )
    model = {"name": "other", "model_name_or_path": str(chunky.models / "llama")}
    chunky.write_config(chunky_config(chunky, models=[model]))
    assert forked.run(chunky.folder) == 0, forked.printed
    kept = ROWS if is_complete else 12
    assert counts(chunky) == {"other": (kept, ROWS - kept)}
    (place,) = members(chunky)["other"]["taken_over"]
    assert place.startswith("predictions/llama.csv" if is_complete else "work/llama.")
    got = results(chunky, names=["ensemble.csv", "submission.csv", "predictions/other.csv"])
    got["predictions/llama.csv"] = got.pop("predictions/other.csv")
    assert got == undisturbed, "byte for byte"
    assert (chunky.folder / "runs/first/predictions/llama.csv").exists() == is_complete
    assert forked.run(chunky.folder) == 0, forked.printed
    assert len({step.pid for step in forked.steps}) == 1, "no worker is started"


@pytest.mark.long
@pytest.mark.fault(18)
@pytest.mark.timeout(300)
def test_a_member_that_is_left_out_for_once_keeps_its_work(
    chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    """As people do under a limit: the slow member is commented out to have a submission now."""
    assert forked.run(chunky.folder, judge=kill_after_shards(3)) == -9
    model = {"name": "gemma", "model_name_or_path": str(chunky.models / "gemma")}
    chunky.write_config(chunky_config(chunky, models=[model]))
    assert forked.run(chunky.folder) == 0, forked.printed
    chunky.write_config(chunky_config(chunky))
    assert forked.run(chunky.folder) == 0, forked.printed
    assert counts(chunky) == {"llama": (12, 4)}
    assert results(chunky) == undisturbed, "byte for byte"
    assert not (chunky.folder / "runs/first/work").exists()


@pytest.mark.fault(18)
@pytest.mark.timeout(300)
def test_members_that_take_each_others_names_and_share_work(chunky: Project, forked: ForkedRuns) -> None:
    def model(name: str, max_length: int) -> dict[str, Any]:
        return {"name": name, "model_name_or_path": str(chunky.models / "llama"), "max_length": max_length}

    def run(*models: dict[str, Any]) -> dict[str, bytes]:
        chunky.write_config(chunky_config(chunky, models=list(models), submission=None))
        assert forked.run(chunky.folder) == 0, forked.printed
        names = [model["name"] for model in models]
        return {name: (chunky.folder / f"runs/first/predictions/{name}.csv").read_bytes() for name in names}

    before = run(model("a", 16), model("b", 12))
    assert before["a"] != before["b"]
    swapped = run(model("a", 12), model("b", 16))
    assert counts(chunky) == {"a": (ROWS, 0), "b": (ROWS, 0)}
    assert swapped == {"a": before["b"], "b": before["a"]}
    shared = run(model("a", 12), model("b", 16), model("c", 12))
    assert counts(chunky) == {"a": (ROWS, 0), "b": (ROWS, 0), "c": (ROWS, 0)}
    assert members(chunky)["a"]["taken_over"] == {}, "what is under its own name stays"
    assert shared == {**swapped, "c": swapped["a"]}


@pytest.mark.timeout(300)
@pytest.mark.parametrize("policy", one_in(2, ["uniform", "fail"]))
def test_bad_rows_of_a_trial(policy: str, chunky: Project, forked: ForkedRuns, tmp_path: Path) -> None:
    """Kept where they are to be uniform, else tried again: as with any earlier run."""
    chunky.write_config(chunky_config(chunky, on_bad_row=policy))
    injected = Injected(tmp_path, Fault("nan", ids_of(chunky, 2)))
    code = forked.run(chunky.folder, "--limit", str(TRIAL), faults=injected)
    assert code == (0 if policy == "uniform" else 1), forked.printed
    assert forked.run(chunky.folder) == 0, forked.printed
    (member,) = chunky.run_json()["members"]
    if policy == "uniform":
        assert counts(chunky) == {"llama": (TRIAL, ROWS - TRIAL)}
        assert [*member["bad_rows"]] == ["2"]
    else:
        assert counts(chunky) == {"llama": (TRIAL - 1, ROWS - TRIAL + 1)}
        assert member["bad_rows"] == {}


@pytest.mark.fault(17)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("harm", one_in(4, ["rows", "predictions", "manifest", "scheme"]))
def test_work_that_cannot_be_proved_is_not_taken_over(
    harm: str, chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder, "--limit", str(TRIAL)) == 0, forked.printed
    folder = chunky.folder / "runs/first/predictions"
    rows, predictions, manifest = (folder / f"llama.{ending}" for ending in ("rows", "csv", "json"))
    if harm == "rows":
        content = bytearray(rows.read_bytes())
        content[-1] ^= 1
        rows.write_bytes(content)
    elif harm == "predictions":
        predictions.write_bytes(predictions.read_bytes().replace(b"0.", b"0.1", 1))
    elif harm == "manifest":
        manifest.unlink()
    else:
        document = json.loads(manifest.read_text())
        document["fingerprint"]["scheme"] = 1
        manifest.write_text(json.dumps(document, indent=2))
        rows.unlink()
    assert forked.run(chunky.folder) == 0, forked.printed
    assert counts(chunky) == {"llama": (0, ROWS)}
    assert results(chunky) == undisturbed
    assert ("its predictions are of another version" in forked.printed) == (harm == "scheme")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("share", shares(10))
def test_a_trial_killed_at_each_name_it_gives_is_of_use_or_of_none(
    share: int, project: Project, forked: ForkedRuns, tmp_path: Path
) -> None:
    """And so is the full run after it, killed while it takes the trial's rows over."""
    write_chunky_table(project, 8)
    project.write_config(chunky_config(project, submission=None))
    expected = fresh_results(project, forked)
    assert forked.run(project.folder, "--limit", "6") == 0, forked.printed
    shutil.copytree(project.folder / "runs", tmp_path / "runs")
    for number in range(share, 100, 10):
        shutil.rmtree(project.folder / "runs")
        shutil.copytree(tmp_path / "runs", project.folder / "runs")
        seen = 0

        def judge(step: Step) -> Verdict:
            nonlocal seen
            seen += step.call.startswith(("rename", "unlink"))
            return Verdict.KILL if seen > number else Verdict.GO  # noqa: B023

        code = forked.run(project.folder, judge=judge)
        if code == 0:
            break
        assert code == -9, forked.printed
        assert forked.run(project.folder) == 0, forked.printed
        assert counts(project)["llama"][0] >= 6, f"{number}: nothing of the trial is lost"
        check_close(results_now(project), expected)
    assert number > 8


def results_now(project: Project) -> dict[str, bytes]:
    return {"ensemble.csv": (project.folder / "runs/first/ensemble.csv").read_bytes()}
