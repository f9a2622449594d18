"""The merge methods beside the means, against scikit-learn, SciPy and numpy; and calibration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import special, stats
from sklearn.ensemble import VotingClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.multioutput import MultiOutputClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from ensemble.common.protocol import Activation
from ensemble.config import CalibrationConfig, EnsembleConfig
from ensemble.config.values import AnyWeight
from ensemble.merging.blocks import weights_by_bin
from ensemble.merging.calibration import EPSILON, calibrator
from ensemble.merging.methods import METHODS
from ensemble.merging.methods.base import Block, Members
from tests.sampling import tries

NAN = float("nan")
ROWS = 200
LABELS = ("a", "b", "c")
Values = npt.NDArray[np.float64]


def values_of(member: int, activation: Activation = "softmax", rows: int = ROWS) -> Values:
    chooser = np.random.default_rng(member)
    if activation == "softmax":
        return np.asfortranarray(chooser.dirichlet(np.ones(3), rows))
    values = chooser.random((rows, 3)) if activation == "sigmoid" else chooser.normal(size=(rows, 3))
    return np.asfortranarray(values)


def method_of(name: str, members: Members, **settings: object) -> Any:
    method = METHODS.load(name)
    return method(method.Settings.model_validate({"method": name, **settings}), members)


def merged(
    name: str,
    arrays: Sequence[Values],
    weights: Sequence[AnyWeight] | None = None,
    activation: Activation = "softmax",
    **settings: Any,
) -> Values:
    """By the method as a run has it, in two blocks; what the blocks hold must stay as it is."""
    given = tuple(weights or [1.0] * len(arrays))
    names = tuple(f"m{number}" for number in range(len(arrays)))
    edges = settings.get("length_bins", ())
    method = method_of(name, Members(names, (activation,) * len(arrays), LABELS, given), **settings)
    by_bin = weights_by_bin(given, LABELS, len(edges) + 1)
    rows = len(arrays[0])
    blocks = []
    for start, stop in ((0, rows // 3), (rows // 3, rows)):
        part = np.array([array[start:stop] for array in arrays]).swapaxes(1, 2).copy().swapaxes(1, 2)
        ids = pa.chunked_array([pa.array([str(row) for row in range(start, stop)])])
        is_present = ~np.isnan(part[:, :, 0])
        blocks.append(Block(start, ids, part, is_present, np.arange(start, stop)))
    before = [block.probabilities.copy() for block in blocks]
    if method.needs_first_pass:
        for block in blocks:
            method.look(block)
    results = []
    for block in blocks:
        bins = np.searchsorted(edges, block.text_bytes, side="right")
        results.append(method.merge(block, by_bin[:, bins] if by_bin.shape[1] > 1 else by_bin))
    for block, old in zip(blocks, before, strict=True):
        np.testing.assert_array_equal(block.probabilities, old)
    return np.concatenate(results)


def to_1(values: Any) -> Values:
    return np.asarray(values / values.sum(axis=1, keepdims=True))


def lacking() -> list[Values]:
    """Three members, of which the second lacks rows, two of them that the third lacks, too, and one that all do."""
    arrays = [values_of(number) for number in range(3)]
    arrays[1][10:150] = NAN
    arrays[2][[20, 199]] = NAN
    arrays[0][199] = arrays[1][199] = NAN
    return arrays


ALL = ("mean", "geometric_mean", "median", "rank_mean", "vote", "power_mean")


@pytest.mark.parametrize("name", ALL)
def test_rows_that_members_lack_are_merged_from_the_others(name: str) -> None:
    settings: dict[str, Any] = {"power": 2} if name == "power_mean" else {}
    arrays, weights = lacking(), [0.5, 2, 1.0]
    merged_rows = merged(name, arrays, weights, **settings)
    assert np.isnan(merged_rows[199]).all()
    assert np.isfinite(merged_rows[:199]).all()
    if name == "rank_mean":  # against SciPy below: a rank is one among the rows that the member has
        return
    whole, without_second = (range(150, 199), (0, 1, 2)), (range(30, 60), (0, 2))
    for rows, there in ((range(10), (0, 1, 2)), ([20], (0,)), whole, without_second):
        alone = merged(
            name, [arrays[path][rows] for path in there], [weights[path] for path in there], **settings
        )
        np.testing.assert_allclose(merged_rows[rows], alone, rtol=1e-12, err_msg=str(rows))


@pytest.mark.parametrize("name", ALL)
def test_weights_by_label_and_by_length_bin(name: str) -> None:
    settings: dict[str, Any] = {"power": 3} if name == "power_mean" else {}
    arrays = [values_of(number, "sigmoid") for number in range(3)]
    by_label: list[AnyWeight] = [{"a": 0.5, "b": 0, "c": 1.0}, {"a": 1.0, "b": 2, "c": 0.0}, 0.7]
    merged_rows = merged(name, arrays, by_label, "sigmoid", **settings)
    for number, label in enumerate(LABELS):
        plain: list[AnyWeight] = [
            weight[label] if isinstance(weight, dict) else weight for weight in by_label
        ]
        column = merged(name, arrays, plain, "sigmoid", **settings)[:, number]
        np.testing.assert_allclose(merged_rows[:, number], column, rtol=1e-12)
    by_bin: list[AnyWeight] = [(1, 0, 3), 0.5, (0, 2, 0.25)]
    merged_rows = merged(name, arrays, by_bin, "sigmoid", length_bins=(50, 120), **settings)
    for number, rows in enumerate((slice(0, 50), slice(50, 120), slice(120, ROWS))):
        plain = [weight[number] if isinstance(weight, tuple) else weight for weight in by_bin]
        part = merged(name, arrays, plain, "sigmoid", **settings)[rows]
        np.testing.assert_allclose(merged_rows[rows], part, rtol=1e-12)
    # Both at a time, and rows that sum to 1 again where labels exclude each other.
    exclusive = merged(
        name, lacking(), [{"a": 1, "b": 0.1, "c": 2}, (1, 0.5, 3), 0.7], length_bins=(50, 120), **settings
    )
    if name != "rank_mean":
        np.testing.assert_allclose(exclusive[:199].sum(axis=1), 1, rtol=1e-12)


def test_a_label_that_no_member_there_counts_for_leaves_the_row_empty() -> None:
    arrays = [values_of(0), values_of(1)]
    arrays[0][3:8] = NAN
    for name in ("mean", "geometric_mean", "median", "vote"):
        merged_rows = merged(name, arrays, [1.0, {"a": 1, "b": 0, "c": 1}])
        np.testing.assert_array_equal(
            np.isnan(merged_rows).all(axis=1), np.isnan(arrays[0]).all(axis=1), err_msg=name
        )
        assert np.isfinite(merged_rows[8:]).all()


@tries(40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=6).filter(any), st.integers(0, 99))
def test_the_median_is_that_of_values_repeated_by_their_weights(weights: list[int], seed: int) -> None:
    arrays = [np.round(values_of(seed + number, "none", 9), 1) for number in range(len(weights))]  # with ties
    merged_rows = merged("median", arrays, [weight * 0.1 for weight in weights], "none")
    repeated = np.repeat(np.array(arrays), weights, axis=0)
    np.testing.assert_allclose(merged_rows, np.median(repeated, axis=0), rtol=1e-12, atol=1e-15)


def test_the_median_of_probabilities_sums_to_1() -> None:
    arrays = [values_of(number) for number in range(5)]
    np.testing.assert_allclose(merged("median", arrays), to_1(np.median(arrays, axis=0)), rtol=1e-12)
    sure = [np.eye(3)[[0, 1, 2]], np.eye(3)[[1, 1, 2]], np.eye(3)[[2, 1, 0]]]
    expected = np.array([[1 / 3] * 3, [0, 1, 0], [0, 0, 1]])
    np.testing.assert_allclose(merged("median", sure), expected, atol=1e-15)


def test_the_mean_of_ranks() -> None:
    arrays = [np.round(values_of(number, "none"), 1) for number in range(3)]  # with ties
    arrays[1][5:50] = NAN
    arrays[2][:] = 7.0
    ranks = np.array([stats.rankdata(array, axis=0, nan_policy="omit") for array in arrays])
    shares = (ranks - 0.5) / (~np.isnan(ranks)).sum(axis=1, keepdims=True)
    weights = [1.0, 2.0, 0.5]
    expected = np.ma.average(np.ma.masked_invalid(shares), axis=0, weights=weights)
    for activation in ("none", "softmax"):
        np.testing.assert_allclose(merged("rank_mean", arrays, weights, activation), expected, rtol=1e-12)
    assert (merged("rank_mean", arrays[2:]) == 0.5).all()


@pytest.mark.parametrize("power", [-700.0, -2.0, 0.5, 1.0, 3.0, 900.0])
def test_the_power_mean(power: float) -> None:
    weights = [1.0, 2.0, 0.5]
    arrays = [values_of(number, "sigmoid") for number in range(3)]
    merged_rows = merged("power_mean", arrays, weights, "sigmoid", power=power)
    if abs(power) < 100:  # else SciPy's numbers are too small
        spread = np.broadcast_to(np.reshape(weights, (3, 1, 1)), (3, ROWS, 3))
        np.testing.assert_allclose(
            merged_rows, stats.pmean(arrays, power, axis=0, weights=spread), rtol=1e-12
        )
    else:
        ends = np.max(arrays, axis=0) if power > 0 else np.min(arrays, axis=0)
        np.testing.assert_allclose(merged_rows, ends, rtol=0.01)
    arrays = [values_of(number) for number in range(3)]
    merged_rows = merged("power_mean", arrays, weights, power=power)
    np.testing.assert_allclose(merged_rows.sum(axis=1), 1, rtol=1e-12)
    if power == 1:
        np.testing.assert_allclose(merged_rows, merged("mean", arrays, weights), rtol=1e-12)
    zeros = [np.array([[0.0, 0.5, 0.5]] * 3), np.array([[0.0, 1, 0]] * 3)]
    merged_rows = merged("power_mean", zeros, power=power)
    assert np.isfinite(merged_rows).all()
    assert (merged_rows[:, 0] < 1e-300).all()


def _extreme(chooser: np.random.Generator, activation: Activation, rows: int) -> Values:
    """A member's values with zeros and ones among them, and rows that it lacks."""
    if activation == "none":
        values = chooser.normal(size=(rows, 3)) * 10.0 ** chooser.integers(-3, 4, (rows, 3))
    else:
        values = chooser.random((rows, 3)) ** chooser.choice([0.5, 3, 60], (rows, 3))
        values[chooser.random((rows, 3)) < 0.2] = 0.0
        if activation == "softmax":
            values[values.sum(axis=1) == 0, chooser.integers(3)] = 1.0
            values = to_1(values)
        else:
            values[chooser.random((rows, 3)) < 0.1] = 1.0
    values[chooser.random(rows) < 0.2] = NAN
    return np.asfortranarray(values)


