"""What happens to values around a merge, and in which order, against the same arithmetic row by row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from ensemble.config import CalibrationConfig
from ensemble.config.schema import RuleConfig
from ensemble.merging.calibration import calibrator
from ensemble.merging.post_process import AllowedLabels, PostProcess, RowRules

LABELS = ["a", "b", "c"]
FLAGS = np.array([[True, True, True], [True, False, True], [True, True, False], [True, False, True]])
HITS = np.array([[True, True, False, False]])
VALUES = [[0.2, 0.7, 0.1], [0.1, 0.8, 0.1], [0.3, 0.3, 0.4], [0.2, 0.2, 0.6]]


def post_process(**rule: Any) -> PostProcess:
    rules = [RuleConfig.model_validate({"when": "x", **rule})]
    return PostProcess(AllowedLabels(FLAGS, "column c"), RowRules(rules, LABELS, HITS))


def values() -> Any:
    return np.array(VALUES, order="F")


def test_a_member_is_calibrated_before_impossible_labels_become_0_and_sees_no_rule() -> None:
    calibrate = calibrator(CalibrationConfig(temperature=2.0), "softmax", LABELS)
    changed = values()
    returned = post_process(set={"b": 0.5}).member(0, changed, "softmax", calibrate)
    expected = []
    for row, flags in zip(VALUES, FLAGS, strict=True):
        roots = [math.sqrt(value) * flag for value, flag in zip(row, flags, strict=True)]
        expected.append([root / sum(roots) for root in roots])
    np.testing.assert_allclose(changed, expected, rtol=1e-14)
    assert returned is changed


def test_a_method_that_keeps_impossible_labels_gets_the_calibrated_values_and_scores_the_others() -> None:
    merged, plain = values(), values()
    scored = post_process(mask=["b"]).member(0, merged, "softmax", None, keeps_impossible=True)
    np.testing.assert_array_equal(merged, VALUES)
    np.testing.assert_array_equal(scored, post_process(mask=["b"]).member(0, plain, "softmax"))
    assert (scored[~FLAGS] == 0).all()


def test_no_rule_makes_a_label_possible() -> None:
    changed = values()
    post_process(set={"b": 0.5}).merged(0, changed, exclusive=True)
    np.testing.assert_allclose(changed[0], [0.5 * 2 / 3, 0.5, 0.5 / 3], rtol=1e-14)
    np.testing.assert_allclose(changed[1], [0.5, 0.0, 0.5], rtol=1e-14)  # the rule alone would leave 0.5 to b
    np.testing.assert_allclose(changed[2:], [[0.5, 0.5, 0.0], [0.25, 0.0, 0.75]], rtol=1e-14)


@pytest.mark.parametrize("start", [0, 1, 3])
def test_a_block_and_rows_that_are_taken_are_changed_as_the_whole_table_is(start: int) -> None:
    post, whole = post_process(set={"b": 0.5}), values()
    post.merged(0, whole, exclusive=True)
    block, numbers = values()[start:], np.arange(start, len(VALUES))
    post.merged(start, block, exclusive=True)
    np.testing.assert_array_equal(block, whole[start:])
    taken = values()[numbers]
    post.taken(numbers).merged(0, taken, exclusive=True)
    np.testing.assert_array_equal(taken, whole[numbers])
    nothing, only = values(), np.arange(len(VALUES)) == 0
    post.merged(0, nothing, exclusive=True, only=only)
    np.testing.assert_array_equal(nothing, np.where(only[:, None], whole, VALUES))
    PostProcess().merged(0, taken, exclusive=True)
    np.testing.assert_array_equal(taken, whole[numbers])
