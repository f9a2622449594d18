"""Soft voting: the mean of the members' values by their weights, a linear opinion pool."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ensemble.merging.methods.base import Block, MergeMethod, Values

# Below the smallest normal number products lose digits; a member with so small a share decides no row.
_MIN_SHARE = float(np.finfo(np.float64).tiny)


class WeightedMean(MergeMethod):
    """The mean of the members' values, each counted by its weight over the sum of the weights.

    Where labels exclude each other and have weights of their own, rows are scaled to a sum of 1.
    """

    fit_options = ""

    def merge(self, block: Block, weights: Values) -> Values:
        total = weighted_mean(weights, block.probabilities, block.is_present)
        return scaled(total) if weights.shape[2] > 1 and self.members.are_exclusive else total


def weighted_mean(weights: Values, members: Iterable[Values], is_present: npt.NDArray[np.bool_]) -> Values:
    """The mean over the members that have a row, by their weights over the sum of these members' weights.

    Args:
        weights: float64 [members, rows or 1, labels or 1], >= 0, some of them more.
        members: float64 [rows, labels] each.  Where all weights are 0 nothing of them counts.
        is_present: bool [members, rows].

    Returns:
        float64 [rows, labels]; NaN in a row if for some label nobody with a weight above 0 has it.
    """
    # From the first to the last, which numpy's own sum need not do.
    is_plain = weights.size == len(weights)
    whole = np.array([[sum(weights.ravel().tolist())]]) if is_plain else weights.sum(axis=0)
    with np.errstate(invalid="ignore"):  # where nobody has a weight
        shares = weights / whole
    counts = shares.any(axis=(1, 2))
    total: Values | None = None
    for share, values, present, does_count in zip(shares, members, is_present, counts, strict=True):
        if does_count:
            with np.errstate(invalid="ignore"):  # 0 * -inf, taken out below
                part = values * share
            if not share.all():
                part[np.broadcast_to(share == 0, part.shape)] = 0.0
            if not present.all():
                part[~present] = 0.0
            total = part if total is None else np.add(total, part, out=total)
    assert total is not None
    # Rows that nobody lacks stay as they are, bit for bit.
    short = np.flatnonzero((shares.any(axis=2) & ~is_present).any(axis=0))
    if len(short):
        of_short = shares if shares.shape[1] == 1 else shares[:, short]
        there = np.zeros((len(short), shares.shape[2]))
        for share, present in zip(of_short, is_present, strict=True):
            there += share * present[short, None]
        there[(there < _MIN_SHARE).any(axis=1)] = np.nan
        total[short] /= there
    if not whole.all():
        total[np.broadcast_to((whole == 0).any(axis=-1), len(total))] = np.nan
    return total


def scaled(values: Values) -> Values:
    """Rows of numbers >= 0, scaled to a sum of 1; one of zeros alone gives all labels the same."""
    values += np.finfo(np.float64).tiny
    values /= values.sum(axis=1)[:, None]
    return values
