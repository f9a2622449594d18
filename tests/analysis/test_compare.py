"""Two runs, or two files, side by side."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn import metrics as sk
from typer.testing import CliRunner

import ensemble
from ensemble.analysis.compare import changed_settings, compare
from ensemble.cli.analyses import compare as view
from ensemble.cli.app import app
from ensemble.common.errors import ConfigError, DataError
from tests.cli.reports import shown
from tests.project import LABELS, Project

NAMES = ["winner_a", "winner_b", "tie"]


def settings(first: Any, second: Any) -> list[tuple[str, str, str]]:
    return [
        (changed_setting.key, changed_setting.first, changed_setting.second)
        for changed_setting in changed_settings(first, second)
    ]


def probabilities(rows: int, seed: int) -> pd.DataFrame:
    values = np.random.default_rng(seed).dirichlet([1, 1, 1], rows)
    return pd.DataFrame(
        values, columns=NAMES, index=pd.Index([f"{row:03d}" for row in range(rows)], name="id")
    )


def test_settings_that_differ_by_their_place() -> None:
    first = {
        "data": {"path": "test.csv"},
        "limit": 10,
        "models": [{"name": "a", "weight": 0.5}, {"name": "b", "prompt_template": f"{'x' * 90}first"}],
        "output_dir": "runs/first",
    }
    second = {
        "data": {"path": "test.csv", "label_column": "label"},
        "ensemble": {"method": "median"},
        "models": [
            {"name": "b", "prompt_template": f"{'x' * 90}second"},
            {"name": "c"},
            {"name": "a", "weight": 1},
        ],
        "output_dir": "runs/second",
    }
    assert settings(first, first | {"output_dir": "elsewhere"}) == []
    assert settings(first, second) == [
        ("limit", "10", "not set"),
        ("models", "['a', 'b']", "['b', 'c', 'a']"),
        ("models.a.weight", "0.5", "1"),
        ("models.b.prompt_template", "...'xxxxxxxxxxxxxxxfirst'", "...'xxxxxxxxxxxxxxxsecond'"),
        ("data.label_column", "not set", "'label'"),
        ("ensemble.method", "not set", "'median'"),
    ]


def test_files_by_the_rows_and_labels_that_they_share(tmp_path: Path) -> None:
    """Rows in another order, some of them on one side only, and columns in another order."""
    ours, theirs = probabilities(50, 1), probabilities(60, 2)
    theirs.iloc[5:30] = ours.iloc[5:30]
    ours.to_csv(tmp_path / "a.csv")
    theirs.iloc[::-1][["tie", "winner_a", "winner_b"]].iloc[:-2].to_csv(tmp_path / "b.csv")
    truth = pd.Series(np.random.default_rng(3).choice(NAMES, 50), ours.index, name="label")
    truth.to_csv(tmp_path / "truth.csv")
    comparison = compare(
        tmp_path / "a.csv", tmp_path / "b.csv", ["log_loss", "accuracy"], labels=tmp_path / "truth.csv"
    )
    both = ours.index[2:]
    left, right, true = ours.loc[both], theirs.loc[both], truth.loc[both]
    (change,) = comparison.changes
    flipped = left.idxmax(axis=1) != right.idxmax(axis=1)
    apart = (left - right).abs()
    assert (comparison.rows, change.name, change.rows, change.changed) == (
        48,
        "predictions",
        48,
        flipped.sum(),
    )
    assert change.mean == pytest.approx(apart.to_numpy().mean())
    assert change.largest == pytest.approx(apart.to_numpy().max())
    most = apart[flipped].max(axis=1).sort_values(ascending=False).index
    assert [example.id for example in change.examples] == [*most[:5]]
    example, row = change.examples[0], most[0]
    assert example.first == f"{left.loc[row].idxmax()} {left.loc[row].max():.3f}"
    assert example.second == f"{right.loc[row].idxmax()} {right.loc[row].max():.3f}"
    loss, accuracy = comparison.metrics
    order = sorted(NAMES)
    losses = [sk.log_loss(true, side[order], labels=order) for side in (left, right)]
    assert [loss.first.value, loss.second.value] == pytest.approx(losses)
    assert loss.difference.value == pytest.approx(losses[1] - losses[0])
    assert loss.difference.low < loss.difference.value < loss.difference.high
    assert accuracy.second.value == sk.accuracy_score(true, right.idxmax(axis=1))
    assert comparison.settings is None
    only_ours, only_theirs, _ = comparison.remarks
    assert only_ours.endswith("a.csv: 2 rows left out, which the other side does not have")
    assert only_theirs.endswith("b.csv: 10 rows left out, which the other side does not have")


def test_which_side_is_better_and_when_that_is_noise(tmp_path: Path) -> None:
    index = pd.Index([str(row) for row in range(400)], name="id")
    chances = np.random.default_rng(0).uniform(0.2, 0.8, 400)
    true = np.where(np.random.default_rng(1).random(400) < chances, "yes", "no")
    pd.Series(true, index, name="label").to_csv(tmp_path / "truth.csv")
    for name, own in {"good": chances, "poor": np.full(400, 0.5), "same": chances + 1e-8}.items():
        pd.DataFrame({"no": 1 - own, "yes": own}, index).to_csv(tmp_path / f"{name}.csv")
    labels = tmp_path / "truth.csv"

    def better(first: str, second: str, metric: str) -> str:
        (result,) = compare(tmp_path / f"{first}.csv", tmp_path / f"{second}.csv", [metric], labels).metrics
        return result.better

    assert [better("good", "poor", metric) for metric in ("log_loss", "auc")] == ["first", "first"]
    assert [better("poor", "good", metric) for metric in ("brier", "accuracy")] == ["second", "second"]
    assert better("good", "same", "auc") == ""


def test_each_metric_says_of_which_kind_it_is(tmp_path: Path) -> None:
    ours = probabilities(60, 1)
    ours.to_csv(tmp_path / "a.csv")
    truth = np.random.default_rng(3).choice(NAMES, 60)
    pd.Series(truth, ours.index, name="label").to_csv(tmp_path / "truth.csv")
    kinds = {
        "log_loss": "mean",
        "accuracy": "mean",
        "brier": "mean",
        "map@2": "mean",
        "macro_f1": "sums",
        "quadratic_kappa": "sums",
        "auc": "ranks",
        "ece": "bins",
    }
    comparison = compare(tmp_path / "a.csv", tmp_path / "a.csv", [*kinds], tmp_path / "truth.csv")
    assert {metric.metric: metric.kind for metric in comparison.metrics} == kinds
    (table,) = [
        item for item in view(comparison) if not isinstance(item, str) and item.headers[0] == "metric"
    ]
    assert {row[0]: row[1] for row in table.rows} == kinds
    (ece,) = [row for row in table.rows if row[0] == "ece"]
    assert ece[4] == ece[5] == f"{comparison.metrics[-1].first.value:.4f}"
    assert ece[6] == "+0.0000 [+0.0000, +0.0000]"
    assert any(item.startswith("ece: no interval of A or B") for item in map(str, view(comparison)))
    assert "; ranks: rows compared with each other; bins: rows put into bins" in " ".join(
        map(str, view(comparison))
    )


def test_numbers_and_labels_that_are_not_exclusive(tmp_path: Path) -> None:
    pd.DataFrame({"id": ["x", "y"], "score": [1.5, 2.0]}).to_csv(tmp_path / "a.csv", index=False)
    pd.DataFrame({"id": ["x", "y"], "score": [1.5, 3.25]}).to_csv(tmp_path / "b.csv", index=False)
    pd.DataFrame({"id": ["x", "y"], "label": [1.0, 3.0]}).to_csv(tmp_path / "truth.csv", index=False)
    comparison = compare(tmp_path / "a.csv", tmp_path / "b.csv", labels=tmp_path / "truth.csv")
    (change,), (metric,) = comparison.changes, comparison.metrics
    assert (change.changed, change.largest) == (1, 1.25)
    assert [(example.id, example.first, example.second) for example in change.examples] == [
        ("y", "2", "3.25")
    ]
    assert metric.metric == "rmse"
    assert metric.first.value == pytest.approx((0.25 / 2 + 1 / 2) ** 0.5)
    pd.DataFrame({"id": ["x", "y"], "rude": [0.7, 0.2], "loud": [0.9, 0.6]}).to_csv(
        tmp_path / "c.csv", index=False
    )
    pd.DataFrame({"id": ["x", "y"], "rude": [0.6, 0.8], "loud": [0.9, 0.6]}).to_csv(
        tmp_path / "d.csv", index=False
    )
    (change,) = compare(tmp_path / "c.csv", tmp_path / "d.csv", activation="sigmoid").changes
    assert [(example.id, example.first, example.second) for example in change.examples] == [
        ("y", "rude 0.2", "rude 0.8")
    ]


def test_members_without_any_change_are_one_line(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 2)):
        probabilities(20, seed).to_csv(tmp_path / f"{name}.csv")
    different = compare(tmp_path / "a.csv", tmp_path / "b.csv")
    same = compare(tmp_path / "a.csv", tmp_path / "a.csv")
    (change,), (unchanged,) = different.changes, same.changes
    members = [replace(unchanged, name=name) for name in ("gemma", "llama")]
    _, _, table, line, *_ = view(replace(different, changes=(change, *members)))
    assert not isinstance(table, str)
    assert [row[0] for row in table.rows] == ["predictions"]
    assert line == "Predictions that are the same in all rows: gemma, llama"
    assert not [part for part in view(same) if not isinstance(part, str)]


def test_the_columns_of_labels_are_chosen_by_name(tmp_path: Path) -> None:
    """Of files with other columns beside them, as `merge` takes them; `--label` of the command line."""
    ours, theirs = probabilities(60, 1), probabilities(60, 2)
    ours.assign(fold=3).to_csv(tmp_path / "a.csv")
    theirs.assign(set=7).to_csv(tmp_path / "b.csv")
    truth = pd.Series(np.random.default_rng(3).choice(NAMES, 60), ours.index, name="label")
    truth.to_csv(tmp_path / "truth.csv")
    files = [str(tmp_path / "a.csv"), str(tmp_path / "b.csv")]
    chosen = [text for name in NAMES for text in ("--label", name)]
    labels = ["--labels", str(tmp_path / "truth.csv"), *chosen]
    for command in ("compare", "fit"):
        output = ["-o", str(tmp_path / "weights.yaml")] if command == "fit" else []
        finished = CliRunner().invoke(app, [command, *files, *labels, *output])
        assert finished.exit_code == 0, finished.exception
    report = ensemble.fit(files, labels=tmp_path / "truth.csv", columns=NAMES, quiet=True)
    order = sorted(NAMES)
    alone = {
        name: sk.log_loss(truth, side[order], labels=order) for name, side in (("a", ours), ("b", theirs))
    }
    assert {member.name: member.alone for member in report.members} == pytest.approx(alone)
    with pytest.raises(DataError, match="such as --label winner_a"):
        ensemble.fit(files, labels=tmp_path / "truth.csv", quiet=True)
    with pytest.raises(ConfigError, match="--label: names columns of CSVs, and these are runs"):
        compare(tmp_path, tmp_path, columns=NAMES)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    ours = probabilities(10, 1)
    ours.to_csv(tmp_path / "a.csv")
    ours.set_axis([f"other {row}" for row in range(10)]).rename_axis("id").to_csv(tmp_path / "others.csv")
    ours.rename(columns={"tie": "draw"}).to_csv(tmp_path / "labels.csv")
    pd.DataFrame({"id": ours.index, "label": "tie"}).to_csv(tmp_path / "truth.csv", index=False)
    (tmp_path / "empty").mkdir()
    a = tmp_path / "a.csv"
    for other, asked, message in (
        ("others.csv", [], "have no id in common, so their rows are not compared"),
        (
            "labels.csv",
            [],
            "have other labels, so their rows are not compared: 'winner_a', 'winner_b', 'tie', and",
        ),
        ("empty", [], "there is no run.json"),
        ("a.csv", ["log_loss"], "metrics need the truth; name its table (--labels)"),
        ("a.csv", ["logloss"], "metric 'logloss': unknown; did you mean log_loss?"),
    ):
        with pytest.raises(DataError) as caught:
            compare(a, tmp_path / other, asked)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match="--label-column: is one of --labels or of a run's table"):
        compare(a, a, label_column="label")
    with pytest.raises(DataError, match="auc: not defined"):
        compare(a, a, ["auc"], labels=tmp_path / "truth.csv")
    comparison = compare(a, a, ["auc", "accuracy"], labels=tmp_path / "truth.csv")
    assert [metric.metric for metric in comparison.metrics] == ["accuracy"]
    assert "auc: not defined" in comparison.remarks[0]


@pytest.mark.usefixtures("warm")
def test_two_runs(
    project: Project, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write_table(60)
    project.write_config(project.config())
    assert project.ensemble("run", "config.yaml").returncode == 0
    header, rows = project.read("runs/first/predictions/llama.csv")
    project.write_csv("mate.csv", header, rows)
    changed = project.config(output_dir="runs/second")
    changed["models"][0] |= {"weight": 0.2, "max_length": 24}
    changed["models"][1] = {"name": "mate", "task_type": "csv", "path": "mate.csv"}
    project.write_config(changed, "second.yaml")
    assert project.ensemble("run", "second.yaml", "--set", "limit=50").returncode == 0

    done = project.ensemble("compare", "runs/first", "runs/second", "--metric", "log_loss")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == ["A: runs/first", "B: runs/second"]
    for start in (
        "models.gemma.weight: 0.6 -> 0.2",
        "models.gemma.max_length: not set -> 24",
        "models.llama.model_name_or_path: ",
        "models.mate.path: not set -> 'mate.csv'",
        "limit: not set -> 50",
        "ensemble      50 ",
        "log_loss  mean  ensemble    50  ",
        "mate       B        given",
        "whole run  A ",
        "! runs/first: 10 rows left out",
    ):
        assert sum(line.startswith(start) for line in lines) == 1, (start, done.stdout)
    assert not any(line.startswith("output_dir") for line in lines)

    monkeypatch.chdir(project.folder)
    comparison = ensemble.compare("runs/first", "runs/second", ["log_loss"], quiet=True)
    assert list(shown("analyses.compare", comparison)) == lines
    assert [change.name for change in comparison.changes] == ["ensemble", "gemma"]
    first, second = (ensemble.open_run(f"runs/{name}") for name in ("first", "second"))
    apart = (first.ensemble.iloc[:50] - second.ensemble).abs().to_numpy()
    assert comparison.changes[0].mean == pytest.approx(apart.mean())
    scores = {metric.name: metric for metric in comparison.metrics}
    for name in ("ensemble", "gemma"):
        assert scores[name].second.value == pytest.approx(second.report.scores[name].log_loss)
    loss = sk.log_loss(project.truth[:50], first.ensemble.iloc[:50][sorted(LABELS)], labels=sorted(LABELS))
    assert scores["ensemble"].first.value == pytest.approx(loss)
    for side, opened in ((comparison.first, first), (comparison.second, second)):
        assert side.report == opened.report
    # Again with other weights, for which nothing is computed; with itself; with a file; with rows of other labels.
    shutil.copytree("runs/first", "runs/again")
    project.write_config(
        {"models": [{"name": "gemma", "weight": 9}], "output_dir": "runs/again"}, "weights.yaml"
    )
    assert project.ensemble("run", "config.yaml", "weights.yaml").returncode == 0
    again = ensemble.compare("runs/first", "runs/again", quiet=True)
    assert again.settings is not None
    assert [(setting.key, setting.first, setting.second) for setting in again.settings] == [
        ("models.gemma.weight", "0.6", "9")
    ]
    assert [change.changed > 0 for change in again.changes] == [True, False, False]
    assert sum(line.split()[1:] == ["B", "reused"] for line in shown("analyses.compare", again)) == 2
    same = ensemble.compare("runs/first", Path("runs/first"))
    assert not same.settings
    assert not same.remarks
    assert [(change.changed, change.largest) for change in same.changes] == [(0, 0.0)] * 3
    assert {metric.better for metric in same.metrics} == {""}
    assert "The settings are the same." in capsys.readouterr().out
    alone = project.ensemble("compare", "runs/first")
    assert alone.returncode == 2
    assert "Missing argument 'B'" in alone.stderr
    with_file = ensemble.compare("runs/first", "mate.csv", quiet=True)
    assert [change.name for change in with_file.changes] == ["ensemble"]
    assert (with_file.settings, len(with_file.metrics)) == (None, 2)
    for path in (project.folder / "runs/second").glob("**/*.csv"):
        path.write_text(path.read_text().replace("winner_a", "winner_x", 1))
        path.with_suffix(".json").unlink(missing_ok=True)  # else it is known to be another file
    other = ensemble.compare("runs/first", "runs/second", quiet=True)
    assert (other.rows, other.changes, other.metrics, len(other.settings or ())) == (0, (), (), 8)
    assert "have other labels" in other.remarks[-1]
    with pytest.raises(ensemble.ConfigError, match=r"metrics: give a list"):
        ensemble.compare("runs/first", "runs/second", "auc")


def test_secrets_stay_hidden(tmp_path: Path) -> None:
    """run.json never has them; what two configs call by other names is shown by these."""
    first, second = (
        {"models": [{"name": "a", "token": f"${{{name}}}"}]} for name in ("OLD_TOKEN", "NEW_TOKEN")
    )
    assert settings(json.loads(json.dumps(first)), second) == [
        ("models.a.token", "'${OLD_TOKEN}'", "'${NEW_TOKEN}'")
    ]


@pytest.mark.long
@pytest.mark.usefixtures("warm")
@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_runs_of_labels_that_are_not_exclusive(activation: str, project: Project) -> None:
    """Their truth, too, is that of the run's table; its rows need not sum to 1."""
    generator = np.random.default_rng(4)
    index = pd.Index([str(row) for row in range(80)], name="id")
    true = (generator.random((80, 2)) < 0.4).astype(int)
    names = ["rude", "loud"]
    pd.DataFrame(true, index, [f"is_{name}" for name in names]).to_csv(project.folder / "test.csv")
    sides = {}
    for name, better in (("first", 0.0), ("second", 0.3)):
        values = np.clip(0.35 + 0.3 * generator.random((80, 2)) + better * (true - 0.5), 0, 1)
        sides[name] = values  # numbers from 0 to 1, whatever they mean
        pd.DataFrame(values, index, names).to_csv(project.folder / f"{name}.csv")
        config: dict[str, Any] = {
            "data": {"path": "test.csv", "label_columns": {f"is_{label}": label for label in names}},
            "labels": names,
            "models": [{"name": "m", "task_type": "csv", "path": f"{name}.csv", "activation": activation}],
            "output_dir": f"runs/{name}",
        }
        if name == "second" and activation == "sigmoid":
            config["models"][0]["calibration"] = {"temperature": 0.7}
        project.write_config(config)
        done = project.ensemble("run", "config.yaml")
        assert done.returncode == 0, done.stderr
    comparison = compare(project.folder / "runs/first", project.folder / "runs/second")
    assert [change.name for change in comparison.changes] == ["ensemble", "m"]
    scores = {metric.metric: metric for metric in comparison.metrics if metric.name == "m"}
    # What the run said at its end.
    item = scores["rmse" if activation == "none" else "log_loss"]
    for name, interval in {"first": item.first, "second": item.second}.items():
        told = ensemble.open_run(project.folder / f"runs/{name}").report.scores
        own = told["m"].rmse if activation == "none" else told["m"].log_loss
        assert own == pytest.approx(interval.value, rel=1e-9)
        assert told["ensemble"] == told["m"]
    with_file = compare(project.folder / "first.csv", project.folder / "runs/second")
    assert with_file.first.name.endswith("first.csv")
    assert {metric.metric: metric for metric in with_file.metrics} == {
        name: replace(score, name="ensemble") for name, score in scores.items()
    }
    if activation == "none":
        root = np.sqrt(((sides["first"] - true) ** 2).mean(axis=0)).mean()
        assert scores.keys() == {"rmse"}
        assert scores["rmse"].first.value == pytest.approx(root)
        return
    assert scores["auc"].second.value == pytest.approx(sk.roc_auc_score(true, sides["second"]))
    losses = [sk.log_loss(true[:, label], sides["first"][:, label]) for label in (0, 1)]
    assert scores["log_loss"].first.value == pytest.approx(np.mean(losses))
    assert {score.better for score in scores.values()} == {"second"}
    crossed = ((sides["first"] > 0.5) != (sides["second"] > 0.5)).any(axis=1)
    assert comparison.changes[0].changed == crossed.sum()
