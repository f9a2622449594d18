"""``fit`` as a command: on the demo's run, on CSVs, and what ``weights.yaml`` then does to a run."""

from __future__ import annotations

import csv
from typing import Any

import numpy as np
import pytest
import yaml
from scipy.special import softmax
from sklearn.metrics import log_loss

import ensemble
from ensemble.analysis.weights_file import POOLS
from ensemble.merging.methods import METHODS
from tests.project import ROOT, Project

pytestmark = pytest.mark.usefixtures("warm")
DEMO = str(ROOT / "configs" / "demo.yaml")
LABELS = ["a", "b", "c"]
ROWS = 400


@pytest.fixture
def files(project: Project) -> Project:
    """CSVs of two members, each in an order of its own, the truth, and a config of both."""
    random = np.random.default_rng(2)
    logits = random.normal(size=(ROWS, 3)) * 2
    truth = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    for name, noise in (("one", 0.6), ("two", 1.2)):
        values = softmax(2 * (logits + random.normal(size=logits.shape) * noise), axis=1)
        rows = [[f"r{row}", *map(repr, values[row].tolist())] for row in random.permutation(ROWS).tolist()]
        project.write_csv(f"{name}.csv", ["id", *LABELS], rows)
    project.write_csv("truth.csv", ["id", "label"], [[f"r{row}", LABELS[truth[row]]] for row in range(ROWS)])
    project.write_config(config())
    return project


def config(**ensemble_keys: Any) -> dict[str, Any]:
    members = [{"name": name, "task_type": "csv", "path": f"{name}.csv"} for name in ("one", "two")]
    return {
        "data": {"path": "truth.csv", "label_column": "label"},
        "labels": LABELS,
        "models": members,
        "ensemble": ensemble_keys,
        "output_dir": "out",
    }


def merged(project: Project) -> tuple[Any, list[str]]:
    with (project.folder / "out" / "ensemble.csv").open() as file:
        _, *rows = list(csv.reader(file))
    with (project.folder / "truth.csv").open() as file:
        truth = dict(list(csv.reader(file))[1:])
    return np.array([row[1:] for row in rows], dtype=float), [truth[row[0]] for row in rows]


def test_fitted_weights_of_the_demo_do_not_lose_and_it_says_what_is_noise(project: Project) -> None:
    assert project.ensemble("run", DEMO, "-q").returncode == 0
    done = project.ensemble("fit", DEMO)
    assert done.returncode == 0, done.stderr
    text = (project.folder / "weights.yaml").read_text()
    overlay = yaml.safe_load(text)
    weights = {one["name"]: one["weight"] for one in overlay["models"]}
    assert sum(weights.values()) == pytest.approx(1, abs=1e-5)
    report = ensemble.fit(DEMO, {"output_dir": str(project.folder / "runs/demo")}, quiet=True)
    assert report.over_equal.value >= 0
    noise = "no more than noise" if report.over_equal.is_noise else "more than noise"
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("Against equal weights")]
    assert noise in said
    assert f"# {said}" in text
    assert "2,000 labelled rows" in text
    # What was fitted to all rows is what the run then merges by, from the predictions that are there.
    again = project.ensemble("run", DEMO, "weights.yaml")
    assert again.returncode == 0, again.stderr
    assert all(member["reused_rows"] == 2_000 for member in project.run_json("runs/demo")["members"])
    reached = project.run_json("runs/demo")["scores"]["ensemble"]["log_loss"]
    assert reached < report.equal


