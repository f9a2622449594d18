"""Whose worker starts next, and on which devices; which chunk a worker gets next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ensemble.common.gpus import Device
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import worth_joining
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.standby import Standbys
from ensemble.scheduling.state import MemberState, RunningWorker


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
        in_use = {device.uuid for worker in self.workers for device in worker.devices}
        for state, reserved in self._candidates():
            own = set(state.plan.placement.devices)
            # With no other device of its own in use or coming back, one that never came free is better than none.
            is_last_resort = not own & in_use and not self.pool.is_releasing(own)
            preferred = self.standbys.devices_for(state)
            if not state.plan.gpus:
                # The CPU is one device: it takes the replicas of one member at a time.
                if all(worker.state is state for worker in self.workers if not worker.devices):
                    return state, ()
            elif devices := self.pool.acquire(state.plan.gpus, own - reserved, is_last_resort, preferred):
                return state, devices
        return None

    def is_waiting_for_devices(self) -> bool:
        """Whether a member would start if a device came back."""
        return self.pool.is_releasing() and any(map(self._may_start, self.members))

    def _candidates(self) -> Iterator[tuple[MemberState, set[str]]]:
        reserved: set[str] = set()
        # Whoever waits for rows of others leaves the devices to them, and to all who need not wait.
        for state in sorted(self.members, key=lambda state: state.unknown_rows > 0):
            if not self._may_start(state):
                continue
            if state.running < min(state.plan.first_replicas, state.max_replicas):
                yield state, reserved
            if not state.running:
                reserved |= set(state.plan.placement.devices)
        for state in sorted(self.members, key=lambda state: -state.seconds_left):
            can_grow = 0 < state.running < min(state.plan.replicas, state.max_replicas)
            startup = state.startup_seconds  # 0 while it is not known
            is_worth_it = startup > 0 and worth_joining(state.seconds_left, startup)
            if can_grow and is_worth_it and self._may_start(state):
                yield state, reserved

    def _may_start(self, state: MemberState) -> bool:
        deadline = self.deadline
        return bool(state.pending) and (deadline is None or deadline.may_start(state, self.members))

    def next_chunk(self, worker: RunningWorker) -> Chunk | None:
        """Take the next chunk for this worker; None: it is to stop."""
        state = worker.state
        if not state.pending or state.failure is not None or worker.fault is not None:
            return None
        if self.deadline is None:
            return state.take(self._likely_next(worker))
        # What other workers were told would be theirs is taken last.
        chunks = sorted(state.pending, key=self._hinted_to_others(worker).__contains__)
        found = self.deadline.first_fitting(state, self.members, chunks)
        return None if found is None else state.take(*found)

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
            and (not own.isdisjoint(one.plan.placement.devices) if own else not one.plan.gpus)
            for one in others
        )
        awaited = (one for one in self.members if one.plan.name in state.plan.waits_for)
        return not is_wanted and any(one.running for one in awaited)

    def send_hint(self, worker: RunningWorker) -> None:
        """Let it make the token ids of its next rows while it computes or loads."""
        worker.hint = self._likely_next(worker) if worker.state.pending else None
        if worker.hint is not None:
            worker.handle.send(worker.state.hint_of(worker.hint))

    def _likely_next(self, worker: RunningWorker) -> Chunk:
        """The first that no other worker was told of."""
        pending, hinted = worker.state.pending, self._hinted_to_others(worker)
        return next((chunk for chunk in pending if chunk not in hinted), pending[0])

    def _hinted_to_others(self, worker: RunningWorker) -> list[Chunk]:
        others = (one for one in self.workers if one.state is worker.state and one is not worker)
        return [other.hint for other in others if other.hint is not None]
