"""What a fit is worth: cross-validation done once more by hand, noise that is called noise, what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from scipy.optimize import minimize
from scipy.special import expit, softmax
from scipy.stats import norm, sem
from sklearn.isotonic import IsotonicRegression
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, roc_auc_score

import ensemble
from ensemble.analysis.fit import MIN_ROWS_PER_NUMBER, FitReport, Method, Options, fit, folds
from ensemble.analysis.predictions import Predictions
from ensemble.analysis.weights import Pool, WeightedBlend
from ensemble.analysis.weights_file import verdicts
from ensemble.cli.analyses import fit as view
from ensemble.common.errors import ConfigError, EnsembleError
from ensemble.config.schema import RuleConfig
from ensemble.merging.metrics import row_losses
from ensemble.merging.post_process import AllowedLabels, PostProcess, RowRules
from ensemble.merging.scoring import Interval
from tests.sampling import one_in

ROWS = 1_500
LABELS = ("a", "b", "c")


def predictions(
    rows: int = ROWS, noise: tuple[float, ...] = (0.7, 1.0), sharpness: float = 1.0
) -> Predictions:
    """Members with their own noise, whose logits are too large by ``sharpness``; the truth is hard."""
    random = np.random.default_rng(11)
    logits = random.normal(size=(rows, len(LABELS))) * 2
    members = {
        f"m{number}": np.asfortranarray(
            softmax(sharpness * (logits + random.normal(size=logits.shape) * item), axis=1)
        )
        for number, item in enumerate(noise)
    }
    truth = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    ids = pa.chunked_array([pa.array([str(row) for row in range(rows)])])
    return Predictions(ids, LABELS, members, dict.fromkeys(members, "softmax"), truth)


def multi_label(of: Predictions) -> Predictions:
    """The same members and rows as if each label were on its own."""
    assert of.truth is not None
    truth = np.eye(len(LABELS))[of.truth]
    return replace(of, truth=truth, activations=dict.fromkeys(of.members, "sigmoid"))


def demand_normal(result: tuple[float, float] | None, of_rows: Any) -> None:
    """A bootstrap interval of a mean over many rows is nearly the normal one."""
    low, high = norm.interval(0.95, of_rows.mean(), sem(of_rows))
    assert result == pytest.approx((low, high), abs=0.08 * (high - low))


def weights_of(report: FitReport) -> Any:
    return [member.weight for member in report.members]


def test_what_is_reported_comes_from_rows_that_were_held_out() -> None:
    probabilities = predictions()
    report = fit(probabilities, Options(seed=3))
    members, truth = np.array([*probabilities.members.values()]), np.asarray(probabilities.truth)
    chosen, everything = np.arange(ROWS), folds(truth, 5, 3)

    def losses(weights: Any, rows: Any) -> Any:
        return -np.log(np.einsum("m,mn->n", weights, members[:, rows, truth[rows]]))

    def fitted(rows: Any) -> Any:
        best = minimize(
            lambda w: losses(w, rows).mean(), [0.5, 0.5], method="SLSQP", bounds=[(0, 1)] * 2,
            constraints={"type": "eq", "fun": lambda w: w.sum() - 1}, options={"ftol": 1e-14},
        )  # fmt: skip
        return best.x

    np.testing.assert_allclose(weights_of(report), fitted(chosen), atol=1e-4)
    held, best = np.empty(ROWS), np.empty(ROWS)
    for fold in range(5):
        out, others = np.flatnonzero(everything == fold), np.flatnonzero(everything != fold)
        held[out] = losses(fitted(others), out)
        alone = [losses(item, others).mean() for item in np.eye(2)]
        best[out] = losses(np.eye(2)[int(np.argmin(alone))], out)
    fitted_on = report.fitted_on
    assert (fitted_on.rows, fitted_on.metric) == (ROWS, "log_loss")
    assert fitted_on.value == pytest.approx(held.mean(), abs=1e-6)
    demand_normal(fitted_on.interval, held)
    equal = losses([0.5, 0.5], chosen)
    assert report.score == pytest.approx(held.mean(), abs=1e-6)
    assert report.equal == pytest.approx(log_loss(truth, members.mean(axis=0)), abs=1e-9)
    assert report.over_equal.value == pytest.approx((equal - held).mean(), abs=1e-6)
    demand_normal((report.over_equal.low, report.over_equal.high), equal - held)
    assert report.over_best.value == pytest.approx((best - held).mean(), abs=1e-6)
    for member, values in zip(report.members, members, strict=True):
        assert member.alone == pytest.approx(log_loss(truth, values), abs=1e-9)
    # Of two members the ensemble without one is the other.
    gain = report.members[0].gain
    assert gain is not None
    assert gain.value == pytest.approx((losses([0, 1], chosen) - held).mean(), abs=1e-6)


def test_a_member_of_noise_is_said_not_to_help_and_one_that_helps_is_not() -> None:
    probabilities = predictions(noise=(0.7, 1.0, 50.0))
    report = fit(probabilities, Options(calibration="temperature"))
    assert report.members[2].weight == pytest.approx(0, abs=0.02)
    messages = [sentence for sentence in verdicts(report) if "help" in sentence]
    assert len(messages) == 1
    assert messages[0].startswith("m2 does not help: ")


def test_weights_of_members_that_are_alike_are_called_noise() -> None:
    report = fit(predictions(noise=(0.8, 0.8)), Options())
    assert not report.over_equal.excludes_zero
    against = [sentence for sentence in verdicts(report) if "equal weights" in sentence]
    assert "no more than noise" in against[0]
    assert report.over_best.low > 0


@pytest.mark.parametrize("method", ["temperature", "vector"])
@pytest.mark.parametrize("pool", ["mean", "geometric_mean"])
@pytest.mark.parametrize("is_multi_label", [False, True])
def test_members_that_are_too_sure_are_calibrated_to_gain(
    method: Any, pool: Any, is_multi_label: bool
) -> None:
    probabilities = predictions(sharpness=3.0)
    probabilities = multi_label(probabilities) if is_multi_label else probabilities
    report = fit(probabilities, Options(calibration=method, pool=pool))
    assert report.over_equal.value > 0.05
    assert report.over_equal.low > 0
    plain = fit(probabilities, Options(pool=pool))
    assert plain.score > report.score + 0.05
    if method == "temperature":
        assert all(
            member.calibration is not None and member.calibration.temperature > 1.5
            for member in report.members
        )


def test_isotonic_lines_are_fitted_to_the_other_folds() -> None:
    probabilities = predictions(600, sharpness=3.0)
    report = fit(probabilities, Options(method="equal", calibration="isotonic"))
    truth, fold_of = np.asarray(probabilities.truth), folds(np.asarray(probabilities.truth), 5, 0)
    held_out = np.zeros((600, len(LABELS)))
    for fold in range(5):
        others, scored = fold_of != fold, fold_of == fold
        for values in probabilities.members.values():
            lines = [
                IsotonicRegression(out_of_bounds="clip").fit(values[others, k], truth[others] == k)
                for k in range(len(LABELS))
            ]
            new = np.stack([line.predict(values[scored, k]) for k, line in enumerate(lines)], axis=1)
            held_out[scored] += new / new.sum(axis=1, keepdims=True) / len(probabilities.members)
    assert report.score == pytest.approx(log_loss(truth, held_out), abs=1e-12)
    assert report.score < report.equal
    with pytest.raises(EnsembleError, match="59 labelled rows for 60 numbers to fit"):
        fit(predictions(59), Options(method="equal", calibration="isotonic"))


@pytest.mark.long
def test_any_metric_by_greedy_selection_with_its_interval() -> None:
    probabilities = predictions(800, (0.5, 2.0, 4.0))
    report = fit(probabilities, Options("auc", "greedy"))
    assert sum(member.weight or 0 for member in report.members) == pytest.approx(1)
    assert report.over_equal.value == pytest.approx(report.score - report.equal)
    truth, random = np.asarray(probabilities.truth), np.random.default_rng(0)
    best, mean = probabilities.members["m0"], np.mean([*probabilities.members.values()], axis=0)
    drawn = [random.integers(0, 800, 800) for _ in range(200)]
    spread = np.std([
        roc_auc_score(truth[rows], best[rows], multi_class="ovr")
        - roc_auc_score(truth[rows], mean[rows], multi_class="ovr")
        for rows in drawn
    ])  # fmt: skip
    alone = fit(replace(probabilities, members={"m0": best}), Options("auc", "greedy", "temperature"))
    assert alone.score == pytest.approx(roc_auc_score(truth, best, multi_class="ovr"), abs=0.01)
    width = report.over_equal.high - report.over_equal.low
    assert 0.7 < width / (3.92 * spread) < 1.4


def test_a_calibration_error_has_no_interval() -> None:
    fitted_on = fit(predictions(300), Options("ece")).fitted_on
    assert (fitted_on.metric, fitted_on.interval) == ("ece", None)


def on_two_scales(rows: int = 3_000) -> Predictions:
    """Two members of the same worth, the second of which gives 0.02 to 0.04 where the first gives 0 to 1."""
    random = np.random.default_rng(7)
    truth = random.integers(0, 2, rows)
    logits = 1.2 * truth - 0.6 + random.normal(size=rows)
    plain, squeezed = (expit(logits + 0.2 * random.normal(size=rows)) for _ in range(2))
    columns = {"plain": plain, "squeezed": 0.02 + 0.02 * squeezed}
    members = {name: np.asfortranarray(np.column_stack([1 - yes, yes])) for name, yes in columns.items()}
    ids = pa.chunked_array([pa.array([str(row) for row in range(rows)])])
    return Predictions(ids, ("no", "yes"), members, dict.fromkeys(members, "softmax"), truth)


def placements(truth: Any, scores: Any) -> tuple[Any, Any]:
    """DeLong's components of an AUC, of positive and of negative rows, by comparing all pairs."""
    pairs = scores[truth == 1][:, None] - scores[truth == 0]
    wins = (pairs > 0) + 0.5 * (pairs == 0)
    return wins.mean(axis=1), wins.mean(axis=0)


