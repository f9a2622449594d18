"""Find rows to read: the least certain, the most disputed between members, and those with the highest loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import Activation
from ensemble.merging.methods.base import Values
from ensemble.planning.cascade import entropy_terms, margins


def highest(scores: Values, count: int) -> npt.NDArray[np.int64]:
    """Return the numbers of the rows with the highest scores, of equal ones the earlier first; NaN is no score."""
    rows = np.argsort(-scores, kind="stable")[:count]  # NaN comes last
    return rows[~np.isnan(scores[rows])]


def uncertainty(values: Values, activation: Activation) -> Values:
    """Return how unsure the ensemble is of each row, [rows].

    That is 1 - (first - second probability) for "softmax", the mean entropy of the labels in bits for "sigmoid".
    """
    if activation == "sigmoid":
        return _entropy(values, activation)
    if values.shape[1] < 2:
        return np.full(len(values), np.nan)
    return np.asarray(1 - margins(values))


def disagreement(members: Sequence[Values], weights: Values, activation: Activation) -> Values:
    """Return how far apart the members are in each row, [rows]; NaN in rows of fewer than two members.

    It is the generalized Jensen-Shannon divergence (Lin 1991) in bits: the entropy of the weighted mean minus the
    weighted mean of the entropies, with "sigmoid" its mean over the labels; for regression the weighted standard
    deviation, the labels' root mean square. Weights are scaled to 1 over the members that have the row.

    Args:
        members: float64 [rows, labels] each; NaN in rows that the member does not have.
    """
    is_present = np.array([~np.isnan(values[:, 0]) for values in members])
    shares = weights[:, None] * is_present
    shares = shares / np.where(is_present.sum(axis=0) > 1, shares.sum(axis=0), np.nan)

    def mean(numbers: Sequence[Values]) -> Values:
        total = np.zeros_like(numbers[0])
        for of_member, share in zip(numbers, shares, strict=True):
            total += share.reshape(-1, *[1] * (total.ndim - 1)) * np.nan_to_num(of_member)
        return total

    merged = mean(members)
    if activation == "none":
        return np.sqrt(mean([np.square(values - merged).mean(axis=1) for values in members]))
    entropies = mean([_entropy(values, activation) for values in members])
    return np.maximum(_entropy(merged, activation) - entropies, 0.0)


def _entropy(values: Values, activation: Activation) -> Values:
    """Return the entropy of each row in bits, of labels that are not exclusive their mean."""
    if activation == "sigmoid":
        return np.asarray((entropy_terms(values) + entropy_terms(1 - values)).mean(axis=1) / np.log(2))
    return np.asarray(entropy_terms(values).sum(axis=1) / np.log(2))
