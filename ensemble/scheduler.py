"""Leases devices to workers, hands out chunks, and gathers what came of them.

One thread, one loop: it waits for events on the workers' pipes, so that processes are started from the main
thread and nothing needs a lock.  A worker's failure is data here; it never ends the loop.
"""

from __future__ import annotations

import logging
import selectors
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ensemble.devices import Device
from ensemble.leases import Leases
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import worth_joining
from ensemble.planning.plan import MemberPlan, Plan
from ensemble.protocol import ChunkDone, Closed, Command, Failed, Predict, Progress, Ready, Started, Stop
from ensemble.state import Failure, MemberState, WorkerRecord

TICK_SECONDS = 0.25
# A worker that was told to end, or has closed its line, may take this long: freeing a GPU takes a while.
END_SECONDS = 30.0
log = logging.getLogger(__name__)


class Worker(Protocol):
    """What the scheduler needs of a worker process, wherever it runs."""

    events_fd: int

    @property
    def pid(self) -> int: ...
    def send(self, command: Command) -> None: ...
    def receive(self) -> tuple[list[Any], bool]: ...
    def has_exited(self) -> bool: ...
    def terminate(self) -> None: ...
    def close(self) -> int: ...


@dataclass(eq=False)
class _Slot:
    """A running worker: its process, its record, the lease it holds, the chunk in its hands."""

    state: MemberState
    worker: Worker
    record: WorkerRecord
    lease: tuple[Device, ...]
    chunk: Chunk | None = None
    told_to_stop: bool = False
    failed: Failed | None = None
    is_line_open: bool = True
    end_by: float | None = None  # monotonic clock: no longer does anybody wait for the process


Launch = Callable[[MemberPlan, int, Sequence[Device]], tuple[Worker, str]]


