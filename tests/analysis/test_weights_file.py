"""``fit`` as a command: on the demo's run, on CSVs, and what ``weights.yaml`` then does to a run."""

from __future__ import annotations

import csv
import hashlib
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
from tests.sampling import one_in

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


@pytest.mark.long
def test_fitted_weights_of_the_demo_do_not_lose_and_it_says_what_is_noise(project: Project) -> None:
    assert project.ensemble("run", DEMO, "-q").returncode == 0
    done = project.ensemble("fit", DEMO)
    assert done.returncode == 0, done.stderr
    text = (project.folder / "weights.yaml").read_text()
    overlay = yaml.safe_load(text)
    weights = {model["name"]: model["weight"] for model in overlay["models"]}
    assert sum(weights.values()) == pytest.approx(1, abs=1e-5)
    report = ensemble.fit(DEMO, {"output_dir": str(project.folder / "runs/demo")}, quiet=True)
    assert report.over_equal.value >= 0
    noise = "more than noise" if report.over_equal.excludes_zero else "no more than noise"
    (messages,) = [line for line in done.stdout.splitlines() if line.startswith("Against equal weights")]
    assert noise in messages
    assert f"# {messages}" in text
    assert "2,000 labelled rows" in text
    # What was fitted to all rows is what the run then merges by, from the predictions that are there.
    again = project.ensemble("run", DEMO, "weights.yaml")
    assert again.returncode == 0, again.stderr
    assert all(member["reused_rows"] == 2_000 for member in project.run_json("runs/demo")["members"])
    reached = project.run_json("runs/demo")["scores"]["ensemble"]["log_loss"]
    assert reached < report.equal


@pytest.mark.long
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
        hits = values.argmax(axis=1) == [LABELS.index(label) for label in truth]
        assert report.score - 0.02 < hits.mean() < report.score + 0.05
    else:
        assert report.score - 0.05 < log_loss(truth, values) < report.score


def test_a_run_that_scores_the_rows_it_was_fitted_on_says_so(files: Project) -> None:
    assert files.ensemble(*FIT).returncode == 0
    _, rows = files.read("truth.csv")
    lines = "".join(f"{name}\t{label}\n" for name, label in sorted(rows))
    written = yaml.safe_load((files.folder / "weights.yaml").read_text())
    fitted_on = written["fitted_on"]
    assert fitted_on["sha256"] == hashlib.sha256(lines.encode()).hexdigest()
    assert (fitted_on["rows"], fitted_on["metric"]) == (ROWS, "log_loss")
    low, high = fitted_on["interval"]
    assert low < fitted_on["value"] < high

    done = files.ensemble("run", "config.yaml", "weights.yaml")
    assert done.returncode == 0, done.stderr
    report = files.run_json("out")
    assert report["fitted_on"] == fitted_on
    assert report["scores"]["ensemble"]["log_loss"] < fitted_on["value"]
    message = (
        f"ensemble: fitted on these {ROWS} rows; held-out log loss: {fitted_on['value']:.4f} "
        f"(95 % interval {low:.4f} to {high:.4f})"
    )
    assert message in done.stdout
    assert message in files.ensemble("status", "out").stdout
    assert message.removeprefix("ensemble: ") in (files.folder / "out/report.html").read_text()
    assert message.removeprefix("ensemble: ") in repr(ensemble.open_run(files.folder / "out").report)
    # The run's own predictions and table are the same rows.
    assert files.ensemble("fit", "config.yaml", "-o", "again.yaml").returncode == 0
    again = yaml.safe_load((files.folder / "again.yaml").read_text())
    assert [again["fitted_on"][key] for key in ("rows", "sha256")] == [ROWS, fitted_on["sha256"]]


