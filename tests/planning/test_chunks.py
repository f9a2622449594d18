"""Chunks: what is left of them, and in which order they are dispatched."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.members.base import ResourceRequest
from ensemble.planning.chunks import Chunk, cut_chunks, join_jobs, what_is_left
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import without_done
from tests.planning.test_plan import config, facts, make_plan
from tests.sampling import tries


def test_chunks_are_dispatched_from_the_longest_then_from_the_shortest() -> None:
    lengths = np.arange(100, 5100, dtype=np.int64)
    speeds = {"m0": Speed(1.0, 1e-6, is_measured=True)}
    (member,) = make_plan(config({}), {"m0": facts(lengths)}, [], speeds=speeds).models
    nothing, everything = np.zeros((1, 5000), dtype=np.bool_), np.ones((1, 5000), dtype=np.bool_)
    chunks = without_done(member, nothing, is_timed=True).chunks
    assert [chunk.index for chunk in chunks] == [0, *range(len(chunks) - 1, 0, -1)]
    rows = [chunk.rows for chunk in chunks]
    half = len(rows) // 2
    assert sum(rows[:half]) > 0.6 * sum(rows), "half of the work, and more than half of the rows"
    assert without_done(member, everything, is_timed=True).chunks == ()
    longest = np.isin(np.arange(5000), member.order[: member.chunks[0].stop])
    assert len(without_done(member, ~longest[None], is_timed=True).chunks) == 1
    assert without_done(member, nothing, is_timed=False).chunks == member.chunks


@pytest.mark.parametrize(("chunk_rows", "expected"), [("all", [10]), (4, [4, 4, 2]), (20, [10])])
def test_a_member_can_say_how_many_rows_a_chunk_has(chunk_rows: Any, expected: list[int]) -> None:
    request = ResourceRequest(chunk_rows=chunk_rows)
    known = {"m0": replace(facts(np.arange(10, dtype=np.int64)), request=request)}
    (member,) = make_plan(config({}), known, []).models
    assert [chunk.rows for chunk in member.chunks] == expected
    assert member.order.tolist() == [*reversed(range(10))]


def test_under_a_time_limit_members_that_read_different_texts_have_one_cut() -> None:
    generator = np.random.default_rng(0)
    title, body = (generator.lognormal(5, 1.5, 4000).astype(np.int64) for _ in range(2))
    lengths = {f"m{number}": of_member for number, of_member in enumerate((title, body, title))}
    known = {name: facts(of_member) for name, of_member in lengths.items()}
    members = make_plan(config({}, {}, {}, time_limit=100.0), known, []).models
    for member in members:
        read = lengths[member.name]
        np.testing.assert_array_equal(member.order, members[0].order)
        cuts = [
            [(chunk.index, chunk.start, chunk.stop) for chunk in each.chunks] for each in (member, members[0])
        ]
        assert cuts[0] == cuts[1]
        work = [(read[member.order[chunk.start : chunk.stop]] + 32).sum() for chunk in member.chunks]
        np.testing.assert_allclose(
            [chunk.cost for chunk in member.chunks], np.array(work) / sum(work), rtol=1e-12
        )


def test_a_common_cut_of_one_text_is_the_usual_one() -> None:
    lengths = np.random.default_rng(1).lognormal(5, 1.5, 3000).astype(np.int64)
    known = {name: facts(lengths.copy()) for name in ("m0", "m1", "m2")}
    timed = make_plan(config({}, {}, {}, time_limit=100.0), known, []).models[0]
    usual_order, usual_chunks = cut_chunks(lengths)
    np.testing.assert_array_equal(timed.order, usual_order)
    assert timed.chunks == usual_chunks


@tries(60)
@given(st.lists(st.tuples(st.integers(1, 9000), st.booleans()), min_size=1, max_size=60), st.randoms())
def test_what_is_left_is_every_row_that_is_not_done(rows: list[tuple[int, bool]], random: Random) -> None:
    lengths, is_done = np.array([length for length, _ in rows]), np.array([done for _, done in rows])
    order, chunks = cut_chunks(lengths)
    before = order.copy()
    moved, left = what_is_left(chunks, order, is_done[None])
    np.testing.assert_array_equal(order, before)
    assert sorted(moved.tolist()) == list(range(len(rows)))
    places = [place for left_over in left for place in range(left_over.start, left_over.stop)]
    assert sorted(moved[places].tolist()) == np.flatnonzero(~is_done).tolist(), "each of them, and once"
    in_order = [place for place in order.tolist() if not is_done[place]]
    assert [row for left_over in left for row in moved[left_over.start : left_over.stop].tolist()] == in_order
    whole = [chunk for chunk in chunks if not is_done[order[chunk.start : chunk.stop]].any()]
    assert [left_over for left_over in left if left_over in chunks] == whole, "these stay as they were cut"
    for item in whole:
        np.testing.assert_array_equal(moved[item.start : item.stop], order[item.start : item.stop])
    assert len({left_over.index for left_over in left} | {chunk.index for chunk in chunks}) == len(
        [left_over for left_over in left if left_over not in chunks]
    ) + len(chunks)
    if not is_done.any():
        assert left == chunks
    assert sum(left_over.cost for left_over in left) <= 1 + 1e-9


@tries(60)
@given(st.integers(0, 100), st.integers(2, 5000), st.floats(0, 1))
def test_the_splits_of_a_chunk_hold_the_whole(start: int, rows: int, cost: float) -> None:
    chunk = Chunk(0, start, start + rows, cost)
    front, back = chunk.split(count(5))
    assert (front.index, back.index) == (5, 6)
    assert (front.start, front.stop, back.stop) == (start, back.start, chunk.stop)
    assert 0 <= back.rows - front.rows <= 1
    assert front.cost + back.cost == pytest.approx(cost)


def test_what_is_left_of_the_rows_of_several_jobs() -> None:
    """Chunks of two jobs never join, and each row of each job is in one chunk."""
    part = (*cut_chunks(np.full(64, 16_000, dtype=np.int64)), 2.0)
    order, chunks, work = join_jobs([part] * 3)
    assert work == 6.0
    assert order.tolist() == part[0].tolist() * 3
    assert sum(chunk.cost for chunk in chunks) == pytest.approx(1.0)
    assert len({chunk.index for chunk in chunks}) == len(chunks)
    is_done = np.random.default_rng(0).random((3, 64)) < 0.9
    left_order, left = what_is_left(chunks, order, is_done)
    rows = [(chunk.job, int(row)) for chunk in left for row in left_order[chunk.start : chunk.stop]]
    assert sorted(rows) == list(zip(*map(np.ndarray.tolist, np.nonzero(~is_done)), strict=True))
