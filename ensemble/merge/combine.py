"""Soft voting: arrays of probabilities -> one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ensemble.errors import MergeError


def weighted_mean(
    weights: Sequence[float], members: Iterable[npt.NDArray[np.float64]]
) -> npt.NDArray[np.float64]:
    """The mean of the members' values, each counted by its weight over the sum of all weights.

    Taken one member at a time, so that two of them are in memory at most.

    Args:
        weights: one per member, >= 0.
        members: float64 [rows, labels] each, in the weights' order; their values are used up.

    Raises:
        MergeError: no weight above 0, or different shapes.
    """
    whole = sum(weights)
    if whole <= 0:
        raise MergeError("nothing to merge: no member with a weight above 0")
    total: npt.NDArray[np.float64] | None = None
    for weight, values in zip(weights, members, strict=True):
        values *= weight / whole  # in place: two arrays of a large table are enough
        if total is None:
            total = values
        elif values.shape != total.shape:
            raise MergeError(f"members differ in shape: {values.shape} and {total.shape}")
        else:
            total += values
        del values
    assert total is not None
    return total