_SETTINGS: list[tuple[str, dict[str, Any], Activation]] = [
    *(
        (name, {}, activation)
        for name in ("mean", "median", "rank_mean")
        for activation in get_args(Activation)
    ),
    *((name, {}, "softmax") for name in ("geometric_mean", "vote")),
    *((name, {}, "sigmoid") for name in ("geometric_mean", "logit_mean", "vote")),
    *(
        ("power_mean", {"power": power}, activation)
        for power in (-800.0, -3.0, -1.0, 0.5, 2.0, 900.0)
        for activation in ("softmax", "sigmoid")
    ),
]


@pytest.mark.parametrize(("name", "settings", "activation"), _SETTINGS)
@tries(12)
@given(st.integers(0, 9999), st.integers(1, 4), st.sampled_from([0.0, {"a": 0, "b": 0, "c": 0}, (0, 0, 0)]))
def test_a_member_of_weight_0_changes_nothing(
    name: str, settings: dict[str, Any], activation: Activation, seed: int, count: int, zero: AnyWeight
) -> None:
    chooser = np.random.default_rng(seed)
    arrays = [_extreme(chooser, activation, 60) for _ in range(count)]
    weights = [float(weight) for weight in chooser.choice([0.3, 1, 7], count)]
    place = int(chooser.integers(count + 1))
    keys = {**settings, "length_bins": (20, 40)}
    added = _extreme(chooser, activation, 60)
    merge: Callable[..., Values] = partial(merged, name, activation=activation, **keys)
    with_it = merge([*arrays[:place], added, *arrays[place:]], [*weights[:place], zero, *weights[place:]])
    np.testing.assert_array_equal(with_it, merge(arrays, weights))


