"""A worker's memory does not grow with the table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from ensemble.common.protocol import ChunkDone, Closed, Load, Predict, Stop
from ensemble.data.table import TableNeeds, read_table
from ensemble.planning.chunks import cut_chunks
from ensemble.scheduling.launchers.local import LocalWorker
from tests.checkpoints import make_checkpoint
from tests.members.huggingface.scoring.test_predict import LABELS, start, worker_spec
from tests.waiting import wait_until

ROWS = 1_000_000


def next_event(worker: LocalWorker, kind: type[Any]) -> Any:
    results: list[Any] = []

    def has_come() -> bool:
        events = worker.receive()
        results.extend(event for event in events if isinstance(event, kind))
        assert results or worker.is_open, (events, worker.log.read_text())
        return bool(results)

    wait_until(has_come, f"a {kind.__name__}")
    return results[0]


@pytest.mark.long
def test_a_million_short_rows(tmp_path: Path) -> None:
    """Model + 600 MB is the promise; three chunks from both ends and the middle touch the whole order."""
    import pyarrow.csv as pa_csv

    folder = make_checkpoint(tmp_path / "m", "bert", LABELS)
    numbers = pa.array(np.arange(ROWS)).cast(pa.string())
    pa_csv.write_csv(pa.table({"id": numbers, "text": numbers}), tmp_path / "t.csv")
    needs = TableNeeds("id", None, (), ("text",), (), ("text",), None)
    table = read_table(tmp_path / "t.csv", needs)
    table.publish(tmp_path / "t.arrow")
    order, chunks = cut_chunks(table.text_lengths(["text"]))
    np.save(tmp_path / "order.npy", order)
    (tmp_path / "shards").mkdir()
    places = {"table_path": "t.arrow", "order_path": "order.npy", "shards_dir": "shards"}
    spec = worker_spec(folder, **{key: str(tmp_path / name) for key, name in places.items()})
    worker = LocalWorker({"CUDA_VISIBLE_DEVICES": ""}, tmp_path / "log")
    try:
        worker.send(start(spec))
        worker.send(Load())
        for chunk in (chunks[0], chunks[len(chunks) // 2], chunks[-1]):
            worker.send(Predict(chunk.index, chunk.start, chunk.stop))
            assert next_event(worker, ChunkDone).counters.rows == chunk.stop - chunk.start
        worker.send(Stop())
        assert next_event(worker, Closed).peak_memory_bytes < 600e6
    finally:
        worker.close()
