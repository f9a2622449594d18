"""Weights of least log loss against SciPy's general solvers; greedy selection against a plain one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.optimize import minimize
from scipy.special import softmax
from sklearn.metrics import accuracy_score, log_loss

from ensemble.analysis.weights import (
    GeometricLoss,
    MeanLoss,
    greedy_selection,
    minimize_on_simplex,
    pooled,
)
from ensemble.config import EnsembleConfig
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Block, Members
from ensemble.merging.metrics import row_losses

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
        return [1 / (1 + np.exp(-one)) for one in noisy], likely if "soft" in truth else drawn, "sigmoid"
    hard = (logits + random.gumbel(size=logits.shape)).argmax(axis=1)
    return (
        [softmax(one, axis=1) for one in noisy],
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
    pairs = [np.stack([1 - one, one], axis=2).reshape(-1, 2) for one in members]
    return loss_of(pairs, np.stack([1 - truth, truth], axis=2).reshape(-1, 2), "softmax", weights, geometric)


@pytest.mark.parametrize("truth", TRUTHS)
@pytest.mark.parametrize("family", [MeanLoss, GeometricLoss])
def test_no_general_solver_finds_better_weights(family: Any, truth: str) -> None:
    members, known, kind = sample(truth)
    random = np.random.default_rng(1)
    starts = [np.full(5, 0.2), *random.dirichlet(np.ones(5), 3)]

    def loss(weights: Any) -> float:
        return loss_of(members, known, kind, weights, family is GeometricLoss)

    solved = [
        minimize(loss, start, method="SLSQP", bounds=[(0, 1)] * 5, options={"ftol": 1e-14, "maxiter": 500},
                 constraints={"type": "eq", "fun": lambda w: w.sum() - 1})
        for start in starts
    ]  # fmt: skip
    best = min(one.fun for one in solved)
    fitted = minimize_on_simplex(family.of(members, known, kind))
    assert fitted.weights.min() >= 0
    assert fitted.weights.sum() == pytest.approx(1, abs=1e-12)
    assert fitted.loss == pytest.approx(loss(fitted.weights), abs=1e-12)
    assert fitted.loss <= best + 1e-10
    assert best - 1e-8 <= fitted.loss
    assert 0 <= fitted.gap <= 1e-8


@pytest.mark.parametrize("family", [MeanLoss, GeometricLoss])
def test_weights_of_members_that_are_the_same_constant_or_always_wrong(family: Any) -> None:
    members, truth, _ = sample("hard", 2)
    wrong = np.eye(LABELS)[(truth + 1) % LABELS]
    constant = np.tile([0.5, 0.3, 0.2], (ROWS, 1))
    plain = minimize_on_simplex(family.of([*members, constant], truth, "softmax"))
    odd = minimize_on_simplex(family.of([*members, constant, members[0], wrong], truth, "softmax"))
    assert odd.gap <= 1e-8
    assert odd.loss == pytest.approx(plain.loss, abs=1e-9)
    np.testing.assert_allclose(odd.weights[1:3], plain.weights[1:3], atol=1e-4)
    assert odd.weights[0] + odd.weights[3] == pytest.approx(plain.weights[0], abs=1e-4)
    assert odd.weights[4] == 0
    alone = minimize_on_simplex(family.of([wrong], truth, "softmax"))
    assert list(alone.weights) == [1]


@pytest.mark.parametrize("family", [MeanLoss, GeometricLoss])
def test_leaving_a_member_out_is_fitting_without_it(family: Any) -> None:
    members, truth, _ = sample("hard", 4)
    once = minimize_on_simplex(family.of(members, truth, "softmax").without(1))
    again = minimize_on_simplex(family.of([members[0], *members[2:]], truth, "softmax"))
    np.testing.assert_array_equal(once.weights, again.weights)


def test_greedy_selection_adds_what_is_best_at_each_step() -> None:
    members, truth, _ = sample("hard", 4, 300)

    def score(values: Any) -> float:
        return float(accuracy_score(truth, values.argmax(axis=1)))

    weights, reached = greedy_selection(members, score)
    bag: list[int] = []
    tried = []
    for _ in range(50):
        found = [score(sum(members[one] for one in (*bag, number)) / (len(bag) + 1)) for number in range(4)]
        bag.append(int(np.argmax(found)))
        tried.append(max(found))
        if len(tried) - 1 - int(np.argmax(tried)) == 5:
            break
    best = bag[: int(np.argmax(tried)) + 1]
    np.testing.assert_allclose(weights, np.bincount(best, minlength=4) / len(best))
    assert reached == max(tried)


def test_greedy_selection_comes_close_to_the_weights_of_least_log_loss() -> None:
    members, truth, _ = sample("hard", 4)
    weights, score = greedy_selection(members, lambda values: -float(log_loss(truth, values)))
    least = minimize_on_simplex(MeanLoss.of(members, truth, "softmax"))
    assert least.loss <= -score <= least.loss + 3e-4
    np.testing.assert_allclose(weights, least.weights, atol=0.06)


@pytest.mark.parametrize("labels", ["hard", "multi-label"])
@pytest.mark.parametrize("pool", ["mean", "geometric_mean"])
def test_what_is_fitted_is_what_the_merge_then_gives_also_with_zeros(labels: Any, pool: Any) -> None:
    members, truth, kind = sample(labels, 3, 400)
    for number, values in enumerate(members):  # in a tenth of the rows each is quite sure of one label
        some = np.arange(number, 400, 10)
        values[some] = (values[some] == values[some].max(axis=1, keepdims=True)).astype(float)
    family = MeanLoss if pool == "mean" else GeometricLoss
    fitted = minimize_on_simplex(family.of(members, truth, kind))
    assert (fitted.weights > 0.05).sum() >= 2
    names = Members(("a", "b", "c"), (kind,) * 3, tuple(str(label) for label in range(LABELS)))
    method = merge_method(EnsembleConfig(method=pool), names)
    ids = pa.chunked_array([pa.array([str(row) for row in range(400)])])
    block = Block(0, ids, np.array(members), np.ones((3, 400), bool), np.zeros(400, np.int64))
    merged_rows = method.merge(block, fitted.weights[:, None, None])
    np.testing.assert_allclose(
        pooled(members, fitted.weights, pool, kind), merged_rows, rtol=1e-9, atol=1e-18
    )
    reached = row_losses(truth, merged_rows, kind).mean()
    assert reached == pytest.approx(fitted.loss, rel=1e-6)  # 1 - p has few digits where p is nearly 1
