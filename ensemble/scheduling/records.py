"""Define the records of members and workers for the reports."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from ensemble.common.protocol import Closed, Counters, Ready

FaultKind: TypeAlias = Literal["error", "death", "hang", "memory", "lasting", "lost"]


@dataclass(frozen=True)
class Failure:
    """Say why a member failed: one sentence, the traceback if there is one, and its worker's log.

    ``is_dropped``: some of its rows could not be computed, and the config says to merge without the member.
    ``is_out_of_time``: only the time to train it was lacking.
    ``is_reader``: it reads the predictions of a member that failed.
    """

    member: str
    message: str
    traceback: str = ""
    log_path: str = ""
    is_dropped: bool = False
    is_out_of_time: bool = False
    is_reader: bool = False

    @property
    def outcome(self) -> Literal["left out", "failed"]:
        """Return what to call it: nothing of the member itself has failed where it could not begin."""
        return "left out" if self.is_out_of_time or self.is_reader else "failed"

    def of_reader(self, reader: str) -> Failure:
        """Return the failure of a member that reads the predictions of this one, which has none."""
        ended = "failed" if self.outcome == "failed" else "is left out"
        why = f"it reads the predictions of {self.member}, which {ended}"
        return replace(self, member=reader, message=why, traceback="", log_path="", is_reader=True)


@dataclass(frozen=True)
class Fault:
    """Say why a worker did not deliver.

    ``error``: an exception after which the process can go on.  ``memory``: the kernel ended it because the host ran
    out of memory.  ``lasting``: no retry helps.  ``lost``: its node is lost; the worker is not to blame.
    """

    kind: FaultKind
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class FaultRecord:
    """Record a fault, and what was done about it; ``rows`` are a slice of the model's order."""

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
    """Record what one worker did, for run.json, too.

    Attributes:
        devices: UUIDs, or "cpu" with its node.
        process: the launcher's name for it.
        started_after_seconds: when its process began, since workers could begin.
        leased_after_seconds: when it got its devices; later than its start for a standby worker.
        life_seconds: since the lease.
        computed_from, computed_to: when it got its first chunk and had done its last, since workers could begin.
        node: where it runs; empty: on this machine.
    """

    model: str
    replica: int
    devices: tuple[str, ...]
    process: str
    log_path: str
    started_after_seconds: float
    leased_after_seconds: float
    start_seconds: float | None = None
    load_seconds: float | None = None
    life_seconds: float | None = None
    computed_from: float | None = None
    computed_to: float | None = None
    counters: Counters = field(default_factory=Counters)
    exit_code: int | None = None
    ready: Ready | None = None
    closed: Closed | None = None
    versions: dict[str, str] = field(default_factory=dict)
    node: str = ""

    @property
    def is_running(self) -> bool:
        return self.life_seconds is None and self.exit_code is None

    @property
    def forward_share(self) -> float | None:
        """Return the share of its life in forward passes; None if its life is not over."""
        return self.counters.forward_seconds / self.life_seconds if self.life_seconds else None


@dataclass(frozen=True)
class NodeChange:
    """Record that a node has joined a run, or is lost to it; ``why`` it is lost."""

    node: str
    is_lost: bool
    after_seconds: float = 0.0
    total_bytes: int = 0  # of its host's memory
    why: str = ""


@dataclass(frozen=True)
class Gap:
    """Hold the ``seconds`` from the end of one model's computing on a device ("cpu": the CPU) to another's."""

    device: str
    after: str
    before: str
    seconds: float


def idle_gaps(workers: Iterable[WorkerRecord]) -> tuple[Gap, ...]:
    """Return the gaps between workers of different models on the same device.

    A worker that was loading beside the other, such as with another share of the CPU, did not wait for it.
    """
    spans = []
    for worker in workers:
        if worker.computed_from is not None:
            end = math.inf if worker.computed_to is None else worker.computed_to
            leased = worker.leased_after_seconds
            spans.append((worker.computed_from, end, worker.model, worker.devices, leased))
    gaps = []
    busy: dict[str, tuple[float, str]] = {}  # until when each device computes, and for which model
    for begin, end, model, devices, leased in sorted(spans):
        for device in devices:
            until, before = busy.get(device, (begin, model))
            if until <= begin and before != model and until <= leased:
                gaps.append(Gap(device, before, model, round(begin - until, 3)))
            busy[device] = max((until, before), (end, model))
    return tuple(gaps)
