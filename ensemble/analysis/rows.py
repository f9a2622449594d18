"""Find rows to read: the least certain, the most disputed between members, and those with the highest loss."""

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
    """Row numbers from 0, [n], the highest of ``scores``, [n], first; of equal ones the earlier first."""

    rows: npt.NDArray[np.int64]
    scores: Values


def least_certain(values: Values, activation: Activation, count: int = 20) -> TopRows:
    """Return the rows of which the ensemble is least sure.

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
    """Return the rows on which members are furthest apart.

    Scores are the generalized Jensen-Shannon divergence (Lin 1991) in bits: the entropy of the weighted mean minus
    the weighted mean of the entropies, with "sigmoid" its mean over the labels; for regression the weighted
    standard deviation, the labels' root mean square. Weights are scaled to 1 over the members that have the row.

    Args:
        members: float64 [rows, labels] each; NaN in rows that the member does not have.
        weights: float64 [members].
    """

    def score(rows: slice) -> Values:
        block = np.stack([values[rows] for values in members])
        is_present = ~np.isnan(block).any(axis=2)
        block[~is_present] = 0.0
        shares = weights[:, None] * is_present
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
    """Return the rows with the highest log loss in nats, or of regression the highest mean squared error."""
    return _top(lambda rows: row_losses(truth[rows], values[rows], activation), values.shape, count)


def _top(score: Callable[[slice], Values], shape: tuple[int, ...], count: int) -> TopRows:
    """Return the rows with the highest scores, computed block by block; rows of NaN have none."""
    scores = np.concatenate([score(slice(*span)) for span in block_spans(shape[0], shape[1])])
    rows = np.argsort(-scores, kind="stable")[:count]  # NaN comes last
    rows = rows[~np.isnan(scores[rows])]
    return TopRows(rows, scores[rows])


def _entropy(values: Values) -> Values:
    """Return the entropy over the last axis, in nats."""
    return np.asarray(entropy_terms(values).sum(axis=-1))


def _binary_entropy(values: Values) -> Values:
    """Return the entropy of each cell, in nats."""
    return entropy_terms(values) + entropy_terms(1 - values)