def test_rows_of_different_folds_are_not_ranked_against_each_other() -> None:
    result = on_two_scales()
    report = fit(result, Options("auc"))
    truth, members = np.asarray(result.truth), [values[:, 1] for values in result.members.values()]
    fold_of, equal = folds(truth, 5, 0), np.mean(members, axis=0)
    of_best, of_equal, of_others = [], [], []
    for fold in range(5):
        out, others = fold_of == fold, fold_of != fold
        best = members[int(np.argmax([roc_auc_score(truth[others], member[others]) for member in members]))]
        of_best.append(roc_auc_score(truth[out], best[out]))
        of_equal.append(roc_auc_score(truth[out], equal[out]))
        of_others.append(roc_auc_score(truth[out], members[1][out]))
    assert of_best != of_others  # another member is the best in some fold
    assert report.best == pytest.approx(np.mean(of_best), abs=1e-12)
    assert report.equal == pytest.approx(np.mean(of_equal), abs=1e-12)
    assert report.over_best.value == pytest.approx(report.score - report.best, abs=1e-12)
    gain = report.members[0].gain
    assert gain is not None
    assert gain.value == pytest.approx(report.score - np.mean(of_others), abs=1e-12)
    # Pooled, the merge seemed to be 0.10 better than the best member.
    assert abs(report.over_best.value) < 0.01
    assert report.over_best.low < 0.001
    assert report.mean_over == "the mean over 5 folds"
    (messages,) = [verdict for verdict in verdicts(report) if verdict.startswith("Held-out auc")]
    assert messages.endswith("The figures are the mean over 5 folds.")


