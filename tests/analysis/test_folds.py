"""Rows that several folds' models predicted: each fold is ranked by itself, whoever says which row is whose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy.special import expit
from sklearn.metrics import roc_auc_score

import ensemble
from ensemble.analysis.report.base import ReportData
from ensemble.analysis.report.results import Scores
from ensemble.common.errors import ConfigError, DataError, OutputError
from ensemble.merging.metrics import METRICS

ROWS = 900
UNKNOWN = "--folds-from (a table with columns id and fold)"


class OutOfFold:
    """Predictions of one label by two members; the folds of the better one are on scales of their own."""

    def __init__(self, folder: Path) -> None:
        random = np.random.default_rng(8)
        self.folder = folder
        self.truth, fold_of = random.integers(0, 2, ROWS), random.permutation(np.arange(ROWS) % 3)
        scales = np.array([0.1, 0.5, 0.9])[fold_of]
        ids = [f"r{row}" for row in range(ROWS)]
        better = scales + 0.1 * expit(3 * self.truth - 1.5 + random.normal(size=ROWS)) - 0.05
        worse = expit(1.5 * self.truth - 0.75 + random.normal(size=ROWS))
        self.values = {"better": better, "worse": worse}
        self.folds = pd.DataFrame({"id": ids, "fold": fold_of})
        self.labels = folder / "train.csv"
        pd.DataFrame({"id": ids, "yes": self.truth}).to_csv(self.labels, index=False)
        (folder / "oof").mkdir()
        self.files = [folder / "oof" / f"{name}.csv" for name in self.values]
        for file, values in zip(self.files, self.values.values(), strict=True):
            pd.DataFrame({"id": ids, "yes": values}).to_csv(file, index=False)

    @property
    def pair(self) -> tuple[Path, Path]:
        first, second = self.files
        return first, second

    def auc(self, values: Any) -> float:
        """scikit-learn's of each fold, averaged."""
        folds = [np.flatnonzero(self.folds["fold"] == fold) for fold in range(3)]
        return float(np.mean([roc_auc_score(self.truth[rows], values[rows]) for rows in folds]))

    @property
    def expected(self) -> dict[str, float]:
        return {name: self.auc(values) for name, values in self.values.items()}

    def table_of_folds(self, name: str, **columns: Any) -> Path:
        """A table in another order, with a row that nobody predicted."""
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        others = pd.DataFrame({"id": ["another"], "fold": [2]})
        shuffled = pd.concat([others, self.folds]).assign(**columns).sample(frac=1, random_state=1)
        shuffled.to_csv(path, index=False)
        return path

    def run(self) -> dict[str, Any]:
        """The config of a run of both files."""
        config = {
            "data": {"path": self.labels, "label_columns": {"yes": "yes"}},
            "labels": ["yes"],
            "defaults": {"task_type": "csv", "activation": "sigmoid"},
            "models": [{"name": file.stem, "path": file} for file in self.files],
            "output_dir": self.folder / "run",
            "report": False,
        }
        ensemble.run(config, quiet=True)
        return config


@pytest.fixture
def out_of_fold(tmp_path: Path) -> OutOfFold:
    return OutOfFold(tmp_path)


def test_folds_that_a_table_gives_are_ranked_each_by_itself(out_of_fold: OutOfFold) -> None:
    expected, labels, files = out_of_fold.expected, out_of_fold.labels, out_of_fold.files
    assert roc_auc_score(out_of_fold.truth, out_of_fold.values["better"]) < expected["worse"]
    # Folds may have any names.
    names = np.array(["first", "second", "third"])
    table = out_of_fold.table_of_folds("my folds.csv", fold=lambda frame: names[frame["fold"]])
    config = out_of_fold.run()
    for sources, more in ((files, {"labels": labels}), (config, {})):
        for method in ("greedy", "auto"):
            options: Any = {"metric": "auc", "method": method, "folds_from": table, "quiet": True, **more}
            report = ensemble.fit(sources, **options)
            assert {member.name: member.alone for member in report.members} == pytest.approx(expected)
            assert (report.best_member, report.mean_over) == ("better", "the mean over 3 folds")
            assert not [remark for remark in report.remarks if UNKNOWN in remark]
    compared = ensemble.compare(*out_of_fold.pair, ["auc"], labels=labels, folds_from=table, quiet=True)
    (metric,) = compared.metrics
    assert (metric.first.value, metric.second.value) == pytest.approx(tuple(expected.values()))
    assert compared.remarks == ("auc: the mean over 3 folds",)
    run_dir = config["output_dir"]
    compared = ensemble.compare(run_dir, run_dir, ["auc"], folds_from=table, quiet=True)
    found = {metric.name: metric.first.value for metric in compared.metrics}
    mean = np.mean([*out_of_fold.values.values()], axis=0)
    assert found == pytest.approx({**expected, "ensemble": out_of_fold.auc(mean)})


