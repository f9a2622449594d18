"""Rows worth a look, held against SciPy's divergence and entropy, and scikit-learn's log loss."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from ensemble.analysis.report.rows import disagreement, highest, uncertainty

ROWS = 40_000  # more than one block


def probabilities(seed: int, labels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(labels, 0.7), ROWS)


def test_two_members_of_equal_weight_dispute_by_scipys_divergence() -> None:
    item, other = probabilities(0), probabilities(1)
    disagreements = disagreement([item, other], np.ones(2), "softmax")
    expected = jensenshannon(item, other, base=2, axis=1) ** 2
    assert disagreements == pytest.approx(expected, abs=1e-12)
    assert highest(disagreements, 50).tolist() == np.argsort(-expected, kind="stable")[:50].tolist()


def test_weights_count_and_a_row_of_one_member_is_not_disputed() -> None:
    made = [probabilities(seed) for seed in range(3)]
    made[1][:100] = np.nan
    made[2][50:150] = np.nan
    weights = np.array([0.5, 0.3, 0.2])
    disagreements = disagreement(made, weights, "softmax")
    rows = highest(disagreements, ROWS)
    assert set(range(50, 100)).isdisjoint(rows.tolist())
    assert len(rows) == ROWS - 50
    for row in rows.tolist()[::997]:
        there = [k for k in range(3) if not np.isnan(made[k][row, 0])]
        shares = weights[there] / weights[there].sum()
        values = np.array([made[k][row] for k in there])
        expected = entropy(shares @ values, base=2) - shares @ entropy(values, base=2, axis=1)
        assert disagreements[row] == pytest.approx(expected, abs=1e-12)


def test_labels_by_themselves_and_raw_values_are_disputed_too() -> None:
    chooser = np.random.default_rng(4)
    item, other = chooser.random((2, ROWS, 2))
    disagreements = disagreement([item, other], np.ones(2), "sigmoid")
    both = [np.stack([values, 1 - values], axis=2) for values in (item, other)]
    expected = (jensenshannon(both[0], both[1], base=2, axis=2) ** 2).mean(axis=1)
    assert disagreements == pytest.approx(expected, abs=1e-12)
    raw = disagreement([item * 100, other * 100], np.array([1.0, 3.0]), "none")
    assert raw == pytest.approx(np.sqrt((np.square(100 * (item - other)) * 0.25 * 0.75).mean(axis=1)))


def test_the_least_certain_rows_are_those_of_the_smallest_margin() -> None:
    values = probabilities(2, labels=14)
    values[7] = values[20_000] = 1 / 14
    values[35_000] = np.nan
    result = uncertainty(values, "softmax")
    rows = highest(result, 30)
    assert rows[:2].tolist() == [7, 20_000]  # alike, so the earlier first
    ordered = np.sort(values, axis=1)
    margins = np.where(np.isnan(ordered[:, 0]), np.inf, ordered[:, -1] - ordered[:, -2])
    assert result[rows] == pytest.approx(1 - np.sort(margins)[:30])
    assert 35_000 not in rows
    assert len(highest(uncertainty(values[:, :1], "softmax"), 20)) == 0  # one label leaves no doubt
    sigmoid = uncertainty(values, "sigmoid")
    cells = np.stack([values, 1 - values], axis=2)
    expected = entropy(np.delete(cells, 35_000, axis=0), base=2, axis=2).mean(axis=1)
    assert np.delete(sigmoid, 35_000) == pytest.approx(expected)
