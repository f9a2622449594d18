"""How a member's batches are made, on record: whose choice counts, and who hears of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from ensemble.common.gpus import Device
from ensemble.common.protocol import BatchChoice, Predict, Ready, decode, encode
from ensemble.common.shards import CHOICES_FILE, read_shard, shard_name
from ensemble.pipeline.resume import Choices, kept_batches
from ensemble.scheduling.batches import BatchRecord, room_text
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.state import ModelState
from tests.planning.test_plan import config, facts, gpus, make_plan
from tests.pretended import PretendedLauncher, PretendedWorker, make_scheduler

GIB = 1 << 30
T4 = [Device("GPU-0", "Tesla T4", (7, 5), 15 * GIB, 0)]
OTHER_T4 = [Device("GPU-1", "Tesla T4", (7, 5), 15 * GIB, GIB)]
P100 = [Device("GPU-2", "Tesla P100", (6, 0), 16 * GIB, 0)]


def ready(room_gib: int) -> Ready:
    return Ready(room_bytes=room_gib * GIB, max_room_bytes=room_gib * GIB + GIB // 2)


def test_the_first_worker_on_a_kind_of_device_decides() -> None:
    record = BatchRecord().with_worker(T4, ready(8))
    assert record.with_worker(OTHER_T4, ready(9)) == record
    assert record.choice(OTHER_T4) == BatchChoice(8 * GIB, False)
    assert record.choice(P100) == BatchChoice(None, False)
    assert record.with_worker(P100, ready(9)).rooms == {
        "Tesla T4 (16106127360 bytes)": 8 * GIB,
        "Tesla P100 (17179869184 bytes)": 9 * GIB,
    }
    both = record.with_worker([*T4, *P100], ready(4))
    assert both.choice([*P100, *T4]).room_bytes == 4 * GIB
    assert both.choice(T4).room_bytes == 8 * GIB


def test_a_room_that_does_not_fit_is_made_anew_with_a_note() -> None:
    before = BatchRecord().with_worker(T4, ready(8))
    after = before.with_worker(OTHER_T4, ready(7))
    assert after.choice(T4).room_bytes == 7 * GIB
    text = room_text(OTHER_T4, before, after, ready(7))
    assert text.startswith(
        "batches had 8.0 GiB beside the weights on Tesla T4, more than is free now, and go on"
    )
    assert "7.0 GiB" in text
    assert "third or fourth" in text
    assert room_text(T4, before, before, ready(8)) == ""
    assert room_text(T4, BatchRecord(), before, ready(8)) == "", "the first one takes over nothing"


def test_a_room_that_is_much_smaller_than_what_is_free_is_kept_with_a_note() -> None:
    """A first worker on a GPU that is nearly full, or an out-of-memory error in an earlier run."""
    before = BatchRecord().with_worker(T4, ready(8)).with_chunk(T4, BatchChoice(GIB))
    after = before.with_worker(OTHER_T4, ready(8))
    assert after == before
    text = room_text(OTHER_T4, before, after, ready(8))
    assert text.startswith(
        "batches keep the 1.0 GiB beside the weights that they began with on Tesla T4, although 8.0"
    )
    assert text.endswith("set max_num_batched_tokens, or run with --fresh")
    assert room_text(OTHER_T4, before, after, ready(1)) == ""


def test_what_chunks_teach_is_for_all_workers() -> None:
    record = BatchRecord().with_worker(T4, ready(8))
    shrunk = record.with_chunk(T4, BatchChoice(3 * GIB, in_float32=True))
    assert shrunk.choice(OTHER_T4) == BatchChoice(3 * GIB, in_float32=True)
    # A chunk that was dispatched before.
    assert shrunk.with_chunk(OTHER_T4, BatchChoice(8 * GIB)) == shrunk


def test_replicas_that_load_at_the_same_time_get_the_first_ones_room() -> None:
    """Neither has heard of the other while it loads; the command for the first chunk makes them agree."""
    devices = gpus(2)
    known = {"m0": facts(np.full(40, 200_000, dtype=np.int64))}
    (plan,) = make_plan(config({}), known, devices).models
    state = ModelState(replace(plan, first_replicas=2))
    scheduler = make_scheduler([state], devices, PretendedLauncher(), Rules(2, "fail", 60.0))
    scheduler._start_workers()
    first, second = scheduler._workers
    for worker, room_gib in ((first, 8), (second, 7)):
        event = Ready(room_bytes=room_gib * GIB, max_room_bytes=8 * GIB)
        worker.note(event, 0.0)
        scheduler._handle(worker, event)
        assert isinstance(worker.handle, PretendedWorker)
        command = worker.handle.got[-1]
        assert isinstance(command, Predict)
        assert command.choice == BatchChoice(8 * GIB)
        assert worker.record.ready == event, "without a note"


def test_a_record_is_read_back_and_a_damaged_one_is_none(tmp_path: Path) -> None:
    record = BatchRecord({"Tesla T4 (1 bytes)": 5})
    Choices(rooms=record.rooms).write([tmp_path])
    assert kept_batches([tmp_path]) == record
    for text in ("", "[]", "{}", '{"rooms": {"a": "5"}}', '{"rooms": {"b": -1}}'):
        (tmp_path / CHOICES_FILE).write_text(text)
        assert kept_batches([tmp_path]) == BatchRecord()
    (tmp_path / CHOICES_FILE).unlink()
    assert kept_batches([tmp_path]) == BatchRecord()


def test_shards_say_that_chunks_start_in_float32(tmp_path: Path) -> None:
    folders = [tmp_path / "m@a.0123", tmp_path / "m@b.0123"]
    for folder in folders:
        folder.mkdir()
    content = b'"row","p0"\n0,0.5\n'
    for in_float32 in (False, True):
        path = folders[1] / shard_name(0, 1, content, in_float32)
        path.write_bytes(content)
        assert read_shard(path) == content
        assert kept_batches(folders).in_float32 == in_float32
    path.write_bytes(b"something else")
    assert read_shard(path) is None


def test_a_choice_travels_with_its_message() -> None:
    command = Predict(1, 2, 3, choice=BatchChoice(7, in_float32=True))
    assert decode(encode(command)) == command