def test_a_runs_own_figures_are_of_each_fold_if_its_files_come_from_a_folder_that_knows_them(
    out_of_fold: OutOfFold, monkeypatch: pytest.MonkeyPatch
) -> None:
    out_of_fold.table_of_folds("training/folds.csv")
    monkeypatch.chdir(out_of_fold.folder)
    out_of_fold.files = [file.relative_to(out_of_fold.folder) for file in out_of_fold.files]
    run_dir = out_of_fold.run()["output_dir"]
    monkeypatch.chdir("/")  # run.json knows where the files are
    run = ensemble.open_run(run_dir)
    scores = run.scores.query("metric == 'auc'").set_index("member")["value"].to_dict()
    mean = np.mean([*out_of_fold.values.values()], axis=0)
    expected = {**out_of_fold.expected, "ensemble": out_of_fold.auc(mean)}
    assert scores == pytest.approx(expected)
    data = ReportData(run_dir, run.report)
    for name, values in data.predictions.members.items():
        score = data.score(METRICS["auc"], values)
        assert score is not None
        assert score.value == pytest.approx(expected[name])
    page = Scores().html(data)
    assert "auc: the mean over 3 folds" in page
    assert "--folds-from" not in page


def test_a_run_of_files_says_if_the_folds_of_their_models_are_not_known(out_of_fold: OutOfFold) -> None:
    config = out_of_fold.run()
    run_dir, labels = config["output_dir"], out_of_fold.labels
    results = (
        ensemble.fit(config, metric="auc", quiet=True),
        ensemble.fit(out_of_fold.files, labels=labels, metric="auc", quiet=True),
        ensemble.compare(*out_of_fold.pair, ["auc"], labels=labels, quiet=True),
        ensemble.compare(run_dir, run_dir, quiet=True),
    )
    for result in results:
        (remark,) = [remark for remark in result.remarks if "folds" in remark]
        assert remark.startswith("auc ranks rows against each other; ")
        assert UNKNOWN in remark
    data = ReportData(run_dir, ensemble.open_run(run_dir).report)
    assert UNKNOWN in Scores().html(data)
    report = ensemble.fit(config, metric="brier", quiet=True)
    assert not [remark for remark in report.remarks if "folds" in remark]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda frame: frame.rename(columns={"fold": "kfold"}), "no column for the folds: 'fold'"),
        (
            lambda frame: frame.assign(fold=frame["fold"].mask(frame["id"] == "r7")),
            "column 'fold' of {path} is empty in 1 row, first: row 8 (id 'r7')",
        ),
        (lambda frame: frame.iloc[2:], "2 ids of the predictions missing ('r0', 'r1'); the fold of each row"),
        (lambda frame: frame.replace({"id": {"r3": "r4"}}), "'r4' in row 4, 5"),
    ],
)
def test_a_table_of_folds_that_lacks_some_is_refused_by_its_file_column_and_row(
    out_of_fold: OutOfFold, change: Any, problem: str
) -> None:
    path = out_of_fold.folder / "folds.csv"
    change(out_of_fold.folds).to_csv(path, index=False)
    for command in (
        lambda: ensemble.fit(out_of_fold.files, labels=out_of_fold.labels, metric="auc", folds_from=path),
        lambda: ensemble.compare(*out_of_fold.pair, ["auc"], labels=out_of_fold.labels, folds_from=path),
    ):
        with pytest.raises(DataError) as error:
            command()
        assert str(path) in str(error.value)
        assert problem.format(path=path) in str(error.value)


def test_a_metric_that_no_fold_defines_is_said_to_be_no_mean(out_of_fold: OutOfFold) -> None:
    path = out_of_fold.table_of_folds("folds.csv", fold=np.arange(ROWS + 1))
    options: Any = {"labels": out_of_fold.labels, "folds_from": path, "quiet": True}
    compared = ensemble.compare(*out_of_fold.pair, ["auc", "brier"], **options)
    assert compared.remarks == (
        "predictions: auc: not defined in any part of the rows, by fold: each label needs rows that have it and "
        "rows that lack it",
    )


def test_folds_are_refused_where_no_metric_ranks_rows(out_of_fold: OutOfFold) -> None:
    path = out_of_fold.table_of_folds("folds.csv")
    with pytest.raises(ConfigError, match="--folds-from: is for metrics that compare rows"):
        ensemble.fit(out_of_fold.files, labels=out_of_fold.labels, folds_from=path)
    with pytest.raises(ConfigError, match="--folds-from: is for metrics that compare rows"):
        ensemble.compare(*out_of_fold.pair, ["brier"], labels=out_of_fold.labels, folds_from=path)
    with pytest.raises(OutputError, match="is one of the files that are read"):
        ensemble.fit(out_of_fold.files, labels=out_of_fold.labels, folds_from=path, output=path, force=True)
