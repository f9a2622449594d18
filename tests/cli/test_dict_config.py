"""A config as a dict: the same run as from a file, and problems that name the key."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import ensemble
from tests.project import Project

pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def here(project: Project, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A project whose folder is the working directory, with a label in its table."""
    monkeypatch.chdir(project.folder)
    return project


def problems(config: object, *overrides: Any) -> tuple[str, ...]:
    with pytest.raises(ensemble.ConfigError) as caught:
        ensemble.validate(config, *overrides)  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    return caught.value.problems


def test_a_dict_runs_and_its_yaml_is_the_same_run(here: Project) -> None:
    config = here.config(output_dir=Path("runs/first"), limit=np.int64(40))
    run = ensemble.run(config, quiet=True)
    assert run.report.status == "complete"
    assert run.path == here.folder / "runs/first"
    kept = here.folder / "runs/first/config.yaml"
    assert yaml.safe_load(kept.read_text()) == here.config(output_dir="runs/first", limit=40)
    before, text = run.ensemble, kept.read_bytes()
    done = here.ensemble("run", "runs/first/config.yaml", "--quiet")
    assert done.returncode == 0, done.stderr
    assert [member.chunks for member in run.report.members] == [0, 0], "nothing is computed again"
    assert run.ensemble.equals(before)
    assert kept.read_bytes() == text
    done = here.ensemble("run", "runs/first/config.yaml", "--quiet", "--limit", "30")
    assert "is read by this run and would be overwritten" in done.stderr, "by another config"
    assert {**config, "limit": 40} == {**here.config(output_dir=Path("runs/first"), limit=40)}, "as it was"


def test_overlays_and_overrides_of_a_dict(here: Project) -> None:
    config, over = here.config(), {"models": [{"name": "gemma", "weight": 3}]}
    here.write_config(over, "weights.yaml")
    both: list[list[Any]] = [[config, over], [config, "weights.yaml"]]
    for sources in both:
        preview = ensemble.validate(sources, {"limit": 30})
        assert [model.weight for model in preview.config.models] == [3, 0.4]
        assert preview.config.limit == 30
    assert ensemble.plan(config).config == ensemble.validate(config).config
    preview = ensemble.validate(here.config(output_dir="${CONFIG_DIR}/runs/x"))
    assert preview.config.output_dir == here.folder / "runs/x", "the working directory"


@pytest.mark.long
def test_a_dict_is_rehearsed_and_fitted(here: Project) -> None:
    config = here.config(limit=60)
    assert ensemble.rehearse(config, sample=16, quiet=True).problems == ()
    ensemble.run(config, quiet=True)
    assert ensemble.fit(config, quiet=True).rows == 60


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"limit": np.arange(3)}, "limit: YAML cannot hold a value of type ndarray; "),
        ({"labels": {"a", "b"}}, "labels: YAML cannot hold a value of type set; "),
        ({"data": {"path": object()}}, "data.path: YAML cannot hold a value of type object; "),
        ({"data": {3.5: "x"}}, "data: the key '3.5' must be text"),
        ({"output_dir": b"runs"}, "output_dir: YAML cannot hold a value of type bytes; "),
        ({"output_dir": "a\0b"}, "output_dir: YAML cannot hold this text; "),
        ({"limti": 3}, "limti: unknown key; "),
        ({"limit": "x"}, "limit: must be "),
    ],
)
def test_what_is_wrong_with_a_dict_names_the_key(
    here: Project, change: dict[str, Any], sentence: str
) -> None:
    (message,) = (
        problems({**here.config(), **change})
        if "data" not in change
        else problems({**here.config(), "data": {**here.config()["data"], **change["data"]}})
    )
    assert message.startswith(sentence)
    assert "line" not in message


def test_problems_in_lists_and_circles(here: Project) -> None:
    config = here.config()
    config["models"][1]["weight"] = {1, 2}
    (message,) = problems(config)
    assert message.startswith("models[1].weight: YAML cannot hold")
    config["models"][1]["weight"] = []
    config["models"][1]["weight"].append(config["models"][1]["weight"])
    assert "nested more than" in problems(config)[0]
    assert problems({"limit": 3})[0].startswith("data: required")
    assert problems([{**here.config(), "limit": 0}, {"fill": 1}])[0].startswith("limit: must be ")
    assert problems(3) == ("'3' is not a path",)


@pytest.mark.long
def test_what_a_notebook_shows_and_completes(here: Project, tmp_path: Path) -> None:
    run = ensemble.run(here.config(limit=60), quiet=True)
    (run.path / "report.html").write_text("a page")  # the config says report: false
    scores = run.scores
    assert [*scores] == ["member", "metric", "value", "interval"]
    assert {*scores.member} == {"ensemble", "gemma", "llama"}
    by_name = scores.set_index(["member", "metric"])
    of_run = run.report.scores["gemma"]
    assert by_name.value["gemma", "log_loss"] == pytest.approx(of_run.log_loss)
    assert by_name.value["gemma", "accuracy"] == pytest.approx(of_run.accuracy)
    low, high = by_name.interval["gemma", "log_loss"]
    assert low < by_name.value["gemma", "log_loss"] < high
    short = repr(run.report).splitlines()
    assert short[0].startswith("complete, after ")
    assert short[0].endswith(": 60 rows, 2 members")
    assert [line.partition(": log loss ")[0] for line in short[1:]] == [*run.report.scores]
    assert '<a href="runs/first/report.html"' in run._repr_html_()
    for preview in (ensemble.plan(here.config()), ensemble.validate(here.config())):
        assert "gemma" in repr(preview)
        assert escape(repr(preview)) in preview._repr_html_()
    assert dir(run) == ["ensemble", "members", "path", "predictions", "report", "scores", "status"]
    assert dir(preview) == ["config", "plan", "prepared", "problems"]
    assert dir(ensemble) == sorted([*ensemble.__all__, "__version__"])
    ensemble.run(
        here.config(data={"path": "test.csv", "id_column": "id"}, limit=60, output_dir="x"), quiet=True
    )
    with pytest.raises(ensemble.DataError, match="true labels"):
        _ = ensemble.open_run("x").scores


def test_completion_in_a_notebook_offers_the_api_only() -> None:
    completer = pytest.importorskip("IPython.core.completer")
    for use_jedi in (False, True):
        made = completer.IPCompleter(namespace={"ensemble": ensemble}, use_jedi=use_jedi)
        with completer.provisionalcompleter():
            texts = {
                completion.text.strip(".") for completion in made.completions("ensemble.", len("ensemble."))
            }
        assert texts == {*ensemble.__all__}, f"jedi: {use_jedi}"
