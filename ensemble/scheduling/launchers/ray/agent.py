"""Start workers on a node of a cluster and pass on their events, as the node's agent.

A worker is the same fresh, pinned process as on one machine, started by the same launcher.  A worker ends with its
agent, and the agent ends with its run.  Nothing here imports Ray: the launcher turns the agent into an actor.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

from ensemble.common import gpus, host
from ensemble.common.device_trials import DeviceTrial, run_trials
from ensemble.common.files import FileState, HubFile, file_state, free_bytes
from ensemble.common.gpus import Device, Inventory
from ensemble.common.packages import DISTRIBUTION, installed_versions
from ensemble.common.protocol import ChunkDone, Command, Event, Failed, ProtocolError, WorkerSpec
from ensemble.common.python_process import python_environment
from ensemble.common.text import gib
from ensemble.scheduling.launchers.base import Exit, Node, WorkerStart
from ensemble.scheduling.launchers.local import LocalLauncher, LocalWorker
from ensemble.scheduling.launchers.ray.copies import THREADS, Copy, Piece, copy_of, with_paths

# Packages whose versions must be the same on all nodes: numbers and messages depend on them.
_SAME_PACKAGES = (DISTRIBUTION, "torch", "transformers", "tokenizers")
_LOG_BYTES = 1 << 16
_HUB_SECONDS = 5.0
_WATCH_SECONDS = 0.5
# Ray ends an agent when its run is over; if it has not by then, its head has gone.
_LEAVE_SECONDS = 5.0


@dataclass(frozen=True)
class NodeFacts:
    """Describe a node."""

    folder: str  # of everything that the run has there
    inventory: Inventory  # the devices that Ray has given to the agent
    node: Node  # without models; with the GPUs that Ray has given to others, too


@dataclass
class WorkerNews:
    """Tell what has happened to a worker since the last batch."""

    has_exited: bool
    events: list[Event] = field(default_factory=list)
    shards: dict[str, bytes] = field(default_factory=dict)  # the files that ``ChunkDone`` names
    printed: bytes = b""


@dataclass
class Batch:
    """Tell what has happened on a node since the last batch."""

    workers: Mapping[int, WorkerNews] = field(default_factory=dict)  # by number
    used_bytes: Mapping[str, int | None] = field(default_factory=dict)  # by UUID
    available_bytes: int | None = None  # of the host's memory


@dataclass
class _Worker:
    process: LocalWorker
    log: Path
    shards: Path
    printed: int = 0  # bytes of its log that were passed on


class Agent:
    """Start and watch a run's workers on a node.

    Args:
        environment: variables of the run's own process that workers here get, too; None: unset.
        name: the node's.
        gpu_count: how many GPUs Ray knows of this node.
    """

    def __init__(self, environment: Mapping[str, str | None], name: str = "", gpu_count: int = 0) -> None:
        for variable, value in environment.items():
            if value is None:
                os.environ.pop(variable, None)
            else:
                os.environ[variable] = value
        self._folder = Path(tempfile.mkdtemp(prefix="ensemble-node-"))
        self._launcher = LocalLauncher({})
        inventory = gpus.inventory()
        uuids = {gpu.uuid for gpu in inventory.gpus}
        others = [gpu for gpu in _gpus_of_ray(gpu_count) if gpu.uuid not in uuids]
        others = others[: max(0, gpu_count - len(uuids))]
        own_gpus = tuple(replace(gpu, node=name) for gpu in inventory.gpus)
        node = Node(
            name=name,
            gpus=(*own_gpus, *(replace(gpu, node=name, is_held=True) for gpu in others)),
            cpus=len(os.sched_getaffinity(0)),
            total_bytes=host.total_memory_bytes() or 0,
            available_bytes=host.available_memory_bytes() or 0,
            free_disk_bytes=free_bytes(self._folder),
            versions=versions(),
            models={},
        )
        self._facts = NodeFacts(str(self._folder), replace(inventory, gpus=own_gpus), node)
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.RLock()
        self._states: dict[str, FileState] = {}
        self._forgotten_at = math.inf  # when the run has lost this node, unless it polls before
        self._is_over = threading.Event()
        _remove_after_this_process(self._folder)
        threading.Thread(target=self._end_with_node, args=(os.getppid(),), daemon=True).start()

    def facts(self) -> NodeFacts:
        return self._facts

    def trials(
        self, devices: Sequence[Device], imports: Sequence[str], flash_attention: bool
    ) -> list[DeviceTrial]:
        """Try torch on these devices of the node."""
        return run_trials(devices, imports, host.available_memory_bytes(), flash_attention=flash_attention)

    def ping(self) -> None:
        """Answer, which shows that this node responds."""

    # Files.

    def local_path(self, path: str) -> str:
        """Return where a file of the run's machine is to be on this node."""
        # Without "..", which could lead out of the folder.
        return str(self._folder / "files" / os.path.normpath(path).lstrip("/"))

    def check(self, copies: Mapping[str, Copy]) -> dict[str, str]:
        """Return which of these files are "missing" at the same path on this node, or are "another" file there.

        A file that cannot be read counts as "another".
        """
        with ThreadPoolExecutor(THREADS) as pool:
            reasons = zip(copies, pool.map(self._difference, copies.keys(), copies.values()), strict=True)
            return {path: reason for path, reason in reasons if reason}

    def _difference(self, path: str, expected: Copy) -> str:
        try:
            state = file_state(path)
            if state is None or copy_of(path) != expected:
                return "missing" if state is None else "another"
        except OSError:
            return "another"
        self._states[path] = state
        return ""

    def missing_hub_files(self, files: Collection[HubFile]) -> dict[HubFile, str]:
        """Download files of the hub that are not in this node's cache; return those that fail, and why."""
        # Imported once the variables of this process are those that the workers will have.
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        reasons = {}
        for file in files:
            folder, name, revision = file
            if isinstance(try_to_load_from_cache(folder, name, revision=revision), str):
                continue
            try:
                hf_hub_download(folder, name, revision=revision, etag_timeout=_HUB_SECONDS)
            except Exception as error:  # the hub's errors share no base; each of them means "not to be had"
                first_line = (str(error).strip().splitlines() or [""])[0]
                reasons[file] = f"{type(error).__name__}: {first_line}"[:200]
        return reasons

    def write(self, pieces: Sequence[Piece]) -> str:
        """Write the next parts of files of the run's machine; return the problem, if any."""
        for piece in pieces:
            target = Path(self.local_path(piece.path))
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("ab" if piece.offset else "wb") as file:
                    file.write(piece.data)
                if piece.offset + len(piece.data) < piece.whole.size:
                    continue
                state = file_state(target)
                written = copy_of(target)
            except OSError as error:
                free = free_bytes(self._folder)
                free_text = f", {gib(free)} free" if free is not None else ""
                return f"{self._folder} cannot take {piece.path} ({error.strerror or error}{free_text})"
            if written != piece.whole or state is None:
                return f"{piece.path} is not in {self._folder} as it was when the run began"
            self._states[str(target)] = state
        return ""

    # Workers.

    def start(self, number: int, start: WorkerStart, paths: Mapping[str, str], search: Sequence[str]) -> int:
        """Start a worker, and return the id of its process.

        Args:
            start: with the paths of the run's machine.
            paths: texts in ``start`` that are paths of the run's machine, and their paths here.
            search: folders here that hold more modules of the worker.

        Raises:
            OSError: it could not be started.
        """
        common = start.command.spec.common
        shards = self._folder / "shards" / str(number)
        files = {paths.get(path, path) for path in common.files}
        local_common = replace(
            common,
            table_path=self.local_path(common.table_path),
            order_path=self.local_path(common.order_path),
            shards_dir=str(shards),
            files={path: self._states[path] for path in files if path in self._states},
        )
        settings = with_paths(start.command.spec.settings, paths)
        command = replace(start.command, spec=WorkerSpec(local_common, start.command.spec.kind, settings))
        environment = dict(start.environment)
        if search:
            folders = python_environment().get("PYTHONPATH", os.environ.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (folders, *search)))
        log = self._folder / f"worker-{number}.log"
        shards.mkdir(parents=True)
        process = self._launcher.start(replace(start, command=command, environment=environment, log=log))
        with self._lock:
            self._workers[number] = _Worker(process, log, shards)
        return process.pid

    def order(self, number: int, method: str, *arguments: Command) -> None:
        """Call a worker's ``send``, ``terminate`` or ``abort``."""
        getattr(self._workers[number].process, method)(*arguments)

    def close(self, number: int) -> tuple[Exit, bytes]:
        """End a worker; return how it ended, and what it had printed that was not passed on."""
        with self._lock:
            worker = self._workers.pop(number)
        exit_ = worker.process.close()
        printed = self._printed(worker)
        shutil.rmtree(worker.shards, ignore_errors=True)
        worker.log.unlink(missing_ok=True)
        return exit_, printed

    def poll(self, seconds: float, forgotten_seconds: float) -> Batch:
        """Wait up to ``seconds`` for events, and return them; the agent ends if it is not polled again in time."""
        self._forgotten_at = math.inf
        with self._lock:
            workers = dict(self._workers)
        handles = [worker.process for worker in workers.values() if worker.process.is_open]
        if handles:
            self._launcher.wait(handles, seconds)
        else:
            time.sleep(seconds)
        with self._lock:
            numbers = workers.keys() & self._workers.keys()
            news = {number: self._news_of(workers[number]) for number in numbers}
        uuids = [device.uuid for device in self._facts.node.gpus]
        batch = Batch(news, gpus.used_memory(uuids), host.available_memory_bytes())
        self._forgotten_at = time.monotonic() + forgotten_seconds
        return batch

    def _news_of(self, worker: _Worker) -> WorkerNews:
        # Whether it has exited is asked first: then all of its events have come.
        news = WorkerNews(has_exited=worker.process.has_exited())
        try:
            news.events = worker.process.receive()
            for event in news.events:
                if isinstance(event, ChunkDone):
                    shard = worker.shards / event.shard
                    news.shards[event.shard] = shard.read_bytes()
                    shard.unlink()
        except (ProtocolError, OSError) as error:  # as where it was told to end for the same reason
            news.events = [Failed(type(error).__name__, str(error), "")]
            worker.process.terminate()
        news.printed = self._printed(worker)
        return news

    def _printed(self, worker: _Worker) -> bytes:
        """Return what a worker has printed since the last call, up to a limit."""
        try:
            with worker.log.open("rb") as file:
                if os.fstat(file.fileno()).st_size < worker.printed:  # ``keep_log_end`` has cut it
                    worker.printed = 0
                file.seek(worker.printed)
                text = file.read(_LOG_BYTES)
        except OSError:
            return b""
        worker.printed += len(text)
        return text

    def _end_with_node(self, raylet: int) -> None:
        """End with the raylet that has started this process: Ray does not end it if the raylet was killed."""
        while os.getppid() == raylet and time.monotonic() < self._forgotten_at:
            if self._is_over.wait(_WATCH_SECONDS):
                time.sleep(_LEAVE_SECONDS)
                break
        self.end()
        os._exit(1)

    def end(self) -> None:
        """End all workers, and remove everything that the run has on this node."""
        with self._lock:
            for number in list(self._workers):
                self.close(number)
        shutil.rmtree(self._folder, ignore_errors=True)

    def leave(self) -> None:
        """End all workers, and end this process soon if Ray does not."""
        self.end()
        self._is_over.set()