def test_the_rows_of_each_folds_model_are_ranked_by_themselves(tmp_path: Path) -> None:
    """Of out-of-fold predictions whose folds are on other scales, the better member has the lower pooled AUC."""
    random = np.random.default_rng(8)
    rows = 900
    truth, fold_of = random.integers(0, 2, rows), random.permutation(np.arange(rows) % 3)
    scales = np.array([0.1, 0.5, 0.9])[fold_of]
    ids = [f"r{row}" for row in range(rows)]
    better = scales + 0.1 * expit(3 * truth - 1.5 + random.normal(size=rows)) - 0.05
    worse = expit(1.5 * truth - 0.75 + random.normal(size=rows))
    (tmp_path / "oof").mkdir()
    (tmp_path / "training").mkdir()
    for name, yes in (("better", better), ("worse", worse)):
        frame = pd.DataFrame({"id": ids, "no": 1 - yes, "yes": yes})
        frame.to_csv(tmp_path / "oof" / f"{name}.csv", index=False)
    order = random.permutation(rows)
    folds_csv = pd.DataFrame({"id": ids, "fold": fold_of}).iloc[order]
    folds_csv.to_csv(tmp_path / "training" / "folds.csv", index=False)
    labels = tmp_path / "train.csv"
    pd.DataFrame({"id": ids, "label": np.array(["no", "yes"])[truth]}).to_csv(labels, index=False)

    expected = {
        name: np.mean([roc_auc_score(truth[fold_of == fold], yes[fold_of == fold]) for fold in range(3)])
        for name, yes in (("better", better), ("worse", worse))
    }
    assert roc_auc_score(truth, better) < roc_auc_score(truth, worse) < expected["better"]
    files = [tmp_path / "oof" / f"{name}.csv" for name in expected]
    methods: tuple[Method, ...] = ("greedy", "best_member", "auto")
    for method in methods:
        report = ensemble.fit(files, labels=labels, metric="auc", method=method, quiet=True)
        assert {member.name: member.alone for member in report.members} == pytest.approx(expected)
        assert report.best_member == "better"
        assert report.mean_over == "the mean over 3 folds"
    compared = ensemble.compare(files[0], files[1], ["auc"], labels=labels, quiet=True)
    (metric,) = compared.metrics
    assert (metric.first.value, metric.second.value) == pytest.approx(tuple(expected.values()))
    assert metric.better == "first"

    config = {
        "data": {"path": labels, "label_column": "label"},
        "labels": ["no", "yes"],
        "models": [{"name": file.stem, "task_type": "csv", "path": file} for file in files],
        "output_dir": tmp_path / "run",
        "report": False,
    }
    ensemble.run(config, quiet=True)
    report = ensemble.fit(config, metric="auc", quiet=True)
    assert {member.name: member.alone for member in report.members} == pytest.approx(expected)

    (tmp_path / "training" / "folds.csv").unlink()
    of_config = ensemble.fit(config, metric="auc", quiet=True)
    assert [remark for remark in of_config.remarks if "beside training/folds.csv" in remark]
    report = ensemble.fit(files, labels=labels, metric="auc", quiet=True)
    compared = ensemble.compare(files[0], files[1], ["auc"], labels=labels, quiet=True)
    for remarks in (report.remarks, compared.remarks):
        assert [remark for remark in remarks if "beside training/folds.csv" in remark]


