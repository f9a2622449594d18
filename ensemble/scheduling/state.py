"""Keep the state of a model during a run, and define what the scheduler needs from the run."""

from __future__ import annotations

import base64
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Literal, TypeAlias

from ensemble.common.gpus import Device
from ensemble.common.protocol import BatchChoice, ChunkDone, Counters, Predict, Progress, Ready
from ensemble.jobs.job import AS_TIME_ALLOWS
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import ModelPlan
from ensemble.scheduling.batches import BatchRecord, room_text
from ensemble.scheduling.launchers.base import WorkerStart
from ensemble.scheduling.records import Failure, FaultRecord, WorkerRecord

Phase: TypeAlias = Literal["waiting", "starting", "loading", "predicting", "paused", "done", "failed"]


class ChunkQueue:
    """Keep a model's chunks; all chunks of a job come before the chunks of the next job.

    Attributes:
        pending: in the order of dispatch.
        in_hand: chunks that workers compute, by number; ``progress`` has the latest progress of each.
        numbers: yields numbers that no chunk of the model has yet.
        done_cost: the share of the model's work that this run has done.
        reused_cost: the share that earlier runs have done.
    """

    def __init__(self, chunks: Iterable[Chunk], other_work: float = 0.0) -> None:
        self.pending = deque(chunks)
        self.in_hand: dict[int, Chunk] = {}
        self.progress: dict[int, Progress] = {}
        self.numbers = count(1 + max((chunk.index for chunk in self.pending), default=-1))
        self.done_cost = 0.0
        self.reused_cost = 1.0 - other_work - sum(chunk.cost for chunk in self.pending)

    def take(self, chunk: Chunk, start: int | None = None) -> Chunk:
        """Move a pending chunk, or its rows from ``start`` on, to ``in_hand``."""
        index = self.pending.index(chunk)
        if start is None or start == chunk.start:
            del self.pending[index]
        else:
            self.pending[index], chunk = chunk.split(self.numbers, start)
        self.in_hand[chunk.index] = chunk
        return chunk

    def put_back(self, *chunks: Chunk) -> None:
        """Put chunks back, as the next chunks of their jobs."""
        for chunk in reversed(chunks):
            self.pending.insert(sum(other.job < chunk.job for other in self.pending), chunk)

    def drop(self, chunk: Chunk) -> None:
        self.in_hand.pop(chunk.index, None)
        self.progress.pop(chunk.index, None)

    @property
    def left(self) -> list[Chunk]:
        return [*self.pending, *self.in_hand.values()]


class SpeedMeter:
    """Measure how long a model's workers take to start, and how fast they compute.

    Attributes:
        startup_seconds: until the slowest worker could compute; 0 before the first worker is ready.
        last_seconds_per_cost: of the latest chunk.
        lost_rows: computed rows of chunks that the deadline cut short.
    """

    def __init__(self) -> None:
        self.startup_seconds = 0.0
        self.last_seconds_per_cost = 0.0
        self.lost_rows = 0
        self._seconds = self._cost = 0.0

    def add_chunk(self, cost: float, seconds: float) -> None:
        """Add a chunk's cost, and the seconds that the chunk took."""
        self._seconds += seconds
        self._cost += cost
        if cost:
            self.last_seconds_per_cost = seconds / cost

    def add_cut_short(self, chunk: Chunk, rows: int, seconds: float) -> None:
        """Add a chunk that the deadline cut short, with its computed rows and its seconds.

        The next run plans with the speed of this chunk.  If no row was computed, half of the chunk counts as
        computed, and the next run tries fewer rows.
        """
        self.lost_rows += rows
        self.add_chunk(chunk.cost * (rows or chunk.rows / 2) / chunk.rows, seconds)

    @property
    def seconds_per_cost(self) -> float | None:
        """Return how long a single worker takes for all work; None before the first chunk."""
        return self._seconds / self._cost if self._seconds and self._cost else None

    def speed(self, plan: ModelPlan) -> Speed:
        """Return the speed measured by this run, or else by an earlier run; 0 if neither measured it."""
        startup = plan.speed.startup_seconds if plan.speed.is_startup_measured else 0.0
        startup = self.startup_seconds or startup
        per_work = plan.speed.seconds_per_work if plan.speed.is_measured else 0.0
        cpu_share = plan.speed.cpu_share
        if self.seconds_per_cost is not None and plan.work:
            per_work, cpu_share = self.seconds_per_cost / plan.work, plan.cpu_share
        return Speed(
            startup_seconds=startup,
            seconds_per_work=per_work,
            is_measured=per_work > 0,
            is_startup_measured=startup > 0,
            cpu_share=cpu_share,
        )


