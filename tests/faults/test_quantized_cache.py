"""Runs whose 4-bit weights are kept for later loads: killed, resumed, out of disk, and the same files after all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.chunky import chunky_config, results, write_chunky_table
from tests.faults.forked.runs import ForkedRuns
from tests.faults.steps import Step, Verdict
from tests.project import Project
from tests.sampling import one_in

pytest.importorskip("bitsandbytes")
FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}
# Of the steps by which weights are kept.
SHARES = one_in(6, (4, 0, 1, 2, 3, 5))
LOADED = "loaded from the quantized weights in the run directory"


def is_of_cache(step: Step) -> bool:
    return any("/cache" in path for path in step.paths)


def quantized(project: Project, **keys: Any) -> None:
    (llama,) = chunky_config(project)["models"]
    member = {**llama, "quantization_config": FOUR_BITS, **keys}
    project.write_config(chunky_config(project, models=[member]))


def caches(project: Project) -> list[Path]:
    return sorted(project.folder.glob("runs/first/work/llama.*/cache/quantized"))


def notes(project: Project) -> list[str]:
    (member,) = project.run_json()["members"]
    return [note for worker in member["workers"] for note in worker["notes"]]


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, tiny_models: Path, forked: ForkedRuns
) -> tuple[dict[str, bytes], list[str]]:
    """What runs make that keep nothing, and the steps by which another one keeps its weights."""
    project = Project(tmp_path_factory.mktemp("kept"), tiny_models)
    write_chunky_table(project)
    quantized(project)
    assert forked.run(project.folder) == 0, forked.printed
    assert not any(map(is_of_cache, forked.steps)), "one replica, no time limit: no later load is expected"
    plain = results(project)
    quantized(project, quantized_cache=True)
    assert forked.run(project.folder, "--fresh") == 0, forked.printed
    assert results(project) == plain
    assert not (project.folder / "runs/first/work").exists(), "removed when the run is complete"
    return plain, [step.call for step in forked.steps if is_of_cache(step)]


def test_plan_tells(chunky: Project) -> None:
    quantized(chunky, quantized_cache=True)
    done = chunky.ensemble("plan", "config.yaml")
    said = " ".join(done.stdout.split())
    assert "quantized once: its weights are kept in the run directory for later loads (0.1 MiB)" in said, done


@pytest.mark.long
def test_a_resumed_run_loads_what_was_kept(
    chunky: Project, forked: ForkedRuns, expected: tuple[dict[str, bytes], list[str]]
) -> None:
    quantized(chunky, quantized_cache=True)

    def kill_at_the_third_shard(step: Step) -> Verdict:
        shards = [one for one in forked.steps if one.call == "rename" and one.paths[-1].endswith(".csv")]
        return Verdict.KILL if len(shards) == 3 else Verdict.GO

    assert forked.run(chunky.folder, judge=kill_at_the_third_shard) == -9
    (kept,) = caches(chunky)
    assert forked.run(chunky.folder, "--set", "models.llama.quantized_cache=auto") == 0, forked.printed
    assert results(chunky) == expected[0]
    assert LOADED in notes(chunky)
    assert not kept.exists()


@pytest.mark.long
@pytest.mark.parametrize("share", SHARES)
def test_a_killed_writer_leaves_nothing_that_is_trusted(
    share: int, chunky: Project, forked: ForkedRuns, expected: tuple[dict[str, bytes], list[str]]
) -> None:
    quantized(chunky, quantized_cache=True)
    wanted, calls = expected
    at = share * len(calls) // 6

    def kill(step: Step) -> Verdict:
        written = [one for one in forked.steps if is_of_cache(one)]
        return Verdict.KILL if is_of_cache(step) and len(written) > at else Verdict.GO

    assert forked.run(chunky.folder, judge=kill) == -9
    is_kept = bool(caches(chunky))
    assert is_kept == ("rename" in calls[:at]), "whole under its name, or not there"
    assert forked.run(chunky.folder) == 0, forked.printed
    assert results(chunky) == wanted
    if chunky.run_json()["members"][0][
        "workers"
    ]:  # else it was killed at the removal, when all rows were done
        assert (LOADED in notes(chunky)) == is_kept
    assert not (chunky.folder / "runs/first/work").exists()


@pytest.mark.parametrize("share", SHARES)
def test_a_full_disk_costs_the_cache_only(
    share: int, chunky: Project, forked: ForkedRuns, expected: tuple[dict[str, bytes], list[str]]
) -> None:
    quantized(chunky, quantized_cache=True)
    wanted, calls = expected
    at = share * len(calls) // 6

    def full(step: Step) -> Verdict:
        written = [one for one in forked.steps if is_of_cache(one)]
        return (
            Verdict.NO_SPACE if is_of_cache(step) and step.takes_space and len(written) > at else Verdict.GO
        )

    assert forked.run(chunky.folder, judge=full) == 0, forked.printed
    assert results(chunky) == wanted
