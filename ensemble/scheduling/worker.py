"""A worker that runs: what it has in hand, whether it hangs, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from ensemble.common.gpus import Device
from ensemble.common.protocol import Closed, Event, Failed, Heartbeat, Ready, Started
from ensemble.planning.chunks import Chunk
from ensemble.scheduling.launchers.base import Exit, Handle
from ensemble.scheduling.records import Fault, WorkerRecord
from ensemble.scheduling.state import MemberState

# Loading has no steps to watch: a large model from a slow disk may take this many times what a batch may.
_LOADING_TIMES = 6


@dataclass(eq=False)
class RunningWorker:
    """A worker with its handle, its record and its chunks.  Times are by the run's clock, in seconds."""

    state: MemberState
    handle: Handle
    record: WorkerRecord
    devices: tuple[Device, ...]  # that it sees; leased once it is told to load
    chunk: Chunk | None = None  # what it computes
    writing: dict[int, Chunk] = field(default_factory=dict)  # what it has computed and writes, by number
    is_stopping: bool = False  # it was told to stop
    failed: Failed | None = None  # why it said it cannot go on
    fault: Fault | None = None  # what the parent found wrong with it
    exit_by: float | None = None  # until when its end is waited for
    leased_at: float = 0.0
    heard_at: float = 0.0  # when it last said anything
    stepped_at: float = 0.0  # when its main thread last made progress
    seconds_left: float = 0.0  # of the time limit, when it got the chunk that it computes

    @property
    def name(self) -> str:
        return f"{self.record.member}-{self.record.replica}"

    @property
    def is_ready(self) -> bool:
        return self.record.ready is not None

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks that it has; if it failed with one of them, that one first."""
        chunks = [chunk for chunk in (self.chunk, *self.writing.values()) if chunk is not None]
        named = None if self.failed is None else self.failed.chunk
        return sorted(chunks, key=lambda chunk: chunk.index != named)

    def expect_exit(self, by: float) -> None:
        """Expect its end by then if it was told to stop; what it still writes has as long as any step."""
        if self.is_stopping and not self.writing:
            self.exit_by = self.exit_by or by

    def drop(self, chunk: Chunk) -> None:
        """Note that it no longer has this chunk."""
        self.state.chunks.drop(chunk)
        self.writing.pop(chunk.index, None)
        if self.chunk is chunk:
            self.chunk = None

    def note(self, event: Event, now: float) -> None:
        """Keep what an event says of the worker, and that it lives."""
        self.heard_at = now
        self.stepped_at = now - event.idle_seconds if isinstance(event, Heartbeat) else now
        if isinstance(event, Failed):
            self.failed = event
        elif isinstance(event, Started):
            self.record.start_seconds, self.record.versions = event.start_seconds, event.versions
            self.record.process = self.handle.process  # of one on another machine it is known by now
        elif isinstance(event, Ready):
            self.state.worker_ready(self.record, event)
        elif isinstance(event, Closed):
            self.record.closed = event

    def hang_text(self, now: float, timeout_seconds: float) -> str:
        """Return why the worker counts as hung; empty while it does not."""
        since = min(self.heard_at, self.stepped_at)
        if now - (since if self.is_ready else min(since, self.leased_at)) <= timeout_seconds:
            return ""  # asked all the time of hundreds of workers, of which hardly any is late
        # To load a library from a slow disk, Python can be held up as long as that takes.
        silence = timeout_seconds * (1 if self.is_ready else _LOADING_TIMES)
        is_late = now - (self.heard_at if self.is_ready else min(self.heard_at, self.leased_at)) > silence
        has_chunks = self.chunk is not None or bool(self.writing)
        if not is_late and not (has_chunks and now - self.stepped_at > silence):
            return ""
        worker = f"its worker (process {self.record.process})"
        if now - self.heard_at > silence:
            return f"{worker} has not responded for {silence:g} s"
        if not self.is_ready and now - self.leased_at > silence:
            return f"{worker} was not ready after {silence:g} s ({_LOADING_TIMES} times hang_timeout)"
        if self.is_ready and has_chunks and now - self.stepped_at > silence:
            what = "finished no batch" if self.chunk is not None else "could not write what it had computed"
            return f"{worker} {what} for {silence:g} s (hang_timeout); its log shows where"
        return ""

    def fault_of(self, exit_: Exit) -> Fault | None:
        """Return what is wrong with how it ended; None for a good end."""
        if self.fault is not None and not (exit_.is_lost and self.fault.kind == "hang"):
            return self.fault
        if self.is_stopping and not self.chunks:
            return None  # it had nothing left to do: how long its exit took, and how it went, costs nobody anything
        if self.failed is not None:
            # The worker's own sentences come as these; of all others the type says half of what is wrong.
            is_own = self.failed.error_type in ("ValueError", "MemberError")
            kind = "" if is_own else f"{self.failed.error_type}: "
            text = f"{kind}{self.failed.message}"
            return Fault("death" if self.failed.can_retry else "lasting", text, self.failed.traceback)
        text = f"its worker (process {self.record.process}) {exit_.text}"
        if exit_.is_lost:
            return Fault("lost", text)
        if exit_.is_out_of_memory:
            return Fault("memory", f"{text}; fewer replicas or a smaller model need less")
        return Fault("death", text if exit_.code < 0 else f"{text}, before its work was done")