class Scheduler:
    """Runs a plan.

    Args:
        plan: members with their chunks.
        leases: the devices that may be leased.
        launch: starts a worker for (member, replica number, lease); returns it and its log's path.
        on_change: called with the members' states a few times a second.
        on_finished: called once for each member, when its last chunk is done.
    """

    def __init__(
        self,
        plan: Plan,
        leases: Leases,
        launch: Launch,
        on_change: Callable[[Sequence[MemberState]], None],
        on_finished: Callable[[MemberState], None],
    ) -> None:
        self.members = [MemberState(member, deque(member.chunks)) for member in plan.members]
        self._leases = leases
        self._launch = launch
        self._on_change = on_change
        self._on_finished = on_finished
        self._slots: list[_Slot] = []
        self._selector = selectors.DefaultSelector()
        self._began = time.monotonic()

    def run(self) -> list[MemberState]:
        """Run every member to its end, good or bad.  No worker outlives this call, however it ends."""
        try:
            self._start_what_fits()
            while self._slots or self._is_waiting_for_release():
                for key, _ in self._selector.select(TICK_SECONDS):
                    self._read(key.data)
                for slot in list(self._slots):
                    if slot.worker.has_exited() or time.monotonic() > (slot.end_by or float("inf")):
                        self._read(slot)
                        self._end(slot)
                self._leases.poll()
                self._start_what_fits()
                self._on_change(self.members)
        finally:
            for slot in self._slots:
                slot.worker.terminate()
            for slot in self._slots:
                slot.worker.close()
            self._selector.close()
        return self.members

    def _start_what_fits(self) -> None:
        """Start workers in the members' order.

        A member that has no worker yet keeps the devices it may use from later ones.  GPUs that nobody waits for
        go to members that have long to run.
        """
        reserved: set[str] = set()
        for state in self.members:
            while (
                state.waiting
                and state.running < state.plan.first_replicas
                and self._can_lease(state, reserved)
            ):
                self._start(state, reserved)
            if state.waiting and not state.running:
                reserved |= set(state.plan.placement.devices)
        for state in sorted(self.members, key=lambda state: -state.seconds_left):
            while (
                state.waiting
                and 0 < state.running < state.plan.replicas
                and self._is_worth_joining(state)
                and self._can_lease(state, reserved)
            ):
                self._start(state, reserved)

    def _is_worth_joining(self, state: MemberState) -> bool:
        startup = state.startup_seconds
        return startup > 0 and worth_joining(state.seconds_left, startup)

    def _is_waiting_for_release(self) -> bool:
        return self._leases.is_releasing() and any(state.waiting for state in self.members)

    def _can_lease(self, state: MemberState, reserved: Collection[str]) -> bool:
        if state.plan.gpus:
            allowed = self._allowed(state, reserved)
            return self._leases.can_take(state.plan.gpus, allowed, self._is_last_resort(state))
        # The CPU is one device: it takes the replicas of one member at a time.
        return all(slot.state is state for slot in self._slots if not slot.lease)

    def _allowed(self, state: MemberState, reserved: Collection[str]) -> list[str]:
        return [uuid for uuid in state.plan.placement.devices if uuid not in reserved]

    def _is_last_resort(self, state: MemberState) -> bool:
        # With no other device of its own in use or coming back, one that never came free is better than none.
        own = set(state.plan.placement.devices)
        in_use = {device.uuid for slot in self._slots for device in slot.lease}
        return not own & in_use and not self._leases.is_releasing(own)

    def _start(self, state: MemberState, reserved: Collection[str]) -> None:
        allowed = self._allowed(state, reserved)
        lease = self._leases.take(state.plan.gpus, allowed, self._is_last_resort(state))
        replica = len(state.workers)
        try:
            worker, log_path = self._launch(state.plan, replica, lease)
        except OSError as error:
            self._leases.give_back(lease)
            self._fail(state, Failure(state.plan.name, f"could not start a worker: {error}", "", ""))
            return
        record = WorkerRecord(
            member=state.plan.name,
            replica=replica,
            devices=tuple(device.uuid for device in lease) or ("cpu",),
            pid=worker.pid,
            log_path=log_path,
            started_after_seconds=round(time.monotonic() - self._began, 3),
        )
        state.workers.append(record)
        state.running += 1
        slot = _Slot(state, worker, record, lease)
        self._slots.append(slot)
        self._selector.register(worker.events_fd, selectors.EVENT_READ, slot)
        log.info("%s-%d started as process %d on %s", record.member, replica, record.pid, record.devices)

    def _read(self, slot: _Slot) -> None:
        if not slot.is_line_open:
            return
        try:
            events, slot.is_line_open = slot.worker.receive()
            for event in events:
                self._handle(slot, event)
        except ValueError as error:
            slot.failed = Failed("ProtocolError", str(error), "")
            self._ask_to_end(slot)
        if not slot.is_line_open:
            self._selector.unregister(slot.worker.events_fd)
            slot.end_by = time.monotonic() + END_SECONDS

    def _handle(self, slot: _Slot, event: Any) -> None:
        record = slot.record
        if isinstance(event, Started):
            record.start_seconds, record.versions = event.start_seconds, event.versions
        elif isinstance(event, Ready):
            record.ready, record.load_seconds = event, event.load_seconds
            log.info("%s-%d ready: %s", record.member, record.replica, event)
            self._hand_out(slot)
        elif isinstance(event, Progress):
            if slot.chunk is None or slot.chunk.index != event.chunk:
                raise ValueError(f"progress of chunk {event.chunk}, which it was not given")
            slot.state.current[record.pid] = event
        elif isinstance(event, ChunkDone):
            self._chunk_done(slot, event)
            self._hand_out(slot)
        elif isinstance(event, Failed):
            slot.failed = event
        elif isinstance(event, Closed):
            record.closed = event

    def _chunk_done(self, slot: _Slot, event: ChunkDone) -> None:
        if slot.chunk is None or slot.chunk.index != event.chunk:
            raise ValueError(f"chunk {event.chunk} done, which it was not given")
        record, state = slot.record, slot.state
        record.rows += event.rows
        record.tokens += event.tokens
        record.padded_tokens += event.padded_tokens
        record.batches += event.batches
        record.truncated_rows += event.truncated_rows
        record.oom_events += event.oom_events
        record.recomputed_rows += event.recomputed_rows
        record.predict_seconds += event.seconds
        record.chunks += 1
        state.chunks_done += 1
        state.done_cost += slot.chunk.cost
        state.current.pop(record.pid, None)
        slot.chunk = None
        if state.finished:
            state.finished_at = time.monotonic()
            self._on_finished(state)
        log.info("%s-%d chunk %d done: %s", record.member, record.replica, event.chunk, event)

    def _hand_out(self, slot: _Slot) -> None:
        state = slot.state
        if state.waiting and state.failure is None:
            if state.predicting_since is None:
                state.predicting_since = time.monotonic()
            slot.chunk = state.waiting.popleft()
            slot.worker.send(Predict(slot.chunk.index, slot.chunk.start, slot.chunk.stop))
        else:
            slot.told_to_stop = True
            slot.worker.send(Stop())

    def _end(self, slot: _Slot) -> None:
        """The process has ended, or had its time: reap it, give its devices back, judge how it ended."""
        self._slots.remove(slot)
        if slot.is_line_open:
            self._selector.unregister(slot.worker.events_fd)
        code = slot.worker.close()
        record, state = slot.record, slot.state
        record.exit_code = code
        record.life_seconds = round(time.monotonic() - self._began - record.started_after_seconds, 3)
        state.current.pop(record.pid, None)
        state.running -= 1
        self._leases.give_back(slot.lease)
        log.info("%s-%d ended with exit code %d", record.member, record.replica, code)
        if code == 0 and slot.told_to_stop and not slot.failed and slot.chunk is None:
            return
        failure = _failure(slot, code)
        if state.finished:  # by other replicas: nothing is missing
            log.warning("%s-%d had no part in the end: %s", record.member, record.replica, failure.message)
        elif state.failure is None:
            self._fail(state, failure)

    def _fail(self, state: MemberState, failure: Failure) -> None:
        log.error("%s failed: %s", failure.member, failure.message)
        state.failure = failure
        state.waiting.clear()
        for slot in self._slots:
            if slot.state is state:
                self._ask_to_end(slot)

    def _ask_to_end(self, slot: _Slot) -> None:
        slot.worker.terminate()
        slot.end_by = time.monotonic() + END_SECONDS


def _failure(slot: _Slot, code: int) -> Failure:
    record = slot.record
    if slot.failed is not None:
        message, traceback = f"{slot.failed.error_type}: {slot.failed.message}", slot.failed.traceback
    elif code < 0:
        message, traceback = f"its worker (process {record.pid}) was killed by signal {-code}", ""
    else:
        message, traceback = f"its worker (process {record.pid}) ended with exit code {code}, work undone", ""
    return Failure(record.member, message, traceback, record.log_path)
