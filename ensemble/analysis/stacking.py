"""Fit a stacked logistic regression on the members' log-probabilities, by scikit-learn.

``ensemble: {method: stacking}`` merges by it (``merging/methods/stacking.py``): the score of a label is an
intercept and the sum over members and labels of a coefficient times ln p; softmax makes probabilities of them. Of
sigmoid members each label has a regression of its own, on the logits that the members give to it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ensemble.analysis.calibration import MAX_ROWS, Kind, one_hot
from ensemble.data.table import Truth
from ensemble.merging.calibration import EPSILON, features, probabilities_of
from ensemble.merging.methods.base import Values
from ensemble.merging.scoring import row_losses

# Candidates for scikit-learn's ``C``: the larger, the weaker the L2 penalty is.
PENALTIES: Final = (0.001, 0.01, 0.1, 1.0)
_INNER_FOLDS = 3


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
    members: Sequence[Values], truth: Truth, kind: Kind, seed: int, left_out: int | None = None
) -> StackingFit:
    """Return the regression of the truth on the members' probabilities, on at most ``MAX_ROWS`` rows.

    Its penalty is the best of ``PENALTIES`` in cross-validation among these rows. At least two labels must occur.
    The coefficients of the member that is ``left_out`` are 0.
    """
    rows = np.random.default_rng(seed).permutation(len(truth))[:MAX_ROWS]
    targets = one_hot(truth, members[0].shape[1])[rows]
    members = [values[rows] for number, values in enumerate(members) if number != left_out]
    # With more rows the penalty hardly matters.
    fold_of = np.arange(min(len(targets), 5_000)) % _INNER_FOLDS
    losses = np.zeros(len(PENALTIES))
    for fold in range(_INNER_FOLDS):
        others, scored = np.flatnonzero(fold_of != fold), np.flatnonzero(fold_of == fold)
        for number, penalty in enumerate(PENALTIES):
            stacking = _fitted([values[others] for values in members], targets[others], kind, penalty)
            merged = stacking.merge([values[scored] for values in members])
            losses[number] += row_losses(targets[scored], merged, kind).sum()
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
