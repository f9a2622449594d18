"""The weighted geometric mean against one number at a time, in exact fractions and 60 digits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from decimal import Decimal, localcontext
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.common.protocol import Activation
from ensemble.config import EnsembleConfig
from ensemble.merging.methods import merge_method
from ensemble.merging.methods.base import Block, Members
from tests.project import LABELS, Project
from tests.sampling import tries

NAN = float("nan")
EPSILON = Decimal(float(np.finfo(np.float64).eps))
Values = npt.NDArray[np.float64]
Kind = Literal["softmax", "sigmoid"]


def merged(weights: Sequence[float], arrays: Sequence[Values], activations: Sequence[Activation]) -> Values:
    """By the method as a run has it: arrays [rows, labels], NaN in the rows that a member lacks."""
    rows, labels = arrays[0].shape
    members = Members(
        tuple(f"m{number}" for number in range(len(arrays))),
        tuple(activations),
        tuple(f"l{number}" for number in range(labels)),
    )
    probabilities = np.array(arrays).swapaxes(1, 2).copy().swapaxes(1, 2)
    block = Block(
        start=0,
        ids=pa.chunked_array([pa.array([str(row) for row in range(rows)])]),
        probabilities=probabilities,
        is_present=~np.isnan(probabilities[:, :, 0]),
        text_bytes=np.zeros(rows, dtype=np.int64),
    )
    before = probabilities.copy()
    result = merge_method(EnsembleConfig(method="geometric_mean"), members).merge(
        block, np.array(weights, float)[:, None, None]
    )
    np.testing.assert_array_equal(probabilities, before)
    assert result.shape == (rows, labels)
    return result


def product(values: Sequence[Decimal], weights: Sequence[Decimal]) -> Decimal:
    result = Decimal(1)
    for value, weight in zip(values, weights, strict=True):
        result *= (max(value, EPSILON).ln() * weight).exp()
    return result


def pooled(options: Sequence[Sequence[Decimal]], weights: Sequence[Decimal]) -> list[Decimal]:
    """Members' probabilities of things that exclude each other, [options][members], as one probability each."""
    products = [product(values, weights) for values in options]
    return [item / sum(products) for item in products]


def expected(weights: Sequence[float], arrays: Sequence[Values], kind: Kind) -> list[list[float]]:
    results = []
    for rows in zip(*(array.tolist() for array in arrays), strict=True):
        there = [index for index, row in enumerate(rows) if row[0] == row[0] and weights[index]]
        if not there:
            results.append([NAN] * len(rows[0]))
            continue
        whole = sum(Decimal(weights[index]) for index in there)
        shares = [Decimal(weights[index]) / whole for index in there]
        labels = [[Decimal(rows[index][label]) for index in there] for label in range(len(rows[0]))]
        if kind == "softmax":
            results.append([float(item) for item in pooled(labels, shares)])
        else:
            one_less = [[min(p, 1 - EPSILON) for p in label] for label in labels]
            results.append([float(pooled([item, [1 - p for p in item]], shares)[0]) for item in one_less])
    return results


PROBABILITY = st.one_of(st.sampled_from([0.0, 1.0, 5e-324, 1e-300, 1 - 2**-53]), st.floats(0, 1))


@st.composite
def merges(draw: st.DrawFn) -> tuple[list[float], list[Values], Kind]:
    """Weights, not all 0, and members that may each lack rows and hold zeros."""
    weights = draw(
        st.lists(st.sampled_from([0.0, 1.0]) | st.floats(1e-3, 1e3), min_size=1, max_size=4).filter(any)
    )
    rows, labels = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    kind: Kind = draw(st.sampled_from(["softmax", "sigmoid"]))
    row = st.lists(PROBABILITY, min_size=labels, max_size=labels)
    if kind == "softmax":
        row = row.filter(any).map(lambda values: [value / sum(values) for value in values])
    cells = st.lists(row | st.just([NAN] * labels), min_size=rows, max_size=rows)
    return weights, [np.array(draw(cells)) for _ in weights], kind


@tries(150)
@given(merges())
def test_it_is_the_product_of_powers(case: tuple[list[float], list[Values], Kind]) -> None:
    weights, arrays, kind = case
    with localcontext(prec=60, Emin=-(10**9), Emax=10**9):
        reference = np.array(expected(weights, arrays, kind))
    merged_rows = merged(weights, arrays, [kind] * len(weights))
    # A logarithm of up to 745 is off by some 1e-13, and so is what exp makes of it, relatively.
    np.testing.assert_allclose(merged_rows, reference, rtol=1e-11, atol=1e-300)


@tries(60)
@given(merges(), st.randoms())
def test_it_is_a_probability_whatever_order_the_members_have(
    case: tuple[list[float], list[Values], Kind], chooser: random.Random
) -> None:
    weights, arrays, kind = case
    merged_rows = merged(weights, arrays, [kind] * len(weights))
    there = ~np.isnan(merged_rows[:, 0])
    counted = [~np.isnan(array[:, 0]) for weight, array in zip(weights, arrays, strict=True) if weight]
    np.testing.assert_array_equal(there, np.any(counted, axis=0))
    assert (merged_rows[there] >= 0).all()
    assert (merged_rows[there] <= 1).all()
    if kind == "softmax":
        np.testing.assert_allclose(merged_rows[there].sum(axis=1), 1, rtol=1e-12)
    order = list(range(len(weights)))
    chooser.shuffle(order)
    again = merged([weights[i] * 3 for i in order], [arrays[i] for i in order], [kind] * len(weights))
    np.testing.assert_allclose(again, merged_rows, rtol=1e-9, atol=1e-300)


