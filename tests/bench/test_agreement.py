"""Nobody wins by computing something else."""

from __future__ import annotations

import numpy as np
import pytest

from bench.agreement import Disagreement, compare

ROWS = np.random.default_rng(0).dirichlet([1, 1, 1], 50)


def test_rounding_is_no_disagreement() -> None:
    assert 0 < compare(ROWS, ROWS + 5e-5, "they") < 1e-4


@pytest.mark.parametrize("wrong", ["one value", "another order", "nan", "a row less"])
def test_wrong_numbers_are_found(wrong: str) -> None:
    other = ROWS.copy()
    if wrong == "one value":
        other[7, 1] += 2e-4
    elif wrong == "another order":
        other[[3, 4]] = other[[4, 3]]
    elif wrong == "nan":
        other[7, 1] = np.nan
    else:
        other = other[:-1]
    with pytest.raises(Disagreement, match="they"):
        compare(ROWS, other, "they")


def test_rows_that_are_all_alike_prove_nothing() -> None:
    alike = np.full((50, 3), 1 / 3)
    with pytest.raises(Disagreement, match="proves nothing"):
        compare(alike, alike, "they")
