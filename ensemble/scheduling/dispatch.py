"""Whose worker starts next, and on which devices; which chunk a worker gets next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product, starmap
from typing import NamedTuple

from ensemble.common.gpus import Device
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import has_room, worth_joining
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.standby import Standbys
from ensemble.scheduling.state import MemberState, RunningWorker


class Rank(NamedTuple):
    """Under a time limit, whose chunk a device computes: the smallest rank comes first."""

    is_later_view: bool
    is_beyond_goal: bool  # the member is as far as the others are to come


# A device that one rank has no use for is the next one's: none is left idle.
RANKS = tuple(starmap(Rank, product((False, True), repeat=2)))


@dataclass(frozen=True)
class Dispatcher:
    """Gives devices to members, and chunks to workers: in order, longest rows first, to whoever comes free.

    So replicas end within a chunk of each other.  ``members`` are in the order in which they start, ``workers``
    those that run, as the scheduler goes on changing them; ``deadline`` is that of the time limit, if there is one.
    """

    members: Sequence[MemberState]
    workers: Sequence[RunningWorker]
    pool: DevicePool
    standbys: Standbys
    deadline: Deadline | None

    def next_lease(self) -> tuple[MemberState, tuple[Device, ...]] | None:
        """Lease devices (none: the CPU) to the member whose worker starts next; None: nobody's does now.

        A member that has no worker yet keeps the devices it may use from later ones.  GPUs that nobody waits for
        go to members that have long to run.
        """
        for _, state, reserved in self._candidates():
            if not state.plan.gpus:
                shares = [one.state.plan.cpu_share for one in self.workers if not one.devices]
                is_full = self.pool.max_cpu_workers is not None and len(shares) >= self.pool.max_cpu_workers
                has_place = has_room(self.pool.hosts - sum(shares), state.plan.cpu_share) and not is_full
                if "cpu" not in reserved and has_place:
                    return state, ()
            else:
                own, places = state.devices, state.plan.placement.places
                # With no other device of its own in use or coming back, one that never came free is better than
                # none.
                is_last_resort = not self.pool.is_in_use(own) and not self.pool.is_releasing(own)
                wanted = state.plan.gpus, own - reserved if reserved else own
                preferred = self.standbys.devices_for(state)
                if devices := self.pool.acquire(*wanted, is_last_resort, preferred, places):
                    return state, devices
        return None

    def is_waiting_for_devices(self) -> bool:
        """Whether a member would start if a device came back."""
        return self.pool.is_releasing() and any(map(self._may_start, self.members))

    def _candidates(self) -> Iterator[tuple[Rank, MemberState, set[str]]]:
        """Members of which a worker may start, in order, with devices that others before them wait for."""
        reserved: set[str] = set()
        for rank in RANKS if self.deadline is not None else RANKS[:1]:
            members = [
                one
                for one in self.members
                if self.deadline is None or rank.is_later_view != one.has_first_view_pending
            ]
            # Whoever waits for rows of others leaves the devices to them, and to all who need not wait.
            for state in sorted(members, key=lambda state: state.unknown_rows > 0):
                if not self._may_start(state, rank.is_beyond_goal):
                    continue
                if state.running < min(state.plan.first_replicas, state.max_replicas):
                    yield rank, state, reserved
                if not state.running:
                    reserved |= state.devices or {"cpu"}
            for state in sorted(members, key=lambda state: -state.seconds_left):
                can_grow = 0 < state.running < min(state.plan.replicas, state.max_replicas)
                startup = state.startup_seconds  # 0 while it is not known
                is_worth_it = startup > 0 and worth_joining(state.seconds_left, startup)
                if can_grow and is_worth_it and self._may_start(state, rank.is_beyond_goal):
                    yield rank, state, reserved

    def _is_wanted(self, worker: RunningWorker, rank: Rank) -> bool:
        """Whether the devices of a worker that would go on in this rank are of use to another member before it."""
        assert self.deadline is not None
        own = {device.uuid for device in worker.devices}
        for other, state, reserved in self._candidates():
            if other >= rank:
                return False
            allowed = state.devices - reserved
            is_able = state is not worker.state and (own & allowed if own else not state.plan.gpus)
            if not is_able or self.deadline.takes_most_to_start(state, self.members):
                continue
            returned = Counter[Device]()
            for one in self.workers if own else ():
                if one is worker or not one.state.has_first_view_pending:
                    returned.update(dict.fromkeys(one.devices, one.state.plan.placement.places))
            needed = state.plan.gpus, allowed, state.plan.placement.places, returned
            if not own or self.pool.could_acquire(*needed):
                return True
        return False

    def _may_start(self, state: MemberState, beyond_goal: bool = False) -> bool:
        deadline = self.deadline
        if deadline is None:
            return bool(state.pending)
        return bool(state.pending) and deadline.may_start(state, self.members, beyond_goal)

    def next_chunk(self, worker: RunningWorker) -> Chunk | None:
        """Take the next chunk for this worker; None: it is to stop."""
        state = worker.state
        if not state.pending or state.failure is not None or worker.fault is not None:
            return None
        if self.deadline is None:
            return state.take(state.pending.first())
        for rank in RANKS:
            if rank.is_later_view == state.has_first_view_pending:
                continue
            found = self.deadline.first_fitting(state, self.members, beyond_goal=rank.is_beyond_goal)
            if found is not None:
                is_next = rank == RANKS[0] or not self._is_wanted(worker, rank)
                return state.take(*found) if is_next else None
        return None

    def is_to_wait(self, worker: RunningWorker) -> bool:
        """Whether a worker that has nothing to do stays, because there will soon be something for it.

        That is while a worker runs of those whose rows its member waits for, and nobody else waits for its devices.
        """
        state = worker.state
        if not state.unknown_rows or state.failure is not None or worker.fault is not None:
            return False
        own = {device.uuid for device in worker.devices}
        others = [one for one in self.members if one is not state and self._may_start(one)]
        is_wanted = any(
            one.running < min(one.plan.first_replicas, one.max_replicas)
            and (not own.isdisjoint(one.devices) if own else not one.plan.gpus)
            for one in others
        )
        awaited = (one for one in self.members if one.plan.name in state.plan.waits_for)
        return not is_wanted and any(one.running for one in awaited)
