"""Fit how members are merged: calibrations, weights, a stacked logistic regression, and the thresholds of answers.

A calibration is a temperature, or a scale and a bias for each label (vector scaling). Softmax members become
softmax(scale * log p / temperature + bias), sigmoid ones the same of the logit, label by label. Log loss is convex
in 1 / temperature, and in scale and bias. Probabilities below ``EPSILON`` count as that: a row in which a member
was wrongly sure costs 36 nats, as in scikit-learn's ``log_loss``.

Weights have the least log loss, which is convex in those of the weighted mean and of the weighted geometric mean,
or are selected greedily for any metric; they are at least 0 and sum to 1.

Of a stacked regression (``merging/methods/stacking.py``) the score of a label is an intercept and the sum over
members and labels of a coefficient times ln p; softmax makes probabilities of them. Of sigmoid members each label
has a regression of its own, on the logits that the members give to it.

C. Guo, G. Pleiss, Y. Sun and K. Q. Weinberger, "On Calibration of Modern Neural Networks", ICML 2017.
R. Caruana, A. Niculescu-Mizil, G. Crew and A. Ksikes, "Ensemble Selection from Libraries of Models", ICML 2004.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.optimize import minimize
from scipy.special import expit, logsumexp

from ensemble.config.schema import IsotonicConfig
from ensemble.data.answers import DIGITS, Answer, halfway
from ensemble.data.table import Truth
from ensemble.merging.calibration import EPSILON, features, probabilities_of
from ensemble.merging.methods.base import Values
from ensemble.merging.methods.weighted_mean import weighted_mean
from ensemble.merging.metrics import (
    METRICS,
    MICRO_F1,
    QUADRATIC_KAPPA,
    LabelledRows,
    Metric,
    Rows,
    answer_scores,
    row_losses,
)
from ensemble.merging.scoring import Interval

Kind: TypeAlias = Literal["softmax", "sigmoid"]
# A merge method that weights can be fitted for.
Pool: TypeAlias = Literal["mean", "geometric_mean"]
# Returns the log loss of weights, float64 [members], and its gradient.
WeightLoss: TypeAlias = Callable[[Values], tuple[float, Values]]

# A member at the upper end knows nothing of these labels, one at the lower end is right in every row.
MIN_TEMPERATURE, MAX_TEMPERATURE = 0.01, 100.0
# More rows are sampled at random: k fitted numbers then cost new rows k / 200,000 nats.
MAX_ROWS: Final = 100_000
_TOLERANCE = 1e-10  # nats per row
# Greedy selection adds so many members at most, and ends after so many that brought nothing.
_MAX_ADDED, _PATIENCE = 50, 5
# Candidates for scikit-learn's ``C``: the larger, the weaker the L2 penalty is.
PENALTIES: Final = (0.001, 0.01, 0.1, 1.0)
_INNER_FOLDS = 3
_MAX_ROWS_OF_THRESHOLDS = 20_000


def fit_temperature(values: Values, known: LabelledRows) -> float:
    """Return the temperature with the least log loss; 1 if none changes anything.

    The values are probabilities, float64 [rows, labels]. Labels that are not possible are 0 after the calibration.
    """
    logs, targets, offsets = _logs_and_targets(values, known)
    rows, kind = logs.shape[1], kind_of(known)

    def loss(inverse: Values) -> tuple[float, Values]:
        value, slopes = loss_of_scores(inverse * logs + offsets, targets, kind)
        return value / rows, np.array([(slopes * logs).sum() / rows])

    bounds = [(1 / MAX_TEMPERATURE, 1 / MIN_TEMPERATURE)]
    options = {"ftol": 1e-13, "gtol": 1e-8}
    best = minimize(loss, [1.0], jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return float(1 / best.x[0])


def fit_vector_scaling(values: Values, known: LabelledRows) -> tuple[Values, Values]:
    """Return the scale and the bias of each label with the least log loss, float64 [labels] each.

    A normal prior, which counts as one row, takes all scales to be 1 and all biases 0 give or take 1. It decides
    what the rows do not, such as the bias of a label that no row has. Arguments are as for ``fit_temperature``.
    """
    logs, targets, offsets = _logs_and_targets(values, known)
    (labels, rows), kind = logs.shape, kind_of(known)
    start = np.repeat([1.0, 0.0], labels)

    def loss(parameters: Values) -> tuple[float, Values]:
        scores = parameters[:labels, None] * logs + parameters[labels:, None] + offsets
        value, slopes = loss_of_scores(scores, targets, kind)
        distance = parameters - start
        gradient = np.concatenate([(slopes * logs).sum(axis=1), slopes.sum(axis=1)]) + distance
        return (value + distance @ distance / 2) / rows, gradient / rows

    options = {"ftol": 1e-13, "gtol": 1e-7, "maxiter": 500}
    best = minimize(loss, start, jac=True, method="L-BFGS-B", options=options)
    return best.x[:labels], best.x[labels:]


def fit_isotonic(values: Values, known: LabelledRows) -> dict[int, IsotonicConfig]:
    """Return scikit-learn's isotonic regression of each label's truth, by the label's number.

    Labels that all rows have, or none, are left out. Arguments are as for ``fit_temperature``.
    """
    from sklearn.isotonic import IsotonicRegression

    rows, lines = sampled_rows(len(values), MAX_ROWS), dict[int, IsotonicConfig]()
    for label, targets in enumerate(one_hot(known.truth, values.shape[1])[rows].T):
        is_used = np.ones(len(rows), np.bool_) if known.possible is None else known.possible[rows, label]
        if len(np.unique(targets[is_used])) > 1:
            model = IsotonicRegression(y_min=0, y_max=1, out_of_bounds="clip")
            model.fit(values[rows, label][is_used], targets[is_used])
            x, y = model.X_thresholds_.tolist(), model.y_thresholds_.tolist()
            lines[label] = IsotonicConfig(x=tuple(x), y=tuple(y))
    return lines


def loss_of_scores(scores: Values, targets: Values, kind: Kind) -> tuple[float, Values]:
    """Return the summed log loss of scores, and its derivative by the scores; all are float64 [labels, rows]."""
    if kind == "sigmoid":
        norms, shares = np.logaddexp(0, scores), expit(scores)
    else:
        norms = logsumexp(scores, axis=0)
        shares = np.exp(scores - norms)
    return float(norms.sum() - (targets * scores).sum()), shares - targets


def kind_of(known: LabelledRows) -> Kind:
    """Return how values are merged: of exclusive labels, or each label by itself."""
    return "softmax" if known.activation == "softmax" else "sigmoid"


def one_hot(truth: Truth, labels: int) -> Values:
    """Return the truth as probabilities, float64 [rows, labels]."""
    if truth.ndim == 2:
        return truth.astype(np.float64, copy=False)
    return np.asarray((truth == np.arange(labels)[:, None]).T, np.float64)


def sampled_rows(rows: int, most: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """Return the numbers of all rows, or of so many drawn at random."""
    if rows <= most:
        return np.arange(rows)
    return np.random.default_rng(seed).permutation(rows)[:most]


def _logs_and_targets(values: Values, known: LabelledRows) -> tuple[Values, Values, Values | float]:
    """Return a sample's features, its truth, and what to add to scores, float64 [labels, rows] each.

    A label that is impossible in a row has no feature there, and a score that makes its probability 0. Where a true
    label is impossible, the calibration cannot help, and all labels of the row count as possible.
    """
    rows = sampled_rows(len(values), MAX_ROWS)
    known = known.taken(rows)
    logs = features(values[rows], kind_of(known)).T
    targets = one_hot(known.truth, values.shape[1]).T
    offsets: Values | float = 0.0
    if known.possible is not None:
        is_impossible = ~known.possible.T
        is_impossible[:, (is_impossible & (targets > 0)).any(axis=0)] = False
        offsets = np.where(is_impossible, -1e5, 0.0)  # far below all scores that a temperature gives
        logs = np.where(is_impossible, 0.0, logs)
    return np.ascontiguousarray(logs), np.ascontiguousarray(targets), offsets


@dataclass(frozen=True)
class WeightedBlend:
    """Merge members by their weighted mean or geometric mean; ``weights`` are float64 [members]."""

    weights: Values
    pool: Pool
    kind: Kind

    def merge(self, members: Sequence[Values]) -> Values:
        """Return the merged probabilities of the members' ones, float64 [rows, labels] each."""
        used = np.flatnonzero(self.weights)
        chosen = [members[number] for number in used.tolist()]
        logs = chosen if self.pool == "mean" else (features(values, self.kind) for values in chosen)
        is_present = np.ones((len(chosen), len(members[0])), dtype=np.bool_)
        mean = weighted_mean(self.weights[used, None, None], logs, is_present)
        return mean if self.pool == "mean" else probabilities_of(mean, [self.kind])


