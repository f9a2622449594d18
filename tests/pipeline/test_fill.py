"""Rows that nobody reached."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.pipeline.results import fill_rows
from tests.sampling import tries

NAN = float("nan")


@st.composite
def holed(draw: st.DrawFn) -> npt.NDArray[np.float64]:
    rows, labels = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    values = np.random.default_rng(draw(st.integers(0, 99))).dirichlet(np.ones(labels), rows)
    values[draw(st.lists(st.integers(0, rows - 1), max_size=rows))] = NAN
    return np.asfortranarray(values) if draw(st.booleans()) else values


@tries(60)
@given(holed(), st.sampled_from(["uniform", "prior", "sample"]))
def test_rows_that_were_reached_stay_bit_for_bit(values: npt.NDArray[np.float64], rule: str) -> None:
    before = values.copy()
    reached = ~np.isnan(before[:, 0])
    sample = np.random.default_rng(5).dirichlet(np.ones(values.shape[1]), len(values))
    assert fill_rows(values, rule, sample, 1 / values.shape[1]) == (~reached).sum()  # type: ignore[arg-type]
    assert values[reached].tobytes() == before[reached].tobytes()
    filled = values[~reached]
    if rule == "sample":
        np.testing.assert_array_equal(filled, sample[~reached])
    elif rule == "prior" and reached.any():
        np.testing.assert_allclose(filled, np.tile(np.nanmean(before, axis=0), (len(filled), 1)), rtol=1e-12)
    else:
        np.testing.assert_array_equal(filled, 1 / values.shape[1])
    np.testing.assert_allclose(values.sum(axis=1), 1, rtol=1e-12)


@pytest.mark.fault(26)
def test_by_hand() -> None:
    made = np.array([[0.2, 0.8], [NAN, NAN], [0.6, 0.4]])
    values = made.copy()
    assert fill_rows(values, "prior", None, 0.5) == 1
    np.testing.assert_allclose(values[1], [0.4, 0.6], rtol=1e-15)
    values = made.copy()
    assert fill_rows(values, "uniform", None, 0.5) == 1
    np.testing.assert_array_equal(values, [[0.2, 0.8], [0.5, 0.5], [0.6, 0.4]])
    assert fill_rows(values, "prior", None, 0.5) == 0
