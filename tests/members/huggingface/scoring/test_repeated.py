"""Rows with the same token ids are computed once, and nobody can tell from the results."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoints import make_checkpoint, make_texts, reference
from tests.members.huggingface.scoring.test_compute import member_of, read_shard
from tests.members.huggingface.scoring.test_float32 import make_overflowing
from tests.members.huggingface.scoring.test_predict import LABELS, worker_spec
from tests.oom.limit import AllocatorLimit

pytestmark = pytest.mark.usefixtures("one_thread")
ONCE = [text for text in dict.fromkeys(make_texts(40, longest=25)) if text]
CHOSEN = np.random.default_rng(0).integers(0, len(ONCE), 90)
TEXTS = [ONCE[index] for index in CHOSEN]


def encode(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> Any:
    from ensemble.members.huggingface.loading.tokenizer import load_tokenizer
    from ensemble.members.huggingface.scoring.encode import Prompt

    spec = worker_spec(folder, **changes)
    return Prompt(spec, load_tokenizer(spec), spec.max_length or 1024).encode(rows)


def check_copies(computed: Any, encoded: Any) -> None:
    """Rows with equal ids have equal logits, to the bit."""
    ids = [array.tobytes() for array in encoded.inputs["input_ids"]]
    seen: dict[bytes, bytes] = {}
    for row, logits in zip(computed.rows.tolist(), computed.logits.numpy(), strict=True):
        assert seen.setdefault(ids[row], logits.tobytes()) == logits.tobytes()


@pytest.mark.parametrize("architecture", ["llama", "bert"])
def test_a_chunk_with_copies_takes_less_and_gives_the_same(architecture: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "m", architecture, LABELS)
    _, predict = member_of(tmp_path, folder, TEXTS)
    work = predict()
    different = len(set(CHOSEN.tolist()))
    assert work.counters.repeated_rows == len(TEXTS) - different > 0
    lengths = encode(folder, [{"text": text} for text in ONCE], max_length=128).lengths
    assert work.counters.tokens == lengths[np.unique(CHOSEN)].sum() <= work.counters.padded_tokens
    got = read_shard(tmp_path / "shards", work.shard)
    np.testing.assert_array_equal(got[:, 0], np.arange(len(TEXTS)))
    np.testing.assert_allclose(got[:, 1:], reference(folder, ONCE, 128)[CHOSEN], atol=1e-5)
    assert len(np.unique(got[:, 1:], axis=0)) == different, "copies have one and the same number"


def test_rows_that_only_truncation_makes_equal(tmp_path: Path) -> None:
    """Every cut row counts, and pairs are equal only where both texts and their types are."""
    folder = make_checkpoint(tmp_path, "bert", LABELS)
    same = "a person who works in an office"
    rows = [{"text": f"{same} {tail}"} for tail in ("food", "drink", "")] + [{"text": ""}, {"text": same[:8]}]
    encoded = encode(folder, rows, max_length=6)
    assert encoded.first.tolist() == [0, 0, 0, 3, 4]
    assert encoded.truncated_rows == 3
    pairs = [("a b", "c"), ("a", "b c"), ("a b", "c")]
    rows = [{"first": first, "second": second} for first, second in pairs]
    encoded = encode(folder, rows, text_columns=("first", "second"))
    assert encoded.first.tolist() == [0, 1, 0]


def test_copies_are_found_across_blocks_and_beside_rows_that_cannot_be_rendered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ensemble.members.huggingface.scoring import encode as prompt

    folder = make_checkpoint(tmp_path, "llama", LABELS)
    cells = [f'["{text}"]' for text in TEXTS]
    cells[3] = cells[50] = "["
    rows = [{"turns": cell} for cell in cells]
    settings: dict[str, Any] = {
        "prompt_template": "{{ (turns | fromjson)[0] }}",
        "text_columns": (),
        "max_length": 9,
    }
    whole = encode(folder, rows, **settings)
    monkeypatch.setattr(prompt, "BLOCK_ROWS", 7)
    blocks = encode(folder, rows, **settings)
    plain = [encode(folder, [row], **settings) for row in rows]
    assert list(blocks.problems) == [3, 50]
    assert blocks.truncated_rows == whole.truncated_rows == sum(item.truncated_rows for item in plain) > 0
    np.testing.assert_array_equal(blocks.first, whole.first)
    for row, item in enumerate(plain):
        assert blocks.lengths[row] == item.lengths[0]
        if row not in blocks.problems:
            np.testing.assert_array_equal(blocks.inputs["input_ids"][row], item.inputs["input_ids"][0])
    firsts = [row for row in range(len(rows)) if blocks.first[row] == row and row not in blocks.problems]
    assert len({blocks.inputs["input_ids"][row].tobytes() for row in firsts}) == len(firsts)


@pytest.mark.long
def test_copies_share_the_fate_of_their_row(tmp_path: Path) -> None:
    """Halved where memory runs out, run again in float32, or too large: each copy with its row."""
    from ensemble.members.huggingface.loading.float32_retry import in_float32
    from ensemble.members.huggingface.loading.load import load
    from ensemble.members.huggingface.scoring.classifier import Classifier
    from ensemble.members.huggingface.scoring.forward import BatchSizes, compute

    folder = make_overflowing(tmp_path, "llama")
    loaded = load(worker_spec(folder, dtype="float16"))
    classifier = Classifier(loaded.model, loaded.pad_token_id)
    encoded = encode(folder, [{"text": text} for text in TEXTS])
    told: list[tuple[int, ...]] = []

    def run(limit: AllocatorLimit, again: bool = True) -> Any:
        mode = partial(in_float32, loaded.model) if again else None
        with limit:
            return compute(
                classifier, encoded, BatchSizes(256, None), lambda *counts: told.append(counts), mode
            )

    plain = run(AllocatorLimit(), again=False)
    assert told[-1][0] == len(TEXTS), "progress counts rows of the table"
    assert told[-1][1] == plain.counters.tokens
    bad = ~np.isfinite(plain.logits.numpy()).all(axis=1)
    assert 3 < bad.sum() < len(TEXTS) - 3
    undisturbed = run(AllocatorLimit())
    assert undisturbed.counters.recomputed_rows == bad.sum()
    halved = run(AllocatorLimit(fail_at=frozenset({1, plain.counters.batches + 1})))
    assert halved.counters.oom_events == 2
    for computed in (plain, undisturbed, halved):
        assert computed.counters.repeated_rows == len(TEXTS) - len(set(CHOSEN.tolist()))
        check_copies(computed, encoded)
    np.testing.assert_allclose(halved.logits.numpy(), undisturbed.logits.numpy(), atol=1e-2)
    nothing_again = run(AllocatorLimit(fail_at=frozenset(range(plain.counters.batches, 1000))))
    assert nothing_again.too_large_in_float32 == tuple(np.flatnonzero(bad).tolist())
    # The attention of one row of this length no longer fits.
    longest = int(encoded.lengths.max())
    too_large = run(AllocatorLimit(largest_bytes=2 * 128 * longest - 1), again=False)
    expected = np.flatnonzero(encoded.lengths == longest)
    assert too_large.too_large == tuple(expected.tolist())
    assert len(expected) > 1, "a copy must be among them"
    np.testing.assert_array_equal(too_large.rows, np.flatnonzero(encoded.lengths < longest))
    check_copies(too_large, encoded)
