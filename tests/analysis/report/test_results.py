"""The sections about results, of runs whose numbers are known: what they say, and where data is missing."""

from __future__ import annotations

import html
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from sklearn.metrics import accuracy_score, cohen_kappa_score, log_loss

from ensemble.analysis.report.base import ReportData, Section
from ensemble.analysis.report.page import SECTIONS, write_report
from ensemble.common.errors import DataError
from ensemble.data.csv_file import write_csv
from ensemble.merging.scoring import Resamples, Scoring
from ensemble.pipeline.ending import gain_text
from ensemble.pipeline.report_page import page_digest
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import RunReport
from tests.cli.reports import member, report
from tests.labelled import labelled
from tests.sampling import one_in

NAMES = ("scores", "agreement", "calibration", "rows")
Values = npt.NDArray[np.float64]


class Made:
    """A run directory with these predictions, and what the sections make of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rundir = RunDir(folder / "run")
        self.rundir.predictions_dir.mkdir(parents=True)
        self.table = folder / "table.csv"

    def write(
        self,
        members: dict[str, Values],
        truth: npt.NDArray[Any] | None,
        merged: Values | None = None,
        weights: dict[str, Any] | None = None,
        ensemble: dict[str, Any] | None = None,
        models: list[dict[str, Any]] | None = None,
    ) -> ReportData:
        """Rows of NaN are left out of a member's file; without ``merged`` it is the weighted mean."""
        rows, count = next(iter(members.values())).shape
        labels = [f"label {number}" for number in range(count)]
        ids = pa.array([f"r{row}" for row in range(rows)])
        shares = weights or dict.fromkeys(members, 1.0)
        columns: dict[str, Any] = {"id": ids, "text": pa.array([f"text of row {row}" for row in range(rows)])}
        data: dict[str, Any] = {"path": str(self.table)}
        if truth is not None and truth.ndim == 1:
            columns["label"] = pa.array(np.array(labels)[truth])
            data["label_column"] = "label"
        elif truth is not None:
            columns |= dict(zip(labels, map(pa.array, truth.T), strict=True))
            data["label_columns"] = labels
        write_csv(self.table, [*columns], [[*columns.values()]])
        for name, values in members.items():
            there = np.isfinite(values[:, 0])
            cells = [ids.filter(pa.array(there)), *(pa.array(column) for column in values[there].T)]
            write_csv(self.rundir.predictions(name), ["id", *labels], [cells])
        if merged is None:
            known = np.stack([np.nan_to_num(values) for values in members.values()])
            counted = np.array([shares[name] for name in members])[:, None] * [
                np.isfinite(values[:, 0]) for values in members.values()
            ]
            merged = np.einsum("mr,mrl->rl", counted / counted.sum(axis=0), known)
        write_csv(self.rundir.ensemble, ["id", *labels], [[ids, *map(pa.array, merged.T)]])
        config = {
            "data": data,
            "labels": labels,
            "models": models or [{"name": name, "task_type": "csv", "path": "x.csv"} for name in members],
            "output_dir": str(self.rundir.root),
        }
        self.rundir.config.write_text(json.dumps(config), encoding="utf-8")
        calibrations = {item["name"]: item.get("calibration", {}) for item in models or []}
        made = report(
            *(
                member(
                    name,
                    weight=shares[name],
                    rows=rows,
                    calibration=calibrations.get(name, {}),
                    activation=activation_of(values),
                )
                for name, values in members.items()
            ),
            rows=rows,
            null_texts={"text": 0},
            table=str(self.table),
            config=json.dumps(config),
            overrides=(),
            merged_rows={name: int(np.isfinite(item[:, 0]).sum()) for name, item in members.items()},
            ensemble=ensemble or {"method": "mean"},
        )
        made.write(self.rundir.run_json)
        return self.read()

    def read(self) -> ReportData:
        return ReportData(self.rundir.root, RunReport.read(self.rundir.run_json))


def activation_of(values: Values) -> str:
    if np.nanmin(values) < 0 or np.nanmax(values) > 1:
        return "none"
    is_exclusive = values.shape[1] > 1 and np.nanmax(np.abs(values.sum(axis=1) - 1)) < 1e-3
    return "softmax" if is_exclusive else "sigmoid"


