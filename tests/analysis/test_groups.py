"""``--group`` and metrics of one's own, in fit, compare, a run's summary and report."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit
from sklearn.isotonic import IsotonicRegression
from sklearn.metrics import f1_score, roc_auc_score

import ensemble
from ensemble.analysis.fit import Options, fit
from ensemble.analysis.predictions import read_files
from ensemble.analysis.report.base import ReportData
from ensemble.analysis.report.results import Scores
from ensemble.analysis.weights_file import verdicts
from ensemble.cli.runs import summary
from ensemble.common.errors import EnsembleError

ROWS = 1_600
OWN = """
import numpy as np

def accuracy(truth, probabilities, labels):
    assert labels == ["no", "yes"]
    probabilities *= 2  # its own copy
    return np.mean(probabilities.argmax(axis=1) == truth)

def loss(truth, probabilities, labels):
    return float(-np.log(probabilities[np.arange(len(truth)), truth].clip(2.3e-16)).mean())

loss.greater_is_better = False
number = 3

def few(truth): return 1.0
def fails(truth, probabilities, labels): raise KeyError("no such key")
def leaves(truth, probabilities, labels): raise SystemExit(0)
def nothing(truth, probabilities, labels): return None
def undefined(truth, probabilities, labels): return float("nan")
"""


class Rules:
    """Comments judged by rules: each member knows one of two rules, and each rule has a scale of its own.

    Every row of a third rule is "no", so that it has no AUC.
    """

    def __init__(self, folder: Path, seed: int = 0, rows: int = ROWS) -> None:
        random = np.random.default_rng(seed)
        self.folder = folder
        self.rule = random.choice(["ads", "law", "odd"], rows, p=[0.55, 0.4, 0.05])
        chance = pd.Series({"ads": 0.8, "law": 0.2, "odd": 0.0})[self.rule].to_numpy()
        self.truth = (random.random(rows) < chance).astype(int)
        ids = [f"r{row}" for row in range(rows)]
        self.values = {}
        # "base" knows how often each rule is broken, which is worth much in all rows and nothing within a rule.
        for name, skills, offset in (("ads", (0.8, 0.0), 0), ("law", (0.0, 0.8), 0), ("base", (0.0, 0.0), 2)):
            skill = pd.Series({"ads": skills[0], "law": skills[1], "odd": 0.0})[self.rule].to_numpy()
            shift = offset * pd.Series({"ads": 1.0, "law": -1.0, "odd": 0.0})[self.rule].to_numpy()
            self.values[name] = expit(skill * (2 * self.truth - 1) + random.normal(size=rows) + shift)
        self.files = [folder / f"{name}.csv" for name in self.values]
        for file, yes in zip(self.files, self.values.values(), strict=True):
            pd.DataFrame({"row": ids, "no": 1 - yes, "yes": yes}).to_csv(file, index=False)
        self.labels = folder / "train.csv"
        label = np.array(["no", "yes"])[self.truth]
        self.table = pd.DataFrame({"row": ids, "text": "?", "label": label, "rule": self.rule})
        self.table.sample(frac=1, random_state=1).to_csv(self.labels, index=False)
        (folder / "my code").mkdir(exist_ok=True)
        (folder / "my code" / "own metric.py").write_text(OWN, encoding="utf-8")

    def own(self, function: str) -> str:
        return f"{self.folder}/my code/own metric.py:{function}"

    def auc(self, yes: Any) -> float:
        """scikit-learn's of the two rules that have both labels."""
        parts = [self.rule == rule for rule in ("ads", "law")]
        return float(np.mean([roc_auc_score(self.truth[rows], yes[rows]) for rows in parts]))

    def run(self, **more: Any) -> dict[str, Any]:
        config = {
            "data": {"path": self.labels, "id_column": "row", "label_column": "label"},
            "labels": ["no", "yes"],
            "models": [{"name": file.stem, "task_type": "csv", "path": file} for file in self.files],
            "output_dir": self.folder / "run",
            **more,
        }
        ensemble.run(config, quiet=True)
        return config


@pytest.fixture
def rules(tmp_path: Path) -> Rules:
    return Rules(tmp_path)