def test_the_interval_of_an_auc_is_delongs_within_each_fold() -> None:
    """Of a member against the mean with one of noise, which no fold gives a weight."""
    result = on_two_scales()
    noise = np.random.default_rng(2).random(3_000)
    members = {"plain": result.members["plain"], "noise": np.column_stack([1 - noise, noise])}
    report = fit(
        replace(result, members=members, activations=dict.fromkeys(members, "softmax")), Options("auc")
    )
    assert report.over_best == Interval(0.0, 0.0, 0.0)
    truth, fold_of = np.asarray(result.truth), folds(np.asarray(result.truth), 5, 0)
    plain, equal = (values[:, 1] for values in (members["plain"], np.mean([*members.values()], axis=0)))
    variance = 0.0
    for fold in range(5):
        out = fold_of == fold
        sides = zip(placements(truth[out], plain[out]), placements(truth[out], equal[out]), strict=True)
        variance += sum((ours - theirs).var(ddof=1) / len(ours) for ours, theirs in sides)
    width = report.over_equal.high - report.over_equal.low
    assert width == pytest.approx(3.92 * variance**0.5 / 5, rel=0.1)


def test_a_fold_without_both_classes_is_left_out_and_counted() -> None:
    random = np.random.default_rng(4)
    truth = (np.arange(120) % 24 == 0).astype(float)
    members = {
        name: expit(2 * truth - 2 + random.normal(size=120))[:, None].copy(order="F") for name in ("m0", "m1")
    }
    ids = pa.chunked_array([pa.array([str(row) for row in range(120)])])
    table = Predictions(ids, ("yes",), members, dict.fromkeys(members, "sigmoid"), truth[:, None])
    report = fit(table, Options("auc"))
    fold_of = folds(truth[:, None], 5, 0)
    equal = np.mean([*members.values()], axis=0)[:, 0]
    of_equal = [
        roc_auc_score(truth[fold_of == fold], equal[fold_of == fold])
        for fold in range(5)
        if truth[fold_of == fold].any()
    ]
    assert 1 < len(of_equal) < 5
    (empty,) = (fold for fold in range(5) if not truth[fold_of == fold].any())
    assert report.mean_over == f"the mean over {len(of_equal)} folds; not defined in 1 more: fold {empty}"
    assert report.equal == pytest.approx(np.mean(of_equal), abs=1e-12)
    assert report.over_equal.low <= report.over_equal.value <= report.over_equal.high
    (messages,) = [verdict for verdict in verdicts(report) if verdict.startswith("Held-out auc")]
    assert messages.endswith(f" The figures are {report.mean_over}.")


@pytest.mark.parametrize("is_multi_label", one_in(2, [False, True]))
def test_stacking_is_the_logistic_regression_of_scikit_learn(is_multi_label: bool) -> None:
    probabilities = predictions(1_200)
    probabilities = multi_label(probabilities) if is_multi_label else probabilities
    report = fit(probabilities, Options(method="stacking"))
    assert report.stacking is not None
    assert weights_of(report) == [None, None]
    values, penalty = [*probabilities.members.values()], report.stacking.penalty
    merged = report.stacking.merge(values)
    if is_multi_label:
        for label in range(3):
            logits = np.column_stack([np.log(value[:, label] / (1 - value[:, label])) for value in values])
            model = LogisticRegression(C=penalty, tol=1e-10, max_iter=20_000).fit(
                logits, np.asarray(probabilities.truth)[:, label]
            )
            np.testing.assert_allclose(merged[:, label], model.predict_proba(logits)[:, 1], atol=1e-5)
    else:
        logs = np.log(np.column_stack(values))
        model = LogisticRegression(C=penalty, tol=1e-10, max_iter=20_000).fit(logs, probabilities.truth)
        np.testing.assert_allclose(merged, model.predict_proba(logs), atol=1e-5)
    assert report.score < min(member.alone for member in report.members)


