"""Whether a member's values are what they should be: the last look before they go into the mean."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.errors import MergeError
from ensemble.protocol import Activation

# What the worker allows a row's sum to be off: probabilities are written in full.
_SUM_TOLERANCE = 1e-3


def refuse_no_probabilities(
    source: str, values: npt.NDArray[np.float64], activation: Activation, ids: pa.ChunkedArray
) -> None:
    """Look at each row that is there; one of NaN is one that the member did not reach.

    Args:
        source: what is said to hold them.
        values: float64 [rows, labels].
        activation: "softmax" for probabilities that sum to 1, "sigmoid" for any from 0 to 1, "none" for any number.
        ids: of the rows, [rows].

    Raises:
        MergeError: values below 0 or above 1, or that do not sum to 1; the first of them is named.
    """
    if activation == "none":
        return
    bad = np.zeros(len(values), dtype=np.bool_)
    for column in values.T:  # one at a time, and they lie in one piece; comparing NaN is False
        bad |= (column < 0) | (column > 1)
    what = "below 0 or above 1"
    if activation == "softmax" and not bad.any():
        bad = np.abs(values.sum(axis=1) - 1) > _SUM_TOLERANCE
        what = "that do not sum to 1"
    rows = np.flatnonzero(bad)
    if len(rows):
        raise MergeError(
            f"{source}: {len(rows):,} rows hold values {what}, the first is id {ids[int(rows[0])]}; remove it, and "
            "the same command again makes it anew"
        )
