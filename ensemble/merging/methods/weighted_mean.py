"""Merge by the weighted mean of the members' values: soft voting, a linear opinion pool."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ensemble.merging.methods.base import Block, MergeMethod, Values


class WeightedMean(MergeMethod):
    """Merge by the weighted mean of the members' values.

    If labels are exclusive and have weights of their own, rows are scaled to a sum of 1.
    """

    fit_options = ""

    def merge(self, block: Block, weights: Values) -> Values:
        total = weighted_mean(weights, block.probabilities, block.is_present)
        return scaled(total) if weights.shape[2] > 1 and self.members.are_exclusive else total


def weighted_mean(weights: Values, members: Iterable[Values], is_present: npt.NDArray[np.bool_]) -> Values:
    """Return the weighted mean over the members that have a row.

    Args:
        weights: float64 [members, rows or 1, labels or 1], at least 0, some of them above 0.
        members: the values of each member, float64 [rows, labels].
        is_present: bool [members, rows].

    Returns:
        float64 [rows, labels]; a row is NaN if for some label no member with a weight above 0 has it.
    """
    # Added from the first to the last, which numpy's sum does not promise.
    is_plain = weights.size == len(weights)
    sums = np.array([[sum(weights.ravel().tolist())]]) if is_plain else weights.sum(axis=0)
    with np.errstate(invalid="ignore"):  # rows and labels for which all weights are 0
        shares = weights / sums
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
    # Only incomplete rows are scaled; the others stay the same, bit for bit.
    incomplete = np.flatnonzero((shares.any(axis=2) & ~is_present).any(axis=0))
    if len(incomplete):
        incomplete_shares = shares if shares.shape[1] == 1 else shares[:, incomplete]
        present_shares = np.zeros((len(incomplete), shares.shape[2]))
        for share, present in zip(incomplete_shares, is_present, strict=True):
            present_shares += share * present[incomplete, None]
        # Below the smallest normal number products lose digits; a member with so small a share decides no row.
        present_shares[(present_shares < np.finfo(np.float64).tiny).any(axis=1)] = np.nan
        total[incomplete] /= present_shares
    if not sums.all():
        total[np.broadcast_to((sums == 0).any(axis=-1), len(total))] = np.nan
    return total


def scaled(values: Values) -> Values:
    """Scale rows of numbers of at least 0 to a sum of 1, in place; a row of zeros becomes equal parts."""
    values += np.finfo(np.float64).tiny
    values /= values.sum(axis=1)[:, None]
    return values
