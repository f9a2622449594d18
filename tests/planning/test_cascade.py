"""Which rows a member with ``when`` computes, and in which chunks: by the values alone."""

from __future__ import annotations

from itertools import chain, pairwise, repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from ensemble.planning.cascade import (
    COMPUTE,
    SKIP,
    UNKNOWN,
    Grouping,
    closest_first,
    decide,
    doubts,
    row_costs,
    when_text,
)
from ensemble.planning.chunks import CHUNK_MAX_ROWS, cut_chunks
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


def test_rules_decide_as_soon_as_they_can() -> None:
    doubt = np.array([-0.3, np.nan, -0.29, np.inf, -0.9])
    assert decide({"margin_below": 0.3}, doubt).tolist() == [SKIP, UNKNOWN, COMPUTE, COMPUTE, SKIP]
    assert decide({"entropy_above": 0.0}, -doubt).tolist()[:3] == [COMPUTE, UNKNOWN, COMPUTE]
    assert set(decide({"share": 0.4}, doubt).tolist()) == {UNKNOWN}
    doubt[1] = -0.29
    assert decide({"share": 0.4}, doubt).tolist() == [SKIP, COMPUTE, SKIP, COMPUTE, SKIP]
    assert decide({"share": 1.0}, doubt).tolist() == [COMPUTE] * 5
    assert int((decide({"share": 0.07}, np.arange(100.0)) == COMPUTE).sum()) == 7
    doubt[:4] = np.inf
    assert int((decide({"share": 0.2}, doubt) == COMPUTE).sum()) == 4, "rows that nobody has are all computed"
    assert when_text({"share": 0.07}).startswith("only on the 7 % of the rows")


@tries(60)
@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=80),
    st.integers(0, 2**32 - 1),
    st.lists(st.integers(0, 80), max_size=6),
)
def test_groups_do_not_depend_on_when_rows_become_known(rows: list[int], seed: int, steps: list[int]) -> None:
    generator = np.random.default_rng(seed)
    order, chunks = cut_chunks(np.array(rows) * 100)
    final = generator.choice([SKIP, COMPUTE], len(rows)).astype(np.int8)
    at_once = Grouping(chunks, order).take(final)
    step_by_step, grouping = [], Grouping(chunks, order)
    came = generator.permutation(len(rows))
    for count in [*sorted(steps), len(rows)]:
        known = np.full(len(rows), UNKNOWN, dtype=np.int8)
        known[came[:count]] = final[came[:count]]
        step_by_step += grouping.take(known)
    assert [one.rows.tolist() for one in step_by_step] == [one.rows.tolist() for one in at_once]
    there = np.concatenate([np.zeros(0, dtype=np.int64), *(one.rows for one in at_once)])
    assert sorted(there.tolist()) == np.flatnonzero(final == COMPUTE).tolist(), "each of them, and once"
    assert there.tolist() == [row for row in order.tolist() if final[row] == COMPUTE], "the longest first"
    costs = row_costs(chunks, order)
    assert costs.sum() == pytest.approx(1)
    for one in at_once:
        assert one.cost == pytest.approx(costs[one.rows].sum())


def test_the_closest_calls_come_first() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(100, 40_000, 500)
    order, chunks = cut_chunks(lengths)
    doubt = -generator.random(500)
    decided = decide({"share": 0.5}, doubt)
    groups = closest_first(doubt, decided, chunks, order, repeat(CHUNK_MAX_ROWS))
    assert len(groups) > 4
    assert (
        sorted(np.concatenate([one.rows for one in groups]).tolist()) == np.flatnonzero(decided == 1).tolist()
    )
    for one, following in pairwise(groups):
        assert doubt[one.rows].min() >= doubt[following.rows].max()
    for one in groups:
        assert (np.diff(lengths[one.rows]) <= 0).all(), "the longest first"
        assert one.cost <= max(chunk.cost for chunk in chunks) * (1 + 1e-6)
    left = groups[0].without(np.isin(np.arange(500), groups[0].rows[:3]))
    assert left.rows.tolist() == groups[0].rows[3:].tolist()
    assert closest_first(doubt, decided, (), order, repeat(CHUNK_MAX_ROWS)) == []


def test_the_first_groups_of_a_member_of_unknown_speed_are_small() -> None:
    order, chunks = cut_chunks(np.full(1000, 100))
    doubt = np.linspace(-1.0, 0.0, 1000)
    decided = np.full(1000, COMPUTE, dtype=np.int8)
    groups = closest_first(
        doubt, decided, chunks, order, chain.from_iterable(repeat(16 * 2**step, 2) for step in range(9))
    )
    assert [len(group.rows) for group in groups] == [16, 16, 32, 32, 64, 64, 128, 128, 256, 256, 8]
    assert sum(group.cost for group in groups) == pytest.approx(1)
