"""Log loss and accuracy, and whether a member knows more of the labels than how often each occurs."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from ensemble.common.protocol import Activation
from ensemble.merging.metrics import LabelledRows, row_losses
from ensemble.merging.scoring import Gain, Interval, Resamples, Score, Scoring
from tests.cli.reports import report, shown
from tests.labelled import labelled


def added_up(values: np.ndarray, known: LabelledRows, resamples: Resamples | None = None) -> Scoring:
    scoring = Scoring(known, resamples or Resamples(len(known)))
    for start in range(0, len(known), 100):  # as the merge does, block by block
        scoring.add(start, values[start : start + 100])
    return scoring


def scored(
    values: np.ndarray,
    truth: np.ndarray,
    activation: Activation = "softmax",
    possible: np.ndarray | None = None,
) -> Score:
    score = added_up(values, labelled(truth, activation, possible)).score()
    assert score is not None
    return score


def gained(
    truth: np.ndarray, ensemble: np.ndarray, other: np.ndarray, activation: Activation = "softmax"
) -> Gain:
    resamples = Resamples(len(truth))
    ours, theirs = (added_up(values, labelled(truth, activation), resamples) for values in (ensemble, other))
    return ours.gain_over(theirs, "a")


def demand_bootstrap(result: Interval | Gain, differences: np.ndarray) -> None:
    """The interval of a mean by SciPy; both are off by chance, by a small part of its width."""
    expected = stats.bootstrap(
        (differences,), np.mean, n_resamples=4_000, method="percentile", random_state=np.random.default_rng(9)
    ).confidence_interval
    assert result.low is not None
    assert result.high is not None
    width = expected.high - expected.low
    assert (result.low, result.high) == pytest.approx((expected.low, expected.high), abs=0.1 * width)


def test_the_prior_by_hand() -> None:
    truth = np.array([0, 0, 1, 0])
    values = np.array([[0.8, 0.2], [0.5, 0.5], [0.5, 0.5], [0.9, 0.1]])
    losses = -np.log([0.8, 0.5, 0.5, 0.9])
    prior = -np.log([0.75, 0.75, 0.25, 0.75])
    score = scored(values, truth)
    assert score.log_loss == pytest.approx(losses.mean())
    assert score.accuracy == 0.75  # of equal probabilities the first label is taken
    assert score.rows == 4
    assert score.prior_log_loss == pytest.approx(prior.mean())
    assert score.above_prior is not None
    assert score.above_prior.value == pytest.approx((losses - prior).mean())
    assert score.above_prior.low < score.above_prior.value < score.above_prior.high


def informed(truth: np.ndarray, strength: float, chooser: np.random.Generator) -> np.ndarray:
    """Probabilities that follow the truth by so much, and chance."""
    logits = chooser.normal(size=(len(truth), 3))
    logits[np.arange(len(truth)), truth] += strength
    exponents = np.exp(logits)
    return np.asarray(exponents / exponents.sum(axis=1, keepdims=True))


@pytest.mark.fault(36)
def test_members_that_are_no_better_than_the_prior_are_found() -> None:
    chooser = np.random.default_rng(0)
    truth = chooser.choice(3, size=1000, p=[0.5, 0.3, 0.2])
    useless = {
        "chance": informed(truth, 0.0, chooser),
        "always the frequencies": np.tile([0.5, 0.3, 0.2], (1000, 1)),
        "always the same": np.full((1000, 3), 1 / 3),
        "columns mixed up": informed((truth + 1) % 3, 2.0, chooser),
    }
    for name, values in useless.items():
        assert scored(values, truth).no_better_than_prior, name
    assert not scored(informed(truth, 1.5, chooser), truth).no_better_than_prior


def test_a_column_per_label_scores_like_one_column_of_labels() -> None:
    chooser = np.random.default_rng(2)
    truth = chooser.choice(3, size=350, p=[0.6, 0.3, 0.1])
    values = informed(truth, 1.0, chooser)
    one_hot = np.eye(3)[truth]
    assert scored(values, one_hot) == scored(values, truth)
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    assert scored(values, one_hot).log_loss == pytest.approx(
        sklearn_metrics.log_loss(one_hot, values), rel=1e-12
    )
    absent = truth[truth < 2]  # a label that no row has
    assert scored(values[truth < 2], np.eye(3)[absent]) == scored(values[truth < 2], absent)


def test_soft_labels_by_the_formulas() -> None:
    chooser = np.random.default_rng(3)
    truth, values = chooser.dirichlet([0.5, 0.5, 0.5], size=350), chooser.dirichlet([1, 1, 1], size=350)
    truth[:3] = np.array([[0.4, 0.4, 0.2], [1, 0, 0], [0, 0.5, 0.5]])
    values[:3] = np.array([[0.3, 0.5, 0.2], [0, 0, 1], [0.2, 0.4, 0.4]])
    score = scored(values, truth)
    shares = np.clip(values, np.finfo(float).eps, 1)
    losses = np.array([-(t[t > 0] * np.log(p[t > 0])).sum() for t, p in zip(truth, shares, strict=True)])
    assert score.log_loss == pytest.approx(losses.mean(), rel=1e-9)
    assert score.accuracy == (truth.argmax(axis=1) == values.argmax(axis=1)).mean()
    prior = -np.log(truth.mean(axis=0))
    assert score.prior_log_loss == pytest.approx(truth.mean(axis=0) @ prior)
    assert score.above_prior is not None
    assert score.above_prior.value == pytest.approx((losses - truth @ prior).mean())
    demand_bootstrap(score.above_prior, losses - truth @ prior)
    assert score.no_better_than_prior
    # By the truth's own entropy no member can get far below the prior here, and one that knows it is not blamed.
    close = np.array([0.5, 0.3, 0.2]) + chooser.normal(scale=0.01, size=(350, 3))
    close /= close.sum(axis=1, keepdims=True)
    assert not scored(close, close).no_better_than_prior
    assert scored(np.tile(close.mean(axis=0), (350, 1)), close).no_better_than_prior
    alike = np.tile([0.5, 0.3, 0.2], (350, 1))
    assert not scored(alike, alike).no_better_than_prior


def test_labels_that_are_not_exclusive_and_regression_by_scikit_learn() -> None:
    metrics = pytest.importorskip("sklearn.metrics")
    chooser = np.random.default_rng(5)
    truth = (chooser.random((350, 2)) < [0.3, 0.6]).astype(float)
    values = np.clip(0.25 + 0.5 * truth + chooser.normal(scale=0.2, size=(350, 2)), 0, 1)
    score = scored(values, truth, "sigmoid")
    each = [metrics.log_loss(truth[:, label], values[:, label]) for label in (0, 1)]
    prior = [metrics.log_loss(truth[:, label], np.full(350, truth[:, label].mean())) for label in (0, 1)]
    assert score.log_loss == pytest.approx(np.mean(each), rel=1e-9)
    assert score.prior_log_loss == pytest.approx(np.mean(prior))
    assert (score.accuracy, score.rmse) == (None, None)
    assert not score.no_better_than_prior
    assert scored(np.tile(truth.mean(axis=0), (350, 1)), truth, "sigmoid").no_better_than_prior
    assert scored(1 - values, truth, "sigmoid").no_better_than_prior
    wanted = 100 * truth + chooser.normal(size=(350, 2))
    score = scored(200 * values, wanted, "none")
    by_label = np.sqrt(metrics.mean_squared_error(wanted, 200 * values, multioutput="raw_values"))
    assert score.rmse == pytest.approx(by_label.mean())
    assert (score.log_loss, score.accuracy) == (None, None)
    # Of what is no probability the accuracy alone is said, and of labels that have none nothing.
    assert Scoring(labelled(truth, "sigmoid"), Resamples(350), has_loss=False).score() is None
    only = Scoring(labelled(np.array([0, 1])), Resamples(2), has_loss=False)
    only.add(0, np.array([[1.5, -1.5], [2.0, -2.0]]))
    assert only.score() == Score(None, 0.5, 2, None, False)


@pytest.mark.parametrize("activation", ["sigmoid", "none"])
def test_gains_of_other_values_by_scipy(activation: Activation) -> None:
    chooser = np.random.default_rng(6)
    truth = chooser.random((250, 2))
    ours, theirs = (chooser.random((250, 2)) for _ in range(2))

    def losses(values: np.ndarray) -> np.ndarray:
        if activation == "none":
            return np.asarray(((values - truth) ** 2).mean(axis=1))
        return np.asarray(-(special.xlogy(truth, values) + special.xlog1py(1 - truth, -values)).mean(axis=1))

    differences = losses(theirs) - losses(ours)
    gain = gained(truth, ours, theirs, activation)
    assert gain.of == ("squared error" if activation == "none" else "log loss")
    assert gain.gain == pytest.approx(differences.mean(), rel=1e-9)
    demand_bootstrap(gain, differences)


@pytest.mark.parametrize("is_soft", [False, True])
@pytest.mark.parametrize("rows", [350, 30_000])
def test_a_gain_and_its_interval_are_those_of_scipy(is_soft: bool, rows: int) -> None:
    """Of many rows, sorted by what is hard about them, too."""
    chooser = np.random.default_rng(4)
    numbers = chooser.integers(0, 3, rows)
    members = [informed(numbers, strength, chooser) for strength in (1.0, 1.5)]
    order = np.argsort(members[0].max(axis=1))
    numbers, members = numbers[order], [values[order] for values in members]
    ensemble = (members[0] + members[1]) / 2
    truth = chooser.dirichlet([1, 1, 1], rows) if is_soft else np.eye(3)[numbers]
    for values in members:
        gain = gained(truth if is_soft else numbers, ensemble, values)
        differences = row_losses(labelled(truth), values) - row_losses(labelled(truth), ensemble)
        assert (gain.best_member, gain.rows) == ("a", rows)
        assert gain.gain == pytest.approx(differences.mean(), rel=1e-9)
        if rows < 1_000:
            demand_bootstrap(gain, differences)
        low, high = stats.norm.interval(0.95, differences.mean(), stats.sem(differences))
        assert (gain.low, gain.high) == pytest.approx((low, high), abs=0.1 * (high - low))


def test_a_gain_of_one_row_and_of_none() -> None:
    truth, values = np.array([0]), np.array([[0.5, 0.5]])
    assert gained(truth, values, values) == Gain("a", 0.0, None, None, 1)
    truth, values = np.zeros(250, dtype=np.int64), np.tile([0.3, 0.7], (250, 1))
    assert gained(truth, values, values) == Gain("a", 0.0, 0.0, 0.0, 250)
    shifted = gained(truth, values, np.tile([0.1, 0.9], (250, 1)))
    assert (shifted.gain, shifted.low, shifted.high) == pytest.approx([np.log(3)] * 3, abs=1e-7)


@pytest.mark.long
def test_a_tiny_table_does_not_cry_wolf() -> None:
    chooser = np.random.default_rng(1)
    wrong = 0
    for _ in range(300):
        truth = chooser.choice(3, size=8)
        wrong += scored(informed(truth, 1.5, chooser), truth).no_better_than_prior
    assert wrong <= 6
    item = scored(np.array([[0.5, 0.5]]), np.array([0]))
    assert not item.no_better_than_prior


def test_what_is_said_of_them() -> None:
    good = Score(0.4, 0.9, 500, 1.0, False, above_prior=Interval(-0.6, -0.7, -0.5))
    bad = Score(1.2345, 0.3, 500, 1.0986, True, above_prior=Interval(0.1359, 0.0847, 0.1871))
    assert "! " not in "".join(shown("runs.summary", report(scores={"a": good})))
    (text,) = (
        line for line in shown("runs.summary", report(scores={"a": good, "b": bad})) if line.startswith("!")
    )
    assert text.startswith("! no better than always predicting how often each label occurs (log loss 1.0986")
    assert "500 rows" in text
    assert "b 1.2345" in text
    assert "a 0.4" not in text


def test_noise_is_no_better_than_the_prior_of_the_labels_that_are_possible_in_a_row() -> None:
    chooser = np.random.default_rng(11)
    possible = np.arange(8) < chooser.integers(2, 6, 600)[:, None]  # two to five of eight choices
    truth = np.array([chooser.choice(np.flatnonzero(flags)) for flags in possible])
    values = np.where(possible, chooser.dirichlet(np.ones(8), 600), 0)
    values /= values.sum(axis=1, keepdims=True)
    score = scored(values, truth, possible=possible)
    assert score.no_better_than_prior
    even = np.log(possible.sum(axis=1)).mean()
    assert score.prior_log_loss == pytest.approx(even, abs=0.02)
    # Where all labels are possible, or the true one is not, nothing changes.
    for flags in (np.ones_like(possible), ~possible):
        score = scored(values, truth, possible=flags)
        assert score.prior_log_loss == pytest.approx(scored(values, truth).prior_log_loss, rel=1e-9)


def test_the_prior_of_independent_labels_is_of_the_rows_in_which_they_are_possible() -> None:
    chooser = np.random.default_rng(12)
    possible = chooser.random((500, 3)) < 0.3
    truth = (possible & (chooser.random((500, 3)) < 0.5)).astype(np.float64)
    score = scored(np.where(possible, 0.5, 0.0), truth, "sigmoid", possible)
    assert score.log_loss == pytest.approx(np.log(2) * possible.mean(), rel=1e-9)
    assert score.prior_log_loss == pytest.approx(score.log_loss, abs=0.002)