@pytest.mark.parametrize(
    "override",
    one_in(
        6,
        [
            *("limit=300", "data.label_column=null", "fitted_on=null"),
            *("models.one.weight=0.9", "models.two.calibration={temperature: 2}", "ensemble.method=median"),
        ],
    ),
)
def test_a_run_of_other_rows_or_other_weights_does_not(files: Project, override: str) -> None:
    assert files.ensemble(*FIT).returncode == 0
    done = files.ensemble(
        "run", "config.yaml", "weights.yaml", "--set", override, "--set", "output_dir=other"
    )
    assert done.returncode == 0, done.stderr
    assert files.run_json("other")["fitted_on"] is None
    assert "fitted on these" not in done.stdout + files.ensemble("status", "other").stdout
    assert "fitted on these" not in (files.folder / "other/report.html").read_text()


def test_a_run_of_other_labels_does_not_and_a_merge_takes_the_file(files: Project) -> None:
    assert files.ensemble(*FIT).returncode == 0
    files.write_config({**config(), "report": False})
    header, rows = files.read("truth.csv")
    rows[0][1] = next(label for label in LABELS if label != rows[0][1])
    files.write_csv("truth.csv", header, rows)
    done = files.ensemble("run", "config.yaml", "weights.yaml", "--set", "output_dir=other", "-q")
    assert done.returncode == 0, done.stderr
    assert files.run_json("other")["fitted_on"] is None, "another label"
    done = files.ensemble("merge", "one.csv", "two.csv", "-o", "merged.csv", "--weights", "weights.yaml")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sha256": "beef"}, "fitted_on.sha256"),
        ({"interval": [1]}, "fitted_on.interval"),
        ({"value": "low"}, "fitted_on.value"),
        ({"when": 1}, "fitted_on.when"),
    ],
)
def test_what_it_was_fitted_on_must_be_what_fit_writes(
    files: Project, given: dict[str, Any], message: str
) -> None:
    fitted_on = {"rows": 4, "sha256": "0" * 64, "metric": "log_loss", "value": 0.5, "interval": [0.4, 0.6]}
    files.write_config(config() | {"fitted_on": fitted_on | given})
    done = files.ensemble("validate", "config.yaml")
    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.long
def test_the_file_loses_nothing_that_matters(files: Project) -> None:
    assert files.ensemble("run", "config.yaml", "-q").returncode == 0
    done = files.ensemble("fit", "config.yaml", "--calibration", "temperature", "-o", "w.yaml")
    assert done.returncode == 0, done.stderr
    assert files.ensemble("run", "config.yaml", "w.yaml", "-q").returncode == 0
    values, truth = merged(files)
    numbers = np.array([LABELS.index(label) for label in truth])
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
        assert member.calibration is not None
        logs = np.log(np.array([rows[row_id] for row_id in ids], dtype=float))
        parts.append(weight * softmax(logs / member.calibration.temperature, axis=1))
    exact = -np.log(sum(parts)[np.arange(ROWS), numbers]).mean()
    assert reached == pytest.approx(exact, abs=1e-7)


@pytest.mark.long
def test_fitting_again_without_calibration_takes_the_calibration_away(files: Project) -> None:
    assert files.ensemble("run", "config.yaml", "-q").returncode == 0
    assert files.ensemble("fit", "config.yaml", "--calibration", "vector").returncode == 0
    done = files.ensemble("fit", "config.yaml", "weights.yaml", "-o", "plain.yaml")
    assert done.returncode == 0, done.stderr
    overlay = yaml.safe_load((files.folder / "plain.yaml").read_text())
    assert all(model["calibration"] is None for model in overlay["models"])
    assert files.ensemble("validate", "config.yaml", "weights.yaml", "plain.yaml").returncode == 0