@pytest.mark.parametrize(("name", "settings", "activation"), _SETTINGS)
@tries(12)
@given(st.integers(0, 9999), st.booleans())
def test_values_of_weight_0_for_a_label_or_a_row_change_nothing(
    name: str, settings: dict[str, Any], activation: Activation, seed: int, by_label: bool
) -> None:
    if name == "rank_mean" or (name == "vote" and activation == "softmax" and by_label):
        pytest.skip("a rank is one among all rows, and a vote one among all labels, of the same member")
    chooser = np.random.default_rng(seed)
    arrays = [_extreme(chooser, activation, 60) for _ in range(3)]
    numbers = [[float(item) for item in chooser.choice([0, 0.3, 2], 3)] for _ in range(2)]
    weights: list[AnyWeight] = [
        *(dict(zip(LABELS, own, strict=True)) if by_label else tuple(own) for own in numbers),
        0.5,
    ]
    others = [array.copy(order="F") for array in arrays]
    for own, array, other in zip(
        numbers, others, (_extreme(chooser, activation, 60) for _ in range(2)), strict=False
    ):
        for bin_number, rows in enumerate((slice(0, 20), slice(20, 40), slice(40, 60))):
            for label in range(3):
                if own[label if by_label else bin_number] == 0:
                    is_present = ~np.isnan(array[rows, label]) & ~np.isnan(other[rows, label])
                    array[rows, label][is_present] = other[rows, label][is_present]
    keys = {**settings, "length_bins": (20, 40)}
    merge: Callable[..., Values] = partial(merged, name, weights=weights, activation=activation, **keys)
    np.testing.assert_array_equal(merge(others), merge(arrays))


