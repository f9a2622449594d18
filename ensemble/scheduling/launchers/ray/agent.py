"""What runs on each node of a cluster: it starts workers there, and passes on what they say.

A worker is the same fresh, pinned process as on one machine, started by the same launcher; it ends with its agent,
and the agent with the run that has started it.  Nothing here needs Ray: it is made an actor where it is started.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ensemble.common import gpus, host
from ensemble.common.device_trials import Trial, run_trials
from ensemble.common.files import FileState, HubFile, file_state, free_bytes
from ensemble.common.gpus import Device, Inventory, Telemetry
from ensemble.common.protocol import ChunkDone, Command, Event, Failed, ProtocolError, WorkerSpec
from ensemble.common.python_process import python_environment
from ensemble.common.text import gib
from ensemble.scheduling.launchers.base import Exit, WorkerStart
from ensemble.scheduling.launchers.local import LocalLauncher, LocalWorker
from ensemble.scheduling.launchers.ray.copies import Copy, Piece, copies_of, copy_of, with_paths

# What must be the same on all nodes: numbers depend on them, and messages.
SAME_PACKAGES = ("ensemble-runner", "torch", "transformers", "tokenizers")
# How often it looks at the memory of its host and devices.
_LOOK_SECONDS = 0.25
_LOG_BYTES = 1 << 16
_HUB_SECONDS = 5.0
_WATCH_SECONDS = 0.5
# Ray ends an agent when its run is over; where it has not by then, its head is not there.
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class NodeFacts:
    """What a node says of itself; ``versions`` are those of Python and of ``SAME_PACKAGES``, by name."""

    host: str
    folder: str  # of all that the run has there
    versions: Mapping[str, str]
    inventory: Inventory  # what Ray has given to the agent
    held: tuple[Device, ...]  # GPUs that Ray has given to others
    cpus: int
    total_bytes: int  # of the host's memory
    used_bytes: int
    free_disk_bytes: int | None  # where ``folder`` is


@dataclass
class Batch:
    """What has happened on a node since the last one.

    Attributes:
        events: of workers, by their numbers, in order.
        pids: of their processes, by their numbers.
        broken: what is wrong with what a worker said, by its number.
        shards: the files that ``ChunkDone`` speaks of, by worker and name.
        logs: what they have printed, by their numbers.
        exits: of those that have ended by themselves or were closed.
        used_bytes, telemetry: of its devices, by UUID.
        available_bytes: of the host's memory.
    """

    events: list[tuple[int, Event]] = field(default_factory=list)
    broken: dict[int, str] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    shards: dict[tuple[int, str], bytes] = field(default_factory=dict)
    logs: list[tuple[int, bytes]] = field(default_factory=list)
    exited: set[int] = field(default_factory=set)
    used_bytes: Mapping[str, int | None] = field(default_factory=dict)
    telemetry: Mapping[str, Telemetry | None] = field(default_factory=dict)
    available_bytes: int | None = None


@dataclass(frozen=True)
class Ended:
    """How a worker ended, and what it had printed that nobody has read."""

    exit: Exit
    printed: bytes


@dataclass
class _Worker:
    process: LocalWorker
    log: Path
    shards: Path
    printed: int = 0  # bytes of its log that were passed on
    is_known: bool = False  # its process number was passed on


class Agent:
    """One for each node and run.

    Args:
        environment: variables of the run's own process that workers shall have here, too; None: unset.
        gpu_count: how many GPUs Ray knows of this node.
    """

    def __init__(self, environment: Mapping[str, str | None], gpu_count: int = 0) -> None:
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self._folder = Path(tempfile.mkdtemp(prefix="ensemble-node-"))
        self._launcher = LocalLauncher({})
        self._inventory = gpus.inventory()
        own = {gpu.uuid for gpu in self._inventory.gpus}
        others = [gpu for gpu in _gpus_of_ray(gpu_count) if gpu.uuid not in own]
        self._held = tuple(replace(gpu, is_held=True) for gpu in others[: max(0, gpu_count - len(own))])
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.RLock()
        self._states: dict[str, FileState] = {}
        self._unwritten: dict[str, int] = {}  # bytes of each file that has begun to come
        self._stillborn: dict[int, str] = {}  # workers that could not be started, and why
        self._looked_at = 0.0
        self._forgotten_at = math.inf
        self._is_over = threading.Event()
        _remove_after_this_process(self._folder)
        threading.Thread(target=self._end_with_node, args=(os.getppid(),), daemon=True).start()

    def facts(self) -> NodeFacts:
        total, available = host.total_memory_bytes() or 0, host.available_memory_bytes() or 0
        return NodeFacts(
            host=platform.node(),
            folder=str(self._folder),
            versions=versions(),
            inventory=self._inventory,
            held=self._held,
            cpus=len(os.sched_getaffinity(0)),
            total_bytes=total,
            used_bytes=max(0, total - available),
            free_disk_bytes=free_bytes(self._folder),
        )

    def trials(self, devices: Sequence[Device], imports: Sequence[str], flash_attention: bool) -> list[Trial]:
        """Try torch on these devices of the node."""
        return run_trials(devices, imports, host.available_memory_bytes(), flash_attention=flash_attention)

    def pulse(self) -> None:
        """Nothing; that it is answered says that this node is there."""

    # Files.

    def place(self, path: str) -> str:
        """Where a file of the run's machine is to lie here."""
        # Without "..", which could lead out of the folder.
        return str(self._folder / "files" / os.path.normpath(path).lstrip("/"))

    def check(self, copies: Mapping[str, Copy]) -> dict[str, str]:
        """Which of these files are not here as they are there, by their path there: "missing", or "another"."""
        states = {path: file_state(path) for path in copies}
        own, unread = dict[str, Copy](), set[str]()
        try:
            own = copies_of(copies)
        except OSError:  # one that nobody may read; which one
            for path in copies:
                try:
                    own |= copies_of([path])
                except OSError:
                    unread.add(path)
        found = {}
        for path, expected in copies.items():
            if path not in own:
                found[path] = "unreadable" if path in unread else "missing"
            elif own[path] != expected:
                found[path] = "another"
            elif (state := states[path]) is not None:
                self._states[path] = state
        return found

    def lacks(self, files: Collection[HubFile]) -> dict[HubFile, str]:
        """Which of these are not in this node's cache of the hub, and do not come from there; why."""
        # Not before the variables of this process are those that the workers will have.
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        found = {}
        for file in files:
            folder, name, revision = file
            if isinstance(try_to_load_from_cache(folder, name, revision=revision), str):
                continue
            try:
                hf_hub_download(folder, name, revision=revision, etag_timeout=_HUB_SECONDS)
            except Exception as error:  # the hub's errors share no base; each of them means "not to be had"
                found[file] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"[:200]
        return found

    def write(self, pieces: Sequence[Piece]) -> str:
        """Write parts of files of the run's machine, in any order.

        Returns:
            What went wrong; empty where nothing did.
        """
        for piece in pieces:
            target = Path(self.place(piece.path))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with os.fdopen(os.open(target, os.O_CREAT | os.O_RDWR, 0o600), "r+b") as file:
                    file.seek(piece.offset)
                    file.write(piece.data)
                with self._lock:
                    left = self._unwritten.get(piece.path, piece.whole.size) - len(piece.data)
                    self._unwritten[piece.path] = left
                if left:
                    continue
                state, found = file_state(target), copy_of(target)
            except OSError as error:
                free = free_bytes(self._folder)
                left_there = f", {gib(free)} free" if free is not None else ""
                return f"{self._folder} cannot take {piece.path} ({error.strerror or error}{left_there})"
            if found != piece.whole or state is None:
                return f"{piece.path} is not in {self._folder} as it was when the run began"
            self._states[str(target)] = state
        return ""

    def link(self, paths: Sequence[str]) -> str:
        """Let files that are here as they are there stand beside those that were written; what went wrong."""
        for path in paths:
            target = Path(self.place(path))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                target.symlink_to(path)
            except FileExistsError:  # of another member
                pass
            except OSError as error:
                return f"{self._folder} cannot take {path} ({error.strerror or error})"
            if path in self._states:
                self._states[str(target)] = self._states[path]
        return ""

    # Workers.

    def start(self, number: int, start: WorkerStart, paths: Mapping[str, str], search: Sequence[str]) -> None:
        """Start a worker; one that cannot be started says so as others do that fail.

        Args:
            start: as the run's machine has it, with the paths there.
            paths: those of its texts that are paths of the run's machine, and what they are here.
            search: folders here in which its modules are, too.
        """
        common = start.command.spec.common
        shards = self._folder / "shards" / str(number)
        files = {paths.get(path, path) for path in common.files}
        here = replace(
            common,
            table_path=self.place(common.table_path),
            order_path=self.place(common.order_path),
            shards_dir=str(shards),
            files={path: self._states[path] for path in files if path in self._states},
        )
        settings = with_paths(start.command.spec.settings, paths)
        spec = WorkerSpec(here, start.command.spec.kind, settings)
        environment = dict(start.environment)
        if search:
            known = python_environment().get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (known, *search)))
        log = self._folder / f"worker-{number}.log"
        command = replace(start.command, spec=spec)
        try:
            shards.mkdir(parents=True)
            process = self._launcher.start(replace(start, command=command, environment=environment, log=log))
        except OSError as error:
            with self._lock:
                self._stillborn[number] = f"it could not be started on its node ({error})"
            return
        with self._lock:
            self._workers[number] = _Worker(process, log, shards)

    def send(self, number: int, command: Command) -> None:
        with self._lock:
            if (worker := self._workers.get(number)) is not None:
                worker.process.send(command)

    def terminate(self, number: int) -> None:
        with self._lock:
            if (worker := self._workers.get(number)) is not None:
                worker.process.terminate()

    def abort(self, number: int) -> None:
        with self._lock:
            if (worker := self._workers.get(number)) is not None:
                worker.process.abort()

    def close(self, number: int) -> Ended:
        """End what still runs of a worker, with all that it started."""
        with self._lock:
            if (worker := self._workers.pop(number, None)) is None:
                return Ended(Exit(1, "could not be started"), b"")
        exit_ = worker.process.close()
        printed = self._printed(worker)
        shutil.rmtree(worker.shards, ignore_errors=True)
        worker.log.unlink(missing_ok=True)
        return Ended(exit_, printed)

    def poll(self, seconds: float, forgotten_seconds: float) -> Batch:
        """What has happened; waits so long for something to happen.

        Args:
            forgotten_seconds: if nobody asks again within them, the run has lost this node, or has ended.
        """
        self._forgotten_at = math.inf
        try:
            return self._poll(seconds)
        finally:
            self._forgotten_at = time.monotonic() + forgotten_seconds

    def _poll(self, seconds: float) -> Batch:
        batch = Batch()
        with self._lock:
            workers = dict(self._workers)
            stillborn, self._stillborn = self._stillborn, {}
        for number, text in stillborn.items():
            batch.events.append((number, Failed("OSError", text, "", can_retry=True)))
            batch.exited.add(number)
        handles = {worker.process: number for number, worker in workers.items() if worker.process.is_open}
        if stillborn:
            seconds = 0.0
        if handles:
            self._launcher.wait([*handles], seconds)
        else:
            time.sleep(seconds)
        for number, worker in workers.items():
            with self._lock:
                if number in self._workers:
                    self._hear(number, worker, batch)
        uuids = [device.uuid for device in (*self._inventory.gpus, *self._held)]
        now = time.monotonic()
        if now - self._looked_at >= _LOOK_SECONDS:
            self._looked_at = now
            batch.used_bytes, batch.telemetry = gpus.used_memory(uuids), gpus.telemetry(uuids)
            batch.available_bytes = host.available_memory_bytes()
        return batch

    def _hear(self, number: int, worker: _Worker, batch: Batch) -> None:
        if not worker.is_known:
            worker.is_known, batch.pids[number] = True, worker.process.pid
        has_exited = worker.process.has_exited()
        try:
            events = worker.process.receive()
        except ProtocolError as error:
            events, batch.broken[number] = [], str(error)
        for event in events:
            if isinstance(event, ChunkDone):
                shard = worker.shards / event.shard
                try:
                    batch.shards[number, event.shard] = shard.read_bytes()
                    shard.unlink()
                except OSError as error:
                    batch.broken[number] = f"{shard} cannot be read ({error.strerror})"
            batch.events.append((number, event))
        if text := self._printed(worker):
            batch.logs.append((number, text))
        if has_exited:
            batch.exited.add(number)

    def _printed(self, worker: _Worker) -> bytes:
        with contextlib.suppress(OSError), worker.log.open("rb") as file:
            file.seek(worker.printed)
            text = file.read(_LOG_BYTES)
            worker.printed += len(text)
            return text
        return b""

    def _end_with_node(self, raylet: int) -> None:
        """End with the process that has started this one, which Ray leaves to itself where that was killed."""
        while os.getppid() == raylet and time.monotonic() < self._forgotten_at:
            if self._is_over.wait(_WATCH_SECONDS):
                time.sleep(_LEAVE_SECONDS)
                break
        self.end()
        os._exit(1)

    def end(self) -> None:
        """The run is over: nothing of it stays on this node."""
        with self._lock:
            for number in list(self._workers):
                self.close(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def leave(self) -> None:
        """The same; and this process ends by itself if Ray does not end it."""
        self.end()
        self._is_over.set()


class Holder:
    """Has a GPU of which the agent could not have been given: it is kept for the run as long as this lives."""

    def uuids(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in gpus.inventory().gpus)


def _gpus_of_ray(count: int) -> tuple[Device, ...]:
    """The GPUs of this node that Ray knows, whoever has them: as many of those that the raylet sees."""
    visible = {}
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        variables = dict(pair.decode(errors="replace").partition("=")[::2] for pair in pairs)
        visible = {name: variables[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in variables}
    return gpus.inventory(visible).gpus[:count]


def _remove_after_this_process(folder: Path) -> None:
    """Have a folder removed once this process has ended, however it does: Ray ends it without a word."""
    read_end, _ = os.pipe()  # the other one closes with this process
    # Not its child, which Ray may end as well; and once more for what workers still wrote that were about to end.
    # Where the agent itself has removed it, they have all ended.
    script = (
        "exec 3<&0 >/dev/null 2>&1; "
        '(read -r line <&3; [ -e "$1" ] || exit 0; sleep 1; rm -rf -- "$1"; sleep 5; rm -rf -- "$1") &'
    )
    subprocess.run(
        ["/bin/sh", "-c", script, "sh", folder], stdin=read_end, start_new_session=True, check=True
    )
    os.close(read_end)


def versions() -> dict[str, str]:
    """Those of Python and of ``SAME_PACKAGES`` here, by name."""
    found = {"python": platform.python_version()}
    for name in SAME_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
