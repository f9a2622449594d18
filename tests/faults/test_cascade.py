"""Members with ``when`` where something goes wrong: what they compute is what the others' values say in the end."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.faults.chunky import ROWS, chunky_config, ids_of, results, word
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected, token_ids
from tests.faults.steps import Judge, Step, Verdict
from tests.faults.test_endings import wait_for
from tests.nvml.sim import Gpu, NvmlSim, gpu_uuid
from tests.project import LABELS, Project
from tests.sampling import one_in
from tests.waiting import PATIENCE_SECONDS

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
    found = {row[0]: row[1:] for row in project.read(f"runs/first/{name}.csv")[1]}
    return np.array([found.get(row_id, [np.nan] * 3) for row_id in project.ids], dtype=float)


def closest(project: Project, rows: int) -> list[int]:
    ordered = np.sort(values(project, "predictions/first"), axis=1)
    return sorted(np.argsort(ordered[:, -1] - ordered[:, -2], kind="stable")[:rows].tolist())


def rows_of(project: Project, name: str) -> list[int]:
    return np.flatnonzero(~np.isnan(values(project, f"predictions/{name}")[:, 0])).tolist()


def at_shard(member: str, number: int) -> Judge:
    """Kill the run before the member's n-th shard gets its name."""
    seen: set[str] = set()

    def judge(step: Step) -> Verdict:
        if (
            step.call.startswith("rename")
            and f"work/{member}." in step.paths[-1]
            and ".csv" in step.paths[-1]
        ):
            seen.add(step.paths[-1])
        return Verdict.KILL if len(seen) == number else Verdict.GO

    return judge


