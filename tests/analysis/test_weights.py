"""Weights of least log loss against SciPy's general solvers; greedy selection against a plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.optimize import approx_fprime, minimize
from scipy.special import softmax
from sklearn.metrics import accuracy_score, log_loss

from ensemble.analysis.weights import (
    WeightedBlend,
    fit_greedy,
    fit_stacking,
    geometric_loss,
    mean_loss,
    minimize_on_simplex,
)
from ensemble.config import EnsembleConfig
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Block, Members
from ensemble.merging.metrics import row_losses
from tests.labelled import labelled

ROWS, LABELS = 1_500, 3
TRUTHS = ("hard", "soft", "multi-label", "soft multi-label")


def sample(truth: str, members: int = 5, rows: int = ROWS) -> tuple[list[Any], Any, Any]:
    """Members that are wrong in their own ways, the truth, and what the members are."""
    random = np.random.default_rng(5)
    logits = random.normal(size=(rows, LABELS)) * 2
    noisy = [logits + random.normal(size=logits.shape) * (0.8 + 0.3 * n) for n in range(members)]
    if "multi-label" in truth:
        likely = 1 / (1 + np.exp(-logits))
        drawn = (random.random(likely.shape) < likely).astype(float)
        return (
            [1 / (1 + np.exp(-noisy_row)) for noisy_row in noisy],
            likely if "soft" in truth else drawn,
            "sigmoid",
        )
    hard = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    return (
        [softmax(noisy_row, axis=1) for noisy_row in noisy],
        softmax(logits, axis=1) if truth == "soft" else hard,
        "softmax",
    )


def merged(members: Any, weights: Any, geometric: bool) -> Any:
    if not geometric:
        return np.einsum("m,mnk->nk", weights, np.array(members))
    return softmax(np.einsum("m,mnk->nk", weights, np.log(np.array(members))), axis=1)


def loss_of(members: Any, truth: Any, kind: str, weights: Any, geometric: bool) -> float:
    """Log loss by plain sums; of sigmoid members over no and yes of each label."""
    if truth.ndim == 1:
        truth = np.eye(LABELS)[truth]
    if kind == "softmax":
        return -float((truth * np.log(merged(members, weights, geometric))).sum(axis=1).mean())
    pairs = [np.stack([1 - member, member], axis=2).reshape(-1, 2) for member in members]
    return loss_of(pairs, np.stack([1 - truth, truth], axis=2).reshape(-1, 2), "softmax", weights, geometric)


def gap(loss: Any, weights: Any) -> float:
    """By convexity the loss of the weights is at most so much above the least."""
    _, gradient = loss(weights)
    return float(gradient @ weights - gradient.min())


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("family", [mean_loss, geometric_loss])
def test_no_general_solver_finds_better_weights(family: Any, truth: str) -> None:
    members, known, kind = sample(truth)
    random = np.random.default_rng(1)
    starts = [np.full(5, 0.2), *random.dirichlet(np.ones(5), 3)]

    def plain_loss(weights: Any) -> float:
        return loss_of(members, known, kind, weights, family is geometric_loss)

    solved = [
        minimize(plain_loss, start, method="SLSQP", bounds=[(0, 1)] * 5, options={"ftol": 1e-14, "maxiter": 500},
                 constraints={"type": "eq", "fun": lambda w: w.sum() - 1})
        for start in starts
    ]  # fmt: skip
    loss = family(members, labelled(known, kind))
    weights = minimize_on_simplex(loss, 5)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert loss(weights)[0] == pytest.approx(plain_loss(weights), abs=1e-12)
    assert loss(weights)[0] <= min(item.fun for item in solved) + 1e-9
    # The gap is of the first order, so that it is far larger than what is left to gain.
    assert gap(loss, weights) <= 1e-4
    assert approx_fprime(weights, lambda w: loss(w)[0]) == pytest.approx(loss(weights)[1], abs=1e-6)


@pytest.mark.parametrize("family", [mean_loss, geometric_loss])
def test_weights_of_members_that_are_the_same_constant_or_always_wrong(family: Any) -> None:
    members, truth, _ = sample("hard", 2)
    wrong = np.eye(LABELS)[(truth + 1) % LABELS]
    constant = np.tile([0.5, 0.3, 0.2], (ROWS, 1))
    plain_loss = family([*members, constant], labelled(truth))
    odd_loss = family([*members, constant, members[0], wrong], labelled(truth))
    plain, odd = minimize_on_simplex(plain_loss, 3), minimize_on_simplex(odd_loss, 5)
    assert odd_loss(odd)[0] == pytest.approx(plain_loss(plain)[0], abs=1e-6)
    np.testing.assert_allclose(odd[1:3], plain[1:3], atol=5e-3)
    assert odd[0] + odd[3] == pytest.approx(plain[0], abs=5e-3)
    assert odd[4] == 0
    assert list(minimize_on_simplex(family([wrong], labelled(truth)), 1)) == [1]


@pytest.mark.parametrize("family", [mean_loss, geometric_loss])
def test_leaving_a_member_out_is_fitting_without_it(family: Any) -> None:
    members, truth, _ = sample("hard", 4)
    loss, rest = (family(each, labelled(truth)) for each in (members, [members[0], *members[2:]]))
    once = minimize_on_simplex(loss, 4, left_out=1)
    assert once[1] == 0
    assert loss(once)[0] == pytest.approx(rest(minimize_on_simplex(rest, 3))[0], abs=1e-6)


@pytest.mark.parametrize("pool", ["mean", "geometric_mean"])
def test_other_methods_leave_a_member_out_too(pool: Any) -> None:
    members, truth, _ = sample("hard", 3, 300)
    rest = [members[0], members[2]]

    def score(values: Any) -> float:
        return float(accuracy_score(truth, values.argmax(axis=1)))

    without = fit_greedy(members, score, pool, "softmax", left_out=1)
    assert (
        without.weights.tolist() == np.insert(fit_greedy(rest, score, pool, "softmax").weights, 1, 0).tolist()
    )
    stacking = fit_stacking(members, labelled(truth), 0, left_out=1)
    expected = fit_stacking(rest, labelled(truth), 0).merge(rest)
    np.testing.assert_allclose(stacking.merge(members), expected, rtol=1e-12)


def test_greedy_selection_adds_what_is_best_at_each_step() -> None:
    members, truth, _ = sample("hard", 4, 300)

    def score(values: Any) -> float:
        return float(accuracy_score(truth, values.argmax(axis=1)))

    weights = fit_greedy(members, score, "mean", "softmax").weights
    bag: list[int] = []
    tried = []
    for _ in range(50):
        results = [
            score(sum(members[item] for item in (*bag, number)) / (len(bag) + 1)) for number in range(4)
        ]
        bag.append(int(np.argmax(results)))
        tried.append(max(results))
        if len(tried) - 1 - int(np.argmax(tried)) == 5:
            break
    best = bag[: int(np.argmax(tried)) + 1]
    np.testing.assert_allclose(weights, np.bincount(best, minlength=4) / len(best))


def test_greedy_selection_comes_close_to_the_weights_of_least_log_loss() -> None:
    members, truth, _ = sample("hard", 4)
    blend = fit_greedy(members, lambda values: -float(log_loss(truth, values)), "mean", "softmax")
    weights = blend.weights
    loss = mean_loss(members, labelled(truth))
    least = minimize_on_simplex(loss, 4)
    assert loss(least)[0] <= loss(weights)[0] <= loss(least)[0] + 3e-4
    np.testing.assert_allclose(weights, least, atol=0.06)


@pytest.mark.parametrize("labels", ["hard", "multi-label"])
@pytest.mark.parametrize("pool", ["mean", "geometric_mean"])
def test_what_is_fitted_is_what_the_merge_then_gives_also_with_zeros(labels: Any, pool: Any) -> None:
    members, truth, kind = sample(labels, 3, 400)
    for number, values in enumerate(members):  # in a tenth of the rows each is quite sure of one label
        some = np.arange(number, 400, 10)
        values[some] = (values[some] == values[some].max(axis=1, keepdims=True)).astype(float)
    loss = (mean_loss if pool == "mean" else geometric_loss)(members, labelled(truth, kind))
    weights = minimize_on_simplex(loss, 3)
    assert (weights > 0.05).sum() >= 2
    names = Members(("a", "b", "c"), (kind,) * 3, tuple(str(label) for label in range(LABELS)))
    method = merge_method(EnsembleConfig(method=pool), names)
    ids = pa.chunked_array([pa.array([str(row) for row in range(400)])])
    block = Block(0, ids, np.array(members), np.ones((3, 400), bool), np.zeros(400, np.int64))
    merged_rows = method.merge(block, weights[:, None, None])
    merged_here = WeightedBlend(weights, pool, kind).merge(members)
    np.testing.assert_allclose(merged_here, merged_rows, rtol=1e-9, atol=1e-18)
    reached = row_losses(labelled(truth, kind), merged_rows).mean()
    assert reached == pytest.approx(loss(weights)[0], rel=1e-6)  # 1 - p has few digits where p is nearly 1
