"""A stacked logistic regression on the members' log-probabilities, by scikit-learn.

It is what ``ensemble: {method: stacking}`` merges by (``merging/methods/stacking.py``): the score of a label is
an intercept and the sum over members and labels of a coefficient times ln p; softmax makes probabilities of them.
Of sigmoid members each label has a regression of its own, on the logits that the members give to it.

The strength of the penalty (L2, as scikit-learn's ``C``) is chosen by cross-validation among the rows to fit to.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ensemble.analysis.calibration import Kind, Truth, Values, one_hot
from ensemble.merging.calibration import EPSILON, features, probabilities_of
from ensemble.merging.metrics import row_losses

# Inverse strengths of the penalty: the larger, the weaker it is.
PENALTIES: Final = (0.001, 0.01, 0.1, 1.0)
_INNER_FOLDS = 3
# With many rows the penalty hardly matters: it is chosen by so many of them, drawn at random.
_MAX_CHOOSING_ROWS = 5_000
# Of more rows so many, drawn at random, are fitted to: k coefficients then cost new rows k / 200,000 nats.
MAX_ROWS: Final = 100_000
_MAX_STEPS = 500
_TOLERANCE = 1e-4


@dataclass(frozen=True)
class Stacking:
    """``coefficients``, float64 [labels, members, labels] of ln p (softmax), or [labels, members] of logits
    (sigmoid); ``intercepts``, float64 [labels]; ``penalty`` as scikit-learn's ``C``."""

    coefficients: Values
    intercepts: Values
    penalty: float
    kind: Kind

    def merge(self, members: Sequence[Values]) -> Values:
        """The probabilities, float64 [rows, labels], of the members' ones, in the order of the coefficients."""
        return self.of_logs([features(one, self.kind) for one in members])

    def of_logs(self, logs: Sequence[Values]) -> Values:
        """The same of ln p, or of the logits."""
        scores = np.repeat(self.intercepts[:, None], len(logs[0]), axis=1)  # [labels, rows]
        for number, values in enumerate(logs):
            if self.kind == "softmax":
                scores += self.coefficients[:, number] @ values.T
            else:
                scores += self.coefficients[:, number, None] * values.T
        return probabilities_of(scores.T, [self.kind])


def fit_stacking(
    members: Sequence[Values], truth: Truth, kind: Kind, seed: int, penalty: float | None = None
) -> Stacking:
    """The regression of the truth on the members.

    Args:
        penalty: as scikit-learn's ``C``; None: the best of ``PENALTIES``.
        members: probabilities, float64 [rows, labels] each.
        truth: label numbers, int64 [rows], or probabilities, float64 [rows, labels]; two labels at least are there.
    """
    order = np.random.default_rng(seed).permutation(len(truth))[:MAX_ROWS]
    known = one_hot(truth, members[0].shape[1])[order]
    logs = [features(np.take(one, order, axis=0), kind) for one in members]
    if penalty is not None:
        return _fitted(logs, known, kind, penalty)
    fold_of = np.arange(min(len(order), _MAX_CHOOSING_ROWS)) % _INNER_FOLDS
    losses = np.zeros(len(PENALTIES))
    for fold in range(_INNER_FOLDS):
        kept, held = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        for number, tried in enumerate(PENALTIES):
            fitted = _fitted([one[kept] for one in logs], known[kept], kind, tried)
            losses[number] += row_losses(known[held], fitted.of_logs([one[held] for one in logs]), kind).sum()
    return _fitted(logs, known, kind, PENALTIES[int(losses.argmin())])


def _fitted(logs: Sequence[Values], truth: Values, kind: Kind, penalty: float) -> Stacking:
    labels, members = truth.shape[1], len(logs)
    if kind == "sigmoid":
        found = [
            _regression(
                np.column_stack([one[:, label] for one in logs]),
                np.stack([1 - truth[:, label], truth[:, label]], axis=1),
                penalty,
            )
            for label in range(labels)
        ]
        # Of two labels no and yes, of which sigmoid knows the difference.
        coefficients = np.array([weights[1] - weights[0] for weights, _ in found])
        return Stacking(coefficients, np.array([start[1] - start[0] for _, start in found]), penalty, kind)
    weights, intercepts = _regression(np.column_stack(logs), truth, penalty)
    return Stacking(weights.reshape(labels, members, labels), intercepts, penalty, kind)


def _regression(given: Values, truth: Values, penalty: float) -> tuple[Values, Values]:
    """Coefficients, float64 [labels, given numbers], and intercepts, [labels].

    A row that is of several labels in part counts as several rows.  A label of no row gets the lowest intercept.
    """
    # Takes a second to import, which fits of weights shall not wait for.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.linear_model import LogisticRegression

    rows, numbers = np.nonzero(truth)
    shares = truth[rows, numbers]
    labels = truth.shape[1]
    there = np.unique(numbers)
    weights, intercepts = np.zeros((labels, given.shape[1])), np.full(labels, np.log(EPSILON))
    if len(there) == 1:
        intercepts[there] = 0
        return weights, intercepts
    model = LogisticRegression(C=penalty, solver="lbfgs", tol=_TOLERANCE, max_iter=_MAX_STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # near enough: the gain is measured on other rows
        model.fit(given[rows], numbers, sample_weight=shares)
    if len(there) == 2:  # one set of numbers, for the second label
        weights[there], intercepts[there] = [-model.coef_[0] / 2, model.coef_[0] / 2], [
            -model.intercept_[0] / 2,
            model.intercept_[0] / 2,
        ]  # fmt: skip
    else:
        weights[there], intercepts[there] = model.coef_, model.intercept_
    return weights, intercepts
