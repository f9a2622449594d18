"""What is known of members and workers while a run goes on, and what is left of it for the reports."""

from __future__ import annotations

import base64
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.gpus import Device
from ensemble.common.protocol import (
    ChunkDone,
    Closed,
    Counters,
    Event,
    Failed,
    Heartbeat,
    Predict,
    Progress,
    Ready,
    Started,
)
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.launchers.base import Exit, Handle, WorkerStart
from ensemble.scheduling.pending import Costs, PendingChunks

Kind: TypeAlias = Literal["error", "death", "hang", "memory", "lasting", "lost"]
Phase: TypeAlias = Literal["waiting", "starting", "loading", "predicting", "paused", "done", "failed"]
# Loading has no steps to watch: a large model from a slow disk may take this many times what a batch may.
_LOADING_TIMES = 6


@dataclass(frozen=True)
class Failure:
    """Why a member failed: one sentence, the whole traceback where there is one, and where to read on.

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
    ``memory``: the kernel ended it because the host ran out of memory.  ``lasting``: what no further attempt fixes.
    ``lost``: its node has gone, for which nothing that it did is to blame.
    """

    kind: Kind
    message: str
    traceback: str = ""


@dataclass(frozen=True)
class FaultRecord:
    """Something that went wrong, and what was done about it; ``rows`` are a slice of its order."""

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

    ``devices`` are UUIDs, or "cpu" with its node. ``started_after_seconds`` is when its process began,
    ``leased_after_seconds`` when it got its devices: later where it stood by before. ``life_seconds`` count from
    the lease. ``process`` is the launcher's name for it, ``node`` the one that it runs on, if any.
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


