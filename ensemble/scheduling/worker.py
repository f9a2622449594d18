"""Follow a running worker: its chunk, whether it hangs, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass

from ensemble.common.gpus import Device
from ensemble.common.protocol import ChunkDone, Closed, Event, Failed, Heartbeat, Ready, Started
from ensemble.planning.chunks import Chunk
from ensemble.scheduling.launchers.base import Exit, Handle
from ensemble.scheduling.records import Fault, WorkerRecord
from ensemble.scheduling.state import ModelState

# Loading has no steps to watch: a large model from a slow disk may take this many times hang_timeout.
_LOADING_TIMES = 6


@dataclass(eq=False)
class RunningWorker:
    """Hold a worker with its handle, its record and its chunk.

    Times are in seconds by the run's clock.

    Attributes:
        devices: those that it sees; they are leased when it is told to load.
        failed: its own event that it cannot go on.
        fault: what the parent process has noticed.
        exit_by: when it is killed unless it has exited.
        responded_at: when its last event came.
        progressed_at: when its main thread last made progress.
        seconds_left: of the time limit, when it got the chunk that it computes.
    """

    state: ModelState
    handle: Handle
    record: WorkerRecord
    devices: tuple[Device, ...]
    chunk: Chunk | None = None
    is_stopping: bool = False
    failed: Failed | None = None
    fault: Fault | None = None
    exit_by: float | None = None
    leased_at: float = 0.0
    responded_at: float = 0.0
    progressed_at: float = 0.0
    seconds_left: float = 0.0

    @property
    def name(self) -> str:
        return f"{self.record.model}-{self.record.replica}"

    @property
    def is_ready(self) -> bool:
        return self.record.ready is not None

    @property
    def is_idle(self) -> bool:
        """Return whether the worker has loaded the model and waits for a chunk."""
        is_ending = self.is_stopping or self.exit_by is not None or self.fault is not None
        return self.is_ready and self.chunk is None and not is_ending

    def drop(self, chunk: Chunk) -> None:
        self.state.chunks.drop(chunk)
        self.chunk = None

    def note(self, event: Event, now: float) -> None:
        """Note what an event says of the worker, and that it responds."""
        self.responded_at = now
        self.progressed_at = now
        if isinstance(event, Heartbeat):
            self.progressed_at -= event.idle_seconds
        elif isinstance(event, Failed):
            self.failed = event
        elif isinstance(event, Started):
            self.record.start_seconds = event.start_seconds
            self.record.versions = event.versions
        elif isinstance(event, Ready):
            self.state.worker_ready(self.record, event)
            self.state.follow_worker(self.record, self.devices)
        elif isinstance(event, ChunkDone):
            self.state.follow_chunk(event.choice, self.devices)
        elif isinstance(event, Closed):
            self.record.closed = event

    def hang_text(self, now: float, timeout_seconds: float) -> str:
        """Return why the worker counts as hung; empty while it does not."""
        worker = f"its worker (process {self.record.process})"
        if not self.is_ready:
            # A library from a slow disk can hold up all threads, so that heartbeats say nothing.
            limit = _LOADING_TIMES * timeout_seconds
            if now - self.leased_at > limit:
                return f"{worker} was not ready after {limit:g} s ({_LOADING_TIMES} times hang_timeout)"
        elif now - self.responded_at > timeout_seconds:
            return f"{worker} has not responded for {timeout_seconds:g} s"
        elif self.chunk is not None and now - self.progressed_at > timeout_seconds:
            if not self.state.plan.has_rows:
                silent = "its command printed nothing and wrote nothing into its folder"
                return f"{silent} for {timeout_seconds:g} s (hang_timeout)"
            return f"{worker} finished no batch for {timeout_seconds:g} s (hang_timeout); its log shows where"
        return ""

    def fault_of(self, exit_: Exit) -> Fault | None:
        """Return the fault of a worker that has ended; None if all is well."""
        if self.fault is not None and not (exit_.is_lost and self.fault.kind == "hang"):
            return self.fault
        if self.is_stopping and self.chunk is None:
            return None  # it had nothing left to do, so that its exit does not matter
        if self.failed is not None:
            text = self.failed.message
            # These have full sentences; for any other error the type says half of what is wrong.
            if self.failed.error_type not in ("ValueError", "MemberError", "ChildProcessError"):
                text = f"{self.failed.error_type}: {text}"
            return Fault("death" if self.failed.can_retry else "lasting", text, self.failed.traceback)
        text = f"its worker (process {self.record.process}) {exit_.text}"
        if exit_.is_out_of_memory:
            return Fault("memory", f"{text}; fewer replicas or a smaller model need less")
        if exit_.is_lost:
            return Fault("lost", text)
        if exit_.code >= 0:
            text += ", before its work was done"
        return Fault("death", text)