def test_a_sigmoid_member_of_weight_0_leaves_labels_exclusive() -> None:
    arrays = [values_of(0), values_of(1), values_of(2, "sigmoid")]
    part = np.array(arrays)
    ids = pa.chunked_array([pa.array([str(row) for row in range(ROWS)])])
    block = Block(0, ids, part, np.ones((3, ROWS), dtype=np.bool_), np.zeros(ROWS, dtype=np.int64))
    settings: dict[str, dict[str, Any]] = {"geometric_mean": {}, "median": {}, "power_mean": {"power": 2}}
    for name, keys in settings.items():
        members = Members(("x", "y", "z"), ("softmax", "softmax", "sigmoid"), LABELS, (1.0, 2.0, 0.0))
        result = method_of(name, members, **keys).merge(block, np.array([1.0, 2.0, 0.0])[:, None, None])
        np.testing.assert_array_equal(result, merged(name, arrays[:2], [1.0, 2.0], **keys), err_msg=name)


def test_stacking_fills_rows_from_members_that_have_a_coefficient_for_the_label() -> None:
    arrays = [values_of(number, "none") for number in range(3)]
    arrays[0][:50] = NAN
    coefficients = {"m0": 0.5, "m1": {"a": 2, "b": 1}, "m2": {"a": 1}}
    merged_rows = merged("stacking", arrays, activation="none", coefficients=coefficients)
    first, second, third = arrays
    assert np.isnan(merged_rows[:50]).all()  # of label c nobody else has a coefficient
    coefficients = {"m0": {"a": 0.5, "b": 0.5}, "m1": {"a": 2, "b": 1}, "m2": {"a": 1}}
    merged_rows = merged("stacking", arrays, activation="none", coefficients=coefficients)
    filled = np.where(np.isnan(first), np.column_stack([(second + third)[:, 0] / 2, *second.T[1:]]), first)
    expected = np.column_stack(
        [
            0.5 * filled[:, 0] + 2 * second[:, 0] + third[:, 0],
            0.5 * filled[:, 1] + second[:, 1],
            np.zeros(ROWS),
        ]
    )
    np.testing.assert_allclose(merged_rows, expected, rtol=1e-12)


