"""A member's parts -> its rows in the table's order."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def gather_parts(parts: Iterable[pa.Table], rows: int, labels: int) -> npt.NDArray[np.float64]:
    """Put every part of a member where it belongs.

    Args:
        parts: tables with a ``row`` column and one column per label, ``p0`` and so on.  A row may stand in several,
            where runs cut their chunks differently.
        rows: rows of the input table.
        labels: how many columns of probabilities there are.

    Returns:
        float64 [rows, labels], in the table's order; NaN where no part has the row.
    """
    values = np.full((rows, labels), np.nan, order="F")  # columns are written, not rows
    for part in parts:
        numbers = part.column("row").to_numpy()
        for label in range(labels):
            values[numbers, label] = part.column(f"p{label}").to_numpy()
    return values
