"""The same command again: what is proved to be done is kept, what changed is done again, and nothing else."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ensemble.analysis.report.page import write_report
from ensemble.common.text import duration
from tests.checkpoints import make_checkpoint
from tests.faults.chunky import ROWS, chunky_config, kill_before_predictions, results
from tests.faults.forked.runs import ForkedRuns
from tests.faults.steps import Step, Verdict
from tests.faults.test_taken_over import check_close
from tests.project import LABELS, Project


def full_before_predictions(step: Step) -> Verdict:
    return Verdict.NO_SPACE if step.takes_space and "predictions/" in step.paths[0] else Verdict.GO


def edit(path: Path) -> None:
    """Another digit, and the same size."""
    content = bytearray(path.read_bytes())
    place = content.rindex(b"0.") + 2
    content[place] = ord("1") if content[place] != ord("1") else ord("2")
    path.write_bytes(content)


@pytest.mark.fault(17)
def test_parts_that_were_harmed_are_done_again(
    chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder, judge=kill_before_predictions) == -9
    cut, edited, lost, kept = sorted(chunky.folder.glob("runs/first/work/llama.*/*.csv"))
    cut.write_bytes(cut.read_bytes()[:-7])
    edit(edited)
    lost.unlink()
    assert forked.run(chunky.folder) == 0, forked.printed
    assert results(chunky) == undisturbed
    (member,) = chunky.run_json()["members"]
    assert (member["reused_rows"], member["counters"]["rows"]) == (4, 12), kept.name
    edit(chunky.folder / "runs/first/predictions/llama.csv")
    assert forked.run(chunky.folder) == 0, forked.printed
    assert results(chunky) == undisturbed


def reused(project: Project, forked: ForkedRuns, config: dict[str, Any]) -> dict[str, int]:
    """Runs this config; how many rows each member has from earlier runs."""
    project.write_config(config)
    assert forked.run(project.folder) == 0, forked.printed
    return {member["name"]: member["reused_rows"] for member in project.run_json()["members"]}


@pytest.mark.fault(18)
def test_exactly_those_run_again_that_what_changed_is_for(
    chunky: Project, forked: ForkedRuns, tmp_path: Path
) -> None:
    shutil.copytree(chunky.models / "llama", tmp_path / "a")
    b = {"name": "b", "model_name_or_path": str(chunky.models / "llama"), "weight": 1.0}
    config = chunky_config(chunky, models=[{**b, "name": "a", "model_name_or_path": str(tmp_path / "a")}, b])
    assert reused(chunky, forked, config) == {"a": 0, "b": 0}
    first = results(chunky, names=["ensemble.csv"])
    config["models"][1] = b | {"weight": 3.0, "batch_size": 2, "replicas": 2}
    make_checkpoint(tmp_path / "other", "llama", LABELS, seed=7, pad=None)
    assert reused(chunky, forked, config) == {"a": ROWS, "b": ROWS}
    weights = [place / "model.safetensors" for place in (tmp_path / "other", tmp_path / "a")]
    assert weights[0].stat().st_size == weights[1].stat().st_size
    shutil.copy(*weights)
    assert reused(chunky, forked, config) == {"a": 0, "b": ROWS}
    assert "a: weights changed since" in forked.printed
    assert results(chunky, names=["ensemble.csv"]) != first
    config["models"][1] = {**config["models"][1], "max_length": 12}
    assert reused(chunky, forked, config) == {"a": ROWS, "b": 0}
    header, rows = chunky.read("test.csv")
    rows[5][header.index("text")] += "s"
    chunky.write_csv("test.csv", header, rows)
    assert reused(chunky, forked, config) == {"a": ROWS - 1, "b": ROWS - 1}, (
        "and of each but the row that changed"
    )
    assert all(member["computed_before"] for member in chunky.run_json()["members"])
    last = results(chunky, names=["ensemble.csv", "predictions/a.csv", "predictions/b.csv"])
    assert forked.run(chunky.folder, "--fresh") == 0
    assert [member["reused_rows"] for member in chunky.run_json()["members"]] == [0, 0]
    check_close(results(chunky, names=["ensemble.csv", "predictions/a.csv", "predictions/b.csv"]), last)


@pytest.mark.fault(19)
def test_where_nothing_changed_nothing_is_computed(
    chunky: Project, forked: ForkedRuns, undisturbed: dict[str, bytes]
) -> None:
    assert forked.run(chunky.folder) == 0, forked.printed
    assert len({step.pid for step in forked.steps}) == 2
    assert forked.run(chunky.folder) == 0, forked.printed
    assert "llama: done by an earlier run, reused" in forked.printed
    assert len({step.pid for step in forked.steps}) == 1, "no worker is started"
    assert not any(path.startswith("runs/first/predictions") for step in forked.steps for path in step.paths)
    assert results(chunky) == undisturbed


def test_a_run_that_only_merges_again_keeps_what_its_predictions_were_made_with(
    chunky: Project, forked: ForkedRuns
) -> None:
    assert forked.run(chunky.folder) == 0, forked.printed
    (first,) = chunky.run_json()["members"]
    made = first["computed"]
    assert {"ensemble", "python", "torch", "transformers"} <= {*made["versions"]}
    assert made["versions"] == chunky.run_json()["versions"]
    (device,) = chunky.run_json()["devices"]
    assert made["devices"] == {device["uuid"]: device["name"]}
    assert made["seconds"] == pytest.approx(first["seconds"], abs=0.5)
    assert first["computed_before"] == []
    for weight in (0.7, 0.8):  # the report in between computed nothing either
        assert forked.run(chunky.folder, "--set", f"models.llama.weight={weight}") == 0, forked.printed
        (again,) = chunky.run_json()["members"]
        assert again["computed"] is None
        (earlier,) = again["computed_before"]
        assert {**earlier, "at": ""} == {**made, "at": "", "seconds": earlier["seconds"]}
        assert again["workers"] == first["workers"]
        assert again["forecast"] == first["forecast"]
    assert write_report(chunky.folder / "runs/first", chunky.folder / "page.html") == []
    page = (chunky.folder / "page.html").read_text()
    assert f"llama ({duration(earlier['seconds'])})" in page
    assert "computed by an earlier run on " in page
    assert f"torch {made['versions']['torch']}" in page


def test_a_run_that_goes_on_says_what_the_earlier_one_computed_with(
    chunky: Project, forked: ForkedRuns
) -> None:
    assert forked.run(chunky.folder, judge=full_before_predictions) == 1, forked.printed
    for shard in sorted(chunky.folder.glob("runs/first/work/llama.*/*.csv"))[:2]:
        shard.unlink()
    assert forked.run(chunky.folder) == 0, forked.printed
    (member,) = chunky.run_json()["members"]
    (earlier,) = member["computed_before"]
    assert (member["reused_rows"], member["counters"]["rows"]) == (8, 8)
    assert member["computed"]["at"] >= earlier["at"]
    assert earlier["versions"] == member["computed"]["versions"]
    assert write_report(chunky.folder / "runs/first", chunky.folder / "page.html") == []
    page = " ".join((chunky.folder / "page.html").read_text().split())
    assert f"8 rows of llama ({duration(earlier['seconds'])})" in page
    # Both stay with the predictions, also beside another config in between.
    chunky.write_config(chunky_config(chunky, models=chunky.config()["models"][:1]))
    assert forked.run(chunky.folder) == 0, forked.printed
    chunky.write_config(chunky_config(chunky))
    assert forked.run(chunky.folder) == 0, forked.printed
    (again,) = chunky.run_json()["members"]
    assert [item["versions"] for item in again["computed_before"]] == [earlier["versions"]] * 2


@pytest.mark.fault(10)
def test_predictions_that_are_no_probabilities_are_not_merged(chunky: Project, forked: ForkedRuns) -> None:
    """Not even where their manifest says that they are what they should be."""
    assert forked.run(chunky.folder) == 0, forked.printed
    predictions = chunky.folder / "runs/first/predictions/llama.csv"
    header, first, *rest = predictions.read_text().splitlines(keepends=True)
    predictions.write_text("".join([header, f"{first.split(',')[0]},-0.5,1.0,0.5\n", *rest]))
    manifest = predictions.with_suffix(".json")
    document = json.loads(manifest.read_text())
    document["sha256"] = hashlib.sha256(predictions.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(document))
    assert forked.run(chunky.folder) == 1
    assert "the first is id 000" in forked.printed