def mean_loss(members: Sequence[Values], known: LabelledRows) -> WeightLoss:
    """Return the log loss of the weighted mean; of sigmoid members it is the mean over rows and labels."""
    targets = one_hot(known.truth, members[0].shape[1])
    if kind_of(known) == "sigmoid":
        targets = _no_and_yes(targets)
        members = [_no_and_yes(values) for values in members]
    # Only what members give to the true labels counts.
    labels, rows = np.nonzero(targets.T)
    shares = targets[rows, labels] / len(targets)
    probabilities = np.column_stack([np.maximum(values[rows, labels], EPSILON) for values in members])

    def loss(weights: Values) -> tuple[float, Values]:
        mean = np.maximum(probabilities @ weights, EPSILON)
        return -float(shares @ np.log(mean)), -(shares / mean) @ probabilities

    return loss


def geometric_loss(members: Sequence[Values], known: LabelledRows) -> WeightLoss:
    """Return the same for the weighted geometric mean, scaled to sum to 1: softmax of the weighted mean of ln p."""
    (rows, labels), kind = members[0].shape, kind_of(known)
    logs = np.stack([features(values, kind).T for values in members])
    targets = one_hot(known.truth, labels).T
    terms = rows if kind == "softmax" else rows * labels

    def loss(weights: Values) -> tuple[float, Values]:
        value, slopes = loss_of_scores(np.tensordot(weights, logs, 1), targets, kind)
        return value / terms, np.tensordot(logs, slopes, 2) / terms

    return loss


