"""Rows that no worker gets over, and members that fail for good: the policies of the config."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint
from tests.faults.chunky import ROWS, chunky_config, ids_of, results, values
from tests.faults.forked.runs import ForkedRuns
from tests.faults.inject import Fault, Injected
from tests.project import LABELS, Project

BAD = 6


def floats(content: bytes) -> np.ndarray:
    return np.array([line.split(",")[1:] for line in content.decode().splitlines()[1:]], dtype=float)


@pytest.mark.fault(9)
def test_a_row_that_always_crashes_its_worker_is_found(
    chunky: Project, forked: ForkedRuns, tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    injected = Injected(tmp_path, Fault("segfault", ids_of(chunky, BAD)))
    options = ["--set", "retries=0"]
    assert forked.run(chunky.folder, *options, faults=injected) == 1
    assert "computed: row 7: its worker" in forked.printed
    assert "signal 11 (SIGSEGV)" in forked.printed
    assert not (chunky.folder / "runs/first/ensemble.csv").exists()
    (member,) = chunky.run_json()["members"]
    result = [(fault["rows"], fault["remedy"]) for fault in member["faults"]]
    assert result == [
        ([4, 8], "in halves"),
        ([6, 8], "in halves"),
        ([6, 7], "again"),
        ([6, 7], "row set aside"),
    ]
    assert member["counters"]["rows"] == ROWS - 1, "the rest is done"
    assert forked.run(chunky.folder, *options, "--set", "on_bad_row=uniform", faults=injected) == 0
    assert re.search("llama: 1 row could not be computed .*equal probabilities.*: row 7;", forked.printed)
    (member,) = chunky.run_json()["members"]
    assert (member["reused_rows"], list(member["bad_rows"])) == (ROWS, [str(BAD)]), "it is known by now"
    expected = floats(undisturbed["predictions/llama.csv"])
    expected[BAD] = 1 / 3
    np.testing.assert_allclose(values(chunky, "predictions/llama"), expected, atol=1e-5)
    assert forked.run(chunky.folder) == 0, "once it crashes no more, it is as if it never had"
    np.testing.assert_allclose(values(chunky, "ensemble"), floats(undisturbed["ensemble.csv"]), atol=1e-5)


@pytest.mark.fault(9, 25)
def test_a_member_with_a_bad_row_can_be_dropped(chunky: Project, forked: ForkedRuns, tmp_path: Path) -> None:
    injected = Injected(tmp_path, Fault("raise", ids_of(chunky, BAD), error="IndexError"))
    llama = chunky_config(chunky)["models"][0]
    other = {**llama, "name": "other", "prompt_template": "{{ label }}", "weight": 3.0}
    config = chunky_config(chunky, models=[llama, other], on_bad_row="drop_member")
    chunky.write_config(config)
    assert forked.run(chunky.folder, faults=injected) == 0, forked.printed
    assert "merged without llama: " in forked.printed
    assert chunky.run_json()["left_out"] == ["llama"]
    np.testing.assert_array_equal(values(chunky, "ensemble"), values(chunky, "predictions/other"))


@pytest.mark.fault(25)
def test_a_member_that_fails_for_good(chunky: Project, forked: ForkedRuns, tmp_path: Path) -> None:
    """The others finish; without it is merged only where the config says so."""
    import transformers

    broken = make_checkpoint(tmp_path / "no head", "llama", LABELS)
    transformers.AutoModelForCausalLM.from_pretrained(broken).save_pretrained(broken)
    settings = (broken / "config.json").read_text()
    (broken / "config.json").write_text(
        settings.replace("LlamaForCausalLM", "LlamaForSequenceClassification")
    )
    llama = chunky_config(chunky)["models"][0]
    models = [{"name": "broken", "model_name_or_path": str(broken), "weight": 0.6}, llama]
    chunky.write_config(chunky_config(chunky, models=models))
    assert forked.run(chunky.folder) == 1
    assert "error: member broken failed" in forked.printed
    assert not (chunky.folder / "out/submission.csv").exists()
    report = chunky.run_json()
    assert [member["status"] for member in report["members"]] == ["failed", "complete"]
    assert forked.run(chunky.folder, "--set", "on_member_failure=continue") == 0
    assert "merged without broken: " in forked.printed
    report = chunky.run_json()
    assert (report["status"], report["left_out"]) == ("complete", ["broken"])
    assert report["members"][1]["reused_rows"] == ROWS
    np.testing.assert_array_equal(values(chunky, "ensemble"), values(chunky, "predictions/llama"))
    assert len(results(chunky)) == 4
