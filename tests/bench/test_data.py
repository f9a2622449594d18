"""The benchmark's tables have the lengths that its page says they have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from bench.data import Words, Writer
from bench.tokenizer import counted, made_up_words, save_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tokenizer")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return save_tokenizer(folder, [f" {word}" for word in made_up_words()], kind="encoder")


@pytest.fixture(scope="module")
def words(folder: Path, tokenizer: Any) -> Words:
    return counted(folder, made_up_words())


def lengths(tokenizer: Any, texts: list[Any]) -> npt.NDArray[np.int64]:
    return np.array([len(ids) for ids in tokenizer(texts, truncation=True, max_length=512)["input_ids"]])


@pytest.mark.parametrize("rows", [600, 2200])
def test_lengths_have_a_long_tail(tokenizer: Any, words: Words, rows: int) -> None:
    # This tokenizer adds two tokens to a row, the decoders' one.
    result = lengths(tokenizer, Writer(words, 1).single(rows)) - 1
    assert abs(np.median(result) - 60) <= 2
    assert abs(result.mean() - 86) <= 3
    assert abs(np.percentile(result, 99) - 400) <= 20
    assert result.max() == 511
    assert (result[:100].mean() - result.mean()) < 20, "in order of length"


def test_pairs_are_long(tokenizer: Any, words: Words) -> None:
    actual_lengths = lengths(tokenizer, Writer(words, 1).pairs(400))
    assert 180 < np.median(actual_lengths) < 240
    assert 0.02 < (actual_lengths == 512).mean() < 0.1
