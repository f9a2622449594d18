"""Which rows a member with ``when`` computes, and in which chunks: by the values alone."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from ensemble.jobs.when import doubts, select_rows, when_text
from ensemble.planning.chunks import CHUNK_MAX_ROWS
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import ModelPlan, with_job, without_done
from tests.planning.test_plan import config, facts, make_plan
from tests.sampling import tries


def test_doubts_of_exclusive_labels() -> None:
    mean = np.random.default_rng(0).dirichlet([1, 1, 1, 1], 50)
    mean[3], mean[4] = [1, 0, 0, 0], np.nan
    ordered = np.sort(mean, axis=1)
    margin, nats = doubts("margin_below", mean, True), doubts("entropy_above", 2 * mean, True)
    known = np.arange(50) != 4
    np.testing.assert_allclose(margin[known], (ordered[:, -2] - ordered[:, -1])[known])
    np.testing.assert_allclose(nats[known], entropy(mean[known], axis=1), atol=1e-12)
    assert margin[4] == nats[4] == np.inf, "a row that nobody has"


def test_doubts_of_independent_labels() -> None:
    mean = np.array([[0.9, 0.45, 0.1], [1.0, 0.0, 1.0], [0.2, 0.2, 0.2]])
    np.testing.assert_allclose(doubts("share", mean, False), [-0.1, -1.0, -0.6])
    expected = entropy(np.stack([mean, 1 - mean]), axis=0).sum(axis=1)
    np.testing.assert_allclose(doubts("entropy_above", mean, False), expected)
    np.testing.assert_allclose(doubts("margin_below", mean[:, :1], True), [-0.8, -1.0, -0.6])


def test_rules_select_rows() -> None:
    doubt = np.array([-0.3, -0.3, -0.29, np.inf, -0.9])
    assert select_rows({"margin_below": 0.3}, doubt).tolist() == [False, False, True, True, False]
    assert select_rows({"entropy_above": 0.3}, -doubt[:3]).tolist() == [False, False, False]
    doubt[1] = -0.29
    assert select_rows({"share": 0.4}, doubt).tolist() == [False, True, False, True, False]
    assert select_rows({"share": 1.0}, doubt).all()
    assert select_rows({"share": 0.07}, np.arange(100.0)).sum() == 7
    doubt[:4] = np.inf
    assert select_rows({"share": 0.2}, doubt).sum() == 4, "rows that nobody has are all computed"
    assert when_text({"share": 0.07}).startswith("only on the 7 %")


VIEWS: list[dict[str, Any]] = [
    {"name": "as_is"},
    {"name": "asked", "prompt_template": "{{ text }}?"},
]


def planned(
    lengths: npt.NDArray[np.int64],
    is_selected: npt.NDArray[np.bool_],
    doubt: npt.NDArray[np.float64],
    views: int = 1,
    **keys: Any,
) -> ModelPlan:
    member_keys: dict[str, Any] = {"when": {"share": 0.5}}
    if views > 1:
        member_keys |= {"text_column": None, "prompt_template": "{{ text }}", "views": VIEWS[:views]}
    speeds = {"m0": Speed(1.0, 1e-6, is_measured=True)}
    known = {"m0": facts(lengths), "m1": facts(lengths, **member_keys)}
    plan = make_plan(config({}, member_keys, **keys), known, [], speeds=speeds)
    member = plan.models[1]
    nothing = np.zeros((len(member.jobs), len(lengths)), dtype=np.bool_)
    member = without_done(member, nothing, is_timed=plan.config.time_limit is not None)
    for number in range(len(member.jobs)):
        member = with_job(plan, member, number, is_selected, doubt, nothing[number])
    return member


@tries(60)
@given(
    st.lists(st.tuples(st.integers(1, 9000), st.booleans()), min_size=1, max_size=80),
    st.integers(1, 2),
    st.sampled_from([{}, {"time_limit": 100.0}]),
)
def test_selected_rows_are_cut_like_those_of_any_member(
    rows: list[tuple[int, bool]], views: int, keys: dict[str, Any]
) -> None:
    lengths = np.array([100 * length for length, _ in rows])
    is_selected = np.array([selected for _, selected in rows])
    member = planned(lengths, is_selected, np.linspace(-1.0, 0.0, len(rows)), views, **keys)
    numbers = np.flatnonzero(is_selected)
    expected = [(view, row) for view in range(views) for row in numbers.tolist()]

    def rows_in(plan: ModelPlan) -> list[tuple[int, int]]:
        return sorted(
            (chunk.job, int(row)) for chunk in plan.chunks for row in plan.order[chunk.start : chunk.stop]
        )

    assert rows_in(member) == expected, "each of them in each view, and once"
    assert [chunk.index for chunk in member.chunks] == [*range(len(member.chunks))]
    share = (lengths[is_selected] + 32).sum() / (lengths + 32).sum()
    assert sum(chunk.cost for chunk in member.chunks) == pytest.approx(share)
    assert member.left_out == pytest.approx(1.0 - share)
    assert not member.undecided
    for chunk in member.chunks:
        places = member.order[chunk.start : chunk.stop]
        assert (np.diff(lengths[places]) <= 0).all(), "the longest first"
    is_done = np.zeros((views, len(rows)), dtype=np.bool_)
    for view, row in expected[::2]:
        is_done[view, row] = True
    assert rows_in(without_done(member, is_done, is_timed=False)) == expected[1::2]


def test_under_a_time_limit_the_closest_calls_come_first() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(100, 40_000, 500)
    doubt = -generator.random(500)
    is_selected = select_rows({"share": 0.5}, doubt)
    member = planned(lengths, is_selected, doubt, time_limit=100.0)
    assert len(member.chunks) > 4
    for chunk, following in pairwise(member.chunks):
        first, second = (member.order[part.start : part.stop] for part in (chunk, following))
        assert doubt[first].min() >= doubt[second].max()
    assert max(chunk.rows for chunk in member.chunks) <= CHUNK_MAX_ROWS
