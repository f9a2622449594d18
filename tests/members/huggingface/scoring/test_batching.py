"""Batches against the lengths that users see, and against what must hold for any lengths."""

from __future__ import annotations

import numpy as np
import pytest

from ensemble.members.huggingface.scoring.batching import MemoryLimit, make_batches


def padded(lengths: np.ndarray, batches: list[np.ndarray]) -> int:
    return sum(int(lengths[batch].max()) * len(batch) for batch in batches)


def long_tailed(rows: int, seed: int = 0) -> np.ndarray:
    """Median 60, mean about 86, 99th percentile about 400, cut at 512, as the benchmark draws them."""
    lengths = np.random.default_rng(seed).lognormal(np.log(60), 0.82, rows)
    return np.clip(lengths, 3, 512).astype(np.int64)


def test_the_sample_has_the_long_tail_it_claims() -> None:
    lengths = long_tailed(20_000)
    assert 57 <= np.median(lengths) <= 63
    assert 78 <= lengths.mean() <= 90
    assert 360 <= np.quantile(lengths, 0.99) <= 420


@pytest.mark.parametrize("budget", [2048, 16384])
@pytest.mark.parametrize("rows", [1500, 20_000])
def test_under_three_percent_of_the_computed_tokens_are_padding(rows: int, budget: int) -> None:
    lengths = long_tailed(rows)
    batches = make_batches(lengths, budget)
    assert 1 - lengths.sum() / padded(lengths, batches) < 0.03
    # and not by making batches of one row each
    assert len(batches) < 4 * lengths.sum() / budget + 40


@pytest.mark.parametrize("seed", range(20))
def test_every_row_once_and_no_batch_over_its_budget(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 400, generator.integers(1, 300))
    budget = int(generator.integers(50, 3000))
    batches = make_batches(lengths, budget)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or int(lengths[batch].max()) * len(batch) <= budget


def test_a_fixed_batch_size_is_honoured() -> None:
    batches = make_batches(np.arange(1, 24), 10, batch_size=5)
    assert [len(batch) for batch in batches] == [5, 5, 5, 5, 3]
    assert batches[0].tolist() == [22, 21, 20, 19, 18]


def test_no_rows_no_batches() -> None:
    assert make_batches(np.array([], dtype=np.int64), 100) == []


def test_eager_attention_makes_wide_batches_smaller() -> None:
    limit = MemoryLimit(available_bytes=1_000_000, bytes_per_token=100.0, bytes_per_token_pair=10.0)
    assert limit.cost(padded_tokens=200, width=50) == 200 * (100 + 10 * 50)
    assert [limit.tokens_at(width) for width in (1, 90, 390)] == [9090, 1000, 250]
    assert MemoryLimit(1, 100.0, 0.0).tokens_at(7) == 1, "a row is tried, whatever the estimate says"


@pytest.mark.parametrize("seed", range(20))
def test_no_batch_goes_over_the_memory_and_the_dearest_is_first(seed: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 400, generator.integers(1, 300))
    budget = int(generator.integers(500, 5000))
    available = int(generator.integers(50_000, 500_000))
    limit = MemoryLimit(available, 20.0, float(generator.integers(0, 3)))
    batches = make_batches(lengths, budget, memory=limit)
    assert sorted(np.concatenate(batches).tolist()) == list(range(len(lengths)))
    costs = []
    for batch in batches:
        width = int(lengths[batch].max())
        assert lengths[batch[0]] == width
        padded_tokens = width * len(batch)
        costs.append(padded_tokens * (20.0 + limit.bytes_per_token_pair * width))
        assert len(batch) == 1 or (padded_tokens <= budget and costs[-1] <= available)
    assert costs == sorted(costs, reverse=True)


def test_memory_that_is_plenty_changes_no_batch_but_their_order() -> None:
    lengths = long_tailed(1500)
    plenty = make_batches(lengths, 2048, memory=MemoryLimit(10**12, 100.0, 10.0))
    unlimited = make_batches(lengths, 2048)
    assert sorted(batch.tolist() for batch in plenty) == sorted(batch.tolist() for batch in unlimited)


def test_a_batch_size_of_the_users_holds_whatever_the_memory() -> None:
    lengths = np.full(10, 100)
    for equal_lengths in (False, True):
        batches = make_batches(lengths, 50, 4, equal_lengths, MemoryLimit(1, 1.0, 1.0))
        assert [len(batch) for batch in batches] == [4, 4, 2]


def test_what_is_not_computed_counts_as_memory_and_not_as_work() -> None:
    lengths = np.random.default_rng(0).integers(30, 100, 500)
    limit = MemoryLimit(10**6, 100.0, 0.1, skipped=300)
    batches = make_batches(lengths, 2048, memory=limit)
    assert sorted(np.concatenate(batches).tolist()) == list(range(500))
    for batch in batches:
        whole = int(lengths[batch].max()) + 300
        assert len(batch) * whole * (100.0 + 0.1 * whole) <= 1.1 * 10**6
    assert len(make_batches(lengths, 2048, memory=MemoryLimit(10**12, 100.0, 0.1, 300))) < len(batches)


@pytest.mark.parametrize(
    ("rows", "stages", "batches"), [(400, 2, 16), (400, 4, 34), (2000, 2, 63), (40, 2, 10), (2, 2, 1)]
)
def test_a_chunk_keeps_several_gpus_busy(rows: int, stages: int, batches: int) -> None:
    """Eight batches for each of them, unless batches would get too small or too large."""
    from ensemble.members.huggingface.scoring.forward import BatchSizes

    lengths = np.full(rows, 512)
    sizes = BatchSizes(16_384, None, stages=stages)
    assert len(sizes.cut(lengths, np.arange(rows), np.zeros(rows, dtype=np.int64))) == batches


def test_kept_keys_and_values_count_for_the_tokens_of_a_batch_alone() -> None:
    """Those of the tokens that it skips are kept already."""
    limit = MemoryLimit(10**6, 100.0, 0.0, skipped=300, bytes_per_kept_token=50.0)
    assert limit.cost(40, 20) == 2 * (320 * 100 + 20 * 50)
