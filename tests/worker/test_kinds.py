"""A member kind of somebody else's, in real worker processes: all that the worker asks of it, and no torch."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np

from ensemble.common.files import file_state
from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    Closed,
    Command,
    CommonSpec,
    Event,
    Failed,
    Heartbeat,
    Load,
    Predict,
    Ready,
    Start,
    Started,
    Stop,
    WorkerSpec,
)
from ensemble.members.predictor import Child
from ensemble.scheduling.launchers.local import LocalWorker
from tests.members.huggingface import lengths
from tests.waiting import wait_until
from tests.worker.test_session import publish

CHILD: Child = lengths  # mypy holds the module to the interface
TEXTS = ["aaa", "", "a", "a text that is too long", "why?"]


def start(folder: Path, files: Sequence[Path] = ()) -> Start:
    common = CommonSpec(
        labels=("short", "medium", "long"),
        activation="softmax",
        gpus=0,
        memory_limit_bytes=None,
        seed=0,
        files={str(path): file_state(path) for path in files},
        **cast(Any, publish(folder, {"text": TEXTS}, [2, 1, 0, 3, 4])),
    )
    (folder / "scale").write_text("4")
    settings = {"column": "text", "scale_path": str(folder / "scale")}
    return Start(WorkerSpec(common, "tests.members.huggingface.lengths", settings))


def answers(folder: Path, commands: Sequence[Command]) -> tuple[int, list[Event]]:
    """What a worker process says to these commands, heartbeats left out, and its exit code."""
    worker = LocalWorker({}, folder / "log")
    events: list[Any] = []

    def is_over() -> bool:
        events.extend(event for event in worker.receive() if not isinstance(event, Heartbeat))
        return not worker.is_open

    try:
        for command in commands:
            worker.send(command)
        wait_until(is_over, "the worker's end")
        wait_until(worker.has_exited, "the worker's end")
    finally:
        code = worker.close().code
    return code, events


def test_a_kind_of_another_package_predicts_without_torch(tmp_path: Path) -> None:
    commands = (Load(), Predict(0, 0, 4), Predict(1, 4, 5), Predict(2, 2, 3), Stop())
    code, events = answers(tmp_path, [start(tmp_path), *commands])
    log = (tmp_path / "log").read_text()
    assert code == 0, log
    kinds = [Started, Ready, ChunkDone, ChunkFailed, ChunkDone, Closed]
    assert sorted(type(event).__name__ for event in events) == sorted(kind.__name__ for kind in kinds), log
    started, ready = events[:2]
    assert isinstance(started, Started)
    assert started.versions == {"python": platform.python_version(), "numpy": np.__version__}
    assert isinstance(ready, Ready)
    assert (ready.device, ready.notes, ready.token_budget) == ("cpu", ("imported: []",), None)
    assert ready.load_seconds > 0
    first, second = (event for event in events if isinstance(event, ChunkDone))
    assert (first.chunk, first.bad_rows) == (0, (1, 3))
    assert first.bad_row_reasons[0] == "no text"
    assert first.bad_row_reasons[1].endswith("infinite or not as probabilities; raise the scale")
    assert (first.counters.rows, first.counters.bad_rows, first.counters.batches) == (4, 2, 1)
    lines = (tmp_path / "shards" / first.shard).read_text().splitlines()
    assert lines == ['"row","p0","p1","p2"', "2,0.75,0,0.25", "0,0.25,0,0.75"]
    assert (second.chunk, second.counters.rows) == (2, 1)
    (failed,) = (event for event in events if isinstance(event, ChunkFailed))
    assert (failed.chunk, failed.error_type, failed.message) == (1, "LookupError", "a text that asks")
    closed = events[-1]
    assert isinstance(closed, Closed)
    assert closed.peak_gpu_memory_bytes is None
    assert closed.peak_gpu_allocated_bytes is None
    assert "closed; imported: []" in log


def test_its_files_are_those_that_the_run_has_begun_with(tmp_path: Path) -> None:
    scale = tmp_path / "scale"
    scale.write_text("another scale")
    told = start(tmp_path, [scale])
    code, events = answers(tmp_path, [told, Load()])
    assert code == 1
    assert isinstance(events[-1], Failed)
    assert (events[-1].error_type, events[-1].can_retry) == ("FilesChanged", False)
    assert str(scale) in events[-1].message


def test_a_kind_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    told = start(tmp_path)
    told = Start(WorkerSpec(told.spec.common, "tests.worker.no_such_kind", {}))
    code, events = answers(tmp_path, [told])
    assert code == 1
    assert [type(event) for event in events] == [Failed]
    assert "tests.worker.no_such_kind" in asdict(events[0])["message"]
