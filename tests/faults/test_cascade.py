"""Members with ``when`` where something goes wrong: what they compute is what the others' values say in the end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.chunky import ROWS, chunky_config, ids_of, kill_after_shards, results
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected
from tests.faults.steps import Step, Verdict
from tests.project import Project
from tests.sampling import one_in

NAMES = ("ensemble.csv", "predictions/first.csv", "predictions/second.csv")
BAD = 6


def cascade(project: Project, when: dict[str, float], **changes: Any) -> dict[str, Any]:
    """Two llamas, the second with another max_length and only where ``when`` says so."""
    model = {"model_name_or_path": str(project.models / "llama")}
    models = [
        {**model, "name": "first"},
        {**model, "name": "second", "max_length": 12, "when": when},
    ]
    return chunky_config(project, models=models, **changes)


def values(project: Project, name: str) -> np.ndarray:
    """[16, 3], NaN where there is no row."""
    result = {row[0]: row[1:] for row in project.read(f"runs/first/{name}.csv")[1]}
    return np.array([result.get(row_id, [np.nan] * 3) for row_id in project.ids], dtype=float)


def closest(project: Project, rows: int) -> list[int]:
    ordered = np.sort(values(project, "predictions/first"), axis=1)
    return sorted(np.argsort(ordered[:, -1] - ordered[:, -2], kind="stable")[:rows].tolist())


def rows_of(project: Project, name: str) -> list[int]:
    return np.flatnonzero(~np.isnan(values(project, f"predictions/{name}")[:, 0])).tolist()


@pytest.mark.parametrize("limit", one_in(2, [{"time_limit": "1h"}, {}]), ids=["limited", "free"])
def test_killed_and_resumed_it_ends_with_the_same_bytes(
    chunky: Project, forked: ForkedRuns, limit: dict[str, str]
) -> None:
    chunky.write_config(cascade(chunky, {"share": 0.5}, **limit))
    assert forked.run(chunky.folder) == 0, forked.printed
    undisturbed = results(chunky, names=NAMES)
    assert rows_of(chunky, "second") == closest(chunky, ROWS // 2)
    first_chunk = closest(chunky, 4)
    assert forked.run(chunky.folder, "--fresh", judge=kill_after_shards(2, "first")) == -9
    assert forked.run(chunky.folder, judge=kill_after_shards(1, "second")) == -9
    (shard,) = chunky.folder.glob("runs/first/work/second.*/*.csv")
    rows = sorted(int(line.split(",")[0]) for line in shard.read_text().splitlines()[1:])
    if limit:
        assert rows == first_chunk, "the closest calls come first"
    assert forked.run(chunky.folder) == 0, forked.printed
    assert results(chunky, names=NAMES) == undisturbed
    assert [member["reused_rows"] for member in chunky.run_json()["members"]] == [ROWS, len(rows)]


def test_rows_of_equal_texts_are_selected_alike_after_a_kill(chunky: Project, forked: ForkedRuns) -> None:
    """What a member has computed is not taken over for rows of the same text that it is not asked for."""
    rows = [[row_id, chunky.texts[row % 2], "tie"] for row, row_id in enumerate(chunky.ids)]
    chunky.write_csv("test.csv", ["id", "text", "label"], rows)
    chunky.write_config(cascade(chunky, {"share": 0.25}))
    assert forked.run(chunky.folder) == 0, forked.printed
    undisturbed = results(chunky, names=NAMES)
    assert len(rows_of(chunky, "second")) == ROWS // 4

    def is_merged(step: Step) -> Verdict:
        return Verdict.KILL if step.paths[-1].endswith("ensemble.csv") else Verdict.GO

    assert forked.run(chunky.folder, "--fresh", judge=is_merged) == -9
    assert forked.run(chunky.folder) == 0, forked.printed
    assert results(chunky, names=NAMES) == undisturbed


@pytest.mark.long
def test_a_row_that_the_first_cannot_compute_is_unsure(
    chunky: Project, forked: ForkedRuns, tmp_path: Path
) -> None:
    chunky.write_config(cascade(chunky, {"margin_below": 1e-6}, on_bad_row="uniform", retries=0))
    faults = Injected(tmp_path, Fault("raise", ids_of(chunky, BAD), error="IndexError"))
    assert forked.run(chunky.folder, faults=faults) == 0, forked.printed
    first, second = chunky.run_json()["members"]
    assert list(first["bad_rows"]) == list(second["bad_rows"]) == [str(BAD)]
    assert second["cascade"]["rows"] == 1
    assert rows_of(chunky, "second") == [BAD]
    merged = values(chunky, "ensemble")
    np.testing.assert_allclose(merged[BAD], 1 / 3)
    np.testing.assert_allclose(
        np.delete(merged, BAD, 0), np.delete(values(chunky, "predictions/first"), BAD, 0)
    )
    assert forked.run(chunky.folder) == 0, forked.printed
    assert chunky.run_json()["members"][1]["reused_rows"] == 1, "what is known of a bad row stays"


@pytest.mark.long
def test_where_those_before_fail_it_goes_by_the_others_or_waits(
    chunky: Project, forked: ForkedRuns, tmp_path: Path
) -> None:
    chunky.write_config(cascade(chunky, {"share": 0.25}, retries=0))
    (three := tmp_path / "three").mkdir()
    fault = Fault("raise", ids_of(chunky, BAD), error="IndexError", times=3)  # of four rows, of two, of one
    assert forked.run(chunky.folder, faults=Injected(three, fault)) == 1, forked.printed
    first, second = chunky.run_json()["members"]
    assert (first["status"], second["status"], second["counters"]["rows"]) == ("failed", "unfinished", 0)
    assert (second["cascade"]["rows"], second["cascade"]["is_selected"]) == (0, False)
    (item := tmp_path / "one").mkdir()
    faults = Injected(item, replace(fault, times=1))
    options = ["--set", "on_member_failure=continue"]
    assert forked.run(chunky.folder, *options, faults=faults) == 0, forked.printed
    first, second = chunky.run_json()["members"]
    assert (first["status"], second["status"], second["counters"]["rows"]) == ("failed", "complete", ROWS)
    assert rows_of(chunky, "second") == [*range(ROWS)], "nobody else has them"
    # Once the first has all rows, only those count of the second that it asks for.
    assert forked.run(chunky.folder) == 0, forked.printed
    wanted = closest(chunky, 4)
    assert chunky.run_json()["members"][1]["counters"]["rows"] == 0
    assert chunky.run_json()["merged_rows"] == {"first": ROWS, "second": 4}
    merged, mean = values(chunky, "ensemble"), values(chunky, "predictions/first")
    mean[wanted] = (mean[wanted] + values(chunky, "predictions/second")[wanted]) / 2
    np.testing.assert_allclose(merged, mean, rtol=1e-12)
