"""Pairs of members, held against NumPy's correlation and scikit-learn's kappa on the rows that both have."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.stats import zscore
from sklearn.metrics import cohen_kappa_score

from ensemble.analysis.report.results import compare_pair, effective_members
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
    for (i, first), (j, second) in combinations(enumerate(made), 2):
        both = np.isfinite(first[:, 0] + second[:, 0])
        item, other, true = first[both], second[both], one_hot[both]
        pair = compare_pair(first, second, activation, actual)
        plain = compare_pair(first, second, activation)
        assert pair.rows == both.sum()
        if 3 in (i, j):
            assert np.isnan(plain.correlation)
        else:
            assert plain.correlation == pytest.approx(
                np.corrcoef((item - offset).ravel(), (other - offset).ravel())[0, 1], abs=1e-7
            )
        errors = [(values - offset - true).ravel() for values in (item, other)]
        assert pair.correlation == pytest.approx(np.asarray(np.corrcoef(errors))[0, 1], abs=1e-7)
        if activation == "none":
            assert (pair.decisions, pair.differ, pair.only_first) == (0, 0, 0)
            continue
        ours, theirs, right = (
            (values.argmax(axis=1) if activation == "softmax" else (values >= 0.5).ravel())
            for values in (item, other, true)
        )
        assert pair.decisions == len(ours)
        assert pair.differ == (ours != theirs).sum()
        assert pair.only_first == ((ours == right) & (theirs != right)).sum()
        assert pair.only_second == ((ours != right) & (theirs == right)).sum()
        # A constant rater agrees by chance alone.
        kappa = 0 if 3 in (i, j) else cohen_kappa_score(ours, theirs)
        assert pair.kappa == pytest.approx(kappa, abs=1e-9)


def test_probabilities_as_truth_count_by_their_likeliest_label() -> None:
    first, *_, last = members("softmax")
    truth = np.random.default_rng(2).dirichlet(np.ones(3), ROWS)
    soft = compare_pair(first, last, "softmax", truth)
    hard = compare_pair(first, last, "softmax", truth.argmax(axis=1))
    assert (soft.only_first, soft.only_second) == (hard.only_first, hard.only_second)
    errors = [(values - truth).ravel() for values in (first, last)]
    assert soft.correlation == pytest.approx(np.asarray(np.corrcoef(errors))[0, 1], abs=1e-9)


def test_a_pair_that_shares_no_row_has_nothing_to_compare() -> None:
    first, second = (values.copy() for values in members("softmax")[::3])
    first[: ROWS // 2] = np.nan
    second[ROWS // 2 :] = np.nan
    pair = compare_pair(first, second, "softmax", np.zeros(ROWS, np.int64))
    assert pair.rows == pair.decisions == 0
    assert np.isnan([pair.difference, pair.kappa, pair.correlation]).all()
    assert np.isnan(compare_pair(second[:9], second[:9], "softmax").kappa), "one decision alone"


@pytest.mark.parametrize(("members", "shared"), [(2, 0.0), (3, 1.0), (5, 0.3)])
def test_effective_members_are_those_whose_mean_varies_as_much(members: int, shared: float) -> None:
    chooser = np.random.default_rng(0)
    errors = shared * chooser.normal(size=40_000) + chooser.normal(size=(members, 40_000))
    errors = zscore(errors, axis=1)
    pairs = np.asarray(np.corrcoef(errors))[np.triu_indices(members, 1)]
    result = effective_members(members, float(pairs.mean()))
    assert result == pytest.approx(1 / errors.mean(axis=0).var(), rel=1e-9)
    assert 1 < result < members + 0.1
    assert effective_members(2, -1.0) == np.inf