@pytest.mark.long
def test_weights_of_csvs_take_the_calibration_of_a_config_away(files: Project) -> None:
    assert files.ensemble(*FIT).returncode == 0
    done = files.ensemble("merge", "one.csv", "two.csv", "-o", "merged.csv", "--weights", "weights.yaml")
    assert done.returncode == 0, done.stderr
    hot = config()
    for member in hot["models"]:
        member["calibration"] = {"temperature": 3.0}
    files.write_config(hot)
    done = files.ensemble("run", "config.yaml", "weights.yaml", "-q")
    assert done.returncode == 0, done.stderr
    of_run = {row[0]: row[1:] for row in files.read("out/ensemble.csv")[1]}
    of_merge = {row[0]: row[1:] for row in files.read("merged.csv")[1]}
    assert of_run == of_merge


@pytest.mark.long
@pytest.mark.parametrize("method", ["mean", "geometric_mean"])
def test_the_log_loss_of_the_merge_is_that_of_the_fit_also_where_members_say_0(
    files: Project, method: str
) -> None:
    def some_sure(header: list[str], rows: list[list[str]]) -> tuple[list[str], list[list[str]]]:
        for row in rows[::10]:
            numbers = [float(cell) for cell in row[1:]]
            row[1:] = [str(float(number == max(numbers))) for number in numbers]
        return header, rows

    for name in ("one.csv", "two.csv"):
        write(files, name, some_sure)
    assert files.ensemble(*FIT, "--merge-method", method).returncode == 0
    done = files.ensemble("run", "config.yaml", "weights.yaml", "-q")
    assert done.returncode == 0, done.stderr
    overlay = yaml.safe_load((files.folder / "weights.yaml").read_text())
    assert overlay["ensemble"] == {"method": method}
    report = ensemble.fit(
        [files.folder / "one.csv", files.folder / "two.csv"],
        labels=files.folder / "truth.csv",
        merge_method="mean" if method == "mean" else "geometric_mean",
        quiet=True,
    )
    assert all(member.weight is not None and member.weight > 0.1 for member in report.members)
    # On the rows that it is fitted to it is a little less than on those held out.
    assert files.run_json("out")["scores"]["ensemble"]["log_loss"] == pytest.approx(report.score, abs=0.15)


def test_rows_that_some_files_lack_are_left_out_by_partial_alone(files: Project) -> None:
    write(files, "one.csv", lambda header, rows: (header, rows[3:]))
    problems = {
        ("one.csv", "two.csv"): "two.csv: 3 ids not in one.csv (",
        ("two.csv", "one.csv"): "one.csv: 3 ids of two.csv missing (",
    }
    for order, problem in problems.items():
        done = files.ensemble("fit", *order, "--labels", "truth.csv", "--force")
        assert done.returncode == 2
        assert problem in done.stderr
        assert "--partial" in done.stderr
        done = files.ensemble("fit", *order, "--labels", "truth.csv", "--partial", "--force")
        assert done.returncode == 0, done.stderr
        text = (files.folder / "weights.yaml").read_text()
        for message in (done.stdout, text):
            assert "of the 397 of 400 rows that all members have; a run merges" in message


@pytest.mark.long
def test_a_member_with_when_is_fitted_on_the_rows_that_it_is_asked_for(files: Project) -> None:
    limited = config()
    limited["models"][1]["when"] = {"margin_below": 0.5}
    files.write_config(limited)
    assert files.ensemble("run", "config.yaml", "-q").returncode == 0
    asked = files.run_json("out")["merged_rows"]["two"]
    assert 40 < asked < 300
    for name in ("out/ensemble.csv", "out/run.json", "out/tune/w.yaml"):
        (files.folder / "out/tune").mkdir(exist_ok=True)
        done = files.ensemble("fit", "config.yaml", "--force", "-o", name)
        assert (done.returncode, f"--output: runs write {files.folder}/{name} " in done.stderr) == (2, True)
    done = files.ensemble("fit", "config.yaml")
    assert done.returncode == 0, done.stderr
    assert f"of the {asked} of 400 rows" in done.stdout


