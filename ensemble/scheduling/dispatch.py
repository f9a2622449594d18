"""Decides whose worker starts next and on which devices, and which chunk a worker gets next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ensemble.common.gpus import Device
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import has_room, worth_joining
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.standby import Standbys
from ensemble.scheduling.state import MemberState
from ensemble.scheduling.worker import RunningWorker


class Rank(NamedTuple):
    """Which chunks come first under a time limit: those of the smallest rank."""

    is_later_view: bool
    is_beyond_goal: bool  # the member has reached the goal of all members


# A device that a rank cannot use goes to the next rank, so that none is idle.
RANKS = (Rank(False, False), Rank(False, True), Rank(True, False), Rank(True, True))


@dataclass(frozen=True)
class Dispatcher:
    """Gives devices to members, and chunks in their order to the next free worker.

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
                state.devices - reserved if reserved else state.devices,
                self.standbys.devices_for(state),
                state.plan.placement.places,
            )
            if devices:
                return state, devices
        return None

    def is_waiting_for_devices(self) -> bool:
        """Return whether a member would start if a device became free."""
        return self.pool.is_releasing() and any(map(self._may_start, self.members))

    def _has_cpu_room(self, state: MemberState) -> bool:
        shares = [worker.state.plan.cpu_share for worker in self.workers if not worker.devices]
        if self.pool.max_cpu_workers is not None and len(shares) >= self.pool.max_cpu_workers:
            return False
        return has_room(self.pool.hosts - sum(shares), state.plan.cpu_share)

    def _candidates(self) -> Iterator[tuple[Rank, MemberState, set[str]]]:
        """Yield members of which a worker may start, with the devices reserved for members before them."""
        reserved: set[str] = set()
        for rank in RANKS if self.deadline is not None else RANKS[:1]:
            members = [
                state
                for state in self.members
                if (self.deadline is None or rank.is_later_view != state.chunks.has_first_view)
                and self._may_start(state, rank.is_beyond_goal)
            ]
            for state in members:
                if state.running < min(state.plan.first_replicas, state.max_replicas):
                    yield rank, state, reserved
                if not state.running:
                    reserved |= state.devices or {"cpu"}
            for state in sorted(members, key=lambda state: -state.seconds_left):
                can_grow = 0 < state.running < min(state.plan.replicas, state.max_replicas)
                startup = state.speed_meter.startup_seconds  # 0 while it is not known
                if can_grow and startup > 0 and worth_joining(state.seconds_left, startup):
                    yield rank, state, reserved

    def _is_needed_by_others(self, worker: RunningWorker, rank: Rank) -> bool:
        """Return whether another member with a smaller rank could use this worker's devices."""
        assert self.deadline is not None
        uuids = {device.uuid for device in worker.devices}
        for other_rank, state, reserved in self._candidates():
            if other_rank >= rank:
                return False
            allowed = state.devices - reserved
            can_use = bool(uuids & allowed) if uuids else not state.plan.gpus
            takes_most = self.deadline.takes_most_to_start(state, self.members)
            if state is worker.state or not can_use or takes_most:
                continue
            if not uuids:
                return True
            returned: Counter[Device] = Counter()
            for other in self.workers:
                if other is worker or not other.state.chunks.has_first_view:
                    returned.update(dict.fromkeys(other.devices, other.state.plan.placement.places))
            if self.pool.could_acquire(state.plan.gpus, allowed, state.plan.placement.places, returned):
                return True
        return False

    def _may_start(self, state: MemberState, beyond_goal: bool = False) -> bool:
        if not state.chunks.pending:
            return False
        return self.deadline is None or self.deadline.may_start(state, self.members, beyond_goal)

    def next_chunk(self, worker: RunningWorker) -> Chunk | None:
        """Take the next chunk for this worker; None if the worker should stop."""
        state = worker.state
        if not state.chunks.pending or state.failure is not None or worker.fault is not None:
            return None
        if self.deadline is None:
            return state.take(state.chunks.pending[0])
        for rank in RANKS:
            if rank.is_later_view == state.chunks.has_first_view:
                continue
            fitting = self.deadline.first_fitting(state, self.members, beyond_goal=rank.is_beyond_goal)
            if fitting is None:
                continue
            if rank != RANKS[0] and self._is_needed_by_others(worker, rank):
                return None
            return state.take(*fitting)
        return None
