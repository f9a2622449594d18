"""What is no probability is refused by the merge too, whatever let it through before."""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from ensemble.common.errors import MergeError
from ensemble.merging.blocks import RowCheck

IDS = pa.chunked_array([pa.array(["001", "002", "003"] * 2)])
GOOD = np.array([[0.2, 0.3, 0.5], [1.0, 0.0, 0.0], [np.nan, np.nan, np.nan]])
NAN, INF = float("nan"), float("inf")
Activation = Literal["softmax", "sigmoid", "none"]


def look(
    *blocks: npt.NDArray[np.float64], activation: Activation = "softmax", may_lack_rows: bool = True
) -> int:
    """Look at the blocks, one after the other; returns the rows that were there."""
    check, start = RowCheck("m.csv", activation, IDS, may_lack_rows), 0
    for values in blocks:
        check.look(start, values)
        start += len(values)
    check.refuse()
    assert not check.has_found_any
    return check.reached


@pytest.mark.fault(10)
@pytest.mark.parametrize(
    ("row", "words"),
    [
        ([-0.1, 0.6, 0.5], "1 row with values below 0 or above 1, the first is id 002"),
        ([1.1, -0.05, -0.05], "below 0 or above 1"),
        ([0.2, 0.3, 0.4], "1 row with values that do not sum to 1, the first is id 002"),
        ([0.9, 0.9, 0.9], "that do not sum to 1"),
        ([1.0005, 0.0, 0.0], "below 0 or above 1"),
        ([NAN, 0.5, 0.5], "1 row with no finite number, the first is id 002"),
        ([INF, -INF, 0.0], "no finite number"),
    ],
)
def test_rows_that_are_no_probabilities(row: list[float], words: str) -> None:
    values = GOOD.copy()
    assert look(values) == 2
    values[1] = row
    with pytest.raises(MergeError, match=f"^m.csv: .*{words}"):
        look(values)
    with pytest.raises(MergeError, match=words):
        look(GOOD, values)


def test_what_is_wrong_is_counted_over_all_blocks() -> None:
    values = GOOD.copy()
    values[0, 0] = -0.1
    with pytest.raises(MergeError, match=r"2 rows with .* the first is id 001"):
        look(values, values)
    assert look(GOOD, GOOD) == 4


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_a_file_has_every_row(activation: Activation) -> None:
    assert look(GOOD[:2], activation=activation, may_lack_rows=False) == 2
    with pytest.raises(MergeError, match=r"1 row with .* id 003"):
        look(GOOD, activation=activation, may_lack_rows=False)


@pytest.mark.parametrize(("activation", "row"), [("sigmoid", [0.9, 0.9, 0.0]), ("none", [-7.5, 0.0, 12.0])])
def test_other_members_need_not_sum_to_one(activation: Activation, row: list[float]) -> None:
    values = GOOD.copy()
    values[1] = row
    assert look(values, activation=activation) == 2
    with pytest.raises(MergeError):
        look(values)
