"""What a shard holds of a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.common.protocol import ChunkDone, Counters, Predict, Ready
from ensemble.members.predictor import Prediction
from ensemble.worker.shard_writer import write_shard
from tests.checkpoints import make_checkpoint
from tests.members.huggingface.scoring.test_predict import LABELS, make_session, predictor, start, worker_spec
from tests.worker.test_session import publish

pytestmark = pytest.mark.usefixtures("one_thread")


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
        done = write_shard(spec, Predict(4, 0, 6), rows, prediction)
        assert dict(zip(done.bad_rows, done.bad_row_reasons, strict=True)) == reasons
        assert list(done.bad_rows) == sorted(reasons)
        assert done.counters == Counters(chunks=1, rows=6, bad_rows=len(reasons), tokens=7)
        content = read_shard(Path(spec.shards_dir) / done.shard)
        assert content is not None
        assert [int(line.split(b",")[0]) for line in content.splitlines()[1:]] == good


def test_a_prediction_of_another_shape_is_refused(tmp_path: Path) -> None:
    spec = start(worker_spec(tmp_path, **publish(tmp_path, {"text": ["a"] * 4}))).spec.common
    with pytest.raises(ValueError, match=r"shape \(4, 2\), and \(4, 3\) was asked for"):
        write_shard(spec, Predict(0, 0, 4), np.arange(4), Prediction(np.ones((4, 2))))
    assert list((tmp_path / "shards").iterdir()) == []


def test_ids_are_made_for_the_length_of_the_loaded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The positions of a model are known only once it is loaded."""
    monkeypatch.setenv("ENSEMBLE_SIMULATED_GPUS", "1")
    folder = make_checkpoint(tmp_path / "m", "gpt2", LABELS)
    texts = ["a person who works " * 60, "any of various plants"]
    spec = worker_spec(folder, gpus=1, max_length=300, **publish(tmp_path, {"text": texts}))
    events: list[Any] = []
    session = make_session(spec, events.append)
    session.load()
    session.write(Predict(0, 0, 2), session.compute(Predict(0, 0, 2)))
    (ready,) = (event for event in events if isinstance(event, Ready))
    (done,) = (event for event in events if isinstance(event, ChunkDone))
    assert ready.max_length == 128
    assert (done.counters.truncated_rows, done.bad_rows) == (1, ())
    second = predictor(spec)._prompts[0].encode([{"text": texts[1]}])
    assert done.counters.tokens == 128 + len(second.inputs["input_ids"][0])