def shown(data: ReportData, name: str) -> str:
    """A section's text, without its tags and pictures."""
    section: Section = SECTIONS.load(name)()
    made = section.html(data)
    assert made is not None
    text = re.sub(r"<svg.*?</svg>|<[^>]*>", " ", str(made), flags=re.DOTALL)
    return " ".join(html.unescape(text).replace("\N{NO-BREAK SPACE}", " ").split())


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path)


def probabilities(rows: int = 2_000, labels: int = 3, noise: tuple[float, ...] = (0.3, 1.0)) -> Any:
    """Truth, and members that see it through noise of their own."""
    chooser = np.random.default_rng(0)
    scores = chooser.normal(size=(rows, labels)) * 2
    truth = (scores + chooser.gumbel(size=scores.shape)).argmax(axis=1)
    result = {}
    for number, spread in enumerate(noise):
        values = np.exp(scores + spread * chooser.normal(size=scores.shape))
        result[f"m{number}"] = values / values.sum(axis=1, keepdims=True)
    return truth, result


def test_numbers_are_those_of_scikit_learn(made: Made) -> None:
    truth, members = probabilities()
    data = made.write(members, truth)
    merged = (members["m0"] + members["m1"]) / 2
    text = shown(data, "scores")
    for values in (*members.values(), merged):
        assert f"{log_loss(truth, values):.4f}" in text
        assert f"{100 * accuracy_score(truth, values.argmax(axis=1)):.1f} %" in text
    gap = log_loss(truth, members["m0"]) - log_loss(truth, merged)
    assert f"{gap:+.4f}".replace("-", "\N{MINUS SIGN}") in text


def test_the_sentence_and_the_interval_are_those_of_the_summary(made: Made) -> None:
    truth, members = probabilities()
    data = made.write(members, truth)
    resamples = Resamples(len(truth))
    whole, best = (Scoring(labelled(truth), resamples) for _ in range(2))
    whole.add(0, (members["m0"] + members["m1"]) / 2)
    best.add(0, members["m0"])
    gain, score = whole.gain_over(best, "m0"), whole.score()
    assert score is not None
    data.report = replace(data.report, gain=gain, scores={"ensemble": score})
    text = shown(data, "scores")
    interval = f"{gain.gain:+.4f} ({gain.low:.4f} to {gain.high:.4f})".replace("-", "\N{MINUS SIGN}")
    assert f"m0 {log_loss(truth, members['m0']):.4f}" in text
    assert interval in text
    assert text.removeprefix("ensemble").startswith(gain_text(data.report).removeprefix("ensemble"))
    assert " its best member m0 " in text
    assert "ensemble fit CONFIG" in text


