"""Pairs of members, held against NumPy's correlation and scikit-learn's kappa on the rows that both have."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score

from ensemble.analysis.diversity import diversity
from ensemble.common.protocol import Activation
from ensemble.merging.methods.base import Values

ROWS = 70_000  # more than two blocks


def members(activation: Activation, labels: int = 3, offset: float = 0.0) -> list[Values]:
    """Four: the second lacks the first rows, the third some in the middle, the last is constant."""
    chooser = np.random.default_rng(5)
    common = chooser.normal(size=(ROWS, labels))
    made = []
    for spread in (0.3, 0.8, 2.0):
        values = common + spread * chooser.normal(size=common.shape)
        if activation == "softmax":
            values = np.exp(values) / np.exp(values).sum(axis=1, keepdims=True)
        elif activation == "sigmoid":
            values = 1 / (1 + np.exp(-values))
        made.append(values + offset)
    made[1][: ROWS // 2] = np.nan
    made[2][ROWS // 3 : 2 * ROWS // 3] = np.nan
    return [*made, np.full(common.shape, 1 / labels)]


@pytest.mark.parametrize("activation", ["softmax", "sigmoid", "none"])
def test_pairs_are_those_of_references(activation: Activation) -> None:
    offset = 1e7 if activation == "none" else 0.0
    made = members(activation, offset=offset)
    chooser = np.random.default_rng(1)
    truth = chooser.integers(0, 3, ROWS)
    one_hot = np.eye(3)[truth]
    actual = one_hot + offset if activation == "none" else one_hot if activation == "sigmoid" else truth
    found = diversity(made, activation, actual)
    if activation != "none":
        assert found.only_right is not None
    for i in range(4):
        for j in range(4):
            both = np.isfinite(made[i][:, 0] + made[j][:, 0])
            one, other, true = made[i][both], made[j][both], one_hot[both]
            assert found.rows[i, j] == both.sum()
            if 3 in (i, j):
                assert np.isnan(found.correlation[i, j])
            else:
                assert found.correlation[i, j] == pytest.approx(
                    np.corrcoef((one - offset).ravel(), (other - offset).ravel())[0, 1], abs=1e-7
                )
            errors = [(values - offset - true).ravel() for values in (one, other)]
            assert found.error_correlation is not None
            assert found.error_correlation[i, j] == pytest.approx(
                np.asarray(np.corrcoef(errors))[0, 1], abs=1e-7
            )
            if activation == "none":
                assert found.only_right is None
                assert found.decisions[i, j] == found.same[i, j] == 0
                continue
            first, second, right = (
                (values.argmax(axis=1) if activation == "softmax" else (values >= 0.5).ravel())
                for values in (one, other, true)
            )
            assert found.decisions[i, j] == len(first)
            assert found.same[i, j] == (first == second).sum()
            assert found.only_right is not None
            assert found.only_right[i, j] == ((first == right) & (second != right)).sum()
            if 3 in (i, j):  # a constant rater agrees by chance alone
                assert (
                    np.isnan(found.kappa[i, j]) if i == j else found.kappa[i, j] == pytest.approx(0, abs=1e-9)
                )
            else:
                assert found.kappa[i, j] == pytest.approx(cohen_kappa_score(first, second), abs=1e-9)


def test_probabilities_as_truth_count_by_their_likeliest_label() -> None:
    made = members("softmax")[:1] + members("softmax")[3:]
    truth = np.random.default_rng(2).dirichlet(np.ones(3), ROWS)
    soft, hard = diversity(made, "softmax", truth), diversity(made, "softmax", truth.argmax(axis=1))
    assert soft.only_right is not None
    assert hard.only_right is not None
    assert (soft.only_right == hard.only_right).all()
    assert soft.error_correlation is not None
    errors = [(values - truth).ravel() for values in made]
    assert soft.error_correlation[0, 1] == pytest.approx(np.asarray(np.corrcoef(errors))[0, 1], abs=1e-9)


def test_a_pair_that_shares_no_row_has_nothing_to_compare() -> None:
    made = [values.copy() for values in members("softmax")[::3]]
    made[0][: ROWS // 2] = np.nan
    made[1][ROWS // 2 :] = np.nan
    found = diversity(made, "softmax", np.zeros(ROWS, np.int64))
    assert found.rows[0, 1] == found.decisions[0, 1] == 0
    assert np.isnan([found.agreement[0, 1], found.kappa[0, 1], found.correlation[0, 1]]).all()