def test_weights_for_groups_beat_those_for_all_rows_on_fresh_rows(rules: Rules, tmp_path: Path) -> None:
    (tmp_path / "fresh").mkdir()
    fresh, scores = Rules(tmp_path / "fresh", seed=1, rows=4_000), {}
    for group in (None, "rule"):
        report = ensemble.fit(rules.files, labels=rules.labels, metric="auc", group=group, quiet=True)
        weights = [member.weight or 0.0 for member in report.members]
        scores[group] = fresh.auc(sum(w * v for w, v in zip(weights, fresh.values.values(), strict=True)))
    assert scores["rule"] > scores[None] + 0.01
    alone = {member.name: member.alone for member in report.members}
    assert max(alone.values()) < report.score
    assert report.fitted_on.metric == "auc by rule"
    (sentence,) = [text for text in verdicts(report) if text.startswith("Held-out auc by rule ")]
    assert (
        "The figures are the mean over 10 groups by column 'rule' and fold; not defined in 5 more: "
        in sentence
    )
    assert report.fitted_on.interval is not None
    assert report.fitted_on.interval[0] < scores["rule"] < report.fitted_on.interval[1]


def test_compare_averages_over_groups(rules: Rules) -> None:
    first, second, _ = rules.files
    options: Any = {"labels": rules.labels, "group": "rule", "quiet": True}
    compared = ensemble.compare(first, second, ["auc", rules.own("accuracy"), "accuracy"], **options)
    auc, own, accuracy = compared.metrics
    assert (auc.metric, auc.kind) == ("auc by rule", "ranks")
    expected = [rules.auc(rules.values[name]) for name in ("ads", "law")]
    assert [auc.first.value, auc.second.value] == pytest.approx(expected, abs=1e-12)
    assert auc.first.low < auc.first.value < auc.first.high
    assert own.first.value == pytest.approx(accuracy.first.value, abs=1e-12)
    assert (
        "auc by rule: the mean over 2 groups by column 'rule'; not defined in 1 more: 'odd'"
        in compared.remarks
    )
    run_dir = rules.run(report=False)["output_dir"]
    of_run = ensemble.compare(run_dir, first, ["auc"], group="rule", quiet=True).metrics[0]
    mean = np.mean([*rules.values.values()], axis=0)
    assert [of_run.first.value, of_run.second.value] == pytest.approx(
        [rules.auc(mean), expected[0]], abs=1e-12
    )


def test_a_function_that_computes_what_a_metric_does_has_its_value_weights_and_interval(
    tmp_path: Path,
) -> None:
    rules = Rules(tmp_path, rows=400)
    first, second, _ = rules.files
    names = ["accuracy", rules.own("accuracy"), "log_loss", rules.own("loss")]
    compared = ensemble.compare(first, second, names, labels=rules.labels, quiet=True)
    for metric, own in (compared.metrics[:2], compared.metrics[2:]):
        assert own.first.value == pytest.approx(metric.first.value, abs=1e-12)
        assert own.greater_is_better is metric.greater_is_better
        width = metric.difference.high - metric.difference.low
        ends = (own.difference.low, own.difference.high)
        assert ends == pytest.approx((metric.difference.low, metric.difference.high), abs=0.2 * width)
    for name, own_name in (("accuracy", "accuracy"), ("log_loss", "loss")):
        reports = [
            ensemble.fit(rules.files, labels=rules.labels, metric=metric, method="greedy", quiet=True)
            for metric in (name, rules.own(own_name))
        ]
        weights = [[member.weight for member in report.members] for report in reports]
        assert weights[0] == pytest.approx(weights[1])
        # Greedy steps of losses that are equal but for the last digit may differ.
        assert reports[0].score == pytest.approx(reports[1].score, abs=1e-12 if name == "accuracy" else 1e-3)
    assert not [path for path in (rules.folder / "my code").iterdir() if path.name == "__pycache__"]


