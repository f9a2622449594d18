"""Members that get each row in several views: killed, short of time, with rows that cannot be computed."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.analysis.predictions import read_run
from tests.checkpoints import WORDS
from tests.faults.chunky import ROWS, chunky_config, kill_after_shards, results, values, word
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected, token_ids
from tests.project import Project
from tests.sampling import one_in

BAD = 6
# A word that is in no row shows the second view.
MARK = word(20)
VIEWS: list[dict[str, Any]] = [
    {"name": "first"},
    {"name": "second", "prompt_template": f"on {MARK} {{{{ text }}}}", "weight": 3.0},
]


def write_config(project: Project, **changes: Any) -> None:
    config = chunky_config(project, **changes)
    config["models"][0] |= {"views": VIEWS, "prompt_template": "on {{ text }}"}
    project.write_config(config)


def shards(forked: ForkedRuns) -> list[str]:
    """The views of the shards that the latest run has written, in the order in which they got their names."""
    names = [
        step.paths[-1] for step in forked.steps if "rename" in step.call and "/work/llama@" in step.paths[-1]
    ]
    return [name.split("/")[3].split(".")[0].split("@")[1] for name in names if name.endswith(".csv")]


def in_second_view(project: Project, row: int) -> tuple[int, ...]:
    """Tokens that stand one behind the other in this row's second view alone."""
    return token_ids(project.models / "llama", f"{MARK} {WORDS[row % len(WORDS)]} {word(row)}")


@pytest.mark.long
@pytest.mark.fault(12)
def test_killed_in_its_second_checkpoint(chunky: Project, forked: ForkedRuns, tmp_path: Path) -> None:
    """First the second checkpoint's worker, then the run."""
    config = chunky_config(chunky, cpu_workers=1)
    views = [VIEWS[0], {**VIEWS[1], "model_name_or_path": str(chunky.models / "gemma")}]
    config["models"][0] |= {"views": views, "prompt_template": "on {{ text }}"}
    chunky.write_config(config)
    assert forked.run(chunky.folder) == 0, forked.printed
    (member,) = chunky.run_json()["members"]
    assert [worker["counters"]["rows"] for worker in member["workers"]] == [ROWS, ROWS]
    names = ["ensemble.csv", "submission.csv", "predictions/llama.csv", "predictions/llama@second.csv"]
    expected = results(chunky, names=names)

    ids = token_ids(chunky.models / "gemma", f"{MARK} {WORDS[1]} {word(1)}")
    faults = Injected(tmp_path, Fault("kill", ids, times=1))
    assert (
        forked.run(chunky.folder, "--fresh", judge=kill_after_shards(1, "llama@second"), faults=faults) == -9
    )
    assert len(faults.pids()) == 1
    assert forked.run(chunky.folder, "--set", "models.llama.replicas=2") == 0, forked.printed
    assert results(chunky, names=names) == expected


@pytest.mark.long
@pytest.mark.fault(9)
def test_a_row_that_cannot_be_computed_in_one_of_its_views(
    chunky: Project, forked: ForkedRuns, tmp_path: Path
) -> None:
    write_config(chunky)
    injected = Injected(tmp_path, Fault("raise", in_second_view(chunky, BAD), error="IndexError"))
    assert forked.run(chunky.folder, faults=injected) == 1
    assert "row 7 (view second): IndexError" in forked.printed
    assert forked.run(chunky.folder, "--set", "on_bad_row=uniform", faults=injected) == 0, forked.printed
    (member,) = chunky.run_json()["members"]
    assert {row: why.split(":")[0] for row, why in member["bad_rows"].items()} == {str(BAD): "view second"}
    first, second = (values(chunky, f"predictions/llama@{view['name']}") for view in VIEWS)
    np.testing.assert_array_equal(second[BAD], 1 / 3)
    np.testing.assert_allclose(values(chunky, "predictions/llama")[BAD], (first[BAD] + 1) / 4, atol=1e-12)
    assert forked.run(chunky.folder, "--set", "on_bad_row=uniform") == 0, "it is known by now"
    assert "llama: done by" in forked.printed


@pytest.mark.long
@pytest.mark.fault(26)
def test_the_time_is_over_in_the_second_view(chunky: Project, forked: ForkedRuns, tmp_path: Path) -> None:
    """Each run has twice the time of the one before; what the second view needs is more than any has."""
    write_config(chunky)
    assert forked.run(chunky.folder) == 0, forked.printed
    expected, first = results(chunky), values(chunky, "predictions/llama@first")
    # But for the first row, with which a worker tries its model.
    slow = Injected(
        tmp_path,
        *(Fault("sleep", in_second_view(chunky, row), seconds=10_000) for row in range(1, ROWS)),
    )
    for limit in itertools.takewhile(lambda seconds: seconds <= 256, (8 * 2**power for power in range(6))):
        write_config(chunky, output_dir="runs/timed", time_limit=limit)
        assert forked.run(chunky.folder, faults=slow) == 4, forked.printed
        assert not {"second"} & {*shards(forked)}
        if chunky.run_json("runs/timed")["merged_rows"].get("llama") == ROWS:
            break
    report = chunky.run_json("runs/timed")
    (member,) = report["members"]
    assert {name: view["rows"] for name, view in member["views"].items()} == {"first": ROWS, "second": 0}
    assert report["partial_rows"] == {"llama": ROWS}
    assert (
        f"llama: {ROWS} rows lack some of 2 views and were averaged over the others (first 16, second 0 rows)"
        in forked.printed
    )
    np.testing.assert_allclose(values(chunky, "ensemble", "runs/timed"), first, atol=1e-5)
    write_config(chunky, output_dir="runs/timed")
    assert forked.run(chunky.folder) == 0, forked.printed
    (member,) = chunky.run_json("runs/timed")["members"]
    assert member["reused_rows"] == ROWS
    assert results(chunky, "runs/timed").keys() == expected.keys()
    np.testing.assert_allclose(
        values(chunky, "predictions/llama", "runs/timed"), values(chunky, "predictions/llama"), atol=1e-5
    )


