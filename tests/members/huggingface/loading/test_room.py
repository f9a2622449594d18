"""The memory that batches may take: the same for workers whose devices differ by some MiB, whoever comes first."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from ensemble.common.gpus import Device
from ensemble.common.protocol import Predict, Ready
from ensemble.members.footprint import Activation, Footprint, Weights
from ensemble.scheduling.batches import BatchRecord
from tests.checkpoints import make_checkpoint, make_texts
from tests.members.huggingface.scoring.test_predict import LABELS, make_session, worker_spec
from tests.sampling import one_in

pytestmark = pytest.mark.usefixtures("one_thread")
MIB, GIB = 1 << 20, 1 << 30
T4 = Device("GPU-0", "Tesla T4", (7, 5), 15 * GIB, 0)
RESERVE = int(0.05 * T4.total_bytes)


def ready_on(monkeypatch: pytest.MonkeyPatch, free_bytes: int, **changes: Any) -> tuple[Ready, Any]:
    """What a worker reports on a T4 of which CUDA says that so much is free, and its limit."""
    import torch

    from ensemble.members.huggingface.loading import load

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (free_bytes, T4.total_bytes))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda index: 4 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 4 * GIB + 5 * MIB)
    spec = worker_spec(Path("m"), **{"bytes_per_token": 900_000.0, **changes})
    memory, max_room_bytes = load._memory_limit(spec, SimpleNamespace(), on_gpu=True)
    room_bytes = None if memory is None else memory.available_bytes
    return Ready(room_bytes=room_bytes, max_room_bytes=max_room_bytes), memory


def batches(memory: Any, record: BatchRecord) -> list[list[int]]:
    """How a worker on the T4 cuts rows into batches."""
    from dataclasses import replace

    from ensemble.members.huggingface.scoring.forward import BatchSizes

    choice = record.choice([T4])
    assert choice.room_bytes is not None
    sizes = BatchSizes(16_384, None, memory=replace(memory, available_bytes=choice.room_bytes))
    lengths = np.random.default_rng(0).integers(20, 1000, 2000)
    return [batch.tolist() for batch in sizes.cut(lengths, np.arange(2000), np.zeros_like(lengths))]


@pytest.mark.parametrize("more_mib", one_in(3, [-200, -64, -4, -1, 1, 4, 64, 200]))
def test_two_workers_whose_free_memory_differs_cut_the_same_batches(
    more_mib: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Right at a step of the rounding, where the second one's own room would be another."""
    at_step = 8 * GIB + RESERVE - 5 * MIB
    free = at_step if more_mib < 0 else at_step - MIB
    first, memory = ready_on(monkeypatch, free)
    record = BatchRecord().with_worker([T4], first)
    expected = batches(memory, record)
    assert len(expected) > 100
    second, memory = ready_on(monkeypatch, free + more_mib * MIB)
    assert second.room_bytes != first.room_bytes
    record = record.with_worker([T4], second)
    assert batches(memory, record) == expected
    # The other order gives other batches, and again the same for both.
    record = BatchRecord().with_worker([T4], second).with_worker([T4], first)
    assert record.choice([T4]).room_bytes == second.room_bytes


def test_a_few_mib_seldom_matter_even_without_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    rooms = [ready_on(monkeypatch, 6 * GIB + step * 4 * MIB)[0].room_bytes for step in range(500)]
    assert len(set(rooms)) == 5
    free = 6 * GIB + 5 * MIB - RESERVE
    assert 7 / 8 * free < (rooms[0] or 0) <= free


@pytest.mark.parametrize("key", ["token_budget", "batch_size"])
def test_a_size_of_the_user_wins(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ready, memory = ready_on(monkeypatch, 6 * GIB, **{key: 64})
    assert (memory, ready.room_bytes, ready.max_room_bytes) == (None, None, None)
    record = BatchRecord({"some": 5})
    assert record.with_worker([T4], ready) == record


def test_the_plan_rounds_as_workers_do(monkeypatch: pytest.MonkeyPatch) -> None:
    width, activation = 1000, Activation(900_000.0, fixed_bytes=5 * MIB)
    weights = Weights(10**9, 4 * GIB, 10**8)
    footprint = Footprint(weights, activation, 0, 0, "float16", "", None, width)
    for free in range(9 * GIB, 12 * GIB, 100 * MIB):
        # CUDA's free bytes are those beside what the weights, and 5 MiB in reserve, take.
        _, memory = ready_on(monkeypatch, free - 4 * GIB - 5 * MIB, fixed_bytes=activation.fixed_bytes)
        assert footprint.token_budget(1, free - RESERVE) == memory.tokens_at(width)


def test_two_workers_write_the_same_shards(tmp_path: Path) -> None:
    """Real ones: the first has 1 MiB less than a step of the rounding, the second 3 MiB more."""
    import pyarrow as pa

    folder = make_checkpoint(tmp_path / "m", "llama", LABELS)
    texts = make_texts(120)
    table = pa.table({"text": texts})
    schema = table.schema.with_metadata({b"ensemble.rows": str(len(texts)).encode()})
    with pa.ipc.new_file(tmp_path / "t.arrow", schema) as file:
        file.write_table(table)
    np.save(tmp_path / "o.npy", np.arange(len(texts)))
    places = {"table_path": str(tmp_path / "t.arrow"), "order_path": str(tmp_path / "o.npy")}
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    record = BatchRecord()
    shards = []
    for number, more_mib in enumerate((-1, 3, -200)):
        shards_dir = tmp_path / f"shards {number}"
        shards_dir.mkdir()
        events: list[Any] = []
        room = {"bytes_per_token": 8e6, "memory_limit_bytes": 8 * GIB + weights + more_mib * MIB}
        spec = worker_spec(folder, max_length=128, shards_dir=str(shards_dir), **places, **room)
        session = make_session(spec, events.append)
        session.load()
        assert (events[-1].room_bytes == 8 * GIB) == (more_mib > 0)
        record = record.with_worker([], events[-1])
        command = Predict(0, 0, len(texts), choice=record.choice([]))
        session.write(command, session.compute(command))
        shards.append((events[-1].shard, events[-1].counters.batches))
        assert events[-1].choice == command.choice
    assert record.rooms == {"cpu": 7 * GIB + GIB // 2}
    assert shards[0][1] > 5
    assert shards[1:] == shards[:1] * 2