def test_by_hand() -> None:
    first = np.array([[0.8, 0.2], [0.5, 0.5], [NAN, NAN], [NAN, NAN]])
    second = np.array([[0.2, 0.8], [0.9, 0.1], [0.3, 0.7], [NAN, NAN]])
    merged_rows = merged([1, 1], [first, second], ["softmax", "softmax"])
    np.testing.assert_allclose(merged_rows, [[0.5, 0.5], [0.75, 0.25], [0.3, 0.7], [NAN, NAN]], rtol=1e-14)
    # (0.8 ** 3 * 0.2) ** 0.25 to (0.2 ** 3 * 0.8) ** 0.25 is 4 ** 0.5 to 1.
    np.testing.assert_allclose(
        merged([3, 1], [first, second], ["softmax"] * 2)[0], [2 / 3, 1 / 3], rtol=1e-14
    )
    first, second = np.array([[0.8, 0.5]]), np.array([[0.2, 0.9]])
    np.testing.assert_allclose(merged([1, 1], [first, second], ["sigmoid"] * 2), [[0.5, 0.75]], rtol=1e-14)


def test_zeros() -> None:
    sure, other = np.array([[0.0, 1.0], [0.0, 1.0]]), np.array([[0.4, 0.6], [1.0, 0.0]])
    # Zeros count as float64's epsilon, 2 ** -52: they do not rule a label out.
    first = (0.4 * 2**-52) ** 0.5 / 0.6**0.5
    expected_rows = np.array([[first / (1 + first), 1 / (1 + first)], [0.5, 0.5]])
    np.testing.assert_allclose(merged([1, 1], [sure, other], ["softmax"] * 2), expected_rows, rtol=1e-12)
    np.testing.assert_allclose(
        merged([1, 1], [sure, other], ["sigmoid"] * 2)[1], expected_rows[1], rtol=1e-12
    )
    # Whose weight is the larger decides where they contradict; and without a weight a zero says nothing.
    against = merged([3, 1], [sure, other], ["softmax"] * 2)[1]
    np.testing.assert_allclose(against[0] / against[1], 2.0**-26, rtol=1e-12)
    np.testing.assert_allclose(merged([0, 1], [sure, other], ["softmax"] * 2), other, rtol=1e-12, atol=3e-16)


def test_one_sigmoid_member_makes_all_labels_independent() -> None:
    first, second = np.array([[0.8, 0.2]]), np.array([[0.2, 0.9]])
    mixed = merged([1, 1], [first, second], ["softmax", "sigmoid"])
    np.testing.assert_array_equal(mixed, merged([1, 1], [first, second], ["sigmoid"] * 2))


def test_raw_values_are_refused() -> None:
    members = Members(("a", "b"), ("none", "none"), ("x",))
    (problem,) = merge_method(EnsembleConfig(method="geometric_mean"), members).problems()
    assert problem.startswith("ensemble.method: geometric_mean is for probabilities")
    assert not [*merge_method(EnsembleConfig(), members).problems()]


@pytest.mark.long
def test_a_run_and_another_method_on_the_same_predictions(project: Project) -> None:
    config = project.config()
    project.write_config(config)
    done = project.ensemble("run", "config.yaml", "--limit", "40", "--set", "ensemble.method=geometric_mean")
    assert done.returncode == 0, done.stderr
    assert "merge method: geometric_mean" in done.stdout
    assert project.run_json()["ensemble"] == {"method": "geometric_mean"}
    members = [values_in(project, f"predictions/{name}.csv") for name in ("gemma", "llama")]
    with localcontext(prec=60):
        reference = expected([0.6, 0.4], members, "softmax")
    np.testing.assert_allclose(values_in(project, "ensemble.csv"), reference, rtol=1e-12)
    score = project.run_json()["scores"]["ensemble"]
    truth = [LABELS.index(label) for label in project.truth[:40]]
    assert score["log_loss"] == pytest.approx(-np.log(np.array(reference)[range(40), truth]).mean(), rel=1e-9)

    done = project.ensemble("run", "config.yaml", "--limit", "40")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("earlier run, reused") == 2
    assert project.run_json()["ensemble"] == {"method": "mean"}
    np.testing.assert_allclose(
        values_in(project, "ensemble.csv"), 0.6 * members[0] + 0.4 * members[1], rtol=1e-14
    )

    raw = [f"--set=models.{name}.problem_type=regression" for name in ("gemma", "llama")]
    done = project.ensemble("validate", "config.yaml", *raw, "--set=ensemble.method=geometric_mean")
    assert done.returncode == 2
    assert "geometric_mean is for probabilities" in done.stderr
    done = project.ensemble("validate", "config.yaml", *raw)
    assert done.returncode == 0, done.stderr


def values_in(project: Project, name: str) -> Values:
    return np.array([[float(cell) for cell in row[1:]] for row in project.read(f"runs/first/{name}")[1]])
