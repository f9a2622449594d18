"""Rows worth a look: the least certain, the most disputed between members, and those that cost most."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.blocks import block_spans
from ensemble.merging.methods.base import Values
from ensemble.merging.scoring import row_losses
from ensemble.planning.cascade import entropy_terms, margins


@dataclass(frozen=True)
class TopRows:
    """Rows of the table from 0, [n], with the highest ``scores``, [n], first; of equal ones the earlier."""

    rows: npt.NDArray[np.int64]
    scores: Values


def least_certain(values: Values, activation: Activation, count: int = 20) -> TopRows:
    """The rows of which the ensemble is least sure.

    Scores are 1 - (first - second probability) for "softmax", the mean entropy of the labels in bits for "sigmoid".

    Args:
        values: probabilities, float64 [rows, labels].
    """

    def score(rows: slice) -> Values:
        block = values[rows]
        if activation == "sigmoid":
            return np.asarray(_binary_entropy(block).mean(axis=1) / np.log(2))
        if block.shape[1] < 2:
            return np.full(len(block), np.nan)
        return np.asarray(1 - margins(block))

    return _top(score, values.shape, count)


def most_disputed(
    members: Sequence[Values], weights: Values, activation: Activation, count: int = 20
) -> TopRows:
    """The rows on which members are furthest apart.

    Scores are the generalized Jensen-Shannon divergence (Lin 1991) in bits: the entropy of the weighted mean less
    the weighted mean of the entropies, from 0 to log2 of the number of members, with "sigmoid" the mean of that
    over the labels; for values that are no probabilities the weighted standard deviation, the labels' root mean
    square.
    Weights are those of the members that have the row, scaled to a sum of 1.

    Args:
        members: float64 [rows, labels] each; NaN in rows that the member does not have.
        weights: float64 [members].
    """

    def score(rows: slice) -> Values:
        block = np.stack([values[rows] for values in members])
        there = ~np.isnan(block).any(axis=2)
        block[~there] = 0.0
        shares = weights[:, None] * there
        with np.errstate(invalid="ignore"):
            shares = shares / shares.sum(axis=0)
        shares[:, np.count_nonzero(shares > 0, axis=0) < 2] = np.nan  # nobody to differ from
        mean = np.einsum("mr,mrl->rl", shares, block)
        if activation == "none":
            spread = np.einsum("mr,mrl->rl", shares, np.square(block - mean))
            return np.asarray(np.sqrt(spread.mean(axis=1)))
        if activation == "sigmoid":
            gain = _binary_entropy(mean) - np.einsum("mr,mrl->rl", shares, _binary_entropy(block))
            return np.asarray(np.maximum(gain, 0.0).mean(axis=1) / np.log(2))
        return np.asarray(
            np.maximum(_entropy(mean) - np.einsum("mr,mr->r", shares, _entropy(block)), 0.0) / np.log(2)
        )

    return _top(score, members[0].shape, count)


def costliest(values: Values, truth: Truth, activation: Activation, count: int = 20) -> TopRows:
    """The rows where the ensemble was surest of what is wrong, or whose label is.

    Scores are the row's log loss in nats (of labels that do not exclude each other, their mean); for values that
    are no probabilities the squared error, the labels' mean.
    """

    def score(rows: slice) -> Values:
        known, given = truth[rows], values[rows]
        if activation == "none":
            return np.asarray(np.square(given - known).mean(axis=1))
        return row_losses(known, given, activation)

    return _top(score, values.shape, count)


def _top(score: Callable[[slice], Values], shape: tuple[int, ...], count: int) -> TopRows:
    """The highest scores, block by block; rows of NaN have none."""
    rows, scores = np.empty(0, np.int64), np.empty(0)
    for start, stop in block_spans(shape[0], shape[1]):
        found = score(slice(start, stop))
        places = np.flatnonzero(~np.isnan(found))
        if len(scores) == count:
            places = places[found[places] > scores[-1]]  # of equal ones the earlier is kept
        rows, scores = np.r_[rows, start + places], np.r_[scores, found[places]]
        best = np.argsort(-scores, kind="stable")[:count]
        rows, scores = rows[best], scores[best]
    return TopRows(rows, scores)


def _entropy(values: Values) -> Values:
    """In nats, over the last axis."""
    return np.asarray(entropy_terms(values).sum(axis=-1))


def _binary_entropy(values: Values) -> Values:
    """In nats, of each cell."""
    return entropy_terms(values) + entropy_terms(1 - values)