@pytest.mark.parametrize("limit", one_in(2, [{"time_limit": "1h"}, {}]), ids=["limited", "free"])
def test_killed_and_resumed_it_ends_with_the_same_bytes(
    chunky: Project, forked: ForkedRuns, limit: dict[str, str]
) -> None:
    chunky.write_config(cascade(chunky, {"share": 0.5}, **limit))
    assert forked.run(chunky.folder) == 0, forked.printed
    undisturbed = results(chunky, names=NAMES)
    assert rows_of(chunky, "second") == closest(chunky, ROWS // 2)
    first_chunk = closest(chunky, 4)
    assert forked.run(chunky.folder, "--fresh", judge=at_shard("first", 3)) == -9
    assert forked.run(chunky.folder, judge=at_shard("second", 2)) == -9
    (shard,) = chunky.folder.glob("runs/first/work/second.*/*.csv")
    rows = sorted(int(line.split(",")[0]) for line in shard.read_text().splitlines()[1:])
    if limit:
        assert rows == first_chunk, "the closest calls come first"
    assert forked.run(chunky.folder) == 0, forked.printed
    assert results(chunky, names=NAMES) == undisturbed
    assert [member["reused_rows"] for member in chunky.run_json()["members"]] == [ROWS, len(rows)]


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
    assert (first["status"], second["status"], second["rows"]) == ("failed", "unfinished", 0)
    assert second["cascade"]["unknown_rows"] == ROWS
    (one := tmp_path / "one").mkdir()
    faults = Injected(one, replace(fault, times=1))
    options = ["--set", "on_member_failure=continue"]
    assert forked.run(chunky.folder, *options, faults=faults) == 0, forked.printed
    first, second = chunky.run_json()["members"]
    assert (first["status"], second["status"], second["rows"]) == ("failed", "complete", ROWS)
    assert rows_of(chunky, "second") == [*range(ROWS)], "nobody else has them"
    # Once the first has all rows, only those count of the second that it asks for.
    assert forked.run(chunky.folder) == 0, forked.printed
    wanted = closest(chunky, 4)
    assert chunky.run_json()["members"][1]["rows"] == 0
    assert chunky.run_json()["merged_rows"] == {"first": ROWS, "second": 4}
    merged, mean = values(chunky, "ensemble"), values(chunky, "predictions/first")
    mean[wanted] = (mean[wanted] + values(chunky, "predictions/second")[wanted]) / 2
    np.testing.assert_allclose(merged, mean, rtol=1e-12)


@pytest.mark.long
def test_a_member_that_fails_late_while_its_rows_are_computed(
    chunky: Project, nvml_sim: NvmlSim, tmp_path: Path
) -> None:
    """gemma fails at its last chunk while llama, which goes by it and by a CSV, has the first one in hand."""
    gpus = [Gpu(gpu_uuid(number), pci=(0, number, 0)) for number in (1, 2)]
    nvml_sim.write(gpus)
    # By the CSV alone llama is to have every second row; with gemma, which counts for nine times as much, most.
    given = [
        [row_id, *(["0.9", "0.05", "0.05"], ["0.4", "0.3", "0.3"])[row % 2]]
        for row, row_id in enumerate(chunky.ids)
    ]
    chunky.write_csv("given.csv", ["id", *LABELS], given)
    models: list[dict[str, Any]] = [
        {"name": "given", "task_type": "csv", "path": "given.csv"},
        {"name": "gemma", "model_name_or_path": str(chunky.models / "gemma"), "weight": 9, "replicas": 1},
        {"name": "llama", "model_name_or_path": str(chunky.models / "llama"), "when": {"margin_below": 0.5}},
    ]
    models[1]["text_column"] = "text"
    models[2]["prompt_template"] = f"person {word(ROWS)} {{{{ text }}}}"  # a word that gemma does not see
    config = chunky_config(
        chunky,
        models=models,
        defaults={"max_length": 16},
        devices=[gpu.uuid for gpu in gpus],
        on_member_failure="continue",
        retries=0,
    )
    chunky.write_config(config)
    # Of its second row, and not what the model is tried on before it has a chunk.
    in_hand = token_ids(chunky.models / "llama", f"{word(ROWS)} {' '.join(chunky.texts[1].split()[:2])}")
    late = ids_of(chunky, 13)
    injected = Injected(
        tmp_path,
        Fault("wait", in_hand, times=1),
        Fault("wait", late, times=1),
        Fault("raise", late, error="IndexError", times=3),  # of four rows, of two, of one
    )
    with subprocess.Popen(
        [sys.executable, "-m", "ensemble", "run", "config.yaml"],
        cwd=chunky.folder,
        env={**os.environ, **nvml_sim.environment(), **injected.environment, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:

        def are_both_at_work() -> bool:
            return bool(injected.pids(0) and injected.pids(1))

        def has_gemma_failed() -> bool:
            return bool(chunky.run_json()["members"][1]["status"] == "failed")

        wait_for(are_both_at_work, process)
        assert process.poll() is None
        injected.let_go(1)
        wait_for(has_gemma_failed, process)
        injected.let_go(0)
        printed, _ = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 0, printed
    assert len({*injected.pids(0), *injected.pids(1)}) == 2, "at the same time"
    _, gemma, llama = chunky.run_json()["members"]
    assert (gemma["status"], llama["status"]) == ("failed", "complete"), printed
    odd, first_chunk = {*range(1, ROWS, 2)}, {0, 1, 2, 3}
    assert {*rows_of(chunky, "llama")} == odd | first_chunk, (
        "the chunk in hand is kept whole, others are dropped"
    )
    assert (llama["rows"], llama["cascade"]["rows"]) == (len(odd | first_chunk), len(odd))
    assert chunky.run_json()["merged_rows"] == {"given": ROWS, "llama": len(odd)}
    merged, alone = values(chunky, "ensemble"), np.array([row[1:] for row in given], dtype=float)
    is_odd = np.arange(ROWS) % 2 == 1
    llamas = values(chunky, "predictions/llama")
    np.testing.assert_allclose(merged, np.where(is_odd[:, None], (alone + llamas) / 2, alone), rtol=1e-12)
    # The next run has gemma, and llama the rows of both.
    again = chunky.ensemble("run", "config.yaml", environment=nvml_sim.environment())
    assert again.returncode == 0, again.stdout + again.stderr
    ordered = np.sort((alone + 9 * values(chunky, "predictions/gemma")) / 10, axis=1)
    unsure = {*np.flatnonzero(ordered[:, -1] - ordered[:, -2] < 0.5).tolist()}
    assert len(unsure) > len(odd), "gemma makes a difference"
    assert {*rows_of(chunky, "llama")} == odd | first_chunk | unsure
    assert chunky.run_json()["merged_rows"]["llama"] == len(unsure)
    _, gemma, llama = chunky.run_json()["members"]
    assert (gemma["rows"], llama["rows"]) == (1, len(unsure - odd - first_chunk)), "what is computed stays"