@pytest.mark.long
def test_soft_truth_that_is_certain_is_the_hard_truth() -> None:
    probabilities = predictions(600)
    truth = np.eye(3)[probabilities.truth]
    for options in (Options(), Options(calibration="vector"), Options(method="stacking")):
        hard, soft = fit(probabilities, options), fit(replace(probabilities, truth=truth), options)
        assert soft.score == pytest.approx(hard.score, abs=1e-6)
        assert soft.over_equal.low == pytest.approx(hard.over_equal.low, abs=1e-5)


def test_rows_that_a_member_lacks_are_left_out_of_the_fit() -> None:
    probabilities = predictions(1_000)
    some = probabilities.members["m1"].copy(order="F")
    some[:300] = np.nan
    members = {"m0": probabilities.members["m0"], "m1": some}
    report = fit(replace(probabilities, members=members), Options())
    rest = {name: values[300:] for name, values in probabilities.members.items()}
    alone = fit(
        replace(
            probabilities,
            members=rest,
            truth=np.asarray(probabilities.truth)[300:],
            ids=probabilities.ids.slice(300),
        ),
        Options(),
    )
    assert (report.rows, report.rows_left_out, report.score) == (700, 300, alone.score)
    assert any(
        sentence.startswith("These figures are of the 700 of 1,000 rows ") for sentence in verdicts(report)
    )


def with_rules(result: Predictions, *rules: dict[str, Any], seed: int = 5) -> Predictions:
    """The same predictions of a run with rules, each for a third of the rows in which no ``a`` is true."""
    hits = (np.random.default_rng(seed).random((len(rules), result.rows)) < 1 / 3) & (result.truth != 0)
    given = [RuleConfig.model_validate({"when": "x", **rule}) for rule in rules]
    return replace(result, post=PostProcess(rules=RowRules(given, result.labels, hits)))


@pytest.mark.parametrize("pool", ["geometric_mean", "mean"])
def test_weights_are_best_for_what_rules_leave_of_the_merge(pool: Pool) -> None:
    """Held against the run's own order, in which the members are merged first, over a grid of weights."""
    ruled = with_rules(predictions(noise=(1.0, 1.2)), {"set": {"b": 0.9}}, {"mask": ["a"]})
    assert ruled.post.rules is not None
    report = fit(ruled, Options(pool=pool))
    is_set = ruled.post.rules.has_set
    assert (report.rows, report.rows_decided, report.rows_left_out) == ((~is_set).sum(), is_set.sum(), 0)
    assert f"Rules decide {is_set.sum()} further rows" in " ".join(verdicts(report))

    def loss(weight: float) -> float:
        blend = WeightedBlend(np.array([weight, 1 - weight]), pool, "softmax")
        merged = blend.merge([*ruled.members.values()])
        assert ruled.post.rules is not None
        ruled.post.rules.apply(0, merged, True)
        return float(row_losses(ruled.labelled, merged)[~is_set].mean())

    (weight, _) = weights_of(report)
    best = min(map(loss, np.linspace(0, 1, 201)))
    # Of the plain mean masks are put on the members, which is not quite the same.
    assert loss(weight) - best < (1e-6 if pool == "geometric_mean" else 1e-4)
    without = replace(ruled, post=PostProcess())
    assert weights_of(fit(without, Options(pool=pool)))[0] != pytest.approx(weight, abs=1e-4)


@pytest.mark.parametrize("method", one_in(2, ["greedy", "stacking"]))
def test_rows_that_rules_decide_tell_nothing_of_the_members(method: Method) -> None:
    ruled = with_rules(predictions(), {"set": {"b": 1.0}})
    assert ruled.post.rules is not None
    rest = np.flatnonzero(~ruled.post.rules.rows[0])
    alone = Predictions(
        ruled.ids.take(rest),
        LABELS,
        {name: np.asfortranarray(values[rest]) for name, values in ruled.members.items()},
        ruled.activations,
        np.asarray(ruled.truth)[rest],
    )
    options = Options(method=method)
    assert fit(ruled, options).score == fit(alone, options).score
    everything = replace(
        ruled, post=PostProcess(rules=RowRules(ruled.post.rules.rules, LABELS, np.ones((1, ROWS), bool)))
    )
    with pytest.raises(
        EnsembleError, match="fit needs labelled rows that every member has and that no rule decides"
    ):
        fit(everything, options)


