"""Find weights of members: with the least log loss, or by greedy selection for any metric.

Log loss is convex in the weights of the weighted mean and of the weighted geometric mean; weights are at least 0
and sum to 1.

R. Caruana, A. Niculescu-Mizil, G. Crew and A. Ksikes, "Ensemble Selection from Libraries of Models", ICML 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from scipy.optimize import minimize

from ensemble.analysis.calibration import Kind, loss_of_scores, one_hot
from ensemble.data.table import Truth
from ensemble.merging.calibration import EPSILON, features, probabilities_of
from ensemble.merging.methods.base import Values
from ensemble.merging.methods.weighted_mean import weighted_mean

# A merge method that weights can be fitted for.
Pool: TypeAlias = Literal["mean", "geometric_mean"]
# Returns the log loss of weights, float64 [members], and its gradient.
WeightLoss: TypeAlias = Callable[[Values], tuple[float, Values]]

_TOLERANCE = 1e-10  # nats per row
# Greedy selection adds so many members at most, and ends after so many that brought nothing.
_MAX_ADDED, _PATIENCE = 50, 5


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


def mean_loss(members: Sequence[Values], truth: Truth, kind: Kind) -> WeightLoss:
    """Return the log loss of the weighted mean; of sigmoid members it is the mean over rows and labels."""
    targets = one_hot(truth, members[0].shape[1])
    if kind == "sigmoid":
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


def geometric_loss(members: Sequence[Values], truth: Truth, kind: Kind) -> WeightLoss:
    """Return the same for the weighted geometric mean, scaled to sum to 1: softmax of the weighted mean of ln p."""
    rows, labels = members[0].shape
    logs = np.stack([features(values, kind).T for values in members])
    targets = one_hot(truth, labels).T
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
