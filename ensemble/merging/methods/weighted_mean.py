"""Soft voting: the mean of the members' values by their weights, a linear opinion pool."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ensemble.merging.methods.base import Block, MergeMethod, Values

# Below the smallest normal number products lose digits; a member with so small a share decides no row.
_MIN_SHARE = float(np.finfo(np.float64).tiny)


class WeightedMean(MergeMethod):
    """The mean of the members' values, each counted by its weight over the sum of the weights."""

    def merge(self, block: Block, weights: Values) -> Values:
        return weighted_mean(weights, block.probabilities, block.is_present)


def weighted_mean(weights: Values, members: Iterable[Values], is_present: npt.NDArray[np.bool_]) -> Values:
    """The mean over the members that have a row, by their weights over the sum of these members' weights.

    Args:
        weights: float64 [members], >= 0, some of them more.
        members: float64 [rows, labels] each.  Where the weight is 0 nothing of them counts.
        is_present: bool [members, rows].

    Returns:
        float64 [rows, labels]; NaN in a row that nobody with a weight above 0 has.
    """
    whole = sum(weights.tolist())  # from the first to the last, which numpy's own sum need not do
    shares = weights / whole
    total: Values | None = None
    for share, values, present in zip(shares, members, is_present, strict=True):
        if share:
            part = values * share
            if not present.all():
                part[~present] = 0.0
            total = part if total is None else np.add(total, part, out=total)
    assert total is not None
    # Rows that nobody lacks stay as they are, bit for bit.
    short = np.flatnonzero(~is_present[shares > 0].all(axis=0))
    if len(short):
        there = sum(share * present[short] for share, present in zip(shares, is_present, strict=True))
        there = np.where(there < _MIN_SHARE, np.nan, there)
        for column in total.T:
            column[short] /= there
    return total