def test_a_function_may_print_and_import_its_neighbours_when_it_is_called(
    rules: Rules, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (rules.folder / "neighbour_of_metric.py").write_text("VALUE = 0.25", encoding="utf-8")
    code = "def score(truth, p, labels):\n    import neighbour_of_metric\n    print('called')\n"
    own = rules.folder / "talks.py"
    own.write_text(f"print('imported')\n{code}    return neighbour_of_metric.VALUE", encoding="utf-8")
    first, second, _ = rules.files
    compared = ensemble.compare(first, second, [f"{own}:score"], labels=rules.labels, quiet=True)
    assert compared.metrics[0].first.value == 0.25
    captured = capsys.readouterr()
    assert not captured.out, "commands with --json print nothing but JSON"
    assert {"imported", "called"} <= set(captured.err.split())


def test_a_member_without_a_value_in_a_group_names_the_group(rules: Rules) -> None:
    table = rules.table.assign(label=np.arange(ROWS) * 1.0)[["row", "label"]]
    table.to_csv(rules.folder / "rising.csv", index=False)
    table["label"] = table["label"].where(rules.rule != "law", 0.5)
    table.to_csv(rules.folder / "level.csv", index=False)
    rules.table.assign(label=np.arange(ROWS) ** 2.0).to_csv(rules.labels, index=False)
    first, second = rules.folder / "rising.csv", rules.folder / "level.csv"
    with pytest.raises(EnsembleError) as caught:
        ensemble.compare(
            first,
            second,
            ["pearson"],
            labels=rules.labels,
            activation="none",
            group="rule",
            quiet=True,
        )
    count = int((rules.rule == "law").sum())
    assert f"pearson by rule: not defined for these {count} rows of 'law': the " in caught.value.problems[-1]


def test_a_slow_function_has_no_interval_and_no_verdict(rules: Rules) -> None:
    slow = "import time\ndef score(truth, p, labels):\n    time.sleep(0.06)\n    return float(p[0, 0])"
    (rules.folder / "slow.py").write_text(slow, encoding="utf-8")
    predictions = read_files(rules.files[:2], labels=rules.labels)
    report = fit(predictions, Options(f"{rules.folder}/slow.py:score", "best_member", "temperature", folds=2))
    assert report.fitted_on.interval is None
    assert np.isnan(report.over_equal.low)
    assert not [text for text in verdicts(report) if "more than noise" in text]


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("fails", "raised KeyError: 'no such key'"),
        ("leaves", "raised SystemExit: 0"),
        ("nothing", "returned None; it must return one number"),
        ("undefined", "returned nan for 1,600 rows"),
        ("few", "few is called with truth and probabilities and labels: too many positional arguments"),
        ("number", "number must be a function of "),
        ("acuracy", "acuracy must be a function of "),
    ],
)
def test_a_function_that_gives_no_number_is_refused_by_its_name(
    rules: Rules, function: str, problem: str
) -> None:
    first, second, _ = rules.files
    for command in (
        lambda: ensemble.fit(rules.files, labels=rules.labels, metric=rules.own(function), quiet=True),
        lambda: ensemble.compare(first, second, [rules.own(function)], labels=rules.labels, quiet=True),
    ):
        with pytest.raises(EnsembleError) as caught:
            command()
        assert caught.value.exit_code == 2
        assert f"metric {rules.own(function)}: {problem}" in caught.value.problems[-1]


@pytest.mark.parametrize(
    ("metric", "problem"),
    [
        ("my code/own metric.py:accuracy", "own metric.py: no such file"),
        ("{folder}/broken.py:score", "broken.py:score: SyntaxError: "),
        ("{folder}/gone.py:score", "gone.py: no such file"),
        ("no.such.module:score", "score: ModuleNotFoundError: No module named 'no'"),
        ("{folder}/broken.py", "broken.py: give the file and its function, as in my_metric.py:score"),
        ("{folder}/data.txt:score", "data.txt is no Python file; its name must end in .py"),
    ],
)
def test_a_metric_that_is_not_there_is_refused(rules: Rules, metric: str, problem: str) -> None:
    (rules.folder / "broken.py").write_text("def score(:\n", encoding="utf-8")
    (rules.folder / "data.txt").write_text("", encoding="utf-8")
    name = metric.format(folder=rules.folder)
    with pytest.raises(EnsembleError) as caught:
        ensemble.fit(rules.files, labels=rules.labels, metric=name, quiet=True)
    assert caught.value.exit_code == 2
    (sentence,) = caught.value.problems
    assert problem in sentence
    with pytest.raises(EnsembleError) as caught:
        ensemble.validate({**rules.run(report=False), "metrics": [{"name": name}]})
    assert caught.value.exit_code == 2
    assert caught.value.problems[0].startswith("metrics[0]: metric ")


@pytest.mark.parametrize(
    ("column", "problem"),
    [
        ("rul", "'rul' (did you mean 'rule'?)"),
        ("same", "column 'same' is 'x' in every row"),
        ("gaps", "column 'gaps' of {path} is empty in 1 row, first: row 4 (id 'r3'); fill it in every row"),
    ],
)
def test_a_column_without_groups_is_refused(rules: Rules, column: str, problem: str) -> None:
    first, second, _ = rules.files
    gaps = ["x", "y", "x", "", *["y"] * (ROWS - 4)]
    rules.table.assign(same="x", gaps=gaps).to_csv(rules.labels, index=False)
    config = rules.run(report=False)
    metrics = [{"name": "auc", "group": column}]
    commands: list[Any] = [
        lambda: ensemble.fit(rules.files, labels=rules.labels, metric="auc", group=column, quiet=True),
        lambda: ensemble.fit(config, metric="auc", group=column, quiet=True),
        lambda: ensemble.compare(first, second, labels=rules.labels, group=column, quiet=True),
        lambda: ensemble.compare(config["output_dir"], rules.files[0], group=column, quiet=True),
    ]
    if column != "same":  # which a trial on few rows may have
        commands.append(lambda: ensemble.validate({**config, "metrics": metrics}))
    for command in commands:
        with pytest.raises(EnsembleError) as caught:
            command()
        assert caught.value.exit_code == 2
        (sentence,) = caught.value.problems
        assert problem.format(path=rules.labels) in sentence
    with pytest.raises(EnsembleError, match="metrics need the truth; name its table"):
        ensemble.compare(first, second, group="rule", quiet=True)