class MemberState:
    """A member while the run goes on.  Nothing outside of this class writes its attributes.

    Args:
        plan: with the chunks that are left to do.
        bad_rows: known from an earlier run: row number, through the views, to reason.
        clock: of all times here, in seconds.
    """

    def __init__(
        self,
        plan: MemberPlan,
        bad_rows: Mapping[int, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        cost = sum(chunk.cost for chunk in plan.chunks)
        self.plan, self.devices = plan, frozenset(plan.placement.devices)
        # Of the table, in the order of its chunks; and how many of them there are to be, as far as that is known.
        self.order, self.rows = plan.order, len(plan.order)
        self._order_room = np.empty(0, np.int64)  # what ``order`` is the beginning of, once it has grown
        # Rows of which it is not known yet whether it is to compute them, and whether what is known can change.
        self.unknown_rows, self.may_grow = 0, False
        self.clock = clock
        self.pending = PendingChunks(plan.chunks)  # that nobody computes
        self.in_hand: dict[int, Chunk] = {}  # that workers have, by chunk number
        self.progress: dict[int, Progress] = {}  # how far they are with them
        self._costs_in_hand, self._costs_in_progress = Costs(), Costs()  # of both
        self.chunk_numbers = count(1 + max((chunk.index for chunk in plan.chunks), default=0))
        self.replica_numbers = count()
        self._replica_limit = plan.replicas
        self._chunk_count = len(plan.chunks)
        # What earlier runs did, and this one, in shares of all the work.
        self.reused_rows = len(plan.order) - sum(chunk.rows for chunk in plan.chunks)
        self.reused_cost = max(0.0, 1.0 - cost) if plan.chunks else 1.0
        if plan.waits_for and plan.needs_worker:
            self.decide_anew(len(plan.order))
        self.done_cost = 0.0
        self.slowest_seconds_per_cost = 0.0
        # Of chunks that the end of the time cut short; where not one batch was computed, all of it takes at least
        # ``min_seconds_per_cost``.
        self.cut_short_cost = self.cut_short_seconds = self.min_seconds_per_cost = 0.0
        self.lost_rows = 0  # computed, of chunks that the end of the time cut short
        self._largest_done_cost = 0.0
        self.bad_rows = dict(bad_rows or {})
        self.faults: list[FaultRecord] = []
        self.workers: list[WorkerRecord] = []
        # Of all its workers in this run: how many run, what they have done, chunks in hand left out, and what the
        # slowest took until it computed.  Counted as it comes: there can be hundreds, and each chunk asks.
        self.running, self._loaded, self.counters, self.startup_seconds = 0, 0, Counters(), 0.0
        self.readies: list[Ready] = []  # what they said when they had loaded
        self._is_on_cpu_instead = False  # a worker that was leased a GPU
        self.failure: Failure | None = None
        self.predicting_since: float | None = None
        self.paused_at: float | None = None  # since when no worker of it runs, though there is work
        self.finished_at: float | None = None

    # What happens to a member.

    def take(self, chunk: Chunk, start: int | None = None) -> Chunk:
        """A worker gets a pending chunk, or its rows from ``start`` on; time without workers is no computing."""
        if start is not None and start > chunk.start:
            rest, part = chunk.split(self.chunk_numbers, start)
            self.pending.take(chunk, rest)
            chunk = part
        else:
            self.pending.take(chunk)
        self.in_hand[chunk.index] = chunk
        self._costs_in_hand.add(chunk.view, chunk.cost)
        now = self.clock()
        if self.predicting_since is None:
            self.predicting_since = now
        elif self.paused_at is not None:
            self.predicting_since += now - self.paused_at
        self.paused_at = None
        return chunk

    def advance(self, progress: Progress) -> None:
        chunk = self.in_hand[progress.chunk]
        self._forget_progress(chunk)
        self.progress[chunk.index] = progress
        self._costs_in_progress.add(chunk.view, chunk.cost * progress.rows / chunk.rows)

    def _forget_progress(self, chunk: Chunk) -> None:
        if (progress := self.progress.pop(chunk.index, None)) is not None:
            self._costs_in_progress.remove(chunk.view, chunk.cost * progress.rows / chunk.rows)

    def drop(self, chunk: Chunk) -> None:
        """No worker has this chunk any more."""
        self._forget_progress(chunk)
        if self.in_hand.pop(chunk.index, None) is not None:
            self._costs_in_hand.remove(chunk.view, chunk.cost)

    def decide_anew(self, rows: int) -> None:
        """Of none of so many rows it is known whether it is to compute them; what workers have, they keep."""
        self.pending.clear()
        self._chunk_count = len(self.in_hand)
        self.order = self.order[: max((chunk.stop for chunk in self.in_hand.values()), default=0)]
        self._order_room = np.empty(0, np.int64)
        self.rows = self.reused_rows = 0
        self.reused_cost = 0.0
        self.unknown_rows, self.may_grow = rows, True

    def grow(
        self,
        groups: Sequence[tuple[npt.NDArray[np.int64], float, int]],
        unknown_rows: int,
        rows: int,
        reused_rows: int,
        idle_cost: float,
        may_grow: bool,
    ) -> None:
        """More is known of the rows that it is to compute.

        Args:
            groups: rows of a chunk each, in order, the chunk's share of the work of the whole table, and its view.
            unknown_rows: of which nothing is known yet.
            rows: that it is to have by now in all, ``reused_rows`` of them from earlier runs.
            idle_cost: of all rows that are known and that this run need not compute.
            may_grow: whether this can change, or more come.
        """
        if self.failure is not None:
            return
        start, stop = len(self.order), len(self.order) + sum(len(numbers) for numbers, _, _ in groups)
        if stop > len(
            self._order_room
        ):  # twice as much each time, or a large table is copied with each chunk
            room = np.empty(max(stop, 2 * len(self._order_room)), np.int64)
            room[:start] = self.order
            self._order_room = room
        for numbers, cost, view in groups:
            start = len(self.order)
            self._order_room[start : start + len(numbers)] = numbers
            self.order = self._order_room[: start + len(numbers)]
            self.pending.append(Chunk(next(self.chunk_numbers), start, len(self.order), cost, view))
        self._chunk_count += len(groups)
        self.unknown_rows, self.may_grow = unknown_rows, may_grow
        self.rows, self.reused_rows, self.reused_cost = rows, reused_rows, idle_cost

    def put_back(self, *chunks: Chunk) -> None:
        """These are the next ones."""
        self.pending.put_back(chunks)

    def complete(self, chunk: Chunk, done: ChunkDone) -> None:
        self.done_cost += chunk.cost
        self.counters += done.counters
        per_cost = done.counters.predict_seconds / chunk.cost if chunk.cost else 0.0
        # Small first chunks say little of larger ones: what the first batch takes once is a large part of them.
        if chunk.cost > 1.5 * self._largest_done_cost:
            self.slowest_seconds_per_cost = 0.0
        self._largest_done_cost = max(self._largest_done_cost, chunk.cost)
        self.slowest_seconds_per_cost = max(self.slowest_seconds_per_cost, per_cost)

    def set_aside(self, reasons: Mapping[int, str], chunk: Chunk | None = None) -> None:
        """Rows of the table cannot be computed; ``chunk`` is the one that nobody computes for that."""
        self.bad_rows.update(reasons)
        self.done_cost += 0.0 if chunk is None else chunk.cost

    def cut_short(self, chunk: Chunk, seconds: float) -> None:
        """Note a chunk that the end of the time cut short ``seconds`` after its dispatch.

        The next run learns from it how fast the member is; the rows that were computed are lost.
        """
        progress = self.progress.get(chunk.index)
        if progress is not None and progress.rows:
            self.lost_rows += progress.rows
            self.cut_short_seconds += seconds
            self.cut_short_cost += chunk.cost * progress.rows / chunk.rows
        elif chunk.cost:
            # As if half of it had been done: the next run then takes less, and less again until something fits.
            self.min_seconds_per_cost = max(self.min_seconds_per_cost, 2 * seconds / chunk.cost)

    def worker_began(self, record: WorkerRecord) -> None:
        self.workers.append(record)
        self.running += 1

    def worker_ready(self, record: WorkerRecord, ready: Ready) -> None:
        """One of them has loaded, after it was started."""
        self._loaded += record.ready is None
        record.ready, record.load_seconds = ready, ready.load_seconds
        self.readies.append(ready)
        self.startup_seconds = max(self.startup_seconds, (record.start_seconds or 0.0) + ready.load_seconds)
        self._is_on_cpu_instead |= ready.device == "cpu" and not record.devices[0].startswith("cpu")

    def worker_abandoned(self, record: WorkerRecord, code: int) -> None:
        """The run is over: what the worker had in hand is not done."""
        record.exit_code = code
        self._worker_gone(record)
        self.progress.clear()
        self._costs_in_progress.clear()

    def worker_ended(self, record: WorkerRecord, code: int, life_seconds: float) -> None:
        record.exit_code, record.life_seconds = code, life_seconds
        self._worker_gone(record)
        if not self.running and self.predicting_since is not None and self.finished_at is None:
            self.paused_at = self.clock()

    def _worker_gone(self, record: WorkerRecord) -> None:
        self.running -= 1
        self._loaded -= record.ready is not None

    def move(self, devices: tuple[str, ...], replicas: int) -> None:
        """It may run on these devices from now on, in so many workers at the same time."""
        self.plan = replace(
            self.plan, placement=replace(self.plan.placement, devices=devices), replicas=replicas
        )
        self.devices, self._replica_limit = frozenset(devices), replicas

    def limit_replicas(self) -> None:
        """From now on no more of them than run now, as where the host ran out of memory."""
        self._replica_limit = max(1, self.running)

    def note_fault(self, record: FaultRecord) -> None:
        self.faults.append(record)

    def finish(self) -> None:
        self.finished_at = self.clock()

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self.pending.clear()

    # What follows from that.

    @property
    def finished(self) -> bool:
        return self.failure is None and not self.may_grow and not self.pending and not self.in_hand

    @property
    def has_first_view_pending(self) -> bool:
        """Whether rows in the first view wait for a worker; a member without views has only this one."""
        return self.pending.has(0)

    @property
    def has_work(self) -> bool:
        """Whether there is something to compute that nobody has in hand, or perhaps will be."""
        return bool(self.pending) or (self.unknown_rows > 0 and self.failure is None)

    @property
    def max_replicas(self) -> int:
        """No more of them than have a chunk each, or than there is memory for."""
        return min(self._replica_limit, max(1, self._chunk_count))

    def command_of(self, chunk: Chunk) -> Predict:
        """What tells a worker to compute it."""
        return Predict(chunk.index, chunk.start, chunk.stop, self._travelling(chunk))

    def row_text(self, row: int) -> str:
        """What messages call a row that it computes: its place in the table, and in which view."""
        if not (views := self.plan.model.counted_views):
            return f"{row + 1:,}"
        view, place = divmod(row, self.plan.table_rows)
        return f"{place + 1:,} (view {views[view].name})"

    def _travelling(self, chunk: Chunk) -> str | None:
        if not self.plan.waits_for:
            return None
        return base64.b64encode(self.order[chunk.start : chunk.stop].astype("<i4").tobytes()).decode("ascii")

    @property
    def is_loaded(self) -> bool:
        """Whether a worker of it computes, or could."""
        return self._loaded > 0

    @property
    def rows_done(self) -> int:
        in_hand = sum(progress.rows for progress in self.progress.values())
        return self.reused_rows + self.counters.rows + in_hand

    @property
    def tokens_done(self) -> int:
        return self.counters.tokens + sum(progress.tokens for progress in self.progress.values())

    @property
    def fraction(self) -> float:
        """Share of the member's work that is done, by cost and not by rows: long rows come first."""
        return min(self.reused_cost + self.computed_cost, 1.0)

    @property
    def first_view_fraction(self) -> float:
        """Share of its work in the first view that is done, as far as it knows its rows."""
        if self.plan.views == 1:
            return self.fraction
        left = self.pending.costs.of(0) + self._costs_in_hand.of(0) - self._costs_in_progress.of(0)
        return max(0.0, 1.0 - left * self.plan.views)

    @property
    def computed_cost(self) -> float:
        """Share of the member's work that this run has done."""
        return self.done_cost + self._costs_in_progress.total

    @property
    def seconds_per_cost(self) -> float | None:
        """What all of its work would take one replica, by the chunks that are done; None before the first."""
        seconds = self.counters.predict_seconds
        return seconds / self.done_cost if seconds and self.done_cost else None

    @property
    def speed(self) -> Speed:
        """What is measured by now, by this run or else by an earlier one; 0 for what nobody has measured."""
        known = self.plan.speed
        startup = known.startup_seconds if known.is_startup_measured else 0.0
        per_work, share = known.seconds_per_work if known.is_measured else 0.0, known.cpu_share
        # A worker that was leased a GPU and fell back to the CPU says nothing of the GPU.
        if not self._is_on_cpu_instead:
            startup = self.startup_seconds or startup
            cost = self.done_cost + self.cut_short_cost
            seconds = self.counters.predict_seconds + self.cut_short_seconds
            minimum = self.min_seconds_per_cost / self.plan.work
            if (seconds and cost) or minimum > per_work * self.plan.slowdown:
                measured = seconds / cost / self.plan.work if seconds and cost else 0.0
                per_work, share = max(measured, minimum), self.plan.cpu_share
        return Speed(startup, per_work, per_work > 0, startup > 0, share)

    @property
    def predicting_seconds(self) -> float:
        """For how long it has been computing, at least a moment."""
        if self.predicting_since is None:
            return 1e-9
        until = next((at for at in (self.finished_at, self.paused_at) if at is not None), self.clock())
        return max(until - self.predicting_since, 1e-9)

    @property
    def seconds_left(self) -> float:
        """Until the member's end at the speed so far; 0 while there is none."""
        computed = self.computed_cost
        return self.predicting_seconds * (1 - self.fraction) / computed if computed else 0.0

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        if self.failure is not None:
            return "failed"
        if self.finished:
            return "done"
        if self.paused_at is not None:
            return "starting" if self.running else "paused"
        if self.predicting_since is not None:
            return "predicting"
        if not self.workers:
            return "waiting"
        return "starting" if all(record.start_seconds is None for record in self.workers) else "loading"


@dataclass(eq=False)
class RunningWorker:
    """A worker: its handle, its record, the chunks in its hands.  Times are the run's clock's, in seconds."""

    state: MemberState
    handle: Handle
    record: WorkerRecord
    devices: tuple[Device, ...]  # that it sees; its own once it has been told to load
    chunk: Chunk | None = None  # what it computes
    writing: dict[int, Chunk] = field(default_factory=dict)  # what it has computed and writes, by number
    is_waiting: bool = False  # it has nothing to do until more rows of its member are known
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
            self.record.process = self.handle.process  # of one on another machine it is known by now
        elif isinstance(event, Ready):
            self.state.worker_ready(self.record, event)
        elif isinstance(event, Closed):
            self.record.closed = event

    def hang_text(self, now: float, timeout_seconds: float) -> str:
        """Why it counts as hung; empty while it does not."""
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
        """What is wrong with how it ended; None for a good end."""
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


class RunHooks(Protocol):
    """What the scheduler wants of the run that it works for."""

    def worker_start(self, member: MemberPlan, replica: int, devices: Sequence[Device]) -> WorkerStart:
        """What a worker is started with; raises OSError where its files cannot be made."""

    def say(self, text: str) -> None: ...
    def on_change(self, members: Sequence[MemberState]) -> None:
        """Called a few times a second; what it raises ends the run."""

    def on_bad_rows(self, state: MemberState) -> None: ...
    def on_chunk_done(self, state: MemberState, done: ChunkDone) -> None:
        """A shard stands; members that wait for its rows may get more to do."""

    def on_ended(self, state: MemberState) -> None:
        """A member has failed, or its predictions stand: no row of it comes any more."""

    def on_finished(self, state: MemberState) -> None:
        """A member's last chunk is done.  In another thread; a MergeError fails the member, others end the run."""


@dataclass(frozen=True)
class Gap:
    """``seconds`` from the end of one member's computing on a device ("cpu" for the CPU) to another's beginning."""

    device: str
    after: str
    before: str
    seconds: float


class Gaps:
    """Measures them; a device on which somebody else computes meanwhile has none."""

    def __init__(self) -> None:
        self.found: list[Gap] = []
        self._workers: dict[str, tuple[str, Sequence[str]]] = {}
        self._busy: Counter[str] = Counter()  # how many of them compute on a device
        self._idle_since: dict[str, tuple[str, float]] = {}

    def begin(self, worker: str, member: str, devices: Sequence[str], now: float) -> None:
        """A worker begins a chunk on its devices; only its first one counts."""
        if worker in self._workers:
            return
        self._workers[worker] = (member, devices)
        self._busy.update(devices)
        for device in devices:
            after, since = self._idle_since.pop(device, (member, now))
            if after != member:
                self.found.append(Gap(device, after, member, round(now - since, 3)))

    def end(self, worker: str, now: float) -> None:
        """A worker has computed its last chunk, if it ever had one."""
        member, devices = self._workers.pop(worker, ("", ()))
        self._busy.subtract(devices)
        self._idle_since.update({device: (member, now) for device in devices if not self._busy[device]})