class _Given:
    """A fitted classifier of which only the probabilities are known: those that stand in the row."""

    classes_ = np.array([0, 1, 2])

    def __init__(self, number: int) -> None:
        self.number = number

    def predict(self, rows: Values) -> npt.NDArray[np.int64]:
        return np.asarray(rows[:, 3 * self.number : 3 * self.number + 3].argmax(axis=1))


def test_votes_are_those_of_scikit_learn() -> None:
    arrays = [values_of(number) for number in range(4)]
    weights = [1.0, 1.0, 1.0, 2.0]  # with ties
    merged_rows = merged("vote", arrays, weights)
    voting = VotingClassifier([(str(number), None) for number in range(4)], voting="hard", weights=weights)
    voting.estimators_ = [_Given(number) for number in range(4)]
    voting.le_ = type("Encoder", (), {"inverse_transform": staticmethod(lambda values: values)})()
    voting.classes_ = _Given.classes_
    expected = voting.predict(np.concatenate(arrays, axis=1))
    np.testing.assert_array_equal(merged_rows.argmax(axis=1), expected)
    shares = sum(w * np.eye(3)[weight.argmax(axis=1)] for w, weight in zip(weights, arrays, strict=True)) / 5
    np.testing.assert_allclose(merged_rows, shares, rtol=1e-12)


def test_weights_that_are_equal_in_decimals_are_equal_votes() -> None:
    votes = [np.array([[0.0, 1.0]]), np.array([[0.0, 1.0]]), np.array([[1.0, 0.0]])]
    assert merged("vote", votes, [0.1, 0.2, 0.3]).argmax(axis=1).tolist() == [0]


def test_votes_of_members_that_cannot_choose() -> None:
    split = merged(
        "vote", [np.array([[0.4, 0.4, 0.2], [1 / 3] * 3]), np.array([[0, 1, 0.0], [0, 0, 1]])], [2, 1]
    )
    np.testing.assert_allclose(split, [[1 / 3, 2 / 3, 0], [2 / 9, 2 / 9, 5 / 9]], rtol=1e-12)
    merged_rows = merged(
        "vote", [np.array([[0.5, 0.6, 0.2]] * 2), np.array([[0.9, 0.5, 0.1]] * 2)], [1, 3], "sigmoid"
    )
    np.testing.assert_allclose(merged_rows, [[0.125 + 0.75, 0.25 + 0.375, 0]] * 2, rtol=1e-12)


def test_the_mean_of_logits() -> None:
    arrays, weights = [values_of(number, "sigmoid") for number in range(3)], [1.0, 2.0, 0.5]
    expected = special.expit(np.average(special.logit(np.array(arrays)), axis=0, weights=weights))
    np.testing.assert_allclose(merged("logit_mean", arrays, weights, "sigmoid"), expected, rtol=1e-12)


