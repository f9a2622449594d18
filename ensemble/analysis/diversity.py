"""How alike members are: what they decide, how their values move together, and who is right where they differ.

All of it comes from one pass over the rows in blocks, as products of matrices: 30 members are no slower per pair
than two.  A pair is compared on the rows that both have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ensemble.common.protocol import Activation
from ensemble.data.table import Truth
from ensemble.merging.blocks import block_spans
from ensemble.merging.methods.base import Values

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Diversity:
    """Pairs of members; every array is [members, members], NaN where a pair has nothing to compare.

    Attributes:
        rows: that both have.
        decisions: what both have decided: a row's first label, or with "sigmoid" each label by itself (0.5 is yes).
        same: of these, how many are the same; ``decisions`` and ``same`` are 0 where values are no probabilities.
        kappa: Cohen's, the agreement beyond chance: (same - chance) / (1 - chance), where chance is that of two
            raters with the same frequencies (Cohen 1960).
        correlation: Pearson's of the values, over all rows and labels.
        error_correlation: Pearson's of value - truth; None without a truth.
        only_right: decisions in which the row's member is right and the column's is not; None without a truth.
    """

    rows: Counts
    decisions: Counts
    same: Counts
    kappa: Values
    correlation: Values
    error_correlation: Values | None
    only_right: Counts | None

    @property
    def agreement(self) -> Values:
        """The share of decisions that are the same."""
        with np.errstate(invalid="ignore"):
            return np.asarray(self.same / self.decisions)


def diversity(members: Sequence[Values], activation: Activation, truth: Truth | None = None) -> Diversity:
    """Compare members pair by pair.

    Args:
        members: float64 [rows, labels] each; a row of NaN is one that the member does not have.
        activation: "softmax" where a row's labels exclude each other, "sigmoid" where they do not, "none" for
            values that are no probabilities.
        truth: label numbers, int64 [rows], or values, float64 [rows, labels].
    """
    count = len(members)
    rows, labels = members[0].shape
    products = _Products(count)
    errors = _Products(count)
    decided = np.zeros((count, count))
    same = np.zeros((count, count))
    chosen = np.zeros((count, labels, count))  # decisions of a member for a label in rows of another
    right_there = np.zeros((count, count))
    both_right = np.zeros((count, count))
    for start, stop in block_spans(rows, labels):
        block = np.stack([values[start:stop] for values in members])
        there = np.asarray(~np.isnan(block).any(axis=2))
        block[~there] = 0.0
        products.add(block, there)
        actual = None if truth is None else _as_values(truth[start:stop], labels)
        if actual is not None:
            errors.add(np.where(there[:, :, None], block - actual, 0.0), there)
        if activation == "none":
            continue
        # float32 counts whole numbers up to 2^24 exactly, more than a block has.
        present: npt.NDArray[np.float32] = there.astype(np.float32)
        if activation == "softmax":
            decisions = np.zeros(block.shape, np.float32)
            np.put_along_axis(decisions, block.argmax(axis=2)[:, :, None], 1.0, axis=2)
            decisions *= present[:, :, None]
            decided += present @ present.T
            same += (flat := decisions.reshape(count, -1)) @ flat.T
            chosen += np.tensordot(decisions, present, axes=(1, 1))
        else:
            decisions = (block >= 0.5) * present[:, :, None]
            rejected = present[:, :, None] - decisions
            yes, no = decisions.reshape(count, -1), rejected.reshape(count, -1)
            decided += labels * (present @ present.T)
            same += yes @ yes.T + no @ no.T
            chosen += np.tensordot(decisions, present, axes=(1, 1))
        if actual is not None:
            if activation == "softmax":
                true = actual.argmax(axis=1)
                right = (block.argmax(axis=2) == true) * present
                right_there += right @ present.T
            else:
                right = (((block >= 0.5) == (actual >= 0.5)) * present[:, :, None]).reshape(count, -1)
                right_there += right @ np.repeat(present, labels, axis=1).T
            both_right += right @ right.T
    whole = np.rint
    has_decisions = truth is not None and activation != "none"
    return Diversity(
        rows=whole(products.rows).astype(np.int64),
        decisions=whole(decided).astype(np.int64),
        same=whole(same).astype(np.int64),
        kappa=_kappa(decided, same, chosen, activation),
        correlation=products.correlation(labels),
        error_correlation=None if truth is None else errors.correlation(labels),
        only_right=whole(right_there - both_right).astype(np.int64) if has_decisions else None,
    )


class _Products:
    """Sums of which Pearson's correlation is made, of the rows that both of a pair have.

    Values are counted from each member's mean in the first block that has any, so that numbers far from 0 keep
    their digits.
    """

    def __init__(self, count: int) -> None:
        self.rows = np.zeros((count, count))
        self._sums = np.zeros((count, count))  # of the row's member in rows that the column's has as well
        self._squares = np.zeros((count, count))
        self._products = np.zeros((count, count))
        self._shift = np.full(count, np.nan)

    def add(self, block: Values, there: npt.NDArray[np.bool_]) -> None:
        """A block, float64 [members, rows, labels], 0 in rows that are not ``there``."""
        labels = block.shape[2]
        present = there.astype(np.float64)
        counts = present.sum(axis=1)
        is_new = np.isnan(self._shift) & (counts > 0)
        self._shift[is_new] = block[is_new].sum(axis=(1, 2)) / (counts[is_new] * labels)
        moved = (block - np.nan_to_num(self._shift)[:, None, None]) * present[:, :, None]
        flat = moved.reshape(len(block), -1)
        self.rows += present @ present.T
        self._sums += moved.sum(axis=2) @ present.T
        self._squares += np.square(moved).sum(axis=2) @ present.T
        self._products += flat @ flat.T

    def correlation(self, labels: int) -> Values:
        """[members, members]; NaN where one of a pair is constant, or a pair has no rows."""
        with np.errstate(divide="ignore", invalid="ignore"):
            cells = self.rows * labels
            spread = self._squares - np.square(self._sums) / cells
            together = self._products - self._sums * self._sums.T / cells
            spread[spread <= 1e-13 * self._squares] = np.nan  # a constant, but for rounding
            return np.asarray(np.clip(together / np.sqrt(spread * spread.T), -1.0, 1.0))


def _as_values(truth: Truth, labels: int) -> Values:
    """The truth as float64 [rows, labels]."""
    if truth.ndim == 2:
        return np.asarray(truth, dtype=np.float64)
    return np.asarray(truth[:, None] == np.arange(labels), dtype=np.float64)


def _kappa(decided: Values, same: Values, chosen: Values, activation: Activation) -> Values:
    """Cohen's kappa; decisions of a label by itself are yes and no."""
    with np.errstate(divide="ignore", invalid="ignore"):
        if activation == "sigmoid":
            yes = chosen.sum(axis=1) / decided
            chance = yes * yes.T + (1 - yes) * (1 - yes.T)
        else:
            shares = chosen / decided[:, None, :]
            chance = np.einsum("ikj,jki->ij", shares, shares)
        kappa = (same / decided - chance) / (1 - chance)
    kappa[~np.isfinite(kappa)] = np.nan
    return np.asarray(kappa)
