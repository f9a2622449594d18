"""Real worker processes that are ended in the middle of a chunk."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from ensemble.common.protocol import Load, Predict, Progress
from ensemble.scheduling.launchers.local import LocalWorker
from tests.checkpoints import make_checkpoint, make_texts
from tests.members.huggingface.scoring.test_predict import LABELS, start, worker_spec
from tests.worker.test_heartbeat import wait_for_end
from tests.worker.test_memory import next_event
from tests.worker.test_session import publish

pytestmark = pytest.mark.usefixtures("warm")

ROWS = 10_000  # as one chunk: many seconds


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", LABELS)


def end_in_mid_chunk(checkpoint: Path, folder: Path, number: signal.Signals) -> tuple[int, str]:
    """The exit code and the log of a worker that got a signal while it computed."""
    places = publish(folder, {"text": [f"{row} {text}" for row, text in enumerate(make_texts(ROWS))]})
    environment = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    worker = LocalWorker(environment, folder / "log")
    try:
        worker.send(start(worker_spec(checkpoint, **places)))
        worker.send(Load())
        worker.send(Predict(0, 0, ROWS))
        while next_event(worker, Progress).rows == 0:  # the first ones come while it tokenizes
            pass
        if number == signal.SIGABRT:
            worker.abort()
        else:
            worker.terminate()
        wait_for_end(worker)
    finally:
        code = worker.close().code
    assert list((folder / "shards").iterdir()) == []
    return code, (folder / "log").read_text()


@pytest.mark.fault(5)
def test_a_worker_that_is_aborted_leaves_the_stacks_of_all_its_threads(
    checkpoint: Path, tmp_path: Path
) -> None:
    code, log = end_in_mid_chunk(checkpoint, tmp_path, signal.SIGABRT)
    assert code == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in log
    for function in ("in predict", "in _run", "in read_commands", "in serve"):
        assert function in log, log


def test_a_worker_that_is_told_to_end_drops_its_chunk(checkpoint: Path, tmp_path: Path) -> None:
    code, log = end_in_mid_chunk(checkpoint, tmp_path, signal.SIGTERM)
    assert code == -signal.SIGTERM
    assert "Traceback" not in log