def test_stacking_is_what_scikit_learn_fits() -> None:
    arrays = [values_of(number) for number in range(3)]
    truth = np.random.default_rng(5).integers(0, 3, ROWS)
    logs = np.log(np.concatenate(arrays, axis=1))
    model = LogisticRegression(C=1.0).fit(logs, truth)
    coefficients: dict[str, Any] = {
        f"m{member}": {
            label: dict(zip(LABELS, model.coef_[row, 3 * member : 3 * member + 3].tolist(), strict=True))
            for row, label in enumerate(LABELS)
        }
        for member in range(3)
    }
    intercept = dict(zip(LABELS, model.intercept_.tolist(), strict=True))
    merged_rows = merged("stacking", arrays, coefficients=coefficients, intercept=intercept)
    np.testing.assert_allclose(merged_rows, model.predict_proba(logs), rtol=1e-9)

    arrays = [values_of(number, "sigmoid") for number in range(3)]
    logits = special.logit(np.concatenate(arrays, axis=1))
    truths = np.random.default_rng(5).integers(0, 2, (ROWS, 3))
    each = MultiOutputClassifier(make_pipeline(FunctionTransformer(), LogisticRegression())).fit(
        logits, truths
    )
    for row, label in enumerate(LABELS):
        item = each.estimators_[row][-1]
        intercept[label] = float(item.intercept_[0])
        for member in range(3):
            own = item.coef_[0, 3 * member : 3 * member + 3].tolist()
            coefficients[f"m{member}"][label] = dict(zip(LABELS, own, strict=True))
    merged_rows = merged(
        "stacking", arrays, activation="sigmoid", coefficients=coefficients, intercept=intercept
    )
    expected = np.column_stack([entry[:, 1] for entry in each.predict_proba(logits)])
    np.testing.assert_allclose(merged_rows, expected, rtol=1e-9)

    arrays = [values_of(number, "none") for number in range(2)]
    short = {"m0": 0.5, "m1": {"a": -1, "c": {"a": 2}}}
    merged_rows = merged("stacking", arrays, activation="none", coefficients=short, intercept={"b": 1})
    first, second = arrays
    expected = 0.5 * first + np.column_stack([-second[:, 0], np.ones(ROWS), 2 * second[:, 0]])
    np.testing.assert_allclose(merged_rows, expected, rtol=1e-12)


def test_stacking_of_rows_that_members_lack_and_of_zeros() -> None:
    whole, gaps = [values_of(number) for number in range(4)], [values_of(number) for number in range(4)]
    gaps[1][:50] = gaps[2][40:60] = NAN
    gaps[3][50:] = NAN  # counts for nothing, there or not
    for array in gaps[:3]:
        array[199] = NAN
    coefficients: dict[str, Any] = {"m0": 0.2, "m1": 0.5, "m2": {"a": 0.3, "b": 0.3, "c": 0.3}, "m3": 0}
    merged_rows = merged("stacking", gaps, coefficients=coefficients)
    logs = np.log(np.array(whole))
    filled = np.ma.masked_invalid(np.log(np.array(gaps[:3])))
    logs[:3] = np.where(filled.mask, np.asarray(filled.mean(axis=0)), logs[:3])
    expected = special.softmax(0.2 * logs[0] + 0.5 * logs[1] + 0.3 * logs[2], axis=1)
    np.testing.assert_allclose(merged_rows[:199], expected[:199], rtol=1e-9)
    assert np.isnan(merged_rows[199]).all()
    # Without m2, as where it has failed.
    left = merged("stacking", gaps[:2], coefficients={**coefficients, "m2": 0.3})
    both = merged("stacking", [*gaps[:2], np.full((ROWS, 3), NAN)], coefficients={**coefficients, "m2": 0.3})
    np.testing.assert_array_equal(left, both)
    sure = [np.array([[0, 1, 0], [0.5, 0.5, 0]]), np.array([[1, 0, 0], [0, 0.25, 0.75]])]
    merged_rows = merged("stacking", sure, coefficients={"m0": 1, "m1": 1})
    expected = special.softmax(np.log(np.maximum(sure, EPSILON)).sum(axis=0), axis=1)
    np.testing.assert_allclose(merged_rows, expected, rtol=1e-12)


