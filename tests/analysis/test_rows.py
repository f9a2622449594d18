"""Rows worth a look, held against SciPy's divergence and entropy, and scikit-learn's log loss."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy
from sklearn.metrics import log_loss

from ensemble.analysis.rows import costliest, least_certain, most_disputed

ROWS = 40_000  # more than one block


def probabilities(seed: int, labels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).dirichlet(np.full(labels, 0.7), ROWS)


def test_two_members_of_equal_weight_dispute_by_scipys_divergence() -> None:
    one, other = probabilities(0), probabilities(1)
    found = most_disputed([one, other], np.ones(2), "softmax", count=50)
    expected = jensenshannon(one, other, base=2, axis=1) ** 2
    assert found.rows.tolist() == np.argsort(-expected, kind="stable")[:50].tolist()
    assert found.scores == pytest.approx(expected[found.rows])


def test_weights_count_and_a_row_of_one_member_is_not_disputed() -> None:
    made = [probabilities(seed) for seed in range(3)]
    made[1][:100] = np.nan
    made[2][50:150] = np.nan
    weights = np.array([0.5, 0.3, 0.2])
    found = most_disputed(made, weights, "softmax", count=ROWS)
    assert set(range(50, 100)).isdisjoint(found.rows.tolist())
    assert len(found.rows) == ROWS - 50
    for row, score in list(zip(found.rows.tolist(), found.scores.tolist(), strict=True))[::997]:
        there = [k for k in range(3) if not np.isnan(made[k][row, 0])]
        shares = weights[there] / weights[there].sum()
        values = np.array([made[k][row] for k in there])
        expected = entropy(shares @ values, base=2) - shares @ entropy(values, base=2, axis=1)
        assert score == pytest.approx(expected, abs=1e-12)


def test_labels_by_themselves_and_raw_values_are_disputed_too() -> None:
    chooser = np.random.default_rng(4)
    one, other = chooser.random((2, ROWS, 2))
    found = most_disputed([one, other], np.ones(2), "sigmoid", count=5)
    both = [np.stack([values, 1 - values], axis=2) for values in (one, other)]
    expected = (jensenshannon(both[0], both[1], base=2, axis=2) ** 2).mean(axis=1)
    assert found.scores == pytest.approx(np.sort(expected)[::-1][:5])
    raw = most_disputed([one * 100, other * 100], np.array([1.0, 3.0]), "none", count=5)
    spread = np.sqrt(np.square(one - other) * 0.25 * 0.75).max(axis=0)
    assert raw.scores[0] <= 100 * spread.max()
    row = int(raw.rows[0])
    expected_spread = np.sqrt((np.square(100 * (one[row] - other[row])) * 0.25 * 0.75).mean())
    assert raw.scores[0] == pytest.approx(expected_spread)


def test_the_least_certain_rows_are_those_of_the_smallest_margin() -> None:
    values = probabilities(2, labels=14)
    values[7] = values[20_000] = 1 / 14
    values[35_000] = np.nan
    found = least_certain(values, "softmax", count=30)
    assert found.rows[:2].tolist() == [7, 20_000]  # alike, so the earlier first
    ordered = np.sort(values, axis=1)
    margins = np.where(np.isnan(ordered[:, 0]), np.inf, ordered[:, -1] - ordered[:, -2])
    assert found.scores == pytest.approx(1 - np.sort(margins)[:30])
    assert 35_000 not in found.rows
    assert len(least_certain(values[:, :1], "softmax").rows) == 0  # one label leaves no doubt
    sigmoid = least_certain(values, "sigmoid", count=3)
    cells = np.stack([values, 1 - values], axis=2)
    expected = entropy(np.delete(cells, 35_000, axis=0), base=2, axis=2).mean(axis=1)
    assert sigmoid.scores == pytest.approx(np.sort(expected)[::-1][:3])


def test_the_costliest_rows_are_those_of_the_highest_loss() -> None:
    values = probabilities(3)
    values[11] = [1.0, 0.0, 0.0]
    truth = np.random.default_rng(1).integers(0, 3, ROWS)
    truth[11] = 2
    found = costliest(values, truth, "softmax", count=10)
    assert found.rows[0] == 11
    assert found.scores[0] == pytest.approx(-np.log(np.finfo(np.float64).eps))
    for row, score in zip(found.rows[:3].tolist(), found.scores[:3].tolist(), strict=True):
        assert score == pytest.approx(log_loss(truth[row : row + 1], values[row : row + 1], labels=[0, 1, 2]))
    soft = costliest(values, values, "softmax", count=1)  # what is right costs its entropy
    assert soft.scores[0] == pytest.approx(entropy(values, axis=1).max())
    raw = costliest(np.array([[1.0], [5.0]]), np.array([[2.0], [1.0]]), "none")
    assert (raw.rows.tolist(), raw.scores.tolist()) == ([1, 0], [16.0, 1.0])
