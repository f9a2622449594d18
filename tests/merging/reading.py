"""A predictions file as the merge reads it, and its rows checked a few at a time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.data.predictions_csv import read_predictions
from ensemble.merging.blocks import RowCheck


def read_checked(
    path: Path, id_column: str, labels: Sequence[str], ids: Sequence[str], rows_at_once: int = 3
) -> npt.NDArray[np.float64]:
    """All rows, in the order of ``ids``: float64 [rows, labels]."""
    table_ids = pa.chunked_array([pa.array(ids[:2], pa.string()), pa.array(ids[2:], pa.string())])
    values, _ = read_predictions(path, id_column, labels).join(table_ids)
    check = RowCheck(str(path), "none", table_ids, may_lack_rows=False)
    for start in range(0, len(ids), rows_at_once):
        check.look(start, values[start : start + rows_at_once])
    check.refuse()
    return values
