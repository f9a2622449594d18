"""``run --reuse``: a second run directory without computing again; and the labelled table and the test table."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

import ensemble
from ensemble.common.errors import ConfigError
from ensemble.pipeline.run_dir import RunDir, hold
from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")
_SECOND = ("--set", "output_dir=runs/second", "--reuse", "runs/first")


def _words(done: subprocess.CompletedProcess[str], code: int = 0) -> str:
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stderr if code else done.stdout).split())


@pytest.fixture
def first(project: Project) -> Project:
    """A run of the usual two models over the usual labelled table."""
    project.write_config(project.config(submission=None))
    _words(project.ensemble("run", "config.yaml", "-q"))
    return project


@pytest.mark.long
def test_equal_weights_are_held_against_fitted_ones(first: Project) -> None:
    _words(first.ensemble("fit", "config.yaml", "-q"))
    overlay = yaml.safe_load((first.folder / "weights.yaml").read_text(encoding="utf-8"))
    fitted = {member["name"]: member["weight"] for member in overlay["models"]}
    words = _words(first.ensemble("run", "config.yaml", "weights.yaml", *_SECOND))
    for name in ("gemma", "llama"):
        assert f"{name}: 300 of 300 rows taken over from runs/first/predictions/{name}.csv" in words
        of_first, of_second = (
            (first.folder / run / f"predictions/{name}.csv").read_bytes()
            for run in ("runs/first", "runs/second")
        )
        assert of_first == of_second
    second = first.run_json("runs/second")["members"]
    assert [(member["reused_rows"], member["chunks"]) for member in second] == [(300, 0)] * 2
    assert [member["weight"] for member in second] == [*fitted.values()]
    # When and with what the first run computed them is told by the second.
    assert [len(member["computed_before"]) for member in second] == [1, 1]
    assert not (first.folder / "runs/second/work").exists()
    compared = _words(first.ensemble("compare", "runs/first", "runs/second"))
    assert re.search(rf"models\.gemma\.weight\W+0\.6\W+{re.escape(str(fitted['gemma']))}", compared)
    assert "! runs/second: the ensemble was fitted on these 300 rows; held-out log loss: " in compared
    assert "fitted_on" not in compared
    comparison = ensemble.compare(first.folder / "runs/first", first.folder / "runs/second", quiet=True)
    assert [change.changed for change in comparison.changes if change.name != "ensemble"] == [0, 0]
    assert "log_loss" in {metric.metric for metric in comparison.metrics if metric.name == "ensemble"}
    # The same command again keeps its own rows, and the first run is as it was.
    again = _words(first.ensemble("run", "config.yaml", "weights.yaml", *_SECOND))
    assert "gemma: done by" in again


def test_only_what_the_other_run_lacks_is_computed(first: Project) -> None:
    """Another table that shares rows, and a member with another setting."""
    rows = [[row_id, text, "tie"] for row_id, text in zip(first.ids[:40], first.texts[:40], strict=True)]
    first.write_csv("more.csv", ["id", "text", "label"], [["new", "a row of its own", "tie"], *rows])
    changes = ("--set", "data.path=more.csv", "--set", "models.llama.max_length=9")
    words = _words(first.ensemble("run", "config.yaml", *changes, *_SECOND))
    assert "gemma: 40 of 41 rows taken over from runs/first/predictions/gemma.csv" in words
    gemma, llama = first.run_json("runs/second")["members"]
    assert [(item["reused_rows"], item["counters"]["rows"]) for item in (gemma, llama)] == [(40, 1), (0, 41)]


@pytest.mark.long
def test_the_python_api_takes_another_runs_rows(first: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(first.folder)
    second = {"output_dir": "runs/second"}
    run = ensemble.run("config.yaml", second, reuse="runs/first", quiet=True)
    assert [member.reused_rows for member in run.report.members] == [300, 300]
    with pytest.raises(ConfigError, match=r"is not a path"):
        ensemble.run("config.yaml", second, reuse=1, quiet=True)  # type: ignore[arg-type]


def test_reuse_of_what_has_nothing_is_one_sentence(first: Project) -> None:
    def refused(folder: str, *sets: str, code: int = 2) -> str:
        options = [part for keys in sets for part in ("--set", keys)]
        return _words(first.ensemble("run", "config.yaml", "--reuse", folder, *options), code)

    to_second = "output_dir=runs/second"
    for folder in ("runs/none", "."):
        assert refused(folder, to_second) == (
            f"error: --reuse: {folder} has no run.json; name the output_dir of another run"
        )
    assert refused("runs/../runs/first").startswith(
        "error: --reuse: runs/../runs/first is the output_dir of this run, whose rows it keeps anyway; leave"
    )
    assert not (first.folder / "runs/second").exists()
    rows = [[str(number), f"words of another table {number}", "tie"] for number in range(20)]
    first.write_csv("other.csv", ["id", "text", "label"], rows)
    assert refused("runs/first", to_second, "data.path=other.csv").startswith(
        "error: --reuse: runs/first has no row of this table by members with these settings; name another run"
    )
    assert not (first.folder / "runs/second/run.json").exists()
    with hold(RunDir(first.folder / "runs/first")):
        assert re.fullmatch(
            r"error: --reuse: runs/first is in use by process \d+ on .*; wait for its run to end",
            refused("runs/first", to_second, code=3),
        )
    path: Path = first.folder / "runs/first/predictions/llama.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("0.3", "0.4", 1), encoding="utf-8")
    assert "runs/first/predictions/llama.csv: is not" in refused("runs/first", to_second)


@pytest.mark.long
def test_from_the_labelled_table_to_the_test_table_and_back(first: Project) -> None:
    """The error names the way out, and the way leads there."""
    rows = [[row_id, text] for row_id, text in zip(first.ids[:30], first.texts[:30], strict=True)]
    first.write_csv("unlabelled.csv", ["id", "text"], rows)
    to_test = ("--set", "data.path=unlabelled.csv", "--set", "output_dir=runs/test")
    refused = _words(first.ensemble("run", "config.yaml", *to_test), 2)
    assert (
        "no label column 'label'; the columns are 'id', 'text'; for a table without true labels, --set "
        "data.label_column=null"
    ) in refused
    _words(first.ensemble("fit", "config.yaml", "-q"))
    without = ("--set", "data.label_column=null")
    _words(first.ensemble("run", "config.yaml", "weights.yaml", *to_test, *without, "-q"))
    assert len(first.read("runs/test/ensemble.csv")[1]) == 30
    # And back: the labelled run is as it was, and nothing of it is computed again.
    words = _words(first.ensemble("run", "config.yaml", "weights.yaml"))
    assert "gemma: done by" in words
