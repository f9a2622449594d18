"""Soft voting: arrays of probabilities -> one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import MergeError
from ensemble.common.text import plural

# Below the smallest normal number products lose digits; a member with so small a share decides no row.
_LEAST_SHARE = float(np.finfo(np.float64).tiny)


def weighted_mean(
    weights: Sequence[float], members: Iterable[npt.NDArray[np.float64]]
) -> npt.NDArray[np.float64]:
    """The mean of the members' values, each counted by its weight over the sum of the weights.

    A row of NaN is one that its member did not reach.  A row's mean is over the members that reached it, and its
    weights are those over their own sum; a row that nobody with a weight above 0 reached is NaN.

    Taken one member at a time, so that two of them are in memory at most.

    Args:
        weights: one per member, >= 0.
        members: float64 [rows, labels] each, in the weights' order; their values are used up.

    Raises:
        MergeError: no weight above 0, different shapes, or a row with infinite values or with only some NaN.
        ValueError: fewer members than weights.
    """
    whole = sum(weights)
    if whole <= 0:
        raise MergeError("nothing to merge: no member with a weight above 0")
    total: npt.NDArray[np.float64] | None = None
    reached = _Reached()
    number = 0
    for values in members:  # without zip or enumerate, which hold the last one while the next is read
        share = weights[number] / whole
        number += 1
        if total is not None and values.shape != total.shape:
            raise MergeError(f"members differ in shape: {values.shape} and {total.shape}")
        missing = _missing_rows(f"member {number} of {len(weights)}", values)
        reached.note(share, missing)
        if missing is not None:
            values[missing] = 0.0
        values *= share  # in place: two arrays of a large table are enough
        if total is None:
            total = values
        else:
            total += values
        del values
    if total is None or number < len(weights):
        raise ValueError(f"{len(weights)} weights, but {number} members")
    reached.normalise(total)
    return total


class _Reached:
    """The share of the weights that each row has; arrays only once a member lacks a row."""

    def __init__(self) -> None:
        self._share = 0.0  # of the members so far, for rows that all of them reached
        self._by_row: npt.NDArray[np.float64] | None = None
        self._is_short: npt.NDArray[np.bool_] | None = None

    def note(self, share: float, missing: npt.NDArray[np.bool_] | None) -> None:
        """One more member; ``missing`` marks the rows that it lacks, [rows]."""
        if missing is not None and share and self._by_row is None:
            self._by_row = np.full(len(missing), self._share)
            self._is_short = np.zeros(len(missing), dtype=np.bool_)
        if self._by_row is None or self._is_short is None:
            self._share += share
        elif missing is None:
            self._by_row += share
        elif share:
            self._by_row[~missing] += share
            self._is_short |= missing

    def normalise(self, total: npt.NDArray[np.float64]) -> None:
        """Divide the rows that lack a member by the share they have; the others stay as they are, bit for bit."""
        if self._by_row is None or self._is_short is None:
            return
        short = np.flatnonzero(self._is_short)
        shares = self._by_row[short]
        shares[shares < _LEAST_SHARE] = np.nan
        for column in total.T:  # one at a time, so that no copy of the table is made
            column[short] /= shares


def _missing_rows(member: str, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_] | None:
    """The rows that are NaN, [rows]; None where there are none.

    Raises:
        MergeError: a row has infinite values, or only some NaN.
    """
    columns = values.T  # one at a time, and they lie in one piece
    odd = np.zeros(len(values), dtype=np.bool_)
    for column in columns:
        odd |= ~np.isfinite(column)
    if not odd.any():
        return None
    missing = odd.copy()
    for column in columns:
        missing &= np.isnan(column)
    wrong = np.flatnonzero(odd & ~missing)
    if len(wrong):
        raise MergeError(
            f"{member}: {plural(len(wrong), 'row')} with infinite values or NaN in part, the first is row "
            f"{wrong[0] + 1:,}"
        )
    return missing
