"""``data.allowed_labels``: what pandas and scikit-learn make of the same rows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from sklearn.metrics import accuracy_score, log_loss

import ensemble
from ensemble.analysis.report.base import ReportData
from ensemble.analysis.report.results import Calibration
from ensemble.common.errors import EnsembleError
from ensemble.merging.post_process import AllowedLabels
from ensemble.pipeline.load import load
from ensemble.pipeline.prepare import prepare
from tests.project import Project
from tests.sampling import one_in

NAMES = ["w", "x", "y", "7"]  # a label may be a whole number
# The labels that are possible in the rows of each question.
QUESTIONS: dict[int, list[Any]] = {31: ["w", "x"], 32: ["x", "y", 7], 33: ["y"], 34: NAMES}
ROWS = 300
pytestmark = pytest.mark.usefixtures("warm")

Values = npt.NDArray[np.float64]


def write(project: Project, **changes: Any) -> tuple[pd.DataFrame, dict[str, pd.DataFrame]]:
    """A table and two members of it; ``changes`` are of the config."""
    random = np.random.default_rng(3)
    questions = random.choice(list(QUESTIONS), ROWS)
    table = pd.DataFrame({"id": [f"r{row:03d}" for row in range(ROWS)], "question": questions})
    table["possible"] = [json.dumps(QUESTIONS[question]) for question in questions]
    table["label"] = [
        str(random.choice([str(name) for name in QUESTIONS[question]])) for question in questions
    ]
    members = {}
    for name, noise in (("near", 0.8), ("far", 1.6)):
        right = (table["label"].to_numpy()[:, None] == NAMES).astype(float)
        logits = 2 * right + noise * random.normal(size=(ROWS, len(NAMES)))
        values = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        values[:5] = np.eye(len(NAMES))[
            random.integers(len(NAMES), size=5)
        ]  # sure, and often of the impossible
        members[name] = pd.DataFrame(values, columns=NAMES, index=table["id"])
        members[name].to_csv(project.folder / f"{name}.csv")
    table.to_csv(project.folder / "test.csv", index=False)
    project.write_csv("sample.csv", ["id", *NAMES], [[item, *["0.25"] * 4] for item in table["id"][::-1]])
    config = project.config(
        data={"path": "test.csv", "label_column": "label", "allowed_labels": "possible"},
        labels=NAMES,
        models=[{"name": name, "task_type": "csv", "path": f"{name}.csv"} for name in members],
        defaults=None,
    )
    project.write_config({key: value for key, value in {**config, **changes}.items() if value is not None})
    return table, members


def run(project: Project, *overrides: str, command: str = "run", code: int = 0) -> str:
    done = project.ensemble(
        command, "config.yaml", *(word for override in overrides for word in ("--set", override))
    )
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def read(project: Project, name: str) -> pd.DataFrame:
    header, rows = project.read(name)
    cells = np.array([[float(cell) for cell in row[1:]] for row in rows])  # pandas rounds some
    return pd.DataFrame(cells, columns=header[1:], index=pd.Index([row[0] for row in rows], name="id"))


def possible(table: pd.DataFrame) -> npt.NDArray[np.bool_]:
    """True for the labels of a row's list, [rows, labels]."""
    lists = table["possible"].map(lambda cell: [str(name) for name in json.loads(cell)])
    return np.array([[name in names for name in NAMES] for names in lists])