class Holder:
    """Reserve a GPU for the run while this actor lives; another run used the GPU when the agent started."""

    def uuids(self) -> tuple[str, ...]:
        return tuple(gpu.uuid for gpu in gpus.inventory().gpus)


def _gpus_of_ray(count: int) -> tuple[Device, ...]:
    """Return the GPUs of this node that Ray manages, whoever has them: the first that the raylet sees."""
    visible = {}
    with contextlib.suppress(OSError):
        pairs = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
        variables = dict(pair.decode(errors="replace").partition("=")[::2] for pair in pairs)
        if "CUDA_VISIBLE_DEVICES" in variables:
            visible["CUDA_VISIBLE_DEVICES"] = variables["CUDA_VISIBLE_DEVICES"]
    return gpus.inventory(visible).gpus[:count]


def _remove_after_this_process(folder: Path) -> None:
    """Have a folder removed when this process ends, even if Ray kills the process."""
    read_end, _ = os.pipe()  # the write end closes with this process
    # In the background, as Ray may end children of this process, too; later, as workers may still write.
    script = 'exec 3<&0 >/dev/null 2>&1; (read -r line <&3; [ -e "$1" ] || exit 0; sleep 3; rm -rf -- "$1") &'
    subprocess.run(
        ["/bin/sh", "-c", script, "sh", folder], stdin=read_end, start_new_session=True, check=True
    )
    os.close(read_end)


def versions() -> dict[str, str]:
    """Return the versions here of what must be the same on all nodes, by name."""
    return {"python": platform.python_version(), **installed_versions(_SAME_PACKAGES)}