@pytest.mark.parametrize(
    "options",
    [
        {"calibration": "temperature"},
        {"calibration": "vector", "merge_method": "geometric_mean"},
        {"method": "stacking", "calibration": "temperature"},
        {"metric": "accuracy"},
    ],
)
def test_a_run_merges_as_the_fit_does(files: Project, options: dict[str, Any]) -> None:
    report = ensemble.fit(
        [files.folder / "one.csv", files.folder / "two.csv"],
        labels=files.folder / "truth.csv",
        output=files.folder / "weights.yaml",
        quiet=True,
        **options,
    )
    done = files.ensemble("run", "config.yaml", "weights.yaml", "-q")
    assert done.returncode == 0, done.stderr
    values, truth = merged(files)
    # What is fitted to these rows is better than on rows that were held out, but not by much.
    if "metric" in options:
        hits = values.argmax(axis=1) == [LABELS.index(one) for one in truth]
        assert report.score - 0.02 < hits.mean() < report.score + 0.05
    else:
        assert report.score - 0.05 < log_loss(truth, values) < report.score


def test_the_file_loses_nothing_that_matters(files: Project) -> None:
    assert files.ensemble("run", "config.yaml", "-q").returncode == 0
    done = files.ensemble("fit", "config.yaml", "--calibration", "temperature", "-o", "w.yaml")
    assert done.returncode == 0, done.stderr
    assert files.ensemble("run", "config.yaml", "w.yaml", "-q").returncode == 0
    values, truth = merged(files)
    numbers = np.array([LABELS.index(one) for one in truth])
    reached = -np.log(values[np.arange(ROWS), numbers]).mean()
    report = ensemble.fit(
        [files.folder / "one.csv", files.folder / "two.csv"],
        labels=files.folder / "truth.csv",
        calibration="temperature",
        quiet=True,
    )
    whole = [member.weight for member in report.members]
    parts = []
    for member, weight in zip(report.members, whole, strict=True):
        rows = {row[0]: row[1:] for row in files.read(f"{member.name}.csv")[1]}
        ids = [row[0] for row in files.read("out/ensemble.csv")[1]]
        logs = np.log(np.array([rows[one] for one in ids], dtype=float))
        parts.append(weight * softmax(logs / member.calibration, axis=1))
    exact = -np.log(sum(parts)[np.arange(ROWS), numbers]).mean()
    assert reached == pytest.approx(exact, abs=1e-7)


def test_fitting_again_without_calibration_takes_the_calibration_away(files: Project) -> None:
    assert files.ensemble("run", "config.yaml", "-q").returncode == 0
    assert files.ensemble("fit", "config.yaml", "--calibration", "vector").returncode == 0
    done = files.ensemble("fit", "config.yaml", "weights.yaml", "-o", "plain.yaml")
    assert done.returncode == 0, done.stderr
    overlay = yaml.safe_load((files.folder / "plain.yaml").read_text())
    assert all(one["calibration"] is None for one in overlay["models"])
    assert files.ensemble("validate", "config.yaml", "weights.yaml", "plain.yaml").returncode == 0


def test_a_truth_that_is_named_when_the_run_is_fitted(files: Project) -> None:
    """In a column per label, in a table of its own, with a row that the run did not have."""
    _, rows = files.read("truth.csv")
    files.write_csv("rows.csv", ["id"], [row[:1] for row in rows])
    each = [[name, *(str(int(label == own)) for own in LABELS)] for name, label in [*rows, ["more", "a"]]]
    files.write_csv("columns.csv", ["id", *(f"is_{label}" for label in LABELS)], each)
    given = config()
    given["data"] = {"path": "rows.csv"}
    files.write_config(given)
    assert files.ensemble("run", "config.yaml", "-q").returncode == 0
    columns = ", ".join(f"is_{label}: {label}" for label in LABELS)
    sets = ["data.path=columns.csv", f"data.label_columns={{{columns}}}"]
    done = files.ensemble("fit", "config.yaml", "--set", sets[0], "--set", sets[1], "-o", "a.yaml")
    assert done.returncode == 0, done.stderr
    assert "! 1 row of columns.csv left out, of ids without predictions" in done.stdout
    sets = ["data.path=truth.csv", "data.label_column=label"]
    assert (
        files.ensemble("fit", "config.yaml", "--set", sets[0], "--set", sets[1], "-o", "b.yaml").returncode
        == 0
    )
    found = [yaml.safe_load((files.folder / name).read_text()) for name in ("a.yaml", "b.yaml")]
    assert found[0] == found[1]