class ModelState:
    """Hold the state of a model during a run.  Only this class writes its attributes.

    Args:
        plan: has the chunks that are left to do; jobs have none before their rows are selected.
        bad_rows: why an earlier run could not compute rows of the table, by the number of their job and of the row.
        clock: returns the time in seconds.
        batches: how earlier runs made the model's batches.

    Attributes:
        batches: how the model's workers make their batches from now on.
        running: number of running workers.  A counter, because it is read for each chunk and there can be hundreds
            of workers.
        paused_at: when the last worker ended although work was left; None while workers compute.
    """

    def __init__(
        self,
        plan: ModelPlan,
        bad_rows: Mapping[tuple[int, int], str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        batches: BatchRecord | None = None,
    ) -> None:
        self.clock = clock
        self.bad_rows = dict(bad_rows or {})
        self.batches = batches or BatchRecord()
        self.replica_numbers = count()
        self.counters = Counters()
        self.speed_meter = SpeedMeter()
        self.faults: list[FaultRecord] = []
        self.failure: Failure | None = None
        self.workers: list[WorkerRecord] = []
        self.running = 0
        self._most_replicas = sys.maxsize
        self.predicting_since: float | None = None
        self.paused_at: float | None = None
        self.finished_at: float | None = None
        self._shares: dict[int, float] = {}
        # Of trainings: what was computed at the last progress, and the seconds of predicting until then.
        self._progress_seen: tuple[float, float] | None = None
        self._loaded = 0  # number of running workers that have loaded the model
        self.plan = plan
        self.chunks = ChunkQueue(plan.chunks, plan.undecided_work + plan.left_out)
        self.rows = len(plan.order)
        self.reused_rows = self.rows - sum(chunk.rows for chunk in plan.chunks)

    # Methods that change the state.

    def extend(self, plan: ModelPlan) -> None:
        """Queue the chunks that ``with_job`` has added to the plan."""
        new_rows = len(plan.order) - len(self.plan.order)
        added = [chunk for chunk in plan.chunks if chunk.start >= len(self.plan.order)]
        selected_work = self.plan.undecided_work - plan.undecided_work - (plan.left_out - self.plan.left_out)
        self.plan = plan
        self.rows += new_rows
        self.reused_rows += new_rows - sum(chunk.rows for chunk in added)
        self.chunks.reused_cost += selected_work - sum(chunk.cost for chunk in added)
        self.chunks.put_back(*(replace(chunk, index=next(self.chunks.numbers)) for chunk in added))

    def end_early(self) -> None:
        """Drop the rows for which there was no time."""
        self.plan = replace(self.plan, undecided={}, left_out=0.0)
        self.rows -= sum(chunk.rows for chunk in self.chunks.left)
        done_cost, self.chunks = self.chunks.done_cost, ChunkQueue(())
        self.chunks.done_cost, self.chunks.reused_cost = done_cost, 1.0 - done_cost
        self.finish()

    def take(self, chunk: Chunk, start: int | None = None) -> Chunk:
        """Take a pending chunk, or its rows from ``start`` on, for a worker."""
        now = self.clock()
        if self.predicting_since is None:
            self.predicting_since = now
        elif self.paused_at is not None:  # time without workers does not count
            self.predicting_since += now - self.paused_at
        self.paused_at = None
        return self.chunks.take(chunk, start)

    def follow_shares(self, shares: Mapping[int, float]) -> None:
        """Note which share of each chunk in hand is done, by number, where workers do not count its rows."""
        self._shares = dict(shares)
        computed = self.computed_cost
        if self._progress_seen is None or self._progress_seen[0] != computed:
            self._progress_seen = computed, self.predicting_seconds

    def advance(self, progress: Progress) -> None:
        self.chunks.progress[progress.chunk] = progress

    def complete(self, chunk: Chunk, done: ChunkDone) -> None:
        cost = chunk.cost * done.counters.rows / chunk.rows  # less where the run was stopped in it
        self.chunks.done_cost += cost
        self.counters += done.counters
        self.speed_meter.add_chunk(cost, done.counters.predict_seconds)

    def set_aside(self, job: int, reasons: Mapping[int, str], chunk: Chunk | None = None) -> None:
        """Note rows of a job that cannot be computed; a ``chunk`` that consists of such a row counts as done."""
        self.bad_rows.update({(job, row): reason for row, reason in reasons.items()})
        if chunk is not None:
            self.chunks.done_cost += chunk.cost

    def cut_short(self, chunk: Chunk, seconds: float) -> None:
        """Note a chunk that the deadline cut short ``seconds`` after its dispatch."""
        progress = self.chunks.progress.get(chunk.index)
        self.speed_meter.add_cut_short(chunk, 0 if progress is None else progress.rows, seconds)

    def worker_began(self, record: WorkerRecord) -> None:
        self.workers.append(record)
        self.running += 1

    def worker_ready(self, record: WorkerRecord, ready: Ready) -> None:
        self._loaded += 1
        record.ready = ready
        record.load_seconds = ready.load_seconds
        startup_seconds = (record.start_seconds or 0.0) + ready.load_seconds
        self.speed_meter.startup_seconds = max(self.speed_meter.startup_seconds, startup_seconds)

    def follow_worker(self, record: WorkerRecord, devices: Sequence[Device]) -> None:
        """Note the room of a worker that is ready; a note says where the recorded room does not suit it."""
        assert record.ready is not None
        before = self.batches
        self.batches = before.with_worker(devices, record.ready)
        note = room_text(devices, before, self.batches, record.ready)
        if note:
            record.ready = replace(record.ready, notes=(*record.ready.notes, note))

    def follow_chunk(self, choice: BatchChoice, devices: Sequence[Device]) -> None:
        """Note how a worker makes its batches after a chunk."""
        self.batches = self.batches.with_chunk(devices, choice)

    def worker_ended(self, record: WorkerRecord, code: int, life_seconds: float | None) -> None:
        """Note how a worker ended; ``life_seconds`` is None if the run is over.  Its chunk is not done then."""
        record.exit_code = code
        record.life_seconds = life_seconds
        self.running -= 1
        self._loaded -= record.ready is not None
        if life_seconds is None:
            self.chunks.progress.clear()
        elif not self.running and self.predicting_since is not None and self.finished_at is None:
            self.paused_at = self.clock()

    def move(self, devices: tuple[str, ...], replicas: int) -> None:
        """Change the devices that the model may use, and the number of its workers at the same time."""
        placement = replace(self.plan.placement, devices=devices)
        self.plan = replace(self.plan, placement=placement, replicas=min(replicas, self._most_replicas))

    def limit_replicas(self, running: int, is_lasting: bool = False) -> None:
        """Limit the workers to those that run now; for good if others that join have no more memory."""
        self.plan = replace(self.plan, replicas=max(1, running))
        if is_lasting:
            self._most_replicas = self.plan.replicas

    def finish(self) -> None:
        self.finished_at = self.clock()

    def fail(self, failure: Failure) -> None:
        self.failure = failure
        self.chunks.pending.clear()

    # Methods and properties that only read the state.

    @property
    def has_undecided_rows(self) -> bool:
        return bool(self.plan.undecided)

    @property
    def waits_for_selection(self) -> bool:
        """Return whether all chunks before a job whose rows are not selected yet are done."""
        job, pending = min(self.plan.undecided, default=0), self.chunks.pending
        if not job:
            return False
        are_dispatched = not pending or pending[0].job >= job
        return are_dispatched and all(chunk.job >= job for chunk in self.chunks.in_hand.values())

    @property
    def may_end_early(self) -> bool:
        """Return whether the model lacks nothing but rows of which it has as many as there was time for."""
        if self.failure is not None or self.finished:
            return False
        jobs = {*self.plan.undecided, *(chunk.job for chunk in self.chunks.left)}
        return all(self.plan.jobs[job].phase == AS_TIME_ALLOWS for job in jobs)

    @property
    def finished(self) -> bool:
        is_work_left = self.has_undecided_rows or self.chunks.pending or self.chunks.in_hand
        return self.failure is None and not is_work_left

    @property
    def has_work(self) -> bool:
        """Return whether chunks are pending, or rows are still to be selected."""
        return bool(self.chunks.pending) or (self.has_undecided_rows and self.failure is None)

    @property
    def phase_due(self) -> int:
        """Return the phase of the job whose chunk is next; that of the last jobs if no chunk is left."""
        pending = self.chunks.pending
        return self.plan.jobs[pending[0].job].phase if pending else AS_TIME_ALLOWS

    @property
    def max_replicas(self) -> int:
        """Return how many workers may run at the same time: no more than planned, and no more than chunks."""
        return min(self.plan.replicas, max(1, len(self.plan.chunks)))

    @property
    def missing_first_workers(self) -> int:
        """Return how many workers are missing of those that start before later members' workers."""
        return min(self.plan.first_replicas, self.max_replicas) - self.running

    def command_of(self, chunk: Chunk, devices: Sequence[Device] = ()) -> Predict:
        """Return the command to compute a chunk on these devices.

        The command contains rows that were selected during the run.
        """
        numbers = None
        if self.plan.jobs[chunk.job].selection is not None:
            order = self.plan.order[chunk.start : chunk.stop].astype("<i4")
            numbers = base64.b64encode(order.tobytes()).decode("ascii")
        choice = self.batches.choice(devices)
        return Predict(chunk.index, chunk.start, chunk.stop, numbers, choice, chunk.job)

    def row_text(self, job: int, row: int) -> str:
        """Return a row's name for messages: its number in the table, and its job's title."""
        title = self.plan.jobs[job].title
        return f"{row + 1:,} ({title})" if title else f"{row + 1:,}"

    def bad_rows_of(self, job: int) -> dict[int, str]:
        """Return why rows of the table could not be computed in a job."""
        return {row: reason for (other, row), reason in self.bad_rows.items() if other == job}

    @property
    def in_hand_texts(self) -> list[str]:
        """Return the titles of the jobs without rows that workers do, and how far these are."""
        texts = []
        for chunk in () if self.plan.has_rows else self.chunks.in_hand.values():
            share = f" ({self._shares[chunk.index]:.0%})" if chunk.index in self._shares else ""
            texts.append(self.plan.jobs[chunk.job].title + share)
        return texts

    @property
    def is_loaded(self) -> bool:
        return self._loaded > 0

    @property
    def rows_done(self) -> int:
        in_hand = sum(progress.rows for progress in self.chunks.progress.values())
        return self.reused_rows + self.counters.rows + in_hand

    @property
    def tokens_done(self) -> int:
        return self.counters.tokens + sum(progress.tokens for progress in self.chunks.progress.values())

    @property
    def computed_cost(self) -> float:
        """Return the share of the model's work that this run has done, with the progress of chunks in hand."""
        cost = self.chunks.done_cost
        for number, progress in self.chunks.progress.items():
            chunk = self.chunks.in_hand[number]
            cost += chunk.cost * progress.rows / chunk.rows
        for number, share in self._shares.items():
            if number in self.chunks.in_hand:
                cost += self.chunks.in_hand[number].cost * share
        return cost

    @property
    def fraction(self) -> float:
        """Return the share of the model's work that is done, by cost and not by rows: long rows come first.

        Rows that were not selected count for nothing.
        """
        whole = 1.0 - self.plan.left_out
        if whole < 1e-9:
            return 1.0
        return min(1.0, max(0.0, round((self.chunks.reused_cost + self.computed_cost) / whole, 9)))

    @property
    def speed(self) -> Speed:
        """Return the speed measured by this run, or else by an earlier run; 0 if neither measured it."""
        return self.speed_meter.speed(self.plan)

    @property
    def startup_seconds(self) -> float:
        """Return the measured or guessed time until a worker can compute."""
        return self.speed.startup_seconds or self.plan.speed.startup_seconds

    @property
    def predicting_seconds(self) -> float:
        """Return how long the model has been computing; never 0."""
        if self.predicting_since is None:
            return 1e-9
        end = self.clock()
        if self.finished_at is not None:
            end = self.finished_at
        elif self.paused_at is not None:
            end = self.paused_at
        return max(end - self.predicting_since, 1e-9)

    @property
    def work_left(self) -> float:
        """Return the share of the work on all rows that is expected to be left."""
        whole = 1.0 - self.plan.left_out
        return max(0.0, whole * (1.0 - self.fraction) - self.plan.unexpected_work)

    @property
    def seconds_left(self) -> float:
        """Return how long the model still needs at the speed so far; 0 before it has done anything.

        Trainings may tell nothing for hours: theirs counts down from the last progress.
        """
        computed, elapsed = self.computed_cost, self.predicting_seconds
        if not computed:
            return 0.0
        until = elapsed if self._progress_seen is None else self._progress_seen[1]
        return max(0.0, until * self.work_left / computed - (elapsed - until))

    @property
    def phase(self) -> Phase:
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


class RunHooks(ABC):
    """Define what the scheduler needs from its run."""

    @abstractmethod
    def worker_start(self, model: ModelPlan, replica: int, devices: Sequence[Device]) -> WorkerStart:
        """Return how to start a worker; raises OSError if its files cannot be made."""

    @abstractmethod
    def say(self, text: str) -> None:
        """Show the user a sentence."""

    @abstractmethod
    def on_change(self, models: Sequence[ModelState]) -> None:
        """Show and record progress.  Called a few times a second; an exception ends the run."""

    def on_bad_rows(self, state: ModelState) -> None:
        """Note that rows of a model were set aside."""

    def on_rooms(self, state: ModelState) -> None:
        """Keep how much memory a model's batches may take, which has changed."""

    def on_chunk_done(self, state: ModelState, chunk: Chunk, done: ChunkDone, devices: Sequence[str]) -> None:
        """Note that a chunk is done, by a worker on these devices (UUIDs, or "cpu")."""

    def on_jobs_done(self, state: ModelState) -> None:
        """Select rows of a job whose earlier jobs are done; called again until they are selected."""

    def on_ended(self, state: ModelState) -> None:
        """Start jobs that wait for a model that has failed or has complete predictions."""

    def on_finished(self, state: ModelState) -> None:
        """Gather a model's predictions, in another thread.

        A MergeError fails its member; any other exception ends the run.
        """
