"""A cluster within this process: nodes of GPUs whose workers answer as real ones do, and only pretend to compute.

A launcher like any other, ``launcher: {pretended: {nodes: 64, gpus: 8}}`` once it is registered.  What it takes to
pretend is counted apart from what it takes to keep what came, which the run's own process does with any launcher
whose workers are elsewhere.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.common.gpus import Device, Inventory
from ensemble.common.protocol import (
    ChunkDone,
    Closed,
    Command,
    Counters,
    Event,
    Heartbeat,
    Load,
    Predict,
    Progress,
    Ready,
    Start,
    Started,
    Stop,
)
from ensemble.common.shards import shard_name, write_shards
from ensemble.scheduling.launchers.base import LAUNCHERS, Exit, Handle, Launcher, WorkerStart

_GIB = 1 << 30
_GPU_BYTES, _HOST_BYTES = 80 * _GIB, 512 * _GIB
_START_SECONDS, _LOAD_SECONDS, _WRITE_SECONDS = 0.3, 0.2, 0.02
# As a worker's own, see ``ensemble.worker``.
_HEARTBEAT_SECONDS, _PROGRESS_SECONDS = 2.0, 0.5
# Probabilities have so many digits, so that a run of 50 million rows fits on a small disk.
DIGITS = 3


@dataclass
class Tally:
    """What a pretended cluster did; seconds are of this thread's CPU.

    Attributes:
        pretending_seconds: of making events and shards, which workers on other machines would do.
        sealing_seconds: of keeping the shards that came; with those of the threads that help.
        helped_seconds: of these threads.
        shard_bytes: of these.
        turns: how often somebody waited for events.
        calls: of the handles' methods, by name.
    """

    pretending_seconds: float = 0.0
    sealing_seconds: float = 0.0
    helped_seconds: float = 0.0
    shard_bytes: int = 0
    chunks: int = 0
    rows: int = 0
    events: int = 0
    turns: int = 0
    most_running: int = 0
    calls: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def pretending(self) -> Iterator[None]:
        began = time.thread_time()
        try:
            yield
        finally:
            self.pretending_seconds += time.thread_time() - began


# Of the launcher that was made last: a run makes its own.
last_tally = Tally()


def register() -> None:
    """Let configs name it."""
    assert isinstance(LAUNCHERS.built_in, dict)
    LAUNCHERS.built_in["pretended"] = "bench.pretended:PretendedLauncher"


def probabilities(rows: npt.NDArray[np.int64], member: int, labels: int) -> npt.NDArray[np.float64]:
    """What a member says of rows of the table, [rows, labels]: made up, the same at each time, with few digits."""
    whole = 10**DIGITS
    mixed = (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15 + 2 * member)
    first = ((mixed >> np.uint64(40)) % np.uint64(whole + 1)).astype(np.int64)
    parts = np.zeros((len(rows), labels), dtype=np.int64)
    parts[:, 0], parts[:, 1] = first, whole - first
    return np.asarray(parts / whole)


class PretendedLauncher(Launcher):
    """Pretends.

    Settings: ``nodes``, ``gpus`` of each, ``chunk_seconds``, which a chunk takes (0: as fast as it goes).
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        global last_tally
        super().__init__({})
        self._nodes, self._gpus = int(settings["nodes"]), int(settings["gpus"])
        self.chunk_seconds = float(settings["chunk_seconds"])
        self.tally = last_tally = Tally()
        self._numbers = count()
        self._due: list[tuple[float, int, PretendedWorker, Callable[[], Event | None]]] = []
        self._running = 0

    def inventory(self) -> Inventory:
        devices = tuple(
            Device(f"GPU-{node:04d}-{gpu:02d}", "Pretended", (9, 0), _GPU_BYTES, 0, f"node-{node}")
            for node in range(self._nodes)
            for gpu in range(self._gpus)
        )
        hosts = tuple(
            Device("cpu", "CPU", None, _HOST_BYTES, 0, f"node-{node}") for node in range(self._nodes)
        )
        return Inventory(devices, "", None, (), hosts=hosts)

    def start(self, start: WorkerStart) -> PretendedWorker:
        with self.tally.pretending():
            worker = PretendedWorker(self, next(self._numbers), start)
            self.later(_START_SECONDS, worker, lambda: Started({}, _START_SECONDS))
            worker.beat()
            self._running += 1
            self.tally.most_running = max(self.tally.most_running, self._running)
            return worker

    def later(self, seconds: float, worker: PretendedWorker, what: Callable[[], Event | None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._numbers), worker, what))

    def ended(self) -> None:
        self._running -= 1

    def wait(self, handles: Sequence[Handle], timeout_seconds: float) -> Collection[Handle]:
        self.tally.turns += 1
        now = time.monotonic()
        until = min(self._due[0][0] if self._due else now + timeout_seconds, now + timeout_seconds)
        time.sleep(max(0.0, until - now))
        heard: dict[PretendedWorker, None] = {}
        with self.tally.pretending():
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                *_, worker, what = heapq.heappop(self._due)
                if (event := what()) is not None:
                    worker.events.append(event)
                    self.tally.events += 1
                    heard[worker] = None
            waited_for = set(handles)
        self._seal({path: content for worker in heard for path, content in worker.came().items()})
        return [worker for worker in heard if worker in waited_for]

    def _seal(self, shards: dict[Path, bytes]) -> None:
        """Keep the shards that have come, as whoever gets them over a line has to."""
        began, began_process = time.thread_time(), time.process_time()
        unsealed = write_shards(shards)
        if unsealed:
            raise next(iter(unsealed.values()))
        spent, spent_process = time.thread_time() - began, time.process_time() - began_process
        self.tally.helped_seconds += max(0.0, spent_process - spent)
        self.tally.sealing_seconds += spent_process

    def used_memory(self, uuids: Collection[str]) -> dict[str, int | None]:
        return dict.fromkeys(uuids, 0)

    def available_memory(self, devices: Sequence[Device]) -> int | None:
        return _HOST_BYTES


