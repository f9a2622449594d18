"""Soft voting: arrays of probabilities -> one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ensemble.errors import MergeError


def weighted_mean(members: Iterable[tuple[float, npt.NDArray[np.float64]]]) -> npt.NDArray[np.float64]:
    """The mean of the members' values, each counted by its weight over the sum of all weights.

    Taken one member at a time, so that two of them are in memory at most.

    Args:
        members: pairs of weight (>= 0) and float64 [rows, labels].

    Raises:
        MergeError: no member, all weights zero, or different shapes.
    """
    total: npt.NDArray[np.float64] | None = None
    weights = 0.0
    for weight, values in members:
        if total is None:
            total = np.zeros_like(values)
        if values.shape != total.shape:
            raise MergeError(f"members differ in shape: {values.shape} and {total.shape}")
        total += weight * values
        weights += weight
    if total is None or weights <= 0:
        raise MergeError("nothing to merge: no member with a weight above 0")
    return np.asarray(total / weights)
