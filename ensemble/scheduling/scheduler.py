"""Leases devices to workers, hands out chunks, and gathers what came of them.

One thread, one loop: it waits for events on the workers' pipes, so that processes are started from the main
thread and nothing needs a lock.  A worker's failure is data here; it never ends the loop.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from ensemble.common.clock import Watch
from ensemble.common.errors import MergeError
from ensemble.common.gpus import Device
from ensemble.common.host import available_memory_bytes, oom_kills
from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    Closed,
    Computed,
    Failed,
    Load,
    Predict,
    Progress,
    ProtocolError,
    Ready,
    Started,
    Stop,
)
from ensemble.planning.chunks import Chunk
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.deadline import TimeKeeper
from ensemble.scheduling.device_pool import Leases
from ensemble.scheduling.dispatch import HandOut, Turn, Turns
from ensemble.scheduling.retry import Judge
from ensemble.scheduling.running_worker import Slot, Worker
from ensemble.scheduling.standby import Standbys
from ensemble.scheduling.state import Fault, Gaps, MemberState

TICK_SECONDS = 0.25
# A worker that was told to end, or has closed its line, may take this long: freeing a GPU takes a while.
END_SECONDS = 30.0
# One that is asked to drop its work holds nothing that needs longer.
GRACE_SECONDS = 5.0
# What one that hangs gets to write its stacks to its log.
ABORT_SECONDS = 2.0
log = logging.getLogger(__name__)

Launch = Callable[[MemberPlan, int, Sequence[Device], int], tuple[Worker, str]]


class Scheduler:
    """Runs a plan.

    Args:
        members: in their order, with the chunks that are left to do.
        leases: the devices that may be leased.
        launch: starts a worker for (member, replica number, devices, bytes of weights to read ahead); returns it
            and its log's path.
        judge: says what becomes of the work of workers that failed.
        on_change: called with the members' states a few times a second; what it raises ends the run.
        on_finished: called once for each member, when its last chunk is done, from another thread.
        hang_timeout_seconds: without progress for so long a worker counts as hung.
        time_keeper: says who goes on under a time limit; None: there is none.
        may_stand_by: whether the next members' workers may start while others compute.
    """

    def __init__(
        self,
        members: list[MemberState],
        leases: Leases,
        launch: Launch,
        judge: Judge,
        on_change: Callable[[list[MemberState]], None],
        on_finished: Callable[[MemberState], None],
        hang_timeout_seconds: float,
        time_keeper: TimeKeeper | None = None,
        may_stand_by: bool = True,
    ) -> None:
        self.members = members
        self.gaps = Gaps()
        self._leases = leases
        self._launch = launch
        self._judge = judge
        self._on_change = on_change
        self._finishing = Finishing(on_finished)
        self._hang_timeout_seconds = hang_timeout_seconds
        self._turns = Turns(members, leases, time_keeper)
        self._time_keeper = time_keeper
        self._slots: list[Slot] = []
        self._hand_outs = HandOut(members, self._slots, time_keeper)
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()
        self._standbys = Standbys(launch, available_memory_bytes, lambda: time.monotonic() - self._began)
        self._may_stand_by = may_stand_by
        # What workers are given goes by this one: nobody hangs, and nobody is late, while this process is stopped.
        self._watch = Watch(2 * TICK_SECONDS)

    def run(self) -> None:
        """Run every member to its end, good or bad, or to the end of the time.

        No worker outlives this call, however it ends.
        """
        try:
            for state in self.members:
                self._finish_if_done(state)
            self._start_what_fits()
            while (
                self._slots or self._finishing.is_busy or self._turns.is_anybody_waiting()
            ) and not self._is_over():
                self._hear()
                for slot in list(self._slots):
                    self._look_at(slot)
                self._leases.poll()
                self._start_what_fits()
                if self._may_stand_by:
                    self._standbys.look(self.members, self._slots)
                self._hear_of_finished()
                self._on_change(self.members)
        finally:
            self._end_all()
        self._hear_of_finished()

    def _hear(self) -> None:
        """Wait until somebody has something to say, but no longer than a moment."""
        if not self._slots and self._finishing.is_busy:
            self._finishing.wait(TICK_SECONDS)
            return
        for key, _ in self._selector.select(TICK_SECONDS):
            self._read(key.data)

    def _end_all(self) -> None:
        for slot in self._slots:
            slot.worker.terminate()
            if slot.chunk is not None and self._time_keeper is not None and self._time_keeper.is_over:
                slot.state.cut_short(slot.chunk, slot.seconds_left - self._time_keeper.seconds_left)
        give_up = self._watch() + GRACE_SECONDS
        while self._watch() < give_up and not all(slot.worker.has_exited() for slot in self._slots):
            time.sleep(0.01)
        for slot in self._slots:
            slot.record.exit_code = slot.worker.close()
            slot.state.current.clear()  # what it had in hand is not done
        self._standbys.end_all()
        self._finishing.close()
        self._selector.close()

    def _look_at(self, slot: Slot) -> None:
        """End what has exited or had its time; notice what hangs."""
        now = self._watch()
        if slot.worker.has_exited() or now > (slot.end_by or float("inf")):
            self._read(slot)
            self._end(slot)
        elif slot.end_by is None and slot.hang_text(now, self._hang_timeout_seconds):
            self._read(slot)  # what it said while this process was busy, as with a large table, counts
            now = self._watch()
            text = slot.hang_text(now, self._hang_timeout_seconds)
            if text and slot.end_by is None:
                slot.fault = Fault("hang", text)
                slot.worker.abort()
                slot.end_by = now + ABORT_SECONDS

    def _start_what_fits(self) -> None:
        while (turn := self._turns.next(self._slots)) is not None:
            self._start(turn)

    def _is_over(self) -> bool:
        return self._time_keeper is not None and self._time_keeper.is_over

    def _start(self, turn: Turn) -> None:
        state = turn.state
        lease = self._leases.take(
            state.plan.gpus, turn.allowed, turn.is_last_resort, self._standbys.devices_for(state)
        )
        try:
            process = self._standbys.process_for(state, lease)
        except OSError as error:
            self._leases.give_back(lease)
            self._judge.give_up(state, f"could not start a worker: {error}")
            self._end_failed(state)
            return
        record, worker = process.record(time.monotonic() - self._began), process.worker
        state.workers.append(record)
        state.running += 1
        slot = Slot(state, worker, record, lease, self._watch(), oom_kills())
        self._slots.append(slot)
        self._selector.register(worker.events_fd, selectors.EVENT_READ, slot)
        log.info("%s-%d has %s as process %d", record.member, record.replica, record.devices, record.pid)
        if process.started is not None:
            self._handle(slot, process.started)
        self._hand_outs.give_hint(slot)
        worker.send(Load())

    def _read(self, slot: Slot) -> None:
        if not slot.is_line_open:
            return
        try:
            events, slot.is_line_open = slot.worker.receive()
            for event in events:
                slot.heard(event, self._watch())
                self._handle(slot, event)
        except ProtocolError as error:
            slot.fault = slot.fault or Fault("lasting", f"ProtocolError: {error}")
            self._ask_to_end(slot)
        if not slot.is_line_open:
            self._selector.unregister(slot.worker.events_fd)
            slot.end_by = self._watch() + END_SECONDS

    def _handle(self, slot: Slot, event: Any) -> None:
        record = slot.record
        if isinstance(event, Started):
            record.start_seconds, record.versions = event.start_seconds, event.versions
        elif isinstance(event, Ready):
            record.ready, record.load_seconds = event, event.load_seconds
            log.info("%s-%d ready: %s", record.member, record.replica, event)
            self._judge.started(slot.state)
            self._hand_out(slot)
        elif isinstance(event, Progress):
            self._check_chunk(slot, event.chunk)
            slot.state.current[event.chunk] = event
        elif isinstance(event, Computed):
            self._check_chunk(slot, event.chunk)
            assert slot.chunk is not None
            slot.writing[event.chunk], slot.chunk = slot.chunk, None
            # Under a time limit what fits is told by the time of the first chunk, which ChunkDone brings.
            if self._time_keeper is None or slot.state.seconds_per_cost is not None:
                self._hand_out(slot)
        elif isinstance(event, ChunkDone):
            self._chunk_done(slot, event)
            if slot.chunk is None and not slot.told_to_stop:
                self._hand_out(slot)
            slot.expect_end(self._watch() + END_SECONDS)
        elif isinstance(event, ChunkFailed):
            self._check_chunk(slot, event.chunk)
            fault = Fault("error", f"{event.error_type}: {event.message}", event.traceback)
            assert slot.chunk is not None
            self._judge_chunk(slot, slot.chunk, fault)
            self._hand_out(slot)
        elif isinstance(event, Failed):
            slot.failed = event
        elif isinstance(event, Closed):
            record.closed = event

    def _check_chunk(self, slot: Slot, index: int) -> None:
        if slot.chunk is None or slot.chunk.index != index:
            raise ProtocolError(f"it spoke of chunk {index}, which it was not given")

    def _chunk_done(self, slot: Slot, event: ChunkDone) -> None:
        chunk = slot.writing.get(event.chunk)
        if chunk is None:
            raise ProtocolError(f"it wrote chunk {event.chunk}, which it had not computed")
        record, state = slot.record, slot.state
        record.counters += event.counters
        state.done_cost += chunk.cost
        per_cost = event.counters.predict_seconds / chunk.cost if chunk.cost else 0.0
        state.slowest_seconds_per_cost = max(state.slowest_seconds_per_cost, per_cost)
        slot.drop(chunk)
        log.info("%s-%d chunk %d done: %s", record.member, record.replica, event.chunk, event)
        if event.bad_rows:
            reasons = dict(zip(event.bad_rows, event.bad_row_reasons, strict=True))
            self._judge.bad_rows(state, record.replica, reasons)
            self._end_failed(state)
        self._finish_if_done(state)

    def _judge_chunk(self, slot: Slot, chunk: Chunk, fault: Fault) -> None:
        """What a worker had in hand was not done."""
        slot.drop(chunk)
        self._judge.chunk_failed(slot.state, slot.record.replica, chunk, fault)
        self._end_failed(slot.state)
        self._finish_if_done(slot.state)

    def _finish_if_done(self, state: MemberState) -> None:
        if state.finished and state.finished_at is None:
            state.finished_at = time.monotonic()
            self._judge.finished(state)
            if state.failure is None:
                self._finishing.begin(state)

    def _hear_of_finished(self) -> None:
        for state, error in self._finishing.failures():  # its parts were harmed meanwhile: the others go on
            self._judge.give_up(state, str(error))

    def _hand_out(self, slot: Slot) -> None:
        chunk = self._hand_outs.take_chunk(slot)
        if chunk is None:
            self.gaps.end(slot.record.pid, time.monotonic())
            slot.told_to_stop = True
            slot.expect_end(self._watch() + END_SECONDS)
            slot.worker.send(Stop())
            return
        slot.chunk = slot.state.in_hand[chunk.index] = chunk
        slot.stepped_at, now = self._watch(), time.monotonic()
        slot.seconds_left = self._time_keeper.seconds_left if self._time_keeper is not None else 0.0
        slot.state.go_on(now)
        slot.worker.send(Predict(chunk.index, chunk.start, chunk.stop))
        self._hand_outs.give_hint(slot)
        self.gaps.begin(slot.record.pid, slot.state.plan.name, slot.record.devices, now)

    def _end(self, slot: Slot) -> None:
        """The process has ended, or had its time: reap it, give its devices back, judge how it ended."""
        self._slots.remove(slot)
        if slot.is_line_open:
            self._selector.unregister(slot.worker.events_fd)
        code = slot.worker.close()
        record, state = slot.record, slot.state
        record.exit_code = code
        record.life_seconds = round(time.monotonic() - self._began - record.leased_after_seconds, 3)
        self.gaps.end(record.pid, time.monotonic())
        state.running -= 1
        if not state.running and state.predicting_since is not None and state.finished_at is None:
            state.paused_at = time.monotonic()
        self._leases.give_back(slot.lease, is_suspect=not slot.is_ready and state.failure is None)
        log.info("%s-%d ended with exit code %d", record.member, record.replica, code)
        if state.failure is not None:  # it was told to end
            for chunk in slot.held:
                slot.drop(chunk)
            return
        fault = slot.verdict(code, oom_kills())
        if fault is None:
            return
        if fault.kind == "memory":
            state.most_replicas = max(1, state.running)
            self._may_stand_by = False  # those that did may be what there was no room for
            self._standbys.end_all()
        others_compute = any(other.state is state and other.is_ready for other in self._slots)
        self._judge.worker_ended(slot, fault, others_compute)
        self._end_failed(state)
        self._finish_if_done(state)

    def _end_failed(self, state: MemberState) -> None:
        """A member that has failed needs none of its workers."""
        if state.failure is None:
            return
        state.waiting.clear()
        for slot in self._slots:
            if slot.state is state and slot.end_by is None:
                self._ask_to_end(slot)

    def _ask_to_end(self, slot: Slot) -> None:
        slot.worker.terminate()
        slot.end_by = self._watch() + GRACE_SECONDS


class Finishing:
    """Members' last steps, one after the other.

    Args:
        finish: called in another thread, once for each member.
    """

    def __init__(self, finish: Callable[[MemberState], None]) -> None:
        self._finish = finish
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="finishing")
        self._begun: list[tuple[MemberState, Future[None]]] = []

    @property
    def is_busy(self) -> bool:
        """Whether there is something whose end has not been heard of."""
        return bool(self._begun)

    def begin(self, state: MemberState) -> None:
        self._begun.append((state, self._thread.submit(self._finish, state)))

    def failures(self) -> Iterator[tuple[MemberState, MergeError]]:
        """Members that came to an end meanwhile, badly: their parts were harmed.

        Raises:
            Exception: whatever else the last step of a member raised.
        """
        for state, future in [one for one in self._begun if one[1].done()]:
            self._begun.remove((state, future))
            if future.cancelled():  # the run is over; its parts stay for the next one
                continue
            try:
                future.result()
            except MergeError as error:
                yield state, error

    def wait(self, seconds: float) -> None:
        """Until one has come to its end, or no longer than that."""
        wait([future for _, future in self._begun], seconds, return_when=FIRST_COMPLETED)

    def close(self) -> None:
        """Let the one that has begun come to its end; the others can be done by the next run."""
        self._thread.shutdown(wait=True, cancel_futures=True)