def minimize_on_simplex(
    loss: WeightLoss, members: int, left_out: int | None = None, start: Values | float = 1.0
) -> Values:
    """Return the weights with the least loss, float64 [members], in which ``left_out`` has none.

    If several weights are equally good, as those of two members that are the same, it returns some of them.
    The search begins near ``start``.
    """
    first, bounds = np.full(members, 0.1 / members) + start, [(0.0, 1.0)] * members
    if left_out is not None:
        first[left_out] = 0.0
        bounds[left_out] = (0.0, 0.0)
    best = minimize(
        loss,
        first / first.sum(),
        jac=True,
        method="SLSQP",
        bounds=bounds,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": _TOLERANCE, "maxiter": 200},
    )
    # Less counts as no weight.
    weights = np.where(best.x > 1e-9, best.x, 0.0)
    return np.asarray(weights / weights.sum())


def fit_greedy(
    members: Sequence[Values],
    score: Callable[[Values], float],
    pool: Pool,
    kind: Kind,
    left_out: int | None = None,
) -> WeightedBlend:
    """Return weights found by adding the member that makes the score of the mean best; higher is better.

    It may add a member several times, ``left_out`` never, and takes the best of all means on the way.
    """
    is_geometric = pool == "geometric_mean"
    terms = [features(values, kind) for values in members] if is_geometric else members
    candidates = [number for number in range(len(members)) if number != left_out]
    counts = np.zeros(len(members))
    total = np.zeros(members[0].shape, order="F")
    best, best_score, without_gain = counts, -np.inf, 0
    for added in range(1, _MAX_ADDED + 1):
        means = ((total + terms[number]) / added for number in candidates)
        scores = [score(probabilities_of(mean, [kind]) if is_geometric else mean) for mean in means]
        highest = max(scores)
        chosen = candidates[scores.index(highest)]
        counts[chosen] += 1
        total += terms[chosen]
        without_gain += 1
        if highest > best_score:
            best, best_score, without_gain = counts / added, highest, 0
        if without_gain == _PATIENCE:
            break
    return WeightedBlend(best, pool, kind)


def _no_and_yes(values: Values) -> Values:
    """Return each label of each row as a row of its own: no and yes, float64 [rows x labels, 2], label by label."""
    yes = values.T.ravel()
    return np.stack([1 - yes, yes]).T


@dataclass(frozen=True)
class StackingFit:
    """Merge members by a logistic regression; ``penalty`` is scikit-learn's ``C``.

    ``coefficients`` are float64 [labels, members, labels] of ln p (softmax), or [labels, members] of logits
    (sigmoid), ``intercepts`` float64 [labels].
    """

    coefficients: Values
    intercepts: Values
    penalty: float
    kind: Kind

    def merge(self, members: Sequence[Values]) -> Values:
        """Return probabilities, float64 [rows, labels], of the members' ones, in the order of the coefficients."""
        scores = np.repeat(self.intercepts[:, None], len(members[0]), axis=1)  # [labels, rows]
        for number, values in enumerate(members):
            coefficients, logs = self.coefficients[:, number], features(values, self.kind).T
            scores += coefficients @ logs if self.kind == "softmax" else coefficients[:, None] * logs
        return probabilities_of(scores.T, [self.kind])