@pytest.mark.parametrize(
    ("gain", "message"),
    [
        (
            Interval(0.002, -0.0001, 0.0041),
            "0.0020 better (-0.0001 to 0.0041), which is no more than noise. Equal",
        ),
        (
            Interval(-0.002, -0.0041, 0.0001),
            "0.0020 worse (-0.0001 to 0.0041), which is no more than noise. Equal",
        ),
        (Interval(0.002, 0.0001, 0.0041), "0.0020 better (0.0001 to 0.0041), more than noise."),
        (Interval(0.002, 0.0019, 0.0021), "0.002000 better (0.001900 to 0.002100), more than noise."),
        (Interval(0.0, 0.0, 0.0), "no difference. Equal weights do as well."),
        (
            Interval(0.002, np.nan, np.nan),
            "0.0020 better.",
        ),
    ],
)
def test_more_than_noise_is_an_interval_without_0(gain: Interval, message: str) -> None:
    report = replace(fit(predictions(300), Options()), over_equal=gain)
    (sentence,) = [verdict for verdict in verdicts(report) if verdict.startswith("Against equal weights")]
    assert f": {message}" in sentence
    is_known = not np.isnan(gain.low)
    assert ("Equal weights do as well." in sentence) is (is_known and not gain.excludes_zero)


def test_equal_weights_are_taken_where_the_fitted_ones_do_worse() -> None:
    report = fit(predictions(noise=(1.0, 1.0)), Options(method="best_member"))
    assert report.rejected is not None
    assert report.rejected.over_equal.high < 0
    assert weights_of(report) == [1.0, 1.0]
    assert (report.score, report.over_equal.value) == (report.equal, 0.0)
    assert report.fitted_on.value == report.equal
    assert report.equal == report.rejected.equal
    sentences = [*verdicts(report)]
    assert [text for text in sentences if text.startswith("Equal weights are kept: best_member does worse")]
    assert not [text for text in sentences if text.startswith("Against equal weights")]
    assert fit(predictions(300), Options()).rejected is None


@pytest.mark.parametrize(
    ("rows", "words"),
    [(60, "best on the other folds, for 3 of 5 folds m0"), (300, "Against the best member, m0")],
)
def test_a_best_member_that_is_chosen_anew_for_each_fold_is_said_to_be(rows: int, words: str) -> None:
    report = fit(predictions(rows, noise=(1.0, 1.0)), Options())
    (sentence,) = [text for text in verdicts(report) if "m0" in text and "Against" in text]
    assert words in sentence


def test_a_member_without_any_difference_is_not_called_noise() -> None:
    report = fit(predictions(300), Options())
    member = replace(report.members[0], gain=Interval(1e-9, -1e-9, 2e-9))
    sentences = [*verdicts(replace(report, members=(member, *report.members[1:])))]
    assert "m0 is not shown to help: without it no difference that these rows show." in sentences


def test_the_table_says_that_a_vector_scaling_was_fitted() -> None:
    report = fit(predictions(600), Options(calibration="vector"))
    (table,) = [item for item in view(report) if not isinstance(item, str)]
    assert table.headers[1] == "calibration"
    assert [row[1] for row in table.rows] == ["vector", "vector"]


def rare(result: Predictions, count: int) -> Predictions:
    """The last label is true in so many rows."""
    truth = np.minimum(np.asarray(result.truth), 1)
    truth[:count] = 2
    return replace(result, truth=truth)


@pytest.mark.parametrize("is_multi_label", [False, True])
def test_a_label_that_is_too_rare_for_the_metric_is_named(is_multi_label: bool) -> None:
    result = rare(predictions(400), 1)
    with pytest.raises(EnsembleError) as caught:
        fit(multi_label(result) if is_multi_label else result, Options("auc", "greedy"))
    assert [*caught.value.problems] == [
        "the truth has 'c' in 1 of 400 rows: --metric auc needs at least 5; give more rows, or use log_loss "
        "without stacking"
    ]
    assert fit(rare(predictions(400), 5), Options("auc", "greedy")).mean_over == "the mean over 5 folds"
    report = fit(rare(predictions(400), 5), Options("auc", "greedy", folds=7))
    assert report.mean_over == "the mean over 5 folds; not defined in 2 more: fold 1, fold 2"
    assert fit(result, Options("accuracy", "greedy")).rows == 400


def test_each_fold_has_its_share_of_each_label() -> None:
    truth = np.repeat([0, 1, 2], [50, 20, 6])
    fold_of = folds(truth, 5, 1)
    counts = np.array([np.bincount(truth[fold_of == fold], minlength=3) for fold in range(5)])
    assert (counts.max(axis=0) - counts.min(axis=0)).max() <= 1
    assert not np.array_equal(fold_of, folds(truth, 5, 2))


