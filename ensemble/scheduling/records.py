"""What is left of members and workers for the reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ensemble.common.protocol import Closed, Counters, Ready

FaultKind: TypeAlias = Literal["error", "death", "hang", "memory", "lasting", "lost"]


@dataclass(frozen=True)
class Failure:
    """Why a member failed: one sentence, the traceback if there is one, and where to read on.

    ``is_dropped``: its rows are to blame, and the config says to go on without it.
    """

    member: str
    message: str
    traceback: str = ""
    log_path: str = ""
    is_dropped: bool = False


@dataclass(frozen=True)
class Fault:
    """Why a worker did not deliver.

    ``error``: an exception that left the process sound.  ``death``: the process ended.  ``hang``: it was ended.
    ``memory``: the kernel ended it because the host ran out of memory.  ``lasting``: no further attempt helps.
    ``lost``: its node has gone; the worker is not to blame.
    """

    kind: FaultKind
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class FaultRecord:
    """Something that went wrong, and what was done about it; ``rows`` are a slice of the member's order."""

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
    """What one worker did, for run.json; times in seconds, memory in bytes.

    ``devices`` are UUIDs, or "cpu" with its node.  ``started_after_seconds`` is when its process began,
    ``leased_after_seconds`` when it got its devices: later if it stood by before.  ``life_seconds`` count from the
    lease.  ``process`` is the launcher's name for it, ``node`` the node that it runs on, if any.
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
    after_seconds: float
    total_bytes: int = 0  # of its host's memory
    why: str = ""
