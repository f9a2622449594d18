"""Workers that stand by: processes of the next members, begun while others still compute.

One that stands by has imported its libraries, loaded its tokenizer and made the token ids of its first rows; it has
no model, no lease and no CUDA context, so that all it takes is memory of the host.  It is pinned to the devices
that will probably come free for it.  Nothing depends on it: where it fails, or where other devices come free, a
fresh worker does the same.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ensemble.common.gpus import Device
from ensemble.common.protocol import Failed, Prepare, ProtocolError, Started
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.running_worker import Slot, Worker
from ensemble.scheduling.state import MemberState, WorkerRecord

# What a process takes that has imported torch and transformers and has a chunk's token ids, about.
PROCESS_BYTES = 1 << 30
# Of the memory that is available, what weight files may fill of the page cache.
_READ_AHEAD_SHARE = 0.5
log = logging.getLogger(__name__)

StartProcess = Callable[[MemberPlan, int, Sequence[Device], int], tuple[Worker, str]]


@dataclass(eq=False)
class Standby:
    """A process that sees ``devices`` and has not been told to load its model.

    ``started`` is what it said once its libraries were imported; ``began_after_seconds`` count from when workers
    could begin.
    """

    state: MemberState
    worker: Worker
    log_path: str
    devices: tuple[Device, ...]
    replica: int
    began_after_seconds: float
    started: Started | None = None
    has_failed: bool = False

    def record(self, leased_after_seconds: float) -> WorkerRecord:
        """The record of a worker that has its lease now."""
        return WorkerRecord(
            member=self.state.plan.name,
            replica=self.replica,
            devices=tuple(device.uuid for device in self.devices) or ("cpu",),
            pid=self.worker.pid,
            log_path=self.log_path,
            started_after_seconds=round(self.began_after_seconds, 3),
            leased_after_seconds=round(leased_after_seconds, 3),
        )


class Standbys:
    """Those of a run.

    Args:
        start: starts a process for (member, replica number, devices, bytes of weights to read ahead); returns it
            and its log's path.
        available_bytes: what there is of the host's memory; None where the system does not tell.
        clock: seconds since the run's workers began.
    """

    def __init__(
        self,
        start: StartProcess,
        available_bytes: Callable[[], int | None],
        clock: Callable[[], float],
    ) -> None:
        self._start = start
        self._available_bytes = available_bytes
        self._clock = clock
        self._waiting: list[Standby] = []
        self._failed: set[str] = set()

    def look(self, members: Sequence[MemberState], slots: Sequence[Slot]) -> None:
        """Hear what those that stand by have said; start others where that will pay."""
        for one in list(self._waiting):
            if not self._is_well(one):
                self._failed.add(one.state.plan.name)
                self._drop(one, "it did not get as far as standing by")
            elif not one.state.waiting or self._missing(one.state) < 0:
                self._drop(one, "its member needs no more workers")
        for state, devices in self._wanted(members, slots):
            # What processes that have just begun will take does not show yet.
            growing = sum(one.started is None for one in self._waiting)
            available = self._available_bytes()
            if available is not None and available < (2 + growing) * PROCESS_BYTES:
                return
            left = 0 if available is None else available - (1 + growing) * PROCESS_BYTES
            read_ahead = int(left * _READ_AHEAD_SHARE)
            self._begin(state, devices, read_ahead)

    def devices_for(self, state: MemberState) -> list[tuple[Device, ...]]:
        """What those of a member wait for, the earliest first."""
        return [one.devices for one in self._waiting if one.state is state]

    def process_for(self, state: MemberState, lease: Sequence[Device]) -> Standby:
        """A process of this member that sees just these devices: one that stands by, or else a fresh one.

        Raises:
            OSError: none could be started.
        """
        for one in self._waiting:
            if one.state is state and lease and one.devices == tuple(lease) and self._is_well(one):
                self._waiting.remove(one)
                return one
        return self._started(state, tuple(lease), 0)

    def end_all(self) -> None:
        """None of them outlives this call."""
        for one in self._waiting:
            one.worker.terminate()
        for one in list(self._waiting):
            self._drop(one, "the run is over")

    def _wanted(
        self, members: Sequence[MemberState], slots: Sequence[Slot]
    ) -> Iterator[tuple[MemberState, tuple[Device, ...]]]:
        """Members whose first workers are to come, with the devices that will probably come free for them first."""
        taken = {device for one in self._waiting for device in one.devices}
        # While one still loads, it shall have the disk and the processor to itself; and until all have computed
        # something nobody knows whose devices come free first.
        if not all(slot.told_to_stop or (slot.is_ready and slot.state.computed_cost) for slot in slots):
            return
        by_end = sorted(slots, key=lambda slot: slot.state.seconds_left)
        for state in members:
            # Not for the CPU: all of its cores compute, so that nothing is gained there.
            if not state.plan.gpus or not state.waiting or state.plan.name in self._failed:
                continue
            coming_free = dict.fromkeys(
                device
                for slot in by_end
                if slot.state is not state
                for device in slot.lease
                if device.uuid in state.plan.placement.devices and device not in taken
            )
            able = list(coming_free)
            for _ in range(self._missing(state)):
                devices, able = tuple(able[: state.plan.gpus]), able[state.plan.gpus :]
                if len(devices) < state.plan.gpus:
                    break
                taken.update(devices)
                # In the order of a lease: max_memory and device_map number a member's GPUs.
                order = state.plan.placement.devices.index
                yield state, tuple(sorted(devices, key=lambda device: order(device.uuid)))

    def _missing(self, state: MemberState) -> int:
        """How many of its first workers neither run nor stand by."""
        standing_by = sum(one.state is state for one in self._waiting)
        return min(state.plan.first_replicas, state.most_replicas) - state.running - standing_by

    def _begin(self, state: MemberState, devices: tuple[Device, ...], read_ahead_bytes: int) -> None:
        place = len(self.devices_for(state))
        try:
            one = self._started(state, devices, read_ahead_bytes)
        except OSError as error:
            self._failed.add(state.plan.name)
            log.info("no worker of %s can stand by: %s", state.plan.name, error)
            return
        if place < len(state.waiting):
            first = state.waiting[place]
            one.worker.send(Prepare(first.start, first.stop))
        self._waiting.append(one)
        log.info("%s-%d stands by for %s", state.plan.name, one.replica, [device.uuid for device in devices])

    def _started(self, state: MemberState, devices: tuple[Device, ...], read_ahead_bytes: int) -> Standby:
        replica = next(state.replicas)
        worker, log_path = self._start(state.plan, replica, devices, read_ahead_bytes)
        log.info("%s-%d started as process %d", state.plan.name, replica, worker.pid)
        return Standby(state, worker, log_path, devices, replica, self._clock())

    def _is_well(self, one: Standby) -> bool:
        """Hear what it has said; whether it goes on."""
        try:
            events, is_open = one.worker.receive()
        except ProtocolError:
            return False
        for event in events:
            if isinstance(event, Started):
                one.started = event
            one.has_failed |= isinstance(event, Failed)
        return is_open and not one.has_failed and not one.worker.has_exited()

    def _drop(self, one: Standby, why: str) -> None:
        self._waiting.remove(one)
        with contextlib.suppress(OSError):
            one.worker.terminate()
        code = one.worker.close()
        log.info("%s-%d no longer stands by: %s (exit code %d)", one.state.plan.name, one.replica, why, code)
