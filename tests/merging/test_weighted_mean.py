"""The weighted mean where members did not reach every row, against numpy's masked average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.merging.methods.weighted_mean import weighted_mean
from tests.sampling import tries

NAN = float("nan")
WEIGHT = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(1e-6, 1e6))


def members(count: int, rows: int, labels: int, seed: int = 0) -> list[npt.NDArray[np.float64]]:
    generator = np.random.default_rng(seed)
    return [np.asfortranarray(generator.dirichlet(np.ones(labels), rows)) for _ in range(count)]


def mean(weights: list[float], arrays: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    is_present = np.array([~np.isnan(array[:, 0]) for array in arrays])
    return weighted_mean(np.array(weights, dtype=np.float64)[:, None, None], arrays, is_present)


@st.composite
def merges(draw: st.DrawFn) -> tuple[list[float], list[npt.NDArray[np.float64]]]:
    """Weights, not all 0, and members that each lack some rows."""
    weights = draw(st.lists(WEIGHT, min_size=1, max_size=5).filter(any))
    rows, labels = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    arrays = members(len(weights), rows, labels, draw(st.integers(0, 99)))
    for array in arrays:
        array[draw(st.lists(st.integers(0, rows - 1), max_size=rows))] = NAN
    return weights, arrays


@tries(60)
@given(merges())
@pytest.mark.fault(26)
def test_each_row_is_the_mean_of_the_members_that_reached_it(
    case: tuple[list[float], list[npt.NDArray[np.float64]]],
) -> None:
    weights, arrays = case
    merged = mean(weights, arrays)
    stacked = np.ma.masked_invalid(np.stack(arrays))
    expected: Any = np.ma.average(stacked, axis=0, weights=weights)
    np.testing.assert_allclose(merged, np.ma.filled(expected, NAN), rtol=1e-12, atol=1e-15)
    reached = ~np.isnan(merged[:, 0])
    np.testing.assert_allclose(merged[reached].sum(axis=1), 1, rtol=1e-12)


@tries(60)
@given(merges())
def test_rows_that_all_reached_are_what_they_would_be_without_the_others(
    case: tuple[list[float], list[npt.NDArray[np.float64]]],
) -> None:
    weights, arrays = case
    merged = mean(weights, arrays)
    lacking = np.any([np.isnan(array[:, 0]) for array in arrays], axis=0)
    whole = [np.where(lacking[:, None], 0.5, array) for array in arrays]
    plain = np.zeros_like(merged)
    for weight, array in zip(weights, whole, strict=True):
        plain += array * (weight / sum(weights))
    assert merged[~lacking].tobytes() == plain[~lacking].tobytes()
    assert mean(weights, whole).tobytes() == plain.tobytes()


def test_a_weight_too_small_to_count_decides_no_row() -> None:
    first, second = np.array([[NAN], [0.25]]), np.array([[0.5], [0.5]])
    merged = mean([1e300, 1e-300], [first, second])
    np.testing.assert_array_equal(merged, [[NAN], [0.25]])
    merged = mean([1.0, 1e-300], [first, second])
    np.testing.assert_allclose(merged, [[0.5], [0.25]], rtol=1e-12)


@pytest.mark.filterwarnings("error")
def test_logs_of_zeros_do_not_count_where_their_label_has_no_weight() -> None:
    first = np.array([[-np.inf, -1.0], [-2.0, -np.inf]])
    second = np.array([[-3.0, -4.0], [-5.0, -6.0]])
    weights = np.array([[[0.0, 1.0]], [[1.0, 1.0]]])
    merged = weighted_mean(weights, [first, second], np.ones((2, 2), np.bool_))
    np.testing.assert_array_equal(merged, [[-3.0, -2.5], [-5.0, -np.inf]])