def test_the_methods_that_can_be_fitted_are_those_that_say_so() -> None:
    assert {name for name in METHODS.built_in if not METHODS.load(name).fit_options} == {*POOLS}


def write(project: Project, name: str, change: Any) -> None:
    header, rows = project.read(name)
    header, rows = change(header, rows)
    project.write_csv(name, header, rows)


WRONG: dict[str, Any] = {
    "columns": ("two.csv", lambda h, r: (["id", "a", "b", "d"], r), {}, "two.csv: has other label columns"),
    "labels": ("truth.csv", lambda h, r: (h, [*r[:-1], [r[-1][0], "d"]]), {}, "'d'"),
    "a missing truth": ("truth.csv", lambda h, r: (h, r[1:]), {}, "1 id of the predictions missing"),
    "other ids": ("two.csv", lambda h, r: (h, [["x", *r[0][1:]], *r[1:]]), {}, "1 id that the others do not"),
    "sums": ("two.csv", lambda h, r: (h, [[r[0][0], "0.9", "0.9", "0.9"], *r[1:]]), {}, "do not sum to 1"),
    "constant": (
        "two.csv",
        lambda h, r: (h, [[row[0], "0.5", "0.25", "0.25"] for row in r]),
        {},
        "cannot help",
    ),
    "one label": ("truth.csv", lambda h, r: (h, [[row[0], "b"] for row in r]), {}, "'b' in every row"),
    "no truth": ("", None, {"labels": None}, "--labels"),
    "no run": ("", None, {"sources": "config.yaml"}, "run the config first"),
    "both": ("", None, {"sources": ["config.yaml", "one.csv"]}, "not both"),
    "metric": ("", None, {"metric": "log_los"}, "log_loss"),
    "method": ("", None, {"sources": "config.yaml", "overrides": ["ensemble.method=median"]}, "median"),
    "folder": ("", None, {"output": "nowhere/w.yaml"}, "--output"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_cannot_be_fitted_is_one_sentence_and_nothing_written(
    files: Project, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(files.folder)
    name, change, arguments, words = WRONG[what]
    if change is not None:
        write(files, name, change)
    before = set(files.folder.iterdir())
    usual: dict[str, Any] = {
        "sources": ["one.csv", "two.csv"],
        "labels": "truth.csv",
        "output": "weights.yaml",
    }
    with pytest.raises(ensemble.EnsembleError) as caught:
        ensemble.fit(**{**usual, **arguments})
    assert caught.value.exit_code == 2
    (problem,) = caught.value.problems
    assert words in problem
    assert set(files.folder.iterdir()) == before


FIT = ["fit", "one.csv", "two.csv", "--labels", "truth.csv"]


def test_a_file_that_is_there_is_replaced_by_force_alone(files: Project) -> None:
    (files.folder / "weights.yaml").write_text("mine")
    done = files.ensemble(*FIT)
    assert done.returncode == 2
    assert "--force" in done.stderr
    assert (files.folder / "weights.yaml").read_text() == "mine"
    assert files.ensemble(*FIT, "--force", "-q").stdout == ""
    assert yaml.safe_load((files.folder / "weights.yaml").read_text())["models"][0]["name"] == "one"


def test_predictions_of_a_run_that_is_not_complete_are_not_fitted(files: Project) -> None:
    assert files.ensemble("run", "config.yaml", "-q").returncode == 0
    more = config()
    more["models"].append({"name": "three", "task_type": "csv", "path": "one.csv"})
    files.write_config(more)
    done = files.ensemble("fit", "config.yaml")
    assert done.returncode == 2
    assert "no complete predictions of three" in done.stderr