@pytest.mark.long
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
    assert "! 1 row of columns.csv left out" in done.stdout
    sets = ["data.path=truth.csv", "data.label_column=label"]
    assert (
        files.ensemble("fit", "config.yaml", "--set", sets[0], "--set", sets[1], "-o", "b.yaml").returncode
        == 0
    )
    # The column alone is one of the config's own table, whatever that names.
    files.write_csv("rows.csv", ["id", "winner"], rows)
    done = files.ensemble("fit", "config.yaml", "--label-column", "winner", "-o", "c.yaml")
    assert done.returncode == 0, done.stderr
    results = [yaml.safe_load((files.folder / name).read_text()) for name in ("a.yaml", "b.yaml", "c.yaml")]
    assert results[0] == results[1] == results[2]
    done = files.ensemble("fit", "config.yaml", "--label-column", "winer", "--force")
    assert done.returncode == 2
    assert "label column 'winer'" in done.stderr
    # The same of runs that are compared.
    done = files.ensemble("compare", "out", "out", "--label-column", "winner", "--metric", "accuracy")
    assert done.returncode == 0, done.stderr
    assert "accuracy  mean  ensemble   400" in done.stdout


def test_the_methods_that_can_be_fitted_are_those_that_say_so() -> None:
    assert {name for name in METHODS.built_in if not METHODS.load(name).fit_options} == {*POOLS}


def write(project: Project, name: str, change: Any) -> None:
    header, rows = project.read(name)
    header, rows = change(header, rows)
    project.write_csv(name, header, rows)


