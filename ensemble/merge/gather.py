"""A member's parts -> its rows in the table's order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.errors import MergeError


def gather_parts(member: str, parts: Iterable[Path], rows: int, labels: int) -> npt.NDArray[np.float64]:
    """Read every part of a member.

    Args:
        parts: CSVs with a ``row`` column and one column per label.
        rows: rows of the table.
        labels: how many columns of probabilities there are.

    Returns:
        float64 [rows, labels], in the table's order.

    Raises:
        MergeError: a row is missing or came twice.
    """
    values = np.full((rows, labels), np.nan, order="F")  # columns are written, not rows
    seen = np.zeros(rows, dtype=np.int64)
    types = {"row": pa.int64()} | {f"p{label}": pa.float64() for label in range(labels)}
    for part in parts:
        table = pa_csv.read_csv(part, convert_options=pa_csv.ConvertOptions(column_types=types))
        numbers = table.column("row").to_numpy()
        np.add.at(seen, numbers, 1)
        for label in range(labels):
            values[numbers, label] = table.column(f"p{label}").to_numpy()
    wrong = np.flatnonzero(seen != 1)
    if len(wrong):
        first = ", ".join(f"row {row + 1} ({seen[row]} times)" for row in wrong[:3])
        raise MergeError(f"{member}: {len(wrong)} rows do not stand exactly once in its parts: {first}")
    return values
