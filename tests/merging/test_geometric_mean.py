"""The weighted geometric mean against one number at a time, in exact fractions and 60 digits."""

from __future__ import annotations

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


def test_one_sigmoid_member_makes_all_labels_independent() -> None:
    first, second = np.array([[0.8, 0.2]]), np.array([[0.2, 0.9]])
    mixed = merged([1, 1], [first, second], ["softmax", "sigmoid"])
    np.testing.assert_array_equal(mixed, merged([1, 1], [first, second], ["sigmoid"] * 2))


@pytest.mark.long
def test_a_run_and_another_method_on_the_same_predictions(project: Project) -> None:
    config = project.config()
    project.write_config(config)
    done = project.ensemble("run", "config.yaml", "--limit", "40", "--set", "ensemble.method=geometric_mean")
    assert done.returncode == 0, done.stderr
    assert "merge method: geometric_mean" in done.stdout
    assert project.run_json()["ensemble"] == {"method": "geometric_mean"}
    members = [project.values(f"runs/first/predictions/{name}.csv") for name in ("gemma", "llama")]
    with localcontext(prec=60):
        reference = expected([0.6, 0.4], members, "softmax")
    np.testing.assert_allclose(project.values("runs/first/ensemble.csv"), reference, rtol=1e-12)
    score = project.run_json()["scores"]["ensemble"]
    truth = [LABELS.index(label) for label in project.truth[:40]]
    assert score["log_loss"] == pytest.approx(-np.log(np.array(reference)[range(40), truth]).mean(), rel=1e-9)

    done = project.ensemble("run", "config.yaml", "--limit", "40")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("earlier run, reused") == 2
    assert project.run_json()["ensemble"] == {"method": "mean"}
    np.testing.assert_allclose(
        project.values("runs/first/ensemble.csv"), 0.6 * members[0] + 0.4 * members[1], rtol=1e-14
    )

    raw = [f"--set=models.{name}.problem_type=regression" for name in ("gemma", "llama")]
    done = project.ensemble("validate", "config.yaml", *raw, "--set=ensemble.method=geometric_mean")
    assert done.returncode == 2
    assert "geometric_mean is for probabilities" in done.stderr
    done = project.ensemble("validate", "config.yaml", *raw)
    assert done.returncode == 0, done.stderr
