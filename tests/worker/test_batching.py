"""Batches against the lengths that users see, and against what must hold for any lengths."""

from __future__ import annotations

import numpy as np
import pytest

from ensemble.worker.batching import make_batches


def padded(lengths: np.ndarray, batches: list[np.ndarray]) -> int:
    return sum(int(lengths[batch].max()) * len(batch) for batch in batches)


def long_tailed(rows: int, seed: int = 0) -> np.ndarray:
    """Median 60, mean about 86, 99th percentile about 400, cut at 512: the figures in docs/benchmarks.md."""
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
