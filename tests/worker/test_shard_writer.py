"""Shards written while the next chunk is computed: one at a time, and an error is the main thread's."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common.errors import WriteError
from ensemble.common.protocol import ChunkDone, Computed, Counters, Event, Predict, Ready
from ensemble.members.predictor import Prediction
from ensemble.worker.session import Session
from ensemble.worker.shard_writer import write_shard
from tests.checkpoints import make_checkpoint, make_texts, reference
from tests.waiting import PATIENCE_SECONDS, wait_until
from tests.worker.test_predict import LABELS, make_session, predictor, start, worker_spec
from tests.worker.test_session import publish

pytestmark = pytest.mark.usefixtures("one_thread")
TEXTS = make_texts(40)


class Told:
    """Events as they come; word of a shard waits until ``may_end`` is set."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Any]] = []
        self.may_end = threading.Event()
        self.may_end.set()

    def __call__(self, event: Event) -> None:
        self.events.append((threading.current_thread().name, event))
        if isinstance(event, ChunkDone):
            self.may_end.wait(PATIENCE_SECONDS)

    def done(self) -> list[tuple[str, ChunkDone]]:
        return [(name, event) for name, event in self.events if isinstance(event, ChunkDone)]

    def ready(self) -> Ready:
        return next(event for _, event in self.events if isinstance(event, Ready))


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def session(tmp_path: Path, told: Told) -> Session:
    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    made = make_session(worker_spec(folder, **publish(tmp_path, {"text": TEXTS})), told)
    made.load()
    return made


def chunk(number: int) -> Predict:
    return Predict(number, 10 * number, 10 * number + 10)


def test_no_more_than_one_shard_waits_while_the_next_is_computed(
    session: Session, told: Told, tmp_path: Path
) -> None:
    from ensemble.common.shards import read_shard

    told.may_end.clear()
    session.predict(chunk(0))  # returns although its shard is not done with
    behind = threading.Thread(target=session.predict, args=(chunk(1),))
    behind.start()
    behind.join(0.3)
    assert behind.is_alive(), "the second shard must wait for the first"
    wait_until(lambda: bool(told.done()), "the first shard")
    assert len(told.done()) == 1
    told.may_end.set()
    behind.join()
    session.wait()
    assert [name for name, _ in told.done()] == ["writer_0", "writer_0"]
    expected = reference(tmp_path / "m", TEXTS[:20])
    for place, (_, done) in enumerate(told.done()):
        content = read_shard(tmp_path / "shards" / done.shard)
        assert content is not None
        got = np.array([line.split(",") for line in content.decode().splitlines()[1:]], dtype=float)
        np.testing.assert_array_equal(got[:, 0], np.arange(10) + 10 * place)
        np.testing.assert_allclose(got[:, 1:], expected[10 * place : 10 * place + 10], atol=1e-5)
        assert 0 < done.counters.forward_seconds <= done.counters.predict_seconds
    order = [type(event) for _, event in told.events if isinstance(event, Computed | ChunkDone)]
    assert order == [Computed, ChunkDone, Computed, ChunkDone]


def test_an_error_in_writing_is_raised_by_the_next_chunk_and_at_the_end(
    session: Session, told: Told, tmp_path: Path
) -> None:
    shutil.rmtree(tmp_path / "shards")
    assert session.unwritten_chunk is None
    session.predict(chunk(2))
    with pytest.raises(WriteError, match="make room there") as at_the_end:
        session.wait()
    with pytest.raises(WriteError) as at_the_next:
        session.predict(chunk(3))
    assert at_the_next.value is at_the_end.value
    assert session.unwritten_chunk == 2
    assert not told.done()


def test_rows_that_are_no_probabilities_are_bad_rows(tmp_path: Path) -> None:
    from ensemble.common.shards import read_shard

    values = np.array([[0.2, 0.8], [np.nan, 1.0], [0.5, 0.6], [0.1, 0.9], [1.0, 0.0], [-0.5, 1.5]])
    rows = np.array([10, 9, 8, 7, 6, 5])
    bad = ["came out as NaN, infinite or not as probabilities; ask for more"] * 3
    for activation, good, reasons in (
        ("softmax", [10, 6], {5: bad[0], 7: "too long", 8: bad[0], 9: bad[0]}),
        ("sigmoid", [10, 8, 6], {5: bad[0], 7: "too long", 9: bad[0]}),
        ("none", [10, 8, 6, 5], {7: "too long", 9: bad[0]}),
    ):
        places = publish(tmp_path / activation, {"text": ["a"] * 20})
        spec = start(worker_spec(tmp_path, labels=("a", "b"), activation=activation, **places)).spec.common
        prediction = Prediction(values, {3: "too long"}, Counters(tokens=7, rows=1), "ask for more")
        done = write_shard(spec, Predict(4, 0, 6), rows, prediction, 6)
        assert dict(zip(done.bad_rows, done.bad_row_reasons, strict=True)) == reasons
        assert list(done.bad_rows) == sorted(reasons)
        assert done.counters == Counters(chunks=1, rows=6, bad_rows=len(reasons), tokens=7)
        content = read_shard(Path(spec.shards_dir) / done.shard)
        assert content is not None
        assert [int(line.split(b",")[0]) for line in content.splitlines()[1:]] == good


def test_a_prediction_of_another_shape_is_refused(tmp_path: Path) -> None:
    spec = start(worker_spec(tmp_path, **publish(tmp_path, {"text": ["a"] * 4}))).spec.common
    with pytest.raises(ValueError, match=r"shape \(4, 2\), and \(4, 3\) was asked for"):
        write_shard(spec, Predict(0, 0, 4), np.arange(4), Prediction(np.ones((4, 2))), 4)
    assert list((tmp_path / "shards").iterdir()) == []


def test_ids_are_made_for_the_length_of_the_loaded_model(tmp_path: Path, told: Told) -> None:
    """The positions of a model are known only once it is loaded."""
    folder = make_checkpoint(tmp_path / "m", "gpt2", LABELS)
    texts = ["a person who works " * 60, "any of various plants"]
    spec = worker_spec(folder, gpus=1, max_length=300, **publish(tmp_path, {"text": texts}))
    session = make_session(spec, told)
    session.load()
    assert told.ready().max_length == 128
    session.predict(Predict(0, 0, 2))
    session.wait()
    ((_, done),) = told.done()
    assert (done.counters.truncated_rows, done.bad_rows) == (1, ())
    second = predictor(spec)._prompts[0].encode([{"text": texts[1]}])
    assert done.counters.tokens == 128 + len(second.inputs["input_ids"][0])
