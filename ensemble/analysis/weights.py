"""Weights of members: those with the least log loss, and those that a greedy selection finds for any metric.

Log loss is convex in the weights both of the weighted mean and of the weighted geometric mean, with weights on the
simplex (at least 0, 1 together).  ``minimize_on_simplex`` takes Newton steps; each is a quadratic problem of as
many unknowns as there are members.  It ends with a proof: by convexity the loss is at most ``gap`` above the least.

Y. Kim, P. Carbonetto, M. Stephens and M. Anitescu, "A Fast Algorithm for Maximum Likelihood Estimation of Mixture
Proportions Using Sequential Quadratic Programming", Journal of Computational and Graphical Statistics 29 (2020).
R. Caruana, A. Niculescu-Mizil, G. Crew and A. Ksikes, "Ensemble Selection from Libraries of Models", ICML 2004.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

import numpy as np
import scipy.linalg
import scipy.optimize

from ensemble.analysis.calibration import (
    Kind,
    Truth,
    Values,
    binary,
    of_truth,
    one_hot,
)
from ensemble.merging.blocks import block_spans
from ensemble.merging.calibration import EPSILON, features, probabilities_of
from ensemble.merging.methods.weighted_mean import weighted_mean

# A merge method that weights can be fitted for.
Pool: TypeAlias = Literal["mean", "geometric_mean"]

GAP = 1e-9  # nats per row
_MAX_STEPS = 100
_MIN_SHARE = 1e-6  # of a step
_ROUNDING = 1e-14  # of a sum over many rows, relative; what is less is no ascent
# How much a step may miss that weights sum to 1 before it is scaled; at the optimum it misses nothing.
_SUM_FACTOR = 1e3
# Greedy selection: how many members are added at most, and after how many that brought nothing it ends.
_MAX_ADDED, _PATIENCE = 50, 5


@dataclass(frozen=True)
class Fitted:
    """``weights``, float64 [members]; their ``loss`` is at most ``gap`` above the least there is."""

    weights: Values
    loss: float
    gap: float


class Loss(Protocol):
    """A convex loss of weights on the simplex, which remembers what is linear in them."""

    members: int

    def scores(self, weights: Values) -> Values:
        """What the loss is made of; linear in the weights."""

    def value(self, scores: Values) -> float: ...

    def derivatives(self, scores: Values) -> tuple[Values, Values]:
        """Gradient [members] and Hessian [members, members]."""

    def without(self, member: int) -> Loss: ...


class MeanLoss:
    """Log loss of the weighted mean: all it needs of the members is what they give to the true labels.

    Args:
        given: float64 [terms, members], at least EPSILON.
        counts: float64 [terms], which sum to 1; None: all alike.
    """

    def __init__(self, given: Values, counts: Values | None = None) -> None:
        self._given = given
        self._counts = np.full(len(given), 1 / len(given)) if counts is None else counts
        self.members = given.shape[1]

    @classmethod
    def of(cls, members: Sequence[Values], truth: Truth, kind: Kind) -> MeanLoss:
        """Of float64 [rows, labels] each, and label numbers [rows] or probabilities [rows, labels].

        The loss of sigmoid members is the mean over rows and labels.
        """
        if kind == "sigmoid":
            soft = one_hot(truth, members[0].shape[1]).T.ravel()
            if np.isin(soft, (0.0, 1.0)).all():
                is_true = soft == 1
                given = np.empty((len(soft), len(members)))
                for number, values in enumerate(members):
                    yes = values.T.ravel()
                    given[:, number] = np.maximum(np.where(is_true, yes, 1 - yes), EPSILON)
                return cls(given)
            members, truth = [binary(values) for values in members], np.stack([1 - soft, soft]).T
        if truth.ndim == 1:
            given = np.empty((len(truth), len(members)))
            for number, values in enumerate(members):
                given[:, number] = np.maximum(of_truth(values.T, truth), EPSILON)
            return cls(given)
        flat = truth.T.ravel()
        held = np.flatnonzero(flat)
        given = np.empty((len(held), len(members)))
        for number, values in enumerate(members):
            given[:, number] = np.maximum(values.T.ravel()[held], EPSILON)
        return cls(given, flat[held] / len(truth))

    def scores(self, weights: Values) -> Values:
        return np.asarray(self._given @ weights)

    def value(self, scores: Values) -> float:
        return -float(self._counts @ np.log(scores))

    def derivatives(self, scores: Values) -> tuple[Values, Values]:
        gradient, hessian = np.zeros(self.members), np.zeros((self.members, self.members))
        for start, stop in block_spans(len(scores), self.members):
            part = slice(start, stop)
            shares = self._given[part] / scores[part, None]
            counted = shares * self._counts[part, None]
            gradient -= counted.sum(axis=0)
            hessian += shares.T @ counted
        return gradient, hessian

    def without(self, member: int) -> MeanLoss:
        return MeanLoss(np.delete(self._given, member, axis=1), self._counts)


class GeometricLoss:
    """Log loss of the weighted geometric mean, scaled to sum to 1: softmax of the weighted mean of ln p.

    Of sigmoid members the same for no and yes of each label of each row; the loss is the mean over both.

    Args:
        logs: float64 [labels, rows, members].
        truth: label numbers, int64 [rows], or probabilities, float64 [rows, labels].
    """

    def __init__(self, logs: Values, truth: Truth) -> None:
        self._logs = logs
        self._truth = truth
        self.members = logs.shape[2]
        self._of_truth = sum(
            (truth == label if truth.ndim == 1 else truth[:, label]).astype(np.float64) @ part
            for label, part in enumerate(logs)
        )

    @classmethod
    def of(cls, members: Sequence[Values], truth: Truth, kind: Kind) -> GeometricLoss:
        """See ``MeanLoss.of``."""
        if kind == "sigmoid":
            truth = binary(one_hot(truth, members[0].shape[1]))
            members = [binary(values) for values in members]
        logs = np.empty((members[0].shape[1], len(truth), len(members)))
        for number, values in enumerate(members):
            logs[:, :, number] = np.log(np.maximum(values.T, EPSILON))
        return cls(logs, truth)

    def scores(self, weights: Values) -> Values:
        return np.asarray(self._logs @ weights)  # [labels, rows]

    def value(self, scores: Values) -> float:
        top = scores.max(axis=0)
        whole = top + np.log(np.exp(scores - top).sum(axis=0))
        return float((whole - of_truth(scores, self._truth)).mean())

    def derivatives(self, scores: Values) -> tuple[Values, Values]:
        labels, rows, members = self._logs.shape
        gradient, hessian = -self._of_truth, np.zeros((members, members))
        for start, stop in block_spans(rows, labels * members):
            part = slice(start, stop)
            shares = probabilities_of(scores[:, part].copy().T, ["softmax"]).T
            weighted = self._logs[:, part] * shares[:, :, None]
            means = weighted.sum(axis=0)
            gradient = gradient + means.sum(axis=0)
            for logs, one in zip(self._logs[:, part], weighted, strict=True):
                hessian += one.T @ logs
            hessian -= means.T @ means
        return gradient / rows, hessian / rows

    def without(self, member: int) -> GeometricLoss:
        return GeometricLoss(np.delete(self._logs, member, axis=2), self._truth)


def minimize_on_simplex(loss: Loss, start: Values | None = None) -> Fitted:
    """The weights with the least loss, from ``start``, [members], or from equal weights.

    Where several weights are equally good, as those of two members that are the same, it gives some of them.
    """
    members = loss.members
    weights = np.full(members, 1 / members) if start is None else start / start.sum()
    scores = loss.scores(weights)
    value = loss.value(scores)
    gap = np.inf
    for _ in range(_MAX_STEPS):
        gradient, hessian = loss.derivatives(scores)
        # On the simplex a constant added to the gradient changes nothing.
        gradient = gradient - gradient @ weights
        gap = max(0.0, -float(gradient.min()))
        if gap <= GAP:
            break
        toward = _newton_point(weights, gradient, hessian)
        slope = float(gradient @ (toward - weights))
        if slope >= 0:  # by rounding: the best vertex is a way down, too
            toward = np.eye(members)[gradient.argmin()]
            slope = -gap
        there, share = loss.scores(toward), 1.0
        while share > _MIN_SHARE:
            moved = (1 - share) * scores + share * there
            reached = loss.value(moved)
            if reached <= value + 1e-4 * share * slope + _ROUNDING * abs(value):
                break
            share /= 2
        else:
            break  # nothing is left to gain but rounding
        weights = (1 - share) * weights + share * toward
        scores, value = moved, reached
    return Fitted(weights, value, gap)


def _newton_point(weights: Values, gradient: Values, hessian: Values) -> Values:
    """Where on the simplex the loss would be least, if it were the parabola that it is like at ``weights``.

    By non-negative least squares: with the Hessian as R'R and v the weights, |R v - R w + R'^-1 gradient|.
    """
    members = len(weights)
    ridge = (
        np.eye(members) * max(float(np.diag(hessian).max()), EPSILON) * 1e-11
    )  # of members that are the same
    factor = scipy.linalg.cholesky(hessian + ridge)
    target = factor @ weights - scipy.linalg.solve_triangular(factor, gradient, trans="T")
    weight_of_sum = _SUM_FACTOR * float(np.abs(factor).max())
    rows = np.vstack([factor, np.full(members, weight_of_sum)])
    # Not scipy.optimize.nnls: that of SciPy 1.12 solves normal equations, and fails where members are the same.
    found = scipy.optimize.lsq_linear(
        rows, np.append(target, weight_of_sum), (0, np.inf), method="bvls", tol=1e-15, max_iter=10 * members
    ).x
    found = np.maximum(found, 0)
    return np.asarray(found / found.sum())


def greedy_selection(
    members: Sequence[Values],
    score: Callable[[Values], float],
    finish: Callable[[Values], Values] = lambda values: values,
) -> tuple[Values, float]:
    """Add the member that makes the score of the mean best, again and again, the same one several times if need be.

    It begins with the best member (sorted initialization of one), adds at most 50, ends where 5 in a row have
    brought nothing, and takes the best of all means on the way.  Bagging is for libraries of hundreds of models.

    Args:
        members: float64 [rows, labels] each, of which the mean is taken: probabilities or their logarithms.
        score: the more the better; of what ``finish`` makes of the mean.

    Returns:
        weights, float64 [members], and their score.
    """
    counts = np.zeros(len(members))
    total = np.zeros(members[0].shape, order="F")
    best, best_score, since = counts, -np.inf, 0
    for added in range(1, _MAX_ADDED + 1):
        scores = [score(finish((total + values) / added)) for values in members]
        chosen = int(np.argmax(scores))
        counts[chosen] += 1
        total += members[chosen]
        if scores[chosen] > best_score:
            best, best_score, since = counts / added, scores[chosen], 0
        else:
            since += 1
        if since == _PATIENCE:
            break
    return best, best_score


def pooled(members: Sequence[Values], weights: Values, pool: Pool, kind: Kind) -> Values:
    """The weighted mean, or the weighted geometric mean scaled to sum to 1, float64 [rows, labels].

    Args:
        members: probabilities, float64 [rows, labels] each.
    """
    used = np.flatnonzero(weights)
    kept = [members[number] for number in used.tolist()]
    logs = kept if pool == "mean" else (features(one, kind) for one in kept)
    is_present = np.ones((len(kept), len(members[0])), dtype=np.bool_)
    mean = weighted_mean(weights[used, None, None], logs, is_present)
    return mean if pool == "mean" else probabilities_of(mean, [kind])
