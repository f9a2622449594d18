"""Batches as transformers' own padding makes them, and the count of queue."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoints import make_texts, make_tokenizer


def encoded_of(rows: list[list[int]]) -> Any:
    from ensemble.members.huggingface.scoring.encode import Encoded

    ids = [np.array(row, dtype=np.int64) for row in rows]
    return Encoded({"input_ids": ids}, np.array([len(row) for row in rows]), 0)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_batches_equal_the_tokenizers_own_padding(kind: str, side: str, tmp_path: Path) -> None:
    from ensemble.members.huggingface.scoring.classifier import padded
    from ensemble.members.huggingface.scoring.encode import Encoded

    tokenizer = make_tokenizer(tmp_path, kind=kind, side=side)
    pairs = make_texts(12, seed=3), make_texts(12, seed=4)
    plain = tokenizer(*pairs)
    names = [name for name in plain if name != "attention_mask"]
    inputs = {name: [np.array(ids, dtype=np.int64) for ids in plain[name]] for name in names}
    encoded = Encoded(inputs, np.array([len(ids) for ids in plain["input_ids"]]), 0)
    rows = np.array([7, 2, 11, 5])
    expected = tokenizer.pad(
        {name: [plain[name][row] for row in rows] for name in plain}, return_tensors="np"
    )
    result = padded(encoded, rows, tokenizer.pad_token_id, pad_left=side == "left")
    assert set(result) == set(expected)
    for name, array in result.items():
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, expected[name], err_msg=name)


@given(st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=9), min_size=1, max_size=6))
def test_an_unused_token_is_held_by_none_of_the_rows(rows: list[list[int]]) -> None:
    from ensemble.members.huggingface.scoring.classifier import unused_token

    encoded = encoded_of([[99], *rows])
    result = unused_token(encoded, np.arange(1, len(rows) + 1), vocabulary=100)
    assert result == min(set(range(100)) - {token for row in rows for token in row})


@pytest.mark.parametrize(("stages", "queued"), [(1, 4), (2, 4), (8, 9)])
def test_a_gpu_is_given_passes_before_those_ahead_are_over(
    monkeypatch: pytest.MonkeyPatch, stages: int, queued: int
) -> None:
    """With events in place of a driver's: none is waited for until each GPU that a pass goes through has one."""
    import torch

    from ensemble.members.huggingface.scoring.forward import wait_for_queue

    waited: list[Event] = []

    class Event:
        def record(self, stream: object) -> None: ...

        def synchronize(self) -> None:
            waited.append(self)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
    queue: deque[Any] = deque()
    seen = []
    for _ in range(12):
        seen.append(len(waited))
        wait_for_queue(queue, torch.device("cuda", 0), stages)
    assert seen == [max(0, number + 1 - queued) for number in range(12)]
    wait_for_queue(queue, torch.device("cpu"), stages)
    assert len(queue) == queued - 1, "on a CPU a pass is over when its call returns"