def fit_stacking(
    members: Sequence[Values], known: LabelledRows, seed: int, left_out: int | None = None
) -> StackingFit:
    """Return the regression of the truth on the members' probabilities, on at most ``MAX_ROWS`` rows.

    Its penalty is the best of ``PENALTIES`` in cross-validation among these rows. At least two labels must occur.
    The coefficients of the member that is ``left_out`` are 0.
    """
    rows = np.random.default_rng(seed).permutation(len(known))[:MAX_ROWS]
    targets = one_hot(known.truth, members[0].shape[1])[rows]
    known, kind = replace(known.taken(rows), truth=targets), kind_of(known)
    members = [values[rows] for number, values in enumerate(members) if number != left_out]
    # With more rows the penalty hardly matters.
    fold_of = np.arange(min(len(targets), 5_000)) % _INNER_FOLDS
    losses = np.zeros(len(PENALTIES))
    for fold in range(_INNER_FOLDS):
        others, scored = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        for number, penalty in enumerate(PENALTIES):
            stacking = _fitted([values[others] for values in members], targets[others], kind, penalty)
            merged = stacking.merge([values[scored] for values in members])
            losses[number] += row_losses(known.taken(scored), merged).sum()
    stacking = _fitted(members, targets, kind, PENALTIES[int(losses.argmin())])
    if left_out is None:
        return stacking
    return replace(stacking, coefficients=np.insert(stacking.coefficients, left_out, 0.0, axis=1))


def _fitted(members: Sequence[Values], targets: Values, kind: Kind, penalty: float) -> StackingFit:
    labels = targets.shape[1]
    logs = [features(values, kind) for values in members]
    if kind == "softmax":
        coefficients, intercepts = _regression(np.column_stack(logs), targets, penalty)
        return StackingFit(coefficients.reshape(labels, len(members), labels), intercepts, penalty, kind)
    coefficients, intercepts = np.zeros((labels, len(members))), np.zeros(labels)
    for label in range(labels):
        inputs = np.column_stack([values[:, label] for values in logs])
        no_and_yes = np.stack([1 - targets[:, label], targets[:, label]], axis=1)
        weights, starts = _regression(inputs, no_and_yes, penalty)
        coefficients[label], intercepts[label] = weights[1] - weights[0], starts[1] - starts[0]
    return StackingFit(coefficients, intercepts, penalty, kind)


def _regression(inputs: Values, targets: Values, penalty: float) -> tuple[Values, Values]:
    """Return coefficients, float64 [labels, inputs], and intercepts, [labels].

    A row that is of several labels in part counts as several rows. A label of no row gets the lowest intercept.
    """
    # Takes a second to import, which fits of weights need not wait for.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    rows, numbers = np.nonzero(targets)
    present, labels = np.unique(numbers), targets.shape[1]
    coefficients, intercepts = np.zeros((labels, inputs.shape[1])), np.full(labels, np.log(EPSILON))
    if len(present) == 1:
        intercepts[present] = 0
        return coefficients, intercepts
    # Its default tolerance stops as far as 0.013 from the optimum's probabilities.
    model = LogisticRegression(C=penalty, tol=1e-8, max_iter=5_000)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # what it gains is measured on other rows
        model.fit(inputs[rows], numbers, sample_weight=targets[rows, numbers])
    # Of two labels there is one set of numbers, for the second.
    signs = np.array([[-0.5], [0.5]]) if len(present) == 2 else np.eye(len(present))
    coefficients[present] = signs @ model.coef_
    intercepts[present] = signs @ model.intercept_
    return coefficients, intercepts


@dataclass(frozen=True)
class FittedThresholds:
    """Hold the thresholds (``values``) between the labels' numbers, fitted to held-out predictions of all rows.

    ``score`` is the kappa of rows whose thresholds were fitted without them, ``halfway`` that of rounding. Without
    ``numbers`` they are those of ``labels``, ``score`` is the F1, and ``halfway`` that of 0.5.
    """

    numbers: tuple[float, ...]
    labels: tuple[str, ...]
    values: tuple[float, ...]
    score: float
    halfway: float
    over_halfway: Interval


