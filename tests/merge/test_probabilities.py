"""What is no probability is refused by the merge too, whatever let it through before."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pyarrow as pa
import pytest

from ensemble.errors import MergeError
from ensemble.merge.probabilities import refuse_no_probabilities

IDS = pa.chunked_array([pa.array(["001", "002", "003"])])
GOOD = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [np.nan, np.nan, np.nan]])


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([-0.1, 0.6, 0.5], "1 rows hold values below 0 or above 1, the first is id 002"),
        ([1.1, -0.05, -0.05], "below 0 or above 1"),
        ([0.2, 0.3, 0.4], "1 rows hold values that do not sum to 1, the first is id 002"),
        ([0.9, 0.9, 0.9], "that do not sum to 1"),
    ],
)
def test_rows_that_are_no_probabilities(row: list[float], words: str) -> None:
    values = GOOD.copy()
    refuse_no_probabilities("m.csv", values, "softmax", IDS)
    values[1] = row
    with pytest.raises(MergeError, match=f"^m.csv: .*{words}"):
        refuse_no_probabilities("m.csv", values, "softmax", IDS)


@pytest.mark.parametrize(("activation", "row"), [("sigmoid", [0.9, 0.9, 0.0]), ("none", [-7.5, 0.0, 12.0])])
def test_other_members_need_not_sum_to_one(activation: Literal["sigmoid", "none"], row: list[float]) -> None:
    values = GOOD.copy()
    values[1] = row
    refuse_no_probabilities("m.csv", values, activation, IDS)
    with pytest.raises(MergeError):
        refuse_no_probabilities("m.csv", values, "softmax", IDS)