def test_what_methods_refuse() -> None:
    def problems(name: str, *activations: Activation, weights: Any = (1.0, 1.0), **settings: Any) -> str:
        return " | ".join(
            method_of(name, Members(("x", "y"), activations, LABELS, weights), **settings).problems()
        )

    for name in ("median", "rank_mean"):
        assert not problems(name, "none", "none")
    for name in ("vote", "power_mean", "logit_mean", "geometric_mean"):
        settings: dict[str, Any] = {"power": 2} if name == "power_mean" else {}
        assert problems(name, "none", "none", **settings).startswith(
            f"ensemble.method: {name} is for probabilities, and raw values (regression) come from x, y; use mean"
        )
    assert not problems("logit_mean", "sigmoid", "sigmoid")
    assert problems("logit_mean", "softmax", "sigmoid").endswith(
        "softmax probabilities come from x; use geometric_mean, which is the same there"
    )
    assert not problems("stacking", "softmax", "sigmoid", coefficients={"x": 1, "y": {"a": {"b": 1}}})
    wrong = {"x": {"a": 1, "q": 2}, "z": {"a": {"r": 1}}}
    assert problems(
        "stacking", "softmax", "none", coefficients=wrong, intercept={"s": 0}, weights=(1.0, 0.5)
    ).split(" | ") == [
        "ensemble.coefficients.z: there is no member of that name",
        "ensemble.intercept.s: is none of the labels, which are 'a', 'b', 'c'",
        "ensemble.coefficients.x.q: is none of the labels, which are 'a', 'b', 'c'",
        "ensemble.coefficients.z.a.r: is none of the labels, which are 'a', 'b', 'c'",
        "ensemble.coefficients: has none for y; give each member one, if only 0",
        "ensemble.method: stacking has coefficients in place of weights; leave weight out of the models",
        "ensemble.method: stacking needs probabilities from every member, or raw values from every one",
    ]


def calibrated(values: Values, activation: Activation, **keys: Any) -> Values:
    calibrate = calibrator(CalibrationConfig(**keys), activation, LABELS)
    assert calibrate is not None
    result = values.copy(order="F")
    calibrate(result)
    return result


def test_calibration() -> None:
    keys: dict[str, Any] = {"temperature": 1.7, "scale": {"a": 0.5, "c": -2.0}, "bias": {"b": 0.3}}
    scale, bias = np.array([0.5, 1, -2]), np.array([0, 0.3, 0])
    values = values_of(0)
    values[3] = NAN
    expected = special.softmax(np.log(values) * scale / 1.7 + bias, axis=1)
    np.testing.assert_allclose(calibrated(values, "softmax", **keys), expected, rtol=1e-12)
    values = values_of(0, "sigmoid")
    expected = special.expit(special.logit(values) * scale / 1.7 + bias)
    np.testing.assert_allclose(calibrated(values, "sigmoid", **keys), expected, rtol=1e-12)
    for temperature in (1e-6, 1e6):
        ends = np.array([[1.0, 0, 0], [0.5, 0.5, 0], [1 / 3] * 3])
        for activation in ("softmax", "sigmoid"):
            rescaled = calibrated(ends, activation, temperature=temperature)
            assert np.isfinite(rescaled).all()
            assert ((rescaled >= 0) & (rescaled <= 1)).all()
    assert calibrator(None, "softmax", LABELS) is calibrator(CalibrationConfig(), "softmax", LABELS) is None


def test_plain_settings_have_no_keys_of_other_methods() -> None:
    for name in METHODS.built_in:
        own = METHODS.load(name).Settings
        assert (own is EnsembleConfig) == (name not in ("power_mean", "stacking")), name
