"""A running worker as the scheduler sees it: what it is, when it was last heard of, how it ended.

Does not decide what follows from that.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ensemble.common.gpus import Device
from ensemble.common.protocol import Command, Event, Failed, Heartbeat
from ensemble.planning.chunks import Chunk
from ensemble.scheduling.state import Fault, MemberState, WorkerRecord

# Loading has no steps to watch: a large model from a slow disk may take this many times what a batch may.
_LOADING_TIMES = 6
_SIGNALS: Mapping[int, str] = {number.value: number.name for number in signal.Signals}


class Worker(Protocol):
    """What the scheduler needs of a worker process, wherever it runs."""

    events_fd: int

    @property
    def pid(self) -> int: ...
    def send(self, command: Command) -> None: ...
    def receive(self) -> tuple[list[Any], bool]: ...
    def has_exited(self) -> bool: ...
    def terminate(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> int: ...


@dataclass(eq=False)
class Slot:
    """A worker: its process, its record, the lease it holds, the chunk in its hands.

    Times are the scheduler's ``Watch``'s, in seconds.

    Attributes:
        chunk: what it computes.
        writing: what it has computed and writes, by chunk number.
        hint: what it was told would probably come next.
        failed: why it said it cannot go on.
        fault: what the parent found wrong with it.
        end_by: no longer does anybody wait for the process.
        heard_at: when it last said anything.
        stepped_at: when its main thread last got on.
        seconds_left: of the time limit, when it got the chunk that it computes.
        oom_kills: how many processes the kernel had ended for want of memory when this one began.
    """

    state: MemberState
    worker: Worker
    record: WorkerRecord
    lease: tuple[Device, ...]
    began_at: float
    oom_kills: int
    chunk: Chunk | None = None
    writing: dict[int, Chunk] = field(default_factory=dict)
    hint: Chunk | None = None
    told_to_stop: bool = False
    failed: Failed | None = None
    fault: Fault | None = None
    is_line_open: bool = True
    end_by: float | None = None
    heard_at: float = 0.0
    stepped_at: float = 0.0
    seconds_left: float = 0.0

    def __post_init__(self) -> None:
        self.heard_at = self.stepped_at = self.began_at

    @property
    def is_ready(self) -> bool:
        return self.record.ready is not None

    @property
    def has_work(self) -> bool:
        return bool(self.held)

    @property
    def held(self) -> list[Chunk]:
        """The chunks that it has, the one first that it failed with if it did."""
        chunks = [*([] if self.chunk is None else [self.chunk]), *self.writing.values()]
        named = None if self.failed is None else self.failed.chunk
        return sorted(chunks, key=lambda chunk: chunk.index != named)

    def expect_end(self, by: float) -> None:
        """It is to end by then, if it was told to stop; what it still writes has as long as any step."""
        if self.told_to_stop and not self.writing:
            self.end_by = self.end_by or by

    def drop(self, chunk: Chunk) -> None:
        """It has this chunk no longer."""
        self.state.current.pop(chunk.index, None)
        self.state.in_hand.pop(chunk.index, None)
        self.writing.pop(chunk.index, None)
        if self.chunk is chunk:
            self.chunk = None

    def heard(self, event: Event, now: float) -> None:
        """Note a sign of life."""
        self.heard_at = now
        self.stepped_at = now - event.idle_seconds if isinstance(event, Heartbeat) else now

    def hang_text(self, now: float, timeout_seconds: float) -> str:
        """Why it counts as hung; empty while it does not."""
        process = f"its worker (process {self.record.pid})"
        # To load a library from a slow disk, Python can be held up as long as that takes.
        silence = timeout_seconds * (1 if self.is_ready else _LOADING_TIMES)
        if now - self.heard_at > silence:
            return f"{process} has not responded for {silence:g} s"
        if self.is_ready and self.has_work and now - self.stepped_at > timeout_seconds:
            what = "finished no batch" if self.chunk is not None else "could not write what it had computed"
            text = f"{process} {what} for {timeout_seconds:g} s (hang_timeout)"
            return f"{text}; its log shows where"
        longest = _LOADING_TIMES * timeout_seconds
        if not self.is_ready and now - self.began_at > longest:
            return f"{process} was not ready after {longest:g} s ({_LOADING_TIMES} times hang_timeout)"
        return ""

    def verdict(self, code: int, oom_kills: int) -> Fault | None:
        """How the process ended; None for a good end.

        Args:
            code: its exit code, negative for a signal.
            oom_kills: the kernel's count by now.
        """
        if self.fault is not None:
            return self.fault
        if self.told_to_stop and not self.has_work:
            return None  # it had nothing left to do: how long its exit took, and how it went, costs nobody anything
        process = f"its worker (process {self.record.pid})"
        if self.failed is not None:
            # The worker's own sentences come as ValueError; of all others the type says half of what is wrong.
            kind = "" if self.failed.error_type == "ValueError" else f"{self.failed.error_type}: "
            text = f"{kind}{self.failed.message}"
            return Fault("death" if self.failed.can_retry else "lasting", text, self.failed.traceback)
        if code == -signal.SIGKILL and oom_kills > self.oom_kills:
            return Fault(
                "memory",
                f"{process} was killed, probably by the kernel because the host ran out of memory (RAM, not the "
                "GPU's); fewer replicas or a smaller model need less",
            )
        if code < 0:
            return Fault(
                "death", f"{process} was killed by signal {-code} ({_SIGNALS.get(-code, 'unknown')})"
            )
        return Fault("death", f"{process} ended with exit code {code}, before its work was done")
