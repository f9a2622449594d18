"""A worker as the scheduler sees it: what it has, when it was last heard of, how it ended; not what follows."""

from __future__ import annotations

from dataclasses import dataclass, field

from ensemble.common.gpus import Device
from ensemble.common.protocol import Closed, Event, Failed, Heartbeat, Ready, Started
from ensemble.planning.chunks import Chunk
from ensemble.scheduling.launchers.base import Exit, Handle
from ensemble.scheduling.state import Fault, MemberState, WorkerRecord

# Loading has no steps to watch: a large model from a slow disk may take this many times what a batch may.
_LOADING_TIMES = 6


@dataclass(eq=False)
class RunningWorker:
    """A worker: its handle, its record, the chunks in its hands.  Times are the run's clock's, in seconds."""

    state: MemberState
    handle: Handle
    record: WorkerRecord
    devices: tuple[Device, ...]  # that it sees; its own once it has been told to load
    chunk: Chunk | None = None  # what it computes
    writing: dict[int, Chunk] = field(default_factory=dict)  # what it has computed and writes, by number
    hint: Chunk | None = None  # what it was told would probably come next
    is_stopping: bool = False  # it was told to stop
    failed: Failed | None = None  # why it said it cannot go on
    fault: Fault | None = None  # what the parent found wrong with it
    exit_by: float | None = None  # no longer does anybody wait for its end
    leased_at: float = 0.0
    heard_at: float = 0.0  # when it last said anything
    stepped_at: float = 0.0  # when its main thread last got on
    seconds_left: float = 0.0  # of the time limit, when it got the chunk that it computes

    @property
    def name(self) -> str:
        return f"{self.record.member}-{self.record.replica}"

    @property
    def is_ready(self) -> bool:
        return self.record.ready is not None

    @property
    def chunks(self) -> list[Chunk]:
        """The chunks that it has, the one first that it failed with if it did."""
        chunks = [chunk for chunk in (self.chunk, *self.writing.values()) if chunk is not None]
        named = None if self.failed is None else self.failed.chunk
        return sorted(chunks, key=lambda chunk: chunk.index != named)

    def expect_exit(self, by: float) -> None:
        """It is to end by then, if it was told to stop; what it still writes has as long as any step."""
        if self.is_stopping and not self.writing:
            self.exit_by = self.exit_by or by

    def drop(self, chunk: Chunk) -> None:
        """It has this chunk no longer."""
        self.state.drop(chunk)
        self.writing.pop(chunk.index, None)
        if self.chunk is chunk:
            self.chunk = None

    def note(self, event: Event, now: float) -> None:
        """Keep what it says of itself, and that it lives."""
        self.heard_at = now
        self.stepped_at = now - event.idle_seconds if isinstance(event, Heartbeat) else now
        if isinstance(event, Failed):
            self.failed = event
        elif isinstance(event, Started):
            self.record.start_seconds, self.record.versions = event.start_seconds, event.versions
        elif isinstance(event, Ready):
            self.record.ready, self.record.load_seconds = event, event.load_seconds
        elif isinstance(event, Closed):
            self.record.closed = event

    def hang_text(self, now: float, timeout_seconds: float) -> str:
        """Why it counts as hung; empty while it does not."""
        worker = f"its worker (process {self.record.process})"
        # To load a library from a slow disk, Python can be held up as long as that takes.
        silence = timeout_seconds * (1 if self.is_ready else _LOADING_TIMES)
        if now - self.heard_at > silence:
            return f"{worker} has not responded for {silence:g} s"
        if not self.is_ready and now - self.leased_at > silence:
            return f"{worker} was not ready after {silence:g} s ({_LOADING_TIMES} times hang_timeout)"
        if self.is_ready and self.chunks and now - self.stepped_at > silence:
            what = "finished no batch" if self.chunk is not None else "could not write what it had computed"
            return f"{worker} {what} for {silence:g} s (hang_timeout); its log shows where"
        return ""

    def fault_of(self, exit_: Exit) -> Fault | None:
        """What is wrong with how it ended; None for a good end."""
        if self.fault is not None:
            return self.fault
        if self.is_stopping and not self.chunks:
            return None  # it had nothing left to do: how long its exit took, and how it went, costs nobody anything
        if self.failed is not None:
            # The worker's own sentences come as ValueError; of all others the type says half of what is wrong.
            kind = "" if self.failed.error_type == "ValueError" else f"{self.failed.error_type}: "
            text = f"{kind}{self.failed.message}"
            return Fault("death" if self.failed.can_retry else "lasting", text, self.failed.traceback)
        text = f"its worker (process {self.record.process}) {exit_.text}"
        if exit_.is_out_of_memory:
            return Fault("memory", f"{text}; fewer replicas or a smaller model need less")
        return Fault("death", text if exit_.code < 0 else f"{text}, before its work was done")
