"""Records of members and workers for the reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ensemble.common.protocol import Closed, Counters, Ready

FaultKind: TypeAlias = Literal["error", "death", "hang", "memory", "lasting", "lost"]


@dataclass(frozen=True)
class Failure:
    """Why a member failed: one sentence, the traceback if there is one, and its worker's log.

    ``is_dropped``: some of its rows could not be computed, and the config says to merge without the member.
    """

    member: str
    message: str
    traceback: str = ""
    log_path: str = ""
    is_dropped: bool = False


@dataclass(frozen=True)
class Fault:
    """Why a worker did not deliver.

    ``error``: an exception after which the process can go on.  ``death``: the process ended.  ``hang``: it hung and
    was ended.  ``memory``: the kernel ended it because the host ran out of memory.  ``lasting``: no retry helps.
    ``lost``: its node is lost; the worker is not to blame.
    """

    kind: FaultKind
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class FaultRecord:
    """A fault, and what was done about it; ``rows`` are a slice of the member's order."""

    member: str
    replica: int
    kind: str
    message: str
    traceback: str
    rows: tuple[int, int] | None
    remedy: str
    after_seconds: float


@dataclass
class WorkerRecord:
    """What one worker did, for run.json.

    Attributes:
        devices: UUIDs, or "cpu" with its node.
        process: the launcher's name for it.
        started_after_seconds: when its process began, since workers could begin.
        leased_after_seconds: when it got its devices; later than its start for a standby worker.
        life_seconds: since the lease.
        node: where it runs; empty: on this machine.
    """

    member: str
    replica: int
    devices: tuple[str, ...]
    process: str
    log_path: str
    started_after_seconds: float
    leased_after_seconds: float
    start_seconds: float | None = None
    load_seconds: float | None = None
    life_seconds: float | None = None
    counters: Counters = field(default_factory=Counters)
    exit_code: int | None = None
    ready: Ready | None = None
    closed: Closed | None = None
    versions: dict[str, str] = field(default_factory=dict)
    node: str = ""


@dataclass(frozen=True)
class NodeChange:
    """A node has joined a run, or is lost to it; ``why`` it is lost."""

    node: str
    is_lost: bool
    after_seconds: float = 0.0
    total_bytes: int = 0  # of its host's memory
    why: str = ""


@dataclass(frozen=True)
class Gap:
    """``seconds`` from the end of one member's computing on a device ("cpu" for the CPU) to another's beginning."""

    device: str
    after: str
    before: str
    seconds: float


class Gaps:
    """Measures gaps; a device on which another worker computes meanwhile has none."""

    def __init__(self) -> None:
        self.measured: list[Gap] = []
        self._workers: dict[str, tuple[str, Sequence[str]]] = {}  # member and devices, by the worker's name
        self._busy: Counter[str] = Counter()  # how many workers compute on a device
        self._idle_since: dict[str, tuple[str, float]] = {}

    def begin(self, worker: str, member: str, devices: Sequence[str], now: float) -> None:
        """Note that a worker begins a chunk on its devices; only its first chunk counts."""
        if worker in self._workers:
            return
        self._workers[worker] = (member, devices)
        self._busy.update(devices)
        for device in devices:
            after, since = self._idle_since.pop(device, (member, now))
            if after != member:
                self.measured.append(Gap(device, after, member, round(now - since, 3)))

    def end(self, worker: str, now: float) -> None:
        """Note that a worker has computed its last chunk, if it ever had one."""
        member, devices = self._workers.pop(worker, ("", ()))
        self._busy.subtract(devices)
        self._idle_since.update({device: (member, now) for device in devices if not self._busy[device]})