WRONG: dict[str, Any] = {
    "columns": ("two.csv", lambda h, r: (["id", "a", "b", "d"], r), {}, "two.csv: has other label columns"),
    "labels": ("truth.csv", lambda h, r: (h, [*r[:-1], [r[-1][0], "d"]]), {}, "'d'"),
    "a missing truth": ("truth.csv", lambda h, r: (h, r[1:]), {}, "1 id of the"),
    "other ids": (
        "two.csv",
        lambda h, r: (h, r[1:]),
        {},
        "two.csv: 1 id of one.csv missing (",
    ),
    "sums": ("two.csv", lambda h, r: (h, [[r[0][0], "0.9", "0.9", "0.9"], *r[1:]]), {}, "sum to 1"),
    "constant": (
        "two.csv",
        lambda h, r: (h, [[row[0], "0.5", "0.25", "0.25"] for row in r]),
        {},
        "cannot help",
    ),
    "one label": ("truth.csv", lambda h, r: (h, [[row[0], "b"] for row in r]), {}, "'b' in every row"),
    "no truth": ("", None, {"labels": None}, "--labels"),
    "ids": (
        "",
        None,
        {"sources": "config.yaml", "id_column": "x", "labels": None},
        "--id-column: is for CSVs",
    ),
    "no run": ("", None, {"sources": "config.yaml"}, "run the config first"),
    "both": ("", None, {"sources": ["config.yaml", "one.csv"]}, "not both"),
    "metric": ("", None, {"metric": "log_los"}, "log_loss"),
    "method": ("", None, {"sources": "config.yaml", "overrides": ["ensemble.method=median"]}, "median"),
    "set": ("", None, {"overrides": ["limit=3"]}, "--set: changes a config"),
    "merge method": (
        "",
        None,
        {"sources": "config.yaml", "merge_method": "geometric_mean"},
        "--merge-method",
    ),
    "values": ("", None, {"sources": "config.yaml", "activation": "sigmoid"}, "--activation: is for CSVs"),
    "partial": ("", None, {"sources": "config.yaml", "partial": True}, "--partial: is for CSVs"),
    "unknown values": ("", None, {"activation": "sigmoidal"}, "did you mean sigmoid?"),
    "names": ("", None, {"sources": ["one.csv", "One=two.csv"]}, "as in a=two.csv"),
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
    # Whatever --force says, what is read stays.
    for name in ("truth.csv", "two.csv"):
        done = files.ensemble(*FIT, "--force", "-o", name)
        assert done.returncode == 2
        assert f"{name}: is one of" in done.stderr
    assert files.ensemble("fit", "config.yaml", "--force", "-o", "config.yaml").returncode == 2


def test_labels_that_are_not_exclusive(files: Project) -> None:
    for name in ("one", "two"):
        header, rows = files.read(f"{name}.csv")
        files.write_csv(
            f"{name}.csv", header, [[row[0], *(f"{float(item) * 0.9}" for item in row[1:])] for row in rows]
        )
    truth = {row[0]: LABELS.index(row[1]) for row in files.read("truth.csv")[1]}
    cells = [
        [name, *("1" if number == label else "0" for number in range(3))] for name, label in truth.items()
    ]
    files.write_csv("truth.csv", ["id", *LABELS], cells)
    done = files.ensemble(*FIT)
    assert done.returncode == 2
    assert "say what the values are with --activation" in " ".join(done.stderr.split())
    done = files.ensemble(*FIT[:1], "a=one.csv", *FIT[2:], "--activation", "sigmoid")
    assert done.returncode == 0, done.stderr
    weights = yaml.safe_load((files.folder / "weights.yaml").read_text())["models"]
    assert [weight["name"] for weight in weights] == ["a", "two"]
    loss = ensemble.fit(
        {"a": files.folder / "one.csv"}, labels=files.folder / "truth.csv", activation="sigmoid",
        calibration="temperature", quiet=True,
    ).members[0].alone  # fmt: skip
    values = {row[0]: np.array(row[1:], float) for row in files.read("one.csv")[1]}
    known, message = np.array([row[1:] for row in cells], float), np.array([values[row[0]] for row in cells])
    expected = np.mean([log_loss(known[:, number], message[:, number]) for number in range(3)])
    assert loss == pytest.approx(expected, rel=1e-9)


@pytest.mark.long
def test_predictions_of_a_run_that_is_not_complete_are_not_fitted(files: Project) -> None:
    assert files.ensemble("run", "config.yaml", "-q").returncode == 0
    more = config()
    more["models"].append({"name": "three", "task_type": "csv", "path": "one.csv"})
    files.write_config(more)
    done = files.ensemble("fit", "config.yaml")
    assert done.returncode == 2
    assert "no complete predictions of three" in done.stderr


@pytest.mark.long
def test_a_run_merges_by_what_auto_wrote(files: Project) -> None:
    """Also below a merge method that has no weights to fit."""
    files.write_config(config(method="power_mean", power=2))
    assert files.ensemble("run", "config.yaml", "--set", "report=false", "-q").returncode == 0
    done = files.ensemble("fit", "config.yaml", "--method", "auto")
    assert done.returncode == 0, done.stderr
    overlay = yaml.safe_load((files.folder / "weights.yaml").read_text())
    method = overlay["ensemble"]["method"]
    assert method in ("mean", "geometric_mean", "stacking")
    (messages,) = [line for line in done.stdout.splitlines() if line.startswith("Of 14 ways to merge, ")]
    assert messages.startswith("Of 14 ways to merge, stacking") is (method == "stacking")
    before = files.run_json("out")["scores"]["ensemble"]["log_loss"]
    again = files.ensemble("run", "config.yaml", "weights.yaml", "--set", "report=false")
    assert again.returncode == 0, again.stderr
    loss = files.run_json("out")["scores"]["ensemble"]["log_loss"]
    assert loss < before
    assert loss == pytest.approx(overlay["fitted_on"]["value"], abs=0.02)


def test_a_merge_method_beside_auto_is_refused(files: Project) -> None:
    sources = ("one.csv", "two.csv", "--labels", "truth.csv")
    done = files.ensemble("fit", *sources, "--method", "auto", "--merge-method", "mean")
    assert done.returncode == 2
    assert "--method auto: compares both merge methods; leave --merge-method out" in done.stderr
    assert not (files.folder / "weights.yaml").exists()