def raw(result: Predictions) -> Predictions:
    values = {name: member * 10 for name, member in result.members.items()}
    return replace(
        result,
        members=values,
        activations=dict.fromkeys(values, "none"),
        truth=np.asarray(result.truth)[:, None] * np.ones(3),
    )


def constant(result: Predictions) -> Predictions:
    return replace(result, members={**result.members, "m1": np.tile([0.2, 0.3, 0.5], (result.rows, 1))})


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda p: replace(p, truth=None), Options(), "no true labels"),
        (lambda p: replace(p, truth=np.zeros(ROWS, np.int64)), Options(), "the truth is 'a' in every row"),
        (constant, Options(), "m1 gives every row the same values"),
        (lambda p: predictions(9), Options(), "9 labelled rows for 1 number to fit: too few"),
        (lambda p: predictions(59), Options(calibration="vector"), "59 labelled rows for 13 numbers"),
        (lambda p: p, Options("acuracy", "greedy"), "accuracy"),
        (lambda p: p, Options("accuracy", "simplex"), "use --method greedy"),
        (raw, Options("rmse", "stacking"), "greedy"),
        (raw, Options(), "raw values"),
        (lambda p: replace(p, members={"m0": p.members["m0"]}), Options(), "the only member"),
        (
            lambda p: replace(p, truth=np.minimum(p.truth, 1)),
            Options(method="stacking"),
            "the truth has 'c' in 0 of 1,500 rows: --method stacking needs at least 1",
        ),
        (lambda p: predictions(20), Options(folds=11), "use fewer --folds"),
    ],
)  # fmt: skip
def test_what_cannot_be_fitted_is_refused_in_a_sentence(change: Any, options: Options, words: str) -> None:
    with pytest.raises(EnsembleError, match=words) as caught:
        fit(change(predictions()), options)
    assert caught.value.exit_code == 2
    assert len(caught.value.problems) == 1


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (
            {"method": "foo"},
            "method: 'foo' is unknown; the methods here are equal, best_member, simplex, greedy, stacking, auto",
        ),
        ({"calibration": "temperatur"}, "calibration: 'temperatur' is unknown; did you mean temperature?"),
        ({"pool": "median"}, "merge_method: 'median' is unknown; did you mean mean?"),
        ({"folds": 2.5}, "folds: give a whole number of at least 2, not '2.5'"),
        ({"folds": 1}, "folds: give a whole number of at least 2, not '1'"),
        ({"seed": -1}, "seed: give a whole number of at least 0, not '-1'"),
        ({"seed": True}, "seed: give a whole number of at least 0, not 'True'"),
    ],
)
def test_what_the_command_line_would_refuse_is_refused_in_python(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Options(**asked)
    assert caught.value.problems == (message,)


def test_the_method_goes_by_the_metric_where_none_is_asked_for() -> None:
    assert (Options().method, Options("auc").method, Options(method="greedy").method) == (
        "simplex",
        "greedy",
        "greedy",
    )


def test_regression_is_fitted_by_its_own_metric() -> None:
    result = raw(predictions())
    report = fit(result, Options("rmse", "greedy"))
    assert report.over_equal.high >= 0


@pytest.mark.parametrize("metric", ["pearson", "spearman"])
def test_a_correlation_is_fitted_though_no_number_is_above_a_half(metric: str) -> None:
    chooser = np.random.default_rng(0)
    truth = chooser.normal(-9, 1, (200, 1))
    members = {f"m{noise}": truth + noise * chooser.normal(size=truth.shape) for noise in (1, 3)}
    ids = pa.chunked_array([[str(row) for row in range(200)]])
    report = fit(
        Predictions(ids, ("y",), members, dict.fromkeys(members, "none"), truth), Options(metric, "greedy")
    )
    weights = [member.weight or 0.0 for member in report.members]
    assert weights[0] > 2 * weights[1]
    assert report.over_equal.low > 0


def test_as_few_rows_as_the_threshold_says_are_enough() -> None:
    assert fit(predictions(MIN_ROWS_PER_NUMBER), Options()).rows == MIN_ROWS_PER_NUMBER


def with_allowed(result: Predictions, seed: int = 5) -> Predictions:
    """The same predictions of rows that can have some labels only, the true one among them."""
    flags = np.random.default_rng(seed).random((result.rows, len(LABELS))) < 0.4
    flags[np.arange(result.rows), np.asarray(result.truth)] = True
    return replace(result, post=PostProcess(AllowedLabels(flags, "column c")))


def conditional(values: Any, result: Predictions) -> Any:
    """A member's probabilities, given that the label is one of the possible ones."""
    assert result.post.allowed is not None
    kept = np.where(result.post.allowed.flags, values, 0)
    return kept / kept.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("pool", ["geometric_mean", "mean"])
def test_weights_are_best_for_what_is_possible_in_a_row(pool: Pool) -> None:
    masked = with_allowed(predictions(noise=(1.0, 1.2)))
    report = fit(masked, Options(pool=pool))
    parts = [conditional(values, masked) for values in masked.members.values()]
    truth = np.asarray(masked.truth)
    for member, part in zip(report.members, parts, strict=True):
        assert member.alone == pytest.approx(log_loss(truth, part), rel=1e-9)

    def loss(weight: float) -> float:
        if pool == "mean":
            return float(log_loss(truth, weight * parts[0] + (1 - weight) * parts[1]))
        logs = [np.log(np.where(part > 0, part, 1)) for part in parts]
        product = np.exp(weight * logs[0] + (1 - weight) * logs[1])
        return float(log_loss(truth, conditional(product, masked)))

    (weight, _) = weights_of(report)
    assert loss(weight) - min(map(loss, np.linspace(0, 1, 201))) < 1e-7
    assert report.equal == pytest.approx(loss(0.5), rel=1e-9)
    assert abs(report.score - loss(weight)) < 0.01
    without = replace(masked, post=PostProcess())
    assert weights_of(fit(without, Options(pool=pool)))[0] != pytest.approx(weight, abs=1e-4)


@pytest.mark.parametrize("sharpness", one_in(2, [0.25, 1.8]))
def test_calibrations_are_best_for_what_is_possible_in_a_row(sharpness: float) -> None:
    """A temperature of 1/4 would be another one if it had to take the mass of impossible labels away, too."""
    masked = with_allowed(predictions(noise=(1.0, 1.2), sharpness=sharpness))
    truth, values = np.asarray(masked.truth), masked.members["m0"]

    def loss(parameters: Any, by_label: bool) -> float:
        factors, biases = (parameters[:3], parameters[3:]) if by_label else (1 / parameters, np.zeros(1))
        scores = softmax(factors * np.log(np.maximum(values, np.finfo(float).eps)) + biases, axis=1)
        error = log_loss(truth, conditional(scores, masked))
        # Vector scaling has a prior, which counts as one row.
        prior = ((factors - 1) ** 2).sum() + (biases**2).sum()
        return float(error + by_label * prior / 2 / masked.rows)

    calibration = fit(masked, Options(calibration="temperature")).members[0].calibration
    assert calibration is not None
    best = minimize(loss, [1.0], args=(False,), method="Nelder-Mead", options={"xatol": 1e-6, "fatol": 1e-12})
    assert calibration.temperature == pytest.approx(best.x[0], rel=1e-3)
    calibration = fit(masked, Options(calibration="vector")).members[0].calibration
    assert calibration is not None
    fitted = np.array([*calibration.scale.values(), *calibration.bias.values()])
    best = minimize(loss, fitted, args=(True,), method="Nelder-Mead", options={"maxiter": 400})
    assert loss(fitted, True) - best.fun < 1e-6


@pytest.mark.long
def test_stacking_sees_all_that_members_say_and_is_scored_by_what_is_possible() -> None:
    masked = with_allowed(predictions())
    options = Options(method="stacking")
    plain, report = fit(replace(masked, post=PostProcess()), options), fit(masked, options)
    assert plain.stacking is not None
    assert report.stacking is not None
    np.testing.assert_array_equal(report.stacking.coefficients, plain.stacking.coefficients)
    merged = report.stacking.merge([*masked.members.values()])
    in_sample = log_loss(np.asarray(masked.truth), conditional(merged, masked))
    assert report.score == pytest.approx(in_sample, abs=0.01)
    assert report.score < plain.score - 0.05
    equal = sum(conditional(values, masked) for values in masked.members.values()) / 2
    assert report.equal == pytest.approx(log_loss(np.asarray(masked.truth), equal), rel=1e-9)


def test_rows_whose_true_label_is_impossible_do_not_bend_a_calibration() -> None:
    masked = with_allowed(predictions(noise=(1.0, 1.2), sharpness=1.8))
    assert masked.post.allowed is not None
    flags = masked.post.allowed.flags.copy()
    flags[:20] = np.eye(len(LABELS), dtype=bool)[(np.asarray(masked.truth)[:20] + 1) % len(LABELS)]
    bent = replace(masked, post=PostProcess(AllowedLabels(flags, "column c")))
    for options in (Options(calibration="temperature"), Options(calibration="vector")):
        first, second = fit(masked, options).members[0].calibration, fit(bent, options).members[0].calibration
        assert first is not None
        assert second is not None
        assert second.temperature == pytest.approx(first.temperature, rel=0.05)
        assert all(abs(second.bias[label] - first.bias[label]) < 0.1 for label in first.bias)
