"""What stands in rows that no member reached."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt


def fill_rows(
    values: npt.NDArray[np.float64],
    rule: Literal["uniform", "prior", "sample"],
    sample_values: npt.NDArray[np.float64] | None,
    even: float | None = None,
) -> int:
    """Fill the rows that hold NaN, in place; the others stay as they are, bit for bit.

    Args:
        values: float64 [rows, labels].
        rule: ``uniform``: 1 over the number of labels; ``prior``: the mean of the other rows, uniform where there
            are none; ``sample``: the row of ``sample_values``.
        sample_values: float64 [rows, labels], all finite; only ``sample`` needs them.
        even: the value of ``uniform`` where labels do not exclude each other; None: 1 over their number.

    Returns:
        how many rows were filled.

    Raises:
        ValueError: ``sample`` without values of the right shape.
    """
    empty = np.isnan(values).any(axis=1)
    if rule == "sample":
        if sample_values is None or sample_values.shape != values.shape:
            raise ValueError("fill: sample needs the sample's values, one for each of the values to fill")
        values[empty] = sample_values[empty]
    elif rule == "prior" and not empty.all():
        # Column by column, where the rows need not be copied.
        values[empty] = [column.mean(where=~empty) for column in values.T]
    else:
        values[empty] = 1.0 / values.shape[1] if even is None else even
    return int(empty.sum())