def masked(values: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """What pandas leaves of a member's values."""
    flags = possible(table)
    kept = values.where(flags, 0.0)
    sums = kept.sum(axis=1).to_numpy()
    even = flags / flags.sum(axis=1, keepdims=True)
    kept = kept.div(np.where(sums == 0, 1, sums), axis=0)
    kept[sums == 0] = even[sums == 0]
    return kept


def test_a_row_keeps_its_proportions_and_one_without_any_gets_equal_parts() -> None:
    flags = np.array([[True, True, False], [True, True, True], [False, False, True], [True, True, False]])
    values = np.array([[0.2, 0.6, 0.2], [0.1, 0.3, 0.7], [0.9, 0.1, 0.0], [0.0, 0.0, 1.0]], order="F")
    allowed = AllowedLabels(flags, "column c")
    changed = values.copy(order="F")
    allowed.apply(0, changed, exclusive=True)
    expected = [[0.25, 0.75, 0.0], [0.1, 0.3, 0.7], [0.0, 0.0, 1.0], [0.5, 0.5, 0.0]]
    np.testing.assert_allclose(changed, expected, rtol=1e-15)
    np.testing.assert_array_equal(changed[1], values[1])  # though it does not sum to 1
    changed = values.copy(order="F")
    allowed.apply(0, changed, exclusive=False)
    np.testing.assert_array_equal(changed, np.where(flags, values, 0))
    nobody = np.full((2, 3), np.nan)
    allowed.apply(2, nobody, exclusive=True)
    assert np.isnan(nobody).all()
    changed = values.copy(order="F")
    allowed.apply(0, changed, exclusive=True, only=np.array([False, True, True, False]))
    np.testing.assert_array_equal(changed, [*values[:2].tolist(), [0, 0, 1], values[3].tolist()])
    assert allowed.text == "1 to 3 of 3 labels possible in a row, by column c"
    assert allowed.taken(np.array([1, 1])).text.startswith("3 of 3 labels")
    np.testing.assert_array_equal(allowed.impossible_truths(np.array([2, 2, 2, 0])), [0])
    np.testing.assert_array_equal(allowed.impossible_truths(np.eye(3)[[0, 1, 1, 2]]), [2, 3])


def test_a_run_with_labels_of_its_rows(project: Project) -> None:
    table, members = write(project, report=True)
    output = run(project)
    assert "1 to 4 of 4 labels" in output
    merged = read(project, "runs/first/ensemble.csv")
    parts = {name: masked(values, table) for name, values in members.items()}
    np.testing.assert_allclose(merged, (parts["near"] + parts["far"]) / 2, rtol=1e-12)
    assert (merged.to_numpy()[~possible(table)] == 0).all()
    submission = read(project, "out/submission.csv")
    np.testing.assert_array_equal(submission, merged[::-1])
    report = project.run_json()
    assert report["null_texts"] == {}, "no member reads a column"
    for name, values in {**parts, "ensemble": merged}.items():
        score = report["scores"][name]
        truth, order = table["label"], sorted(NAMES)
        assert score["log_loss"] == pytest.approx(log_loss(truth, values[order], labels=order), rel=1e-6)
        assert score["accuracy"] == accuracy_score(truth, values.idxmax(axis=1))
    for name, values in members.items():
        np.testing.assert_array_equal(read(project, f"runs/first/predictions/{name}.csv"), values)
    page = (project.folder / "runs/first/report.html").read_text(encoding="utf-8")
    assert "1 to 4 of 4 labels" in page
    assert f"{report['scores']['near']['log_loss']:.4f}" in page, "the members' scores of the run"
    assert "1 to 4 of 4 labels" in run(project, command="validate")


@pytest.mark.long
def test_other_lists_only_merge_anew(project: Project) -> None:
    table, members = write(project)
    mine = {"name": "mine", "task_type": "python", "predict": "./mine.py:predict", "columns": ["question"]}
    models = [{"name": "near", "task_type": "csv", "path": "near.csv"}, mine]
    write(project, models=models)
    (project.folder / "mine.py").write_text(
        "from pathlib import Path\n\ndef predict(frame, context):\n"
        "    Path('calls').open('a').write('called ')\n    return [[0.1, 0.2, 0.3, 0.4]] * len(frame)\n"
    )
    run(project)
    calls = (project.folder / "calls").read_text()
    mine_values = members["near"] * 0 + [0.1, 0.2, 0.3, 0.4]

    def demand(values: pd.DataFrame, other: pd.DataFrame) -> None:
        np.testing.assert_allclose(read(project, "runs/first/ensemble.csv"), (values + other) / 2, rtol=1e-12)
        assert (project.folder / "calls").read_text() == calls, "nothing was computed"

    demand(masked(members["near"], table), masked(mine_values, table))
    first = project.run_json()["allowed_labels"]
    table["possible"] = ['["x", "y"]'] * ROWS
    table["label"] = "x"
    table.to_csv(project.folder / "test.csv", index=False)
    assert "2 of 4 labels possible" in run(project)
    demand(masked(members["near"], table), masked(mine_values, table))
    assert project.run_json()["allowed_labels"]["sha256"] != first["sha256"]
    assert "possible" not in run(project, "data.allowed_labels=null")
    demand(members["near"], mine_values)
    assert project.run_json()["allowed_labels"] is None
    assert not (project.folder / "runs/first/predictions/allowed_labels.bits").exists()


@pytest.mark.parametrize("suffix", one_in(3, ["csv", "parquet", "jsonl"]))
def test_another_table_names_the_labels_by_a_key(project: Project, suffix: str) -> None:
    write(project)
    run(project)
    expected = (project.folder / "runs/first/ensemble.csv").read_bytes()
    lists = {key: [str(name) for name in names] for key, names in [*QUESTIONS.items(), (99, ["w"])]}
    side = pd.DataFrame({"question": [*lists], "labels": [*lists.values()]})
    if suffix == "parquet":
        side.to_parquet(project.folder / "questions.parquet", index=False)
    elif suffix == "jsonl":
        side.to_json(project.folder / "questions.jsonl", orient="records", lines=True)
    else:
        side["labels"] = side["labels"].map(json.dumps)
        side.to_csv(project.folder / "questions.csv", index=False)
    output = run(
        project,
        f"data.allowed_labels={{path: questions.{suffix}, key: question, column: labels}}",
        "output_dir=runs/second",
    )
    assert f"by column labels of questions.{suffix}" in output
    assert (project.folder / "runs/second/ensemble.csv").read_bytes() == expected
    pd.read_csv(project.folder / "test.csv", dtype={"id": str}).to_parquet(project.folder / "test.parquet")
    run(
        project,
        "data.path=test.parquet",
        f"data.allowed_labels={{path: questions.{suffix}, key: question, column: labels}}",
        "output_dir=runs/third",
    )
    assert (project.folder / "runs/third/ensemble.csv").read_bytes() == expected


@pytest.mark.long
def test_every_merge_method_gives_impossible_labels_0(project: Project) -> None:
    table, members = write(project)
    flags = possible(table)
    parts = [masked(values, table).to_numpy() for values in members.values()]
    clipped = [np.clip(part, np.finfo(float).eps, 1) for part in parts]
    product = np.where(flags, np.sqrt(clipped[0] * clipped[1]), 0)
    raw = np.clip([values.to_numpy() for values in members.values()], np.finfo(float).eps, 1)
    # Of what members give to all labels.
    stacked = np.where(flags, raw[0] ** 0.5 * raw[1] ** 0.25, 0)
    middle = (parts[0] + parts[1]) / 2
    expected = {
        "ensemble.method=geometric_mean": product / product.sum(axis=1, keepdims=True),
        "ensemble.method=median": middle,
        "ensemble={method: power_mean, power: -1}": None,
        "ensemble.method=vote": None,
        "ensemble={method: stacking, coefficients: {near: 0.5, far: 0.25}}": stacked
        / stacked.sum(axis=1, keepdims=True),
        "ensemble.method=rank_mean": None,
    }
    for method, values in expected.items():
        run(project, method)
        merged = read(project, "runs/first/ensemble.csv").to_numpy()
        assert (merged[~flags] == 0).all(), method
        if "rank_mean" not in method:
            np.testing.assert_allclose(merged.sum(axis=1), 1, rtol=1e-12, err_msg=method)
        if values is not None:
            np.testing.assert_allclose(merged, values, rtol=1e-9, atol=1e-300, err_msg=method)
        if "stacking" in method:
            near = project.run_json()["scores"]["near"]["log_loss"]
    run(project)
    assert near == project.run_json()["scores"]["near"]["log_loss"], "scores are with the mask"


@pytest.mark.long
def test_rows_that_are_filled_have_possible_labels_only(project: Project) -> None:
    table, _ = write(project, time_limit="1h")
    near = read(project, "near.csv")
    near[: ROWS // 2].to_csv(project.folder / "near.csv")
    model = "models=[{name: near, task_type: csv, path: near.csv, partial: true}]"
    flags = possible(table)
    for fill in ("uniform", "prior", "sample"):
        done = project.ensemble("run", "config.yaml", "--set", model, "--set", f"fill={fill}", "--fresh")
        assert done.returncode in (0, 4), done.stderr
        merged = read(project, "runs/first/ensemble.csv").to_numpy()
        assert (merged[~flags] == 0).all()
        np.testing.assert_allclose(merged.sum(axis=1), 1, rtol=1e-12)
        if fill != "prior":
            np.testing.assert_allclose(
                merged[ROWS // 2 :], (flags / flags.sum(axis=1, keepdims=True))[ROWS // 2 :], rtol=1e-12
            )


def test_when_knows_which_labels_are_possible(project: Project) -> None:
    table, members = write(project)
    models = [
        {"name": "near", "task_type": "csv", "path": "near.csv"},
        {"name": "far", "task_type": "csv", "path": "far.csv", "when": {"margin_below": 0.3}},
    ]
    write(project, models=models)
    run(project)
    near, far = masked(members["near"], table), masked(members["far"], table)
    ordered = np.sort(near, axis=1)
    is_close = (ordered[:, -1] - ordered[:, -2]) < 0.3
    assert project.run_json()["members"][1]["cascade"]["rows"] == is_close.sum()
    expected = np.where(is_close[:, None], (near + far) / 2, near)
    np.testing.assert_allclose(read(project, "runs/first/ensemble.csv"), expected, rtol=1e-9)


@pytest.mark.long
def test_fit_takes_the_labels_of_the_run(project: Project) -> None:
    table, members = write(project)
    run(project)
    done = project.ensemble("fit", "config.yaml", "-o", "weights.yaml")
    assert done.returncode == 0, done.stderr
    alone = [log_loss(table["label"], masked(values, table)[sorted(NAMES)]) for values in members.values()]
    assert all(f"{loss:.4f}" in done.stdout for loss in alone)
    done = project.ensemble("run", "config.yaml", "weights.yaml")
    assert done.returncode == 0, done.stderr
    weights = [member["weight"] for member in project.run_json()["members"]]
    parts = [masked(values, table) for values in members.values()]
    merged = sum(weight * part for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    np.testing.assert_allclose(read(project, "runs/first/ensemble.csv"), merged, rtol=1e-9)
    for other in ("null", "{path: q.csv, key: question, column: possible}"):
        done = project.ensemble("fit", "config.yaml", "--force", "--set", f"data.allowed_labels={other}")
        assert done.returncode == 2
        text = " ".join(done.stderr.split())
        assert "its run has other data.allowed_labels than the config; run the config again" in text


def test_the_report_finds_the_temperature_that_fit_finds(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.folder)
    _, members = write(project)
    # So sure of wrong labels that at its best temperature even 1e-15 of an impossible one would be a share.
    sure = members["far"] ** 4
    sure.div(sure.sum(axis=1), axis=0).to_csv("far.csv")
    run(project, "report=false")
    fitted = ensemble.fit("config.yaml", method="equal", calibration="temperature", quiet=True)
    run_dir = Path("runs/first")
    data = ReportData(run_dir, ensemble.open_run(run_dir).report)
    page = Calibration().html(data)
    for member in (fitted.rejected or fitted).members:
        assert member.calibration is not None
        assert f"<td>{member.calibration.temperature:.2f}</td>" in str(page)


@pytest.mark.long
def test_compare_shows_members_as_they_were_merged(project: Project) -> None:
    table, members = write(project)
    run(project)
    run(project, "data.allowed_labels=null", "output_dir=runs/second")
    comparison = ensemble.compare(project.folder / "runs/first", project.folder / "runs/second")
    assert [setting.key for setting in comparison.settings or ()] == ["data.allowed_labels"]
    near = masked(members["near"], table)
    (change,) = (change for change in comparison.changes if change.name == "near")
    assert change.mean == pytest.approx(np.abs(near - members["near"]).to_numpy().mean(), rel=1e-9)
    (metric,) = (
        metric for metric in comparison.metrics if (metric.name, metric.metric) == ("near", "log_loss")
    )
    assert metric.first.value == pytest.approx(project.run_json()["scores"]["near"]["log_loss"])
    bits = project.folder / "runs/first/predictions/allowed_labels.bits"
    bits.write_bytes(bits.read_bytes()[::-1])
    done = project.ensemble("compare", "runs/first", "runs/second")
    assert done.returncode == 2
    assert "is not what the run wrote" in " ".join(done.stderr.split())


def refused(*overrides: str) -> str:
    """The problems of the config in the working directory."""
    with pytest.raises(EnsembleError) as error:
        prepare(load([Path("config.yaml")], overrides))
    assert error.value.exit_code == 2
    return "\n".join(error.value.problems)


def test_what_is_wrong_with_the_lists_is_said_in_a_sentence(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _ = write(project)
    monkeypatch.chdir(project.folder)

    def message_of(*cells: str) -> str:
        changed = table.copy()
        changed.loc[range(2, 2 + len(cells)), "possible"] = [*cells]
        changed.to_csv("test.csv", index=False)
        return refused()

    sentence = message_of('["w", "z"]', '["W"]')
    assert sentence == (
        "data.allowed_labels: test.csv: column 'possible': 2 rows: row 3 (id 'r002'): 'z' is no label; "
        "row 4 (id 'r003'): 'W' is no label (did you mean 'w'?); the labels are 'w', 'x', 'y', '7'"
    )
    for cell in ("[]", "", "null"):
        assert "1 row: row 3 (id 'r002'): names no label; every row needs one; the labels are" in message_of(
            cell
        )
    for cell in ('"w"', '{"w": 1}'):
        assert "row 3 (id 'r002'): is no JSON list of labels" in message_of(cell)
    assert "row 3 (id 'r002'): 'true' is no label" in message_of("[true]")
    assert (
        "test.csv: column 'possible': broken JSON in 1 row; row 3 (id 'r002'): not valid JSON"
        in message_of("w")
    )
    sentence = message_of(*['["z"]'] * 5)
    assert "5 rows: row 3 (id 'r002')" in sentence
    assert "(and 2 more); the labels are" in sentence
    table.to_csv("test.csv", index=False)
    sentence = refused("data.allowed_labels=posible")
    assert "test.csv: no column for data.allowed_labels: 'posible' (did you mean 'possible'?)" in sentence
    sentence = refused("data.allowed_labels={path: q.csv, key: qestion, column: labels}")
    assert "test.csv: no column for data.allowed_labels.key: 'qestion' (did you mean 'question'?)" in sentence
    sentence = refused("data.allowed_labels={path: q.csv, kye: question}")
    assert ".kye: unknown key; " in sentence
    assert ".column: required, for example column: labels" in sentence
    assert "data.allowed_labels=[w]: must be" in refused("data.allowed_labels=[w]")
    raw = [{"name": "near", "task_type": "csv", "path": "near.csv", "activation": "none"}]
    sentence = refused(f"models={json.dumps(raw)}")
    assert "data.allowed_labels: is for probabilities, and the models give raw values" in sentence


def test_what_is_wrong_with_the_other_table_is_said_in_a_sentence(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, _ = write(project)
    monkeypatch.chdir(project.folder)
    other = "data.allowed_labels={path: q.csv, key: question, column: labels}"

    def message_of(*rows: tuple[str, str], override: str = other) -> str:
        project.write_csv("q.csv", ["question", "labels"], [[*row] for row in rows])
        return refused(override)

    usual = [(str(key), json.dumps(names)) for key, names in QUESTIONS.items()]
    first = int(table["question"].eq(34).idxmax())
    sentence = message_of(*usual[:3])
    assert sentence.startswith("data.allowed_labels: test.csv: column 'question': ")
    assert f"rows: row {first + 1} (id 'r{first:03d}'): '34'; " in sentence
    assert "q.csv has no such keys; add them there" in sentence
    assert "data.allowed_labels: q.csv: id column 'question': 1 id more" in message_of(*usual, usual[0])
    sentence = message_of(usual[0], ("32", '["z"]'))
    assert "data.allowed_labels: q.csv: column 'labels': 1 row: row 2 (id '32'): 'z' is no label" in sentence
    sentence = message_of(*usual, override=other.replace("labels}", "label}"))
    assert "q.csv: no text column 'label'" in sentence
    assert "data.allowed_labels: p.csv: no such file" in refused(other.replace("q.csv", "p.csv"))
    assert "submission.path: q.csv would replace what the run reads" in refused(
        other, "submission.path=q.csv"
    )


def test_true_labels_that_are_impossible_are_told(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    table, _ = write(project)
    monkeypatch.chdir(project.folder)
    table.loc[[7, 9], "possible"] = '["w"]'
    table.loc[[7, 9], "label"] = "x"
    table.to_csv("test.csv", index=False)
    assert (
        "data.allowed_labels: 2 rows whose true label is impossible, the first is row 8 (id 'r007'); "
        "no prediction can be right there"
    ) in prepare(load([Path("config.yaml")], [])).warnings


def test_merge_of_files_alone_has_no_table_for_it(project: Project) -> None:
    write(project)
    done = project.ensemble(
        "merge", "near.csv", "far.csv", "-o", "out.csv", "--set", "data.allowed_labels=possible"
    )
    assert done.returncode == 2
    assert "files has no such key" in " ".join(done.stderr.split())