def rounding(numbers: tuple[float, ...]) -> Answer:
    """Return the answer that is the number nearest to the expected one."""
    return Answer(texts=(), numbers=numbers, thresholds=halfway(numbers))


def fit_thresholds(values: Values, known: LabelledRows, numbers: tuple[float, ...], seed: int) -> Answer:
    """Return the answer whose thresholds have the best kappa on these rows that Nelder and Mead's search finds.

    The kappa is flat between rows' expected numbers, so that a search by slopes stands still. The first steps are a
    quarter of the least distance of two numbers. Of more than 20,000 rows it takes as many at random.
    """
    rows, answer = sampled_rows(len(values), _MAX_ROWS_OF_THRESHOLDS, seed), rounding(numbers)
    values, known = values[rows], known.taken(rows)

    def loss(thresholds: Values) -> float:
        tried = replace(answer, thresholds=tuple(np.sort(thresholds).tolist()))
        return -answer_scores(tried, known, values).get(QUADRATIC_KAPPA, 0.0)

    start, step = np.array(answer.thresholds), np.diff(sorted(numbers)).min() / 4
    simplex = np.vstack([start, start + step * np.eye(len(start))])
    best = minimize(loss, start, method="Nelder-Mead", options={"initial_simplex": simplex})
    thresholds = tuple(np.sort(best.x).round(6).tolist())
    return replace(answer, thresholds=thresholds) if len(set(thresholds)) == len(start) else answer


def fit_answer(values: Values, known: LabelledRows, start: Answer, metric: str, seed: int) -> Answer:
    """Return the answer whose thresholds have the best score on these rows; ``start`` has others."""
    if start.numbers:
        return fit_thresholds(values, known, start.numbers, seed)
    above, is_exclusive = np.array(start.above), known.activation == "softmax"
    # One threshold for all labels, or one for each.
    for labels in [start.labels] if metric == MICRO_F1 else start.labels[:, None]:
        truth = known.truth if is_exclusive else known.truth[:, labels].reshape(-1, 1)
        rows = LabelledRows(truth, known.activation, possible=None, folds=None)
        above[labels] = _best_threshold(values[:, labels].ravel(), rows, METRICS[metric])
    return replace(start, above=tuple(above.tolist()))


def _best_threshold(chances: Values, known: LabelledRows, metric: Metric) -> float:
    """Return the threshold with the best score of one label, or of two exclusive ones of which it is the second.

    All that differ are tried: one between any two probabilities, one below and one above them. Of equally good ones
    it is the one nearest to 0.5.
    """
    order = np.argsort(-chances, kind="stable")
    known, chances = known.taken(order), chances[order].round(DIGITS)
    is_exclusive = known.activation == "softmax"
    sides = ([1.0, 0.0], [0.0, 1.0]) if is_exclusive else ([0.0], [1.0])
    no, yes = (metric.statistics(Rows(known, np.tile(side, (len(order), 1)))) for side in sides)
    # The first rows are above: none, one, two and so on.
    sums = no.sum(axis=0) + np.insert((yes - no).cumsum(axis=0), 0, 0.0, axis=0)
    lows, highs = np.append(chances, 0.0), np.insert(chances, 0, 1.0)
    # Equal probabilities are not divided, those of 0 are never above, and no threshold is above 1.
    scores = np.where(lows < highs, metric.of_sums(sums, np.array(float(len(order))), is_exclusive), -np.inf)
    best = np.flatnonzero(scores >= scores.max() - 1e-12)
    middles = np.where((lows < 0.5) & (highs >= 0.5), 0.5, (lows + highs) / 2)
    chosen = best[np.abs(middles[best] - 0.5).argmin()]
    low, threshold, high = lows[chosen], round(float(middles[chosen]), 6), float(highs[chosen])
    return threshold if low < threshold <= high else high


def answered(answer: Answer, values: Values) -> Values:
    """Return each row's answer as probabilities, 1 for it and 0 for the others, float64 [rows, labels]."""
    if answer.above:
        decisions = answer.decisions(values)
        if len(answer.labels) < len(answer.above):  # of two exclusive labels the second
            decisions[:, 0] = ~decisions[:, 1]
        return decisions.astype(np.float64)
    return one_hot(answer.choices(values)[:, 0], values.shape[1])
