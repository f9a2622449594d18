"""Packed batches: which rows share one, and where their tokens stand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ensemble.members.huggingface.scoring.batching import MemoryLimit
from ensemble.members.huggingface.scoring.forward import BatchSizes
from ensemble.members.huggingface.scoring.packing import lay_out, most_rows, pack
from tests.sampling import tries

ROOM = 60
widths_of_rows = st.lists(st.integers(1, ROOM), max_size=60).map(
    lambda items: np.array(items, dtype=np.int64)
)


def numbers(*items: int) -> np.ndarray:
    return np.array(items, dtype=np.int64)


def packed(widths: np.ndarray, rows: int = ROOM) -> list[list[int]]:
    return [batch.tolist() for batch in pack(widths, ROOM, rows)]


@tries(100)
@given(widths_of_rows, st.integers(1, 8))
def test_every_row_once_and_no_batch_over_its_room_or_its_rows(widths: np.ndarray, most: int) -> None:
    batches = packed(widths, most)
    assert sorted(row for batch in batches for row in batch) == list(range(len(widths)))
    for batch in batches:
        assert widths[batch].sum() <= ROOM
        assert len(batch) <= most


@tries(100)
@given(widths_of_rows, st.integers(1, 8), st.data())
def test_a_run_that_goes_on_has_the_batches_that_were_left(
    widths: np.ndarray, most: int, data: st.DataObject
) -> None:
    """The rows of batches that are done are gone; all others stand where they would have stood."""
    batches = packed(widths, most)
    left = [batch for batch in batches if data.draw(st.booleans())]
    rows = np.array(sorted(row for batch in left for row in batch), dtype=np.int64)
    again = [rows[batch].tolist() for batch in packed(widths[rows], most)]
    assert again == left


@tries(100)
@given(widths_of_rows)
def test_no_two_batches_would_fit_into_one(widths: np.ndarray) -> None:
    totals = sorted(int(widths[batch].sum()) for batch in packed(widths))
    assert len(totals) < 2 or totals[0] + totals[1] > ROOM


def test_a_row_goes_into_the_fullest_batch_that_has_room() -> None:
    assert packed(numbers(5, 40, 15, 50, 20)) == [[3, 0], [1, 4], [2]]


def test_rows_have_places_and_positions_of_their_own_and_padding_none() -> None:
    layout = lay_out(numbers(), [numbers(7, 8, 9), numbers(5), numbers(6, 6)], 8)
    assert layout.ids.tolist() == [7, 8, 9, 5, 6, 6]
    assert layout.positions.tolist() == [0, 1, 2, 0, 0, 1, 0, 0]
    assert layout.ends.tolist() == [3, 3, 3, 4, 6, 6, 7, 8]
    assert layout.starts.tolist() == [0, 3, 4]
    assert layout.ends.dtype == np.int32


def test_what_rows_begin_with_stands_once_and_is_seen_by_all_of_them() -> None:
    layout = lay_out(numbers(3, 4), [numbers(7, 8), numbers(5)], 6)
    assert layout.ids.tolist() == [3, 4, 7, 8, 5]
    assert layout.positions.tolist() == [0, 1, 2, 3, 2, 0]
    assert layout.ends.tolist() == [5, 5, 4, 4, 5, 6]
    assert layout.starts.tolist() == [2, 4]


def test_rows_fill_a_batch_without_padding() -> None:
    layout = lay_out(numbers(3), [numbers(7, 8, 9)], 4)
    assert layout.ids.tolist() == [3, 7, 8, 9]
    assert layout.ends.tolist() == [4, 4, 4, 4]


def test_memory_that_a_row_takes_beside_its_tokens_limits_rows() -> None:
    limit = MemoryLimit(10_000, 50.0, 0.0, bytes_per_row=1_000.0)
    assert most_rows(100, limit) == 5
    assert most_rows(199, limit) == 1
    assert most_rows(300, limit) == 1, "a row is tried, whatever the estimate says"
    assert most_rows(100, MemoryLimit(10_000, 50.0, 0.0)) == most_rows(100, None) == 100


@tries(100)
@given(
    st.lists(st.tuples(st.integers(1, 90), st.sampled_from([0, 0, 7, 55])), min_size=1, max_size=40),
    st.sampled_from([0, 30, 64]),
)
def test_rows_are_cut_into_packed_batches_and_the_longer_ones_into_padded(
    rows: list[tuple[int, int]], packed_tokens: int
) -> None:
    widths, skipped = np.array(rows, dtype=np.int64).T
    batches = BatchSizes(100, None).cut(widths, np.arange(len(widths)), skipped, packed_tokens)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(widths)))
    for batch in batches:
        (tokens,) = np.unique(skipped[batch])
        if (widths[batch] <= packed_tokens - tokens).any():
            assert tokens + widths[batch].sum() <= packed_tokens
        else:
            assert len(batch) == 1 or widths[batch].max() * len(batch) <= 100


@pytest.mark.parametrize("packed_tokens", [0, 64])
def test_no_rows_no_batches(packed_tokens: int) -> None:
    nothing = numbers()
    assert not BatchSizes(100, None).cut(nothing, nothing, nothing, packed_tokens)
    assert packed(nothing) == []
