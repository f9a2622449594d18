"""Parts written behind the next chunk's back: one at a time, and an error is the main thread's."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ensemble.common.errors import WriteError
from ensemble.common.protocol import Predict
from tests.checkpoints import make_checkpoint, make_texts, reference
from tests.worker.test_predict import LABELS, worker_spec
from tests.worker.test_serve import publish

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = make_texts(40)


@pytest.fixture
def member(tmp_path: Path) -> Any:
    from ensemble.worker.member import Member

    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    loaded = Member(worker_spec(folder, **publish(tmp_path, {"text": TEXTS})))
    loaded.load()
    return loaded


def predict(member: Any, chunk: int, written: Any) -> None:
    member.predict_chunk(Predict(chunk, 10 * chunk, 10 * chunk + 10), lambda *counts: None, written)


def test_no_more_than_one_part_waits_while_the_next_is_computed(member: Any, tmp_path: Path) -> None:
    from ensemble.common.shards import read_part

    done: list[tuple[str, Any]] = []
    first_may_end = threading.Event()

    def written(work: Any) -> None:
        done.append((threading.current_thread().name, work))
        first_may_end.wait(10)

    predict(member, 0, written)  # returns although its part is not done with
    behind = threading.Thread(target=predict, args=(member, 1, written))
    behind.start()
    behind.join(0.3)
    assert behind.is_alive(), "the second part must wait for the first"
    assert len(done) == 1
    first_may_end.set()
    behind.join()
    member.finish()
    assert [name for name, _ in done] == ["writer", "writer"]
    expected = reference(tmp_path / "m", TEXTS[:20])
    for place, (_, work) in enumerate(done):
        content = read_part(tmp_path / "parts" / work.part)
        assert content is not None
        got = np.array([line.split(",") for line in content.decode().splitlines()[1:]], dtype=float)
        np.testing.assert_array_equal(got[:, 0], np.arange(10) + 10 * place)
        np.testing.assert_allclose(got[:, 1:], expected[10 * place : 10 * place + 10], atol=1e-5)
        assert work.counters.forward_seconds > 0


def test_an_error_in_writing_is_raised_by_the_next_chunk_and_at_the_end(member: Any, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "parts")
    assert member.unwritten_chunk is None
    done: list[Any] = []
    predict(member, 2, done.append)
    with pytest.raises(WriteError, match="make room there") as at_the_end:
        member.finish()
    with pytest.raises(WriteError) as at_the_next:
        predict(member, 3, done.append)
    assert at_the_next.value is at_the_end.value
    assert member.unwritten_chunk == 2
    assert not done


def test_ids_made_for_another_length_are_thrown_away(tmp_path: Path) -> None:
    """The positions of a model are known only once it is loaded."""
    from ensemble.worker.member import Member

    folder = make_checkpoint(tmp_path / "m", "gpt2", LABELS)
    texts = ["a person who works " * 60, "any of various plants"]
    spec = worker_spec(folder, gpus=1, max_length=300, **publish(tmp_path, {"text": texts}))
    member = Member(spec)
    assert member.max_length == 300
    member.prepare(0, 2)
    member.load()
    assert member.max_length == 128
    done: list[Any] = []
    member.predict_chunk(Predict(0, 0, 2), lambda *counts: None, done.append)
    member.finish()
    assert (done[0].counters.truncated_rows, done[0].bad_rows) == (1, ())
    assert done[0].counters.tokens == 128 + len(
        member._prompt.encode([{"text": texts[1]}]).inputs["input_ids"][0]
    )


def test_a_hint_before_loading_is_used(tmp_path: Path) -> None:
    from ensemble.worker.member import Member

    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    places = publish(tmp_path, {"text": TEXTS})
    member = Member(worker_spec(folder, gpus=1, **places))
    member.prepare(0, 40)
    member.load()
    # Whatever the table says by now, these rows have their token ids.
    member._table = pa.table({})
    done: list[Any] = []
    member.predict_chunk(Predict(0, 0, 40), lambda *counts: None, done.append)
    member.finish()
    assert done[0].counters.batches > 0
