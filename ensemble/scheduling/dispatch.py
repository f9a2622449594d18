"""Decide whose worker starts next and on which devices, and which chunk a worker gets next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ensemble.common.gpus import Device
from ensemble.planning.chunks import Chunk
from ensemble.scheduling.deadline import FIRST, Deadline, Rank
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.standby import Standbys
from ensemble.scheduling.state import MemberState
from ensemble.scheduling.worker import RunningWorker


@dataclass(frozen=True)
class Dispatcher:
    """Give devices to members, and chunks in their order to the next free worker.

    Attributes:
        members: in the order in which they start.
        workers: those that run now: the scheduler's own list.
    """

    members: Sequence[MemberState]
    workers: Sequence[RunningWorker]
    pool: DevicePool
    standbys: Standbys
    deadline: Deadline | None

    def next_lease(self) -> tuple[MemberState, tuple[Device, ...]] | None:
        """Lease devices (none: the CPU) to the member whose worker starts next; None if no worker can start now.

        Devices that a member without a worker may use are reserved for it.  GPUs that no member waits for go to
        members that need much more time.
        """
        for _, state, reserved in self._candidates():
            if not state.plan.gpus:
                if "cpu" not in reserved and self._has_cpu_room(state):
                    return state, ()
                continue
            devices = self.pool.acquire(
                state.plan.gpus,
                {*state.plan.placement.devices} - reserved,
                self.standbys.devices_for(state),
                state.plan.placement.places,
            )
            if devices:
                return state, devices
        return None

    def is_waiting_for_devices(self) -> bool:
        """Return whether a member would start if a device became free, or a lost node came back."""
        return (self.pool.is_releasing() or self.pool.expects_nodes) and any(self._candidates())

    def next_chunk(self, worker: RunningWorker) -> Chunk | None:
        """Take the next chunk for this worker; None if the worker should stop."""
        state = worker.state
        first = next(state.pending_for(worker.checkpoint), None)
        if first is None or state.failure is not None or worker.fault is not None:
            return None
        if self.deadline is None:
            return state.take(first)
        rank = self.deadline.ranks(self.members).get(state.plan.name)
        fitting = self.deadline.first_fitting(state, self.members, worker.checkpoint)
        # A worker that no other member needs goes on, so that its device is not idle.
        if rank is None or fitting is None or (rank != FIRST and self._is_needed_by_others(worker, rank)):
            return None
        return state.take(*fitting)

    def may_wait(self, worker: RunningWorker) -> bool:
        """Return whether a worker without a chunk keeps its model loaded, for rows that are about to be selected.

        Other workers of the member compute the last chunks before that, and no other member needs its devices.
        """
        state = worker.state
        if state.failure is not None or worker.fault is not None or state.chunks.pending:
            return False
        view = min(state.plan.undecided_views, default=None)
        is_soon = view is not None and state.plan.checkpoint_of(view) == worker.checkpoint
        return is_soon and bool(state.chunks.in_hand) and not self._is_needed_by_others(worker)

    def _misses_worker(self, state: MemberState) -> bool:
        """Return whether a worker is missing of those that start before later members' workers.

        A checkpoint gets its second worker only where more replicas are worth their start.
        """
        if not state.plan.checkpoints or state.missing_first_workers <= 0:
            return state.missing_first_workers > 0
        checkpoint = self.standbys.next_checkpoint(state)
        return all(worker.state is not state or worker.checkpoint != checkpoint for worker in self.workers)

    def _candidates(self) -> Iterator[tuple[Rank, MemberState, set[str]]]:
        """Yield members of which a worker may start, with the devices reserved for members before them."""
        if self.deadline is None:
            ranks = {state.plan.name: FIRST for state in self.members if state.chunks.pending}
        else:
            ranks = self.deadline.ranks(self.members)
        reserved: set[str] = set()
        for rank in sorted(set(ranks.values())):
            members = [
                state
                for state in self.members
                if ranks.get(state.plan.name) == rank
                and (
                    self.deadline is None
                    or self.deadline.may_start(state, self.members, self.standbys.next_checkpoint(state))
                )
            ]
            for state in members:
                if self._misses_worker(state):
                    yield rank, state, reserved
                if not state.running:
                    reserved |= {*state.plan.placement.devices} or {"cpu"}
            for state in sorted(members, key=lambda state: -state.seconds_left):
                startup = state.speed_meter.startup_seconds  # 0 while it is not known
                # One more worker, which first has to start, would still take a good part of what is left.
                is_worth_it = 0 < 2 * startup < state.seconds_left
                if 0 < state.running < state.max_replicas and is_worth_it:
                    yield rank, state, reserved

    def _has_cpu_room(self, state: MemberState) -> bool:
        shares = [worker.state.plan.cpu_share for worker in self.workers if not worker.devices]
        if self.pool.max_cpu_workers is not None and len(shares) >= self.pool.max_cpu_workers:
            return False
        # Shares are rounded, such as thirds.
        return sum(shares) + state.plan.cpu_share <= self.pool.hosts + 1e-6

    def _is_needed_by_others(self, worker: RunningWorker, rank: Rank | None = None) -> bool:
        """Return whether another member, with a smaller rank, could use this worker's devices."""
        seconds_left = math.inf if self.deadline is None else self.deadline.seconds_left
        uuids = {device.uuid for device in worker.devices}
        for other_rank, state, reserved in self._candidates():
            if rank is not None and other_rank >= rank:
                return False
            # A member whose start would use up most of the time stops no worker.
            takes_most = 2 * state.startup_seconds >= seconds_left
            if state is worker.state or takes_most:
                continue
            if uuids & ({*state.plan.placement.devices} - reserved) or not (uuids or state.plan.gpus):
                return True
        return False