class PretendedWorker(Handle):
    """Says what a worker says, when it would say it."""

    def __init__(self, launcher: PretendedLauncher, number: int, start: WorkerStart) -> None:
        self.process = f"{number} on {start.devices[0].node if start.devices else 'node-0'}"
        self.events: list[Event] = []
        self._launcher = launcher
        self._spec = start.command.spec
        self._member = int(self._spec.settings["kwargs"]["member"])
        self._shards = Path(self._spec.common.shards_dir)
        self._is_over = False
        self._came: dict[Path, bytes] = {}  # shards that are not on the run's disk yet

    def _count(self, call: str) -> None:
        calls = self._launcher.tally.calls
        calls[call] = calls.get(call, 0) + 1

    def beat(self) -> None:
        """Say from time to time that it lives."""

        def say() -> Event | None:
            if self._is_over:
                return None
            self.beat()
            return Heartbeat(0.0)

        self._launcher.later(_HEARTBEAT_SECONDS, self, say)

    def send(self, command: Command) -> None:
        self._count(type(command).__name__)
        later, tally = self._launcher.later, self._launcher.tally
        with tally.pretending():
            if isinstance(command, Load):
                later(
                    _LOAD_SECONDS,
                    self,
                    lambda: Ready(_LOAD_SECONDS, "Pretended", "bfloat16", "sdpa", 1, 512, 4096),
                )
            elif isinstance(command, Predict):
                # No two take as long as each other.
                seconds = self._launcher.chunk_seconds * (0.9 + 0.2 * (command.chunk * 0.618034 % 1.0))
                rows = command.stop - command.start
                for step in range(1, int(seconds / _PROGRESS_SECONDS) + 1):
                    done = int(rows * step * _PROGRESS_SECONDS / seconds)
                    said = Progress(command.chunk, done, 30 * done, 31 * done)
                    later(step * _PROGRESS_SECONDS, self, partial(self._unless_over, said))
                later(seconds + _WRITE_SECONDS, self, lambda: self._done(command, seconds))
            elif isinstance(command, Stop):
                self._is_over = True
                later(0.05, self, lambda: Closed(1 << 30, 1 << 30))
            assert not isinstance(command, Start)

    def _unless_over(self, event: Event) -> Event | None:
        return None if self._is_over else event

    def _done(self, command: Predict, seconds: float) -> ChunkDone:
        rows = np.asarray(_order(self._spec.common.order_path)[command.start : command.stop])
        values = probabilities(rows, self._member, len(self._spec.common.labels))
        columns = {"row": pa.array(rows)} | {f"p{n}": pa.array(column) for n, column in enumerate(values.T)}
        sink = pa.BufferOutputStream()
        pa_csv.write_csv(pa.table(columns), sink)
        content = sink.getvalue().to_pybytes()
        folder = self._spec.common.jobs[command.job].folder
        name = f"{folder}/{shard_name(command.start, command.stop, content)}"
        self._came[self._shards / name] = content
        tally = self._launcher.tally
        tally.chunks, tally.rows = tally.chunks + 1, tally.rows + len(rows)
        tally.shard_bytes += len(content)
        tokens = 30 * len(rows)
        return ChunkDone(
            command.chunk,
            name,
            Counters(1, len(rows), 0, tokens, tokens, 64, predict_seconds=seconds, forward_seconds=seconds),
        )

    def came(self) -> dict[Path, bytes]:
        """The shards that have come since the last call."""
        came, self._came = self._came, {}
        return came

    def receive(self) -> list[Event]:
        events, self.events = self.events, []
        if events and isinstance(events[-1], Closed):
            self.is_open = False
        return events

    def has_exited(self) -> bool:
        self._launcher.tally.calls["has_exited"] = self._launcher.tally.calls.get("has_exited", 0) + 1
        return self._is_over and not self.is_open

    def terminate(self) -> None:
        self._is_over, self.is_open = True, False

    def abort(self) -> None:
        self.terminate()

    def close(self) -> Exit:
        self._is_over = True
        self._launcher.ended()
        return Exit(0, "ended with exit code 0")


@cache
def _order(path: str) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = np.load(path, mmap_mode="r")
    return found