def test_the_title_says_what_the_page_is(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    truth, members = probabilities(rows=60, noise=(0.3, 0.4))
    data = made.write(members, truth)
    monkeypatch.chdir(made.folder)
    assert shown(data, "header").startswith("Run report: run, m0 + m1, 60 rows Complete in ")
    assert write_report(made.rundir.root, made.rundir.report_page) == []
    page = made.rundir.report_page.read_text(encoding="utf-8")
    assert page.count("Run report: run, m0 + m1, 60 rows") == 2, "the heading and the window's title"
    data = made.write(probabilities(rows=60, noise=(0.3,) * 5)[1], None)
    assert shown(data, "header").startswith("Run report: run, m0 + m1 + m2 and 2 more, 60 rows")
    assert "members m0, m1, m2, m3, m4" in shown(data, "header")


def test_weights_stand_in_one_place(made: Made) -> None:
    for truth, members in (probabilities(rows=60), (None, probabilities(rows=60)[1])):
        data = made.write(members, truth, weights={"m0": 3.0, "m1": 1.0})
        page = " ".join(shown(data, name) for name in ("header", *NAMES))
        assert page.count("75.0 %") == page.count("25.0 %") == 1
        assert re.search("m0 .*75.0 %", shown(data, "scores"))


def test_differences_have_a_minus_sign_and_chips_a_legend(made: Made) -> None:
    data = made.write(probabilities(rows=300, noise=(0.3, 0.4, 0.5))[1], probabilities(rows=300)[0])
    texts = {name: shown(data, name) for name in NAMES}
    assert not [
        name for name, text in texts.items() if re.search(r"\bless (the|with|accuracy|truth|before)", text)
    ]
    assert "member \N{MINUS SIGN} ensemble" in texts["scores"]
    assert "answer of the members beside it" in texts["rows"]
    assert "\N{CHECK MARK} the right answer" in texts["rows"]
    assert "the right answer" not in shown(made.write(probabilities(rows=300)[1], None), "rows")


def test_agreement_says_who_is_right_where_two_differ(made: Made) -> None:
    truth, members = probabilities()
    first, second = (members[name].argmax(axis=1) for name in ("m0", "m1"))
    data = made.write(members, truth)
    text = shown(data, "agreement")
    assert f"m0 and m1 agree on {100 * (first == second).mean():.1f} % of rows" in text
    item, other = ((first == truth) & (second != truth)).sum(), ((first != truth) & (second == truth)).sum()
    differ = int((first != second).sum())
    assert re.search(
        rf" m0 / m1 0\.\d\d {differ:,} .* {item:,} {other:,} {differ - item - other:,} m0 ", text
    )
    assert "errors correlate at" in text
    # Of two members without missing rows: https://doi.org/10.1080/19312450709336664, equation 3.
    counts = np.bincount(np.concatenate([first, second]))
    total = counts.sum()
    alpha = 1 - (total - 1) * differ / (total**2 - (counts**2).sum()) * 2
    assert f"Krippendorff's alpha of all members is {alpha:.2f}: 1 is agreement, 0 chance." in text
    merged = np.mean([*members.values()], axis=0)
    errors = np.array([(values - np.eye(values.shape[1])[truth]).ravel() for values in members.values()])
    correlation = np.asarray(np.corrcoef(errors))[0, 1]
    count = f"{2 / (1 + correlation):.1f}"
    kappas = [cohen_kappa_score(truth, values.argmax(axis=1)) for values in (*members.values(), merged)]
    match = re.search(r"with the true labels m0 (\S+) \(.*?\) m1 (\S+) \(.*?\) ensemble (\S+) \(", text)
    assert match is not None
    assert [*match.groups()] == [f"{kappa:.4f}" for kappa in kappas]
    assert f"Together the 2 members count as {count} members with independent errors:" in text


@pytest.mark.long
def test_a_member_that_promises_too_much_is_told_its_temperature(made: Made) -> None:
    truth, members = probabilities(noise=(0.1, 0.1))
    sharp = members["m1"] ** 3
    members["m1"] = sharp / sharp.sum(axis=1, keepdims=True)
    text = shown(made.write(members, truth), "calibration")
    (result,) = re.findall(r" m1 .*? (\d\.\d\d) Members", text)
    assert 2.7 < float(result) < 3.3
    assert "expected calibration error, of 15 bins; the diagrams have 10" in text
    # Once the config has one, the members are those of the merge.
    logs = np.log(members["m1"]) / 3
    soft = np.exp(logs) / np.exp(logs).sum(axis=1, keepdims=True)
    models: list[dict[str, Any]] = [
        {"name": "m0", "task_type": "csv", "path": "x"},
        {"name": "m1", "task_type": "csv", "path": "x", "calibration": {"temperature": 3.0}},
    ]
    data = made.write(members, truth, merged=(members["m0"] + soft) / 2, models=models)
    (result,) = re.findall(r" m1 .*? (\d\.\d\d) Members", shown(data, "calibration"))
    assert 0.9 < float(result) < 1.1
    assert f"m1 {log_loss(truth, soft):.4f}" in shown(data, "scores")


@pytest.mark.parametrize("method", one_in(2, ["geometric_mean", "rank_mean"]))
def test_a_merge_that_gives_no_probabilities_has_no_loss(made: Made, method: str) -> None:
    truth, members = probabilities(rows=500, noise=(0.3, 0.5, 0.7))
    data = made.write(members, truth, ensemble={"method": method})
    is_silent = method == "rank_mean"
    text = shown(data, "scores")
    assert (
        f"The ensemble has no log loss: the values that {method} gives are no probabilities." in text
    ) == is_silent
    assert "accuracy" in text
    assert ("ensemble" in shown(data, "calibration").replace("ensemble fit", "")) != is_silent


@pytest.mark.long
def test_weights_by_label_and_length_are_shown(made: Made) -> None:
    _, members = probabilities(rows=200)
    weights = {"m0": [1.0, 0.0], "m1": {f"label {number}": 0.5 for number in range(3)}}
    made.write(
        members, None, weights=weights, merged=members["m0"], ensemble={"method": "mean", "length_bins": [14]}
    )
    assert write_report(made.rundir.root, made.rundir.report_page) == []
    page = html.unescape(made.rundir.report_page.read_text(encoding="utf-8"))
    assert page.count("[1, 0]") == page.count("label 0 0.5, label 1 0.5, label 2 0.5") == 1


@pytest.mark.long
def test_a_member_with_some_rows_is_compared_on_these(made: Made) -> None:
    truth, members = probabilities(rows=1_000, noise=(0.3, 0.5, 0.7))
    members["m1"][400:] = np.nan
    data = made.write(members, truth)
    text = shown(data, "scores")
    assert f"{log_loss(truth[:400], members['m1'][:400], labels=[0, 1, 2]):.4f}" in text
    merged = data.predictions.ensemble
    assert merged is not None
    gap = log_loss(truth[:400], members["m1"][:400]) - log_loss(truth[:400], merged[:400])
    assert f"{gap:+.4f}".replace("-", "\N{MINUS SIGN}") in text
    for name in NAMES:
        assert "nan" not in shown(data, name).lower()


def test_without_true_labels_each_section_says_what_is_missing(made: Made) -> None:
    _, members = probabilities()
    data = made.write(members, None)
    assert "Without true labels nobody can say how good" in shown(data, "scores")
    assert "data.label_column" in shown(data, "scores")
    assert "m0 and m1 agree on" in shown(data, "agreement")
    assert "right" not in shown(data, "agreement").replace("what is right or what is wrong", "")
    assert "Without true labels" in shown(data, "calibration")
    text = shown(data, "rows")
    assert "Most disputed" in text
    assert "Costliest" not in text


@pytest.mark.parametrize(
    "kind", one_in(4, ["one member", "soft truth", "many labels", "thirty members", "few rows"])
)
def test_every_section_of_other_runs_works(made: Made, kind: str) -> None:
    noise = {"one member": (0.3,), "thirty members": tuple(np.linspace(0.3, 2, 30))}.get(kind, (0.3, 0.6))
    rows = 20 if kind == "few rows" else 300
    truth, members = probabilities(rows, 100 if kind == "many labels" else 3, noise)
    if kind == "soft truth":
        truth = members["m0"] * 0.5 + members["m1"] * 0.5
    data = made.write(members, truth)
    texts = {name: shown(data, name) for name in NAMES}
    assert not [name for name, text in texts.items() if re.search(r"\bnan\b|\binf\b", text.lower())]
    assert ("only member" in texts["agreement"]) == (kind == "one member")
    assert (" temperature ensemble " in texts["calibration"]) == (kind != "few rows")


@pytest.mark.long
def test_labels_that_do_not_exclude_each_other(made: Made) -> None:
    chooser = np.random.default_rng(0)
    scores = chooser.normal(size=(1_000, 3)) * 2
    truth = (scores + chooser.logistic(size=scores.shape) > 0).astype(np.int64)
    members = {
        f"m{number}": 1 / (1 + np.exp(-scores - noise * chooser.normal(size=scores.shape)))
        for number, noise in enumerate((0.5, 1.0))
    }
    data = made.write(members, truth)
    assert data.predictions.activation == "sigmoid"
    merged = (members["m0"] + members["m1"]) / 2
    loss = np.mean([log_loss(truth[:, label], merged[:, label]) for label in range(3)])
    assert f"{loss:.4f}" in shown(data, "scores")
    same = ((members["m0"] >= 0.5) == (members["m1"] >= 0.5)).mean()
    assert f"agree on {100 * same:.1f} % of answers" in shown(data, "agreement")
    for name in NAMES:
        shown(data, name)


def test_values_that_are_no_probabilities(made: Made) -> None:
    chooser = np.random.default_rng(0)
    truth = chooser.normal(100, 20, (1_000, 1))
    members = {f"m{number}": truth + chooser.normal(0, 5 + number, truth.shape) for number in range(2)}
    data = made.write(members, truth)
    assert data.predictions.activation == "none"
    merged = (members["m0"] + members["m1"]) / 2
    assert f"{np.sqrt(np.square(merged - truth).mean()):.4f}" in shown(data, "scores")
    errors = [(values - truth).ravel() for values in members.values()]
    assert f"errors correlate at {np.asarray(np.corrcoef(errors))[0, 1]:.2f}" in shown(data, "agreement")
    assert "no probabilities" in shown(data, "calibration")
    assert "Costliest" in shown(data, "rows")


def test_a_run_that_merged_nothing_shows_its_members(made: Made) -> None:
    truth, members = probabilities(rows=300)
    made.write(members, truth)
    made.rundir.ensemble.unlink()
    data = made.read()
    assert "merged nothing" in shown(data, "scores")
    for name in NAMES:
        shown(data, name)


def test_texts_are_shown_cut_and_not_where_the_table_has_changed(made: Made) -> None:
    truth, members = probabilities(rows=300)
    members["m0"][7], members["m1"][7] = (0.98, 0.01, 0.01), (0.01, 0.98, 0.01)
    data = made.write(members, truth)
    text = shown(data, "rows")
    assert "r7 row 8" in text
    assert "text of row 7" in text
    assert re.search(r"label 0( \N{CHECK MARK})? m0 98 % label 1( \N{CHECK MARK})? m1 98 %", text)
    lines = made.table.read_text().splitlines()
    long = lines[8].split(",")
    long[1] = "word " * 1_000
    made.table.write_text("\n".join([*lines[:8], ",".join(long), *lines[9:]]))
    os.utime(made.table, ns=(0, 0))
    text = shown(made.read(), "rows")
    assert f"word {'word ' * 10}" in text
    assert "(4,999 characters)" in text
    assert len(text) < 60_000
    made.table.write_text("\n".join([lines[0], *lines[2:]]))
    text = shown(made.read(), "rows")
    assert "No texts are shown:" in text
    assert "has changed since the run" in text
    made.table.unlink()
    assert "is not there" in shown(made.read(), "rows")


def test_a_table_whose_path_holds_a_secret_is_said_to_be_one(made: Made) -> None:
    truth, members = probabilities(rows=100)
    data = made.write(members, truth)
    table = data.report.table.replace("table.csv", "***.csv")
    replace(data.report, table=table).write(made.rundir.run_json)
    data = made.read()
    assert "the path of the run's table, which holds a secret" in shown(data, "scores")
    with pytest.raises(DataError, match="holds a secret"):
        data.table_texts.of_rows([0])
    made.table.unlink()
    replace(data.report, table=str(made.table)).write(made.rundir.run_json)
    assert "is not there" in shown(made.read(), "scores")


@pytest.mark.long
def test_a_page_with_something_missing_counts_as_one_of_other_results(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next run makes it anew: once a section works, or the table is there."""
    truth, members = probabilities(rows=100)
    data = made.write(members, truth)
    assert write_report(made.rundir.root, made.rundir.report_page) == []
    assert page_digest(data.report) in made.rundir.report_page.read_text(encoding="utf-8")
    away = made.table.rename(made.table.with_name("away.csv"))
    assert page_digest(data.report) not in made.rundir.report_page.read_text(encoding="utf-8")
    away.rename(made.table)

    def fail(self: Section, data: ReportData) -> None:
        raise RuntimeError("no room")

    monkeypatch.setattr(SECTIONS.load("header"), "html", fail)
    assert len(write_report(made.rundir.root, made.rundir.report_page)) == 1
    assert page_digest(data.report) not in made.rundir.report_page.read_text(encoding="utf-8")