def with_when(project: Project, when: dict[str, Any], **changes: Any) -> None:
    config = chunky_config(project, **changes)
    views = [VIEWS[0], {**VIEWS[1], "when": when}]
    config["models"][0] |= {"views": views, "prompt_template": "on {{ text }}"}
    project.write_config(config)


def closest(project: Project, rows: int, name: str = "llama@first") -> list[int]:
    """Row numbers, the closest call first."""
    ordered = np.sort(values(project, f"predictions/{name}"), axis=1)
    return [int(row) for row in np.argsort(ordered[:, -1] - ordered[:, -2], kind="stable")[:rows]]


def rows_of_second(project: Project, output_dir: str = "runs/first") -> list[int]:
    _, rows = project.read(f"{output_dir}/predictions/llama@second.csv")
    return [project.ids.index(row[0]) for row in rows]


@pytest.mark.fault(12)
@pytest.mark.parametrize("limit", one_in(2, [{"time_limit": "1h"}, {}]), ids=["limited", "free"])
def test_killed_in_a_view_with_when_and_resumed_with_other_replicas(
    chunky: Project, forked: ForkedRuns, tmp_path: Path, limit: dict[str, str]
) -> None:
    """Undisturbed it loads its model once; a worker that dies in that view is replaced."""
    with_when(chunky, {"share": 0.5}, **limit)
    assert forked.run(chunky.folder) == 0, forked.printed
    assert shards(forked) == ["first"] * 4 + ["second"] * 2
    (member,) = chunky.run_json()["members"]
    assert [worker["counters"]["rows"] for worker in member["workers"]] == [ROWS + ROWS // 2]
    assert rows_of_second(chunky) == sorted(closest(chunky, ROWS // 2))
    names = ["ensemble.csv", "submission.csv", "predictions/llama.csv", "predictions/llama@second.csv"]
    expected = results(chunky, names=names)

    # In the first chunk: the closest calls, or the first of the longest rows.
    row = closest(chunky, 1)[0] if limit else sorted(closest(chunky, ROWS // 2))[1]
    faults = Injected(tmp_path, Fault("kill", in_second_view(chunky, row), times=1))
    assert (
        forked.run(chunky.folder, "--fresh", judge=kill_after_shards(1, "llama@second"), faults=faults) == -9
    )
    assert len(faults.pids()) == 1
    assert forked.run(chunky.folder, "--set", "models.llama.replicas=2") == 0, forked.printed
    assert results(chunky, names=names) == expected
    (member,) = chunky.run_json()["members"]
    assert ROWS <= member["reused_rows"] < ROWS + ROWS // 2
    assert member["reused_rows"] + member["counters"]["rows"] == ROWS + ROWS // 2
    assert forked.run(chunky.folder) == 0, forked.printed
    assert chunky.run_json()["members"][0]["counters"]["rows"] == 0
    assert results(chunky, names=names) == expected


@pytest.mark.long
@pytest.mark.fault(26)
def test_as_many_rows_as_there_is_time_for(chunky: Project, forked: ForkedRuns, tmp_path: Path) -> None:
    """The closest chunk is computed, the others would take for ever; the run is complete, another goes on."""
    write_config(chunky)
    assert forked.run(chunky.folder) == 0, forked.printed
    expected = results(chunky)
    first, second = (values(chunky, f"predictions/llama@{name}") for name in ("first", "second"))
    near = sorted(closest(chunky, 4))
    slow = Injected(
        tmp_path,
        *(
            Fault("sleep", in_second_view(chunky, row), seconds=10_000)
            for row in range(1, ROWS)
            if row not in near
        ),
    )
    for limit in itertools.takewhile(lambda seconds: seconds <= 256, (8 * 2**power for power in range(6))):
        with_when(chunky, {"share": "as_time_allows"}, output_dir="runs/timed", time_limit=limit)
        code = forked.run(chunky.folder, faults=slow)
        assert code in (0, 4), forked.printed
        if code == 0 and rows_of_second(chunky, "runs/timed"):
            break
    assert chunky.run_json("runs/timed")["status"] == "complete"
    assert rows_of_second(chunky, "runs/timed") == near
    (member,) = chunky.run_json("runs/timed")["members"]
    assert {name: view["rows"] for name, view in member["views"].items()} == {"first": ROWS, "second": 4}
    assert "view second: there was time for 4 of 16 rows, the closest calls first (25.0 %)" in forked.printed
    mean = np.array(first)
    mean[near] = (first[near] + 3 * second[near]) / 4
    np.testing.assert_allclose(values(chunky, "predictions/llama", "runs/timed"), mean, atol=1e-5)
    predictions = read_run(chunky.folder / "runs/timed")
    np.testing.assert_allclose(predictions.members["llama"], mean, atol=1e-5)

    with_when(chunky, {"share": "as_time_allows"}, output_dir="runs/timed", time_limit="1h")
    assert forked.run(chunky.folder) == 0, forked.printed
    assert chunky.run_json("runs/timed")["members"][0]["counters"]["rows"] == ROWS - 4
    result = results(chunky, "runs/timed")
    assert result.keys() == expected.keys()
    np.testing.assert_allclose(
        values(chunky, "predictions/llama", "runs/timed"), values(chunky, "predictions/llama"), atol=1e-5
    )