def test_a_run_shows_its_metrics_and_outlives_those_that_fail(rules: Rules) -> None:
    names = [rules.own("accuracy"), rules.own("fails")]
    metrics = [{"name": "auc", "group": "rule"}, {"name": "macro_f1"}, *({"name": name} for name in names)]
    config = rules.run(metrics=metrics, report=False)
    run = ensemble.open_run(config["output_dir"])
    report, mean = run.report, np.mean([*rules.values.values()], axis=0)
    for name, yes in (*rules.values.items(), ("ensemble", mean)):
        score = report.scores[name]
        assert [*score.metrics] == ["auc by rule", "macro_f1", names[0]]
        assert score.metrics["auc by rule"] == pytest.approx(rules.auc(yes), abs=1e-12)
        expected = f1_score(rules.truth, yes > 0.5, average="macro")
        assert score.metrics["macro_f1"] == pytest.approx(expected, abs=1e-12)
        assert score.metrics[names[0]] == pytest.approx(score.accuracy)
    remark = "auc by rule: the mean over 2 groups by column 'rule'; not defined in 1 more: 'odd'"
    assert report.metric_remarks == (remark, f"metric {names[1]}: raised KeyError: 'no such key'")
    assert f"! {remark}" in [*summary(report)]
    page = Scores().html(ReportData(config["output_dir"], report))
    for text in ("auc by rule", "macro_f1", "own metric.py:fails: raised KeyError", "mean over 2 groups"):
        assert text in page


def test_ranks_have_the_metrics_that_compare_rows(rules: Rules) -> None:
    metrics = [{"name": "auc", "group": "rule"}, {"name": "brier"}]
    rules.run(metrics=metrics, ensemble={"method": "rank_mean"}, report=False)
    report = ensemble.open_run(rules.folder / "run").report
    assert [*report.scores["ensemble"].metrics] == ["auc by rule"]
    assert [*report.scores["law"].metrics] == ["auc by rule", "brier"]


def test_a_table_without_labels_needs_no_groups(rules: Rules) -> None:
    rules.table[["row", "text"]].to_csv(rules.labels, index=False)
    data = {"path": rules.labels, "id_column": "row"}
    rules.run(data=data, metrics=[{"name": "auc", "group": "rule"}], report=False)
    assert ensemble.open_run(rules.folder / "run").report.scores == {}


def test_numbers_have_their_metrics_by_group(rules: Rules) -> None:
    truth = rules.truth + np.random.default_rng(3).normal(size=ROWS)
    table = rules.table.assign(grade=truth)
    table.to_csv(rules.labels, index=False)
    for file, yes in zip(rules.files, rules.values.values(), strict=True):
        pd.DataFrame({"row": table["row"], "grade": yes}).to_csv(file, index=False)
    models = [
        {"name": file.stem, "task_type": "csv", "path": file, "activation": "none"} for file in rules.files
    ]
    data = {"path": rules.labels, "id_column": "row", "label_columns": ["grade"]}
    metrics = [{"name": "rmse", "group": "rule"}]
    rules.run(data=data, labels=["grade"], models=models, metrics=metrics, report=False)
    scores = ensemble.open_run(rules.folder / "run").report.scores
    for name, yes in rules.values.items():
        squares = pd.Series((yes - truth) ** 2).groupby(rules.rule).mean()
        expected = float(np.sqrt(squares).mean())
        assert scores[name].metrics["rmse by rule"] == pytest.approx(expected, abs=1e-12)


def test_a_run_follows_the_isotonic_lines_that_fit_writes(rules: Rules, tmp_path: Path) -> None:
    config, weights = rules.run(report=False), tmp_path / "weights.yaml"
    report = ensemble.fit(config, calibration="isotonic", output=weights, quiet=True)
    run = ensemble.run([config, weights], quiet=True)
    mean = np.zeros(ROWS)
    for member in report.members:
        line = IsotonicRegression(out_of_bounds="clip").fit(rules.values[member.name], rules.truth)
        mean += (member.weight or 0.0) * line.predict(rules.values[member.name])
    ensemble_values = run.ensemble["yes"].to_numpy()
    in_file = pd.Series(mean, index=rules.table["row"])[run.ensemble.index].to_numpy()
    assert ensemble_values == pytest.approx(in_file, abs=2e-6)  # weights have six digits
    assert (run.report.scores["ensemble"].log_loss or 9.0) < report.score
