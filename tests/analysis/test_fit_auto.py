"""``fit --method auto``: ways scored as others score them, the simplest as good as the best, no harm by members."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.special import expit
from scipy.stats import gmean
from sklearn.metrics import log_loss, roc_auc_score

from bench.fit_halves import AUTO, BEST, EQUAL, held_out_halves, is_worse
from ensemble.analysis.fit import Candidate, FitReport, Options, fit, fit_sample, folds
from ensemble.analysis.predictions import Predictions
from ensemble.analysis.weights_file import verdicts
from ensemble.cli.analyses import fit as view
from ensemble.common.errors import ConfigError, DataError
from ensemble.merging.metrics import find_metric
from ensemble.merging.post_process import AllowedLabels, PostProcess
from tests.analysis.test_fit import (
    conditional,
    demand_normal,
    multi_label,
    predictions,
    weights_of,
    with_allowed,
    with_rules,
)
from tests.sampling import one_in

AUTO_OPTIONS = Options(method="auto")


def by_title(report: FitReport) -> dict[str, Candidate]:
    return {way.options.title: way for way in report.candidates}


def row_losses(truth: Any, values: Any) -> Any:
    return -np.log(values[np.arange(len(truth)), truth])


def test_each_way_has_the_score_that_others_give_it() -> None:
    probabilities = predictions(240)
    report = fit(probabilities, AUTO_OPTIONS)
    truth, values = np.asarray(probabilities.truth), np.array([*probabilities.members.values()])
    ways = by_title(report)
    assert len(ways) == len(report.candidates) == 14
    geometric = gmean(values, axis=0)
    geometric /= geometric.sum(axis=1, keepdims=True)
    assert ways["equal (mean)"].score == pytest.approx(log_loss(truth, values.mean(axis=0)), abs=1e-9)
    assert ways["equal (geometric_mean)"].score == pytest.approx(log_loss(truth, geometric), abs=1e-9)
    losses = np.array([row_losses(truth, member) for member in values])
    fold_of = folds(truth, 5, 0)
    of_best = [
        losses[losses[:, fold_of != fold].mean(axis=1).argmin(), fold_of == fold].sum() for fold in range(5)
    ]
    assert ways["best_member"].score == pytest.approx(sum(of_best) / 240, abs=1e-9)
    for title in ("simplex (geometric_mean, temperature)", "greedy (mean)", "stacking"):
        fitted = fit(probabilities, ways[title].options)
        assert ways[title].score == pytest.approx((fitted.rejected or fitted).score, abs=1e-9)
    best = min(report.candidates, key=lambda way: way.score)
    assert best.behind.value == 0
    behind = ways["equal (mean)"].behind
    assert behind.value == pytest.approx(best.score - ways["equal (mean)"].score, abs=1e-9)
    assert ways["equal (mean)"].log_loss == ways["equal (mean)"].score


@pytest.mark.long
def test_an_interval_is_the_paired_one_of_the_same_rows() -> None:
    """With two members of which one is noise the best way is nearly the other member alone."""
    probabilities = predictions(900, noise=(0.5, 4.0))
    report = fit(probabilities, AUTO_OPTIONS)
    assert report.options.title == "best_member"
    ways, truth = by_title(report), np.asarray(probabilities.truth)
    values = [*probabilities.members.values()]
    if ways["best_member"].behind.value == 0:
        losses = row_losses(truth, values[0]) - row_losses(truth, np.mean(values, axis=0))
        behind = ways["equal (mean)"].behind
        demand_normal((behind.low, behind.high), losses)
    assert report.score == pytest.approx(log_loss(truth, values[0]), abs=1e-9)
    assert weights_of(report) == [1.0, 0.0]


@pytest.mark.long
@pytest.mark.parametrize("sharpness", [1.0, 4.0])
def test_the_fewest_numbers_of_those_as_good_as_the_best(sharpness: float) -> None:
    report = fit(predictions(900, sharpness=sharpness), AUTO_OPTIONS)
    as_good = [way for way in report.candidates if way.behind.low <= 0 <= way.behind.high]
    chosen = report.chosen
    assert chosen in as_good
    assert chosen is not None
    assert chosen.numbers == min(way.numbers for way in as_good)
    assert chosen.score == min(way.score for way in as_good if way.numbers == chosen.numbers)
    assert [way.numbers for way in report.candidates] == sorted(way.numbers for way in report.candidates)
    # Members that are much too sure need temperatures, or the like of stacking.
    assert (chosen.numbers > 1) is (sharpness > 1)
    (messages,) = [line for line in verdicts(report) if line.startswith("Of 14 ways to merge, ")]
    assert f", {chosen.options.title} is fitted: " in messages
    table = next(iter(view(report)))
    assert not isinstance(table, str)
    assert [row[0] for row in table.rows if row[-1] == "fitted"] == [chosen.options.title]


def test_a_member_that_does_harm_is_left_out() -> None:
    probabilities = predictions(300, noise=(0.7, 0.7, 0.7, 0.7, 0.7, 2.0))
    report = fit(probabilities, AUTO_OPTIONS)
    assert [member.name for member in report.members if member.is_left_out] == ["m5"]
    assert [member.name for member in report.members] == [*probabilities.members]
    kept = {name: values for name, values in probabilities.members.items() if name != "m5"}
    without = fit(
        replace(probabilities, members=kept, activations=dict.fromkeys(kept, "softmax")), AUTO_OPTIONS
    )
    assert report.score == without.score
    assert weights_of(report) == [*weights_of(without), 0.0]
    truth = np.asarray(probabilities.truth)
    means = [gmean([*part.values()], axis=0) for part in (probabilities.members, kept)]
    geometric = [log_loss(truth, mean / mean.sum(axis=1, keepdims=True)) for mean in means]
    plain = [log_loss(truth, np.mean([*part.values()], axis=0)) for part in (probabilities.members, kept)]
    (member,) = [member for member in report.members if member.is_left_out]
    assert member.gain is not None
    # It was left out of the mean, and the others are then merged by their geometric mean.
    assert member.gain.value == pytest.approx(plain[1] - plain[0], abs=1e-9)
    assert report.options.title == "equal (geometric_mean)"
    assert report.score == pytest.approx(geometric[1], abs=1e-9)
    assert report.score < min(geometric[0], *plain)
    (messages,) = [line for line in verdicts(report) if line.startswith("m5")]
    assert messages.startswith("m5 is left out, because it does harm: without it ")


@pytest.mark.long
@pytest.mark.parametrize("labels", one_in(2, [2, 3]))
def test_never_worse_than_the_best_member_or_equal_weights_on_held_out_halves(labels: int) -> None:
    probabilities = predictions(500, noise=(0.6, 0.9, 3.0), sharpness=1.5)
    if labels == 2:
        members = {name: values[:, 1:] for name, values in probabilities.members.items()}
        members = {name: values / values.sum(axis=1, keepdims=True) for name, values in members.items()}
        truth = (np.asarray(probabilities.truth) == 2).astype(np.int64)
        probabilities = replace(probabilities, members=members, labels=("b", "c"), truth=truth)
    for half in held_out_halves(probabilities, 2, {}):
        assert not is_worse(half[AUTO], half[BEST])
        assert not is_worse(half[AUTO], half[EQUAL])


def test_a_way_that_wins_the_metric_and_loses_the_log_loss_is_named() -> None:
    """The second member ranks far better, and is far too sure."""
    random, rows = np.random.default_rng(3), 600
    truth = random.integers(0, 2, rows)
    logits = 2 * truth - 1 + np.array([2.0, 1.0])[:, None] * random.normal(size=(2, rows))
    columns = {"modest": expit(0.3 * logits[0]), "sure": expit(30 * logits[1])}
    members = {name: np.column_stack([1 - yes, yes]) for name, yes in columns.items()}
    ids = pa.chunked_array([pa.array([str(row) for row in range(rows)])])
    result = Predictions(ids, ("no", "yes"), members, dict.fromkeys(members, "softmax"), truth)
    report = fit(result, Options("auc", "auto"))
    ways = by_title(report)
    best = max(report.candidates, key=lambda way: way.score)
    assert best.log_loss is not None
    alone = ways["best_member"]
    assert alone.log_loss == pytest.approx(log_loss(truth, members["sure"]), abs=1e-6)
    fold_of = folds(truth, 5, 0)
    scores = [roc_auc_score(truth[fold_of == fold], columns["sure"][fold_of == fold]) for fold in range(5)]
    assert alone.score == pytest.approx(np.mean(scores), abs=1e-9)
    assert alone.log_loss_behind is not None
    assert alone.log_loss_behind.high < 0
    chosen = report.chosen
    assert chosen is not None
    losers = [way for way in (best, chosen) if way.log_loss_behind and way.log_loss_behind.high < 0]
    assert losers, "one of them is far too sure"
    for way in losers:
        rank = "wins" if way is best else "is as good by"
        assert any(
            line.startswith(f"{way.options.title} {rank} auc, and loses the log loss: 0.")
            for line in verdicts(report)
        )
    by_log_loss = fit(result, AUTO_OPTIONS)
    assert not any("loses the log loss" in line for line in verdicts(by_log_loss))
    table = next(iter(view(report)))
    assert not isinstance(table, str)
    assert "log loss" in table.headers


@pytest.mark.parametrize("is_multi_label", [False, True])
def test_a_way_that_needs_more_rows_is_left_out_and_said_to_be(is_multi_label: bool) -> None:
    probabilities = predictions(80)
    report = fit(multi_label(probabilities) if is_multi_label else probabilities, AUTO_OPTIONS)
    assert not any(way.options.method == "stacking" for way in report.candidates)
    numbers = 9 if is_multi_label else 14
    assert report.remarks[0] == (
        f"stacking is not compared: 80 labelled rows for {numbers} numbers to fit: too few, at least 10 for each "
        f"({10 * numbers}) are needed"
    )


def test_regression_and_a_single_member() -> None:
    random = np.random.default_rng(0)
    truth = random.normal(size=(400, 1))
    members = {f"m{number}": truth + 0.5 * random.normal(size=truth.shape) for number in range(2)}
    ids = pa.chunked_array([pa.array([str(row) for row in range(400)])])
    table = Predictions(ids, ("y",), members, dict.fromkeys(members, "none"), truth)
    with pytest.raises(ConfigError, match="have no log loss: use another metric, such as --metric rmse"):
        fit(table, AUTO_OPTIONS)
    report = fit(table, Options("rmse", "auto"))
    assert [way.options.title for way in report.candidates] == [
        "equal (mean)",
        "best_member",
        "greedy (mean)",
    ]
    assert report.options.title == "equal (mean)"
    mean = np.mean([*members.values()], axis=0)
    assert report.score == pytest.approx(np.sqrt(np.square(mean - truth).mean()))
    table = predictions(900, (0.7,), sharpness=4.0)
    report = fit(table, AUTO_OPTIONS)
    titles = [way.options.title for way in report.candidates]
    assert titles == ["equal (mean)", "equal (mean, temperature)", "stacking", "stacking (temperature)"]
    assert report.options.title == "equal (mean, temperature)"


@pytest.mark.long
def test_thresholds_between_the_labels_that_are_possible() -> None:
    probabilities = predictions(400)
    assert probabilities.truth is not None
    only_true = AllowedLabels(
        np.eye(len(probabilities.labels), dtype=np.bool_)[probabilities.truth], "column c"
    )
    probabilities, options = (
        replace(probabilities, post=PostProcess(only_true)),
        Options("quadratic_kappa", "stacking"),
    )
    report = fit_sample(
        probabilities, options, find_metric("quadratic_kappa"), probabilities, 0, equal_pool="mean"
    )
    assert report.thresholds is not None
    assert report.score == report.thresholds.score == report.thresholds.halfway == 1.0


@pytest.mark.long
def test_all_ways_are_compared_on_the_rows_that_no_rule_touches() -> None:
    ruled = with_rules(predictions(200), {"mask": ["a"]})
    assert ruled.post.rules is not None
    rest = np.flatnonzero(~ruled.post.rules.rows[0])
    alone = replace(ruled, post=PostProcess()).taken(rest)
    report = fit(ruled, AUTO_OPTIONS)
    assert (report.rows, report.score) == (len(rest), fit(alone, AUTO_OPTIONS).score)


def test_equal_weights_with_temperatures_and_the_best_member_by_name() -> None:
    probabilities = predictions(600, sharpness=4.0)
    report = fit(probabilities, Options(method="equal", calibration="temperature"))
    assert weights_of(report) == [1.0, 1.0]
    assert report.over_equal.low > 0
    assert weights_of(fit(probabilities, Options("auc", "best_member", "temperature"))) == [1.0, 0.0]
    with pytest.raises(ConfigError, match="--method equal without --calibration: nothing to fit"):
        fit(probabilities, Options(method="equal"))


def test_what_auto_chooses_by_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="--method auto: compares members with and without temperatures"):
        fit(predictions(300), replace(AUTO_OPTIONS, calibration="vector"))
    constant = replace(predictions(300), truth=np.zeros(300, np.int64))
    with pytest.raises(DataError, match="the truth is 'a'"):
        fit(constant, AUTO_OPTIONS)


@pytest.mark.long
def test_all_ways_are_held_against_what_is_possible_in_a_row() -> None:
    masked = with_allowed(predictions(240))
    report = fit(masked, AUTO_OPTIONS)
    ways = by_title(report)
    mean = np.mean([conditional(values, masked) for values in masked.members.values()], axis=0)
    assert ways["equal (mean)"].score == pytest.approx(log_loss(np.asarray(masked.truth), mean), abs=1e-9)
    for title in ("simplex (geometric_mean, temperature)", "greedy (mean)", "stacking"):
        fitted = fit(masked, ways[title].options)
        assert ways[title].score == pytest.approx((fitted.rejected or fitted).score, abs=1e-9)
