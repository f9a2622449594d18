"""Whose worker starts next, and on which devices it may."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ensemble.common.protocol import Prepare
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import worth_joining
from ensemble.scheduling.deadline import TimeKeeper
from ensemble.scheduling.device_pool import Leases
from ensemble.scheduling.running_worker import Slot
from ensemble.scheduling.state import MemberState


@dataclass(frozen=True)
class Turn:
    """A worker of this member may start now, on its ``gpus`` of the ``allowed`` devices (UUIDs), or on the CPU.

    ``is_last_resort``: also on those whose memory never came free.
    """

    state: MemberState
    allowed: tuple[str, ...]
    is_last_resort: bool


class Turns:
    """The members' turns.

    Args:
        members: in the order in which they start.
        time_keeper: says whether starting pays under a time limit; None: there is none.
    """

    def __init__(
        self, members: Sequence[MemberState], leases: Leases, time_keeper: TimeKeeper | None
    ) -> None:
        self._members = members
        self._leases = leases
        self._time_keeper = time_keeper

    def next(self, slots: Sequence[Slot]) -> Turn | None:
        """Who starts next, given the workers that run; None: nobody now.

        A member that has no worker yet keeps the devices it may use from later ones.  GPUs that nobody waits for
        go to members that have long to run.
        """
        for state, reserved in self._candidates():
            turn = self._turn(state, reserved, slots)
            if turn is not None:
                return turn
        return None

    def is_anybody_waiting(self) -> bool:
        """Whether a member would start if a device came back."""
        return self._leases.is_releasing() and any(map(self._may_start, self._members))

    def _candidates(self) -> Iterator[tuple[MemberState, set[str]]]:
        reserved: set[str] = set()
        for state in self._members:
            if not self._may_start(state):
                continue
            if state.running < min(state.plan.first_replicas, state.most_replicas):
                yield state, reserved
            if not state.running:
                reserved |= set(state.plan.placement.devices)
        for state in sorted(self._members, key=lambda state: -state.seconds_left):
            can_grow = 0 < state.running < min(state.plan.replicas, state.most_replicas)
            if can_grow and self._may_start(state) and _is_worth_joining(state):
                yield state, reserved

    def _may_start(self, state: MemberState) -> bool:
        if not state.waiting or self._time_keeper is None:
            return bool(state.waiting)
        return self._time_keeper.may_start(state, self._members)

    def _turn(self, state: MemberState, reserved: Collection[str], slots: Sequence[Slot]) -> Turn | None:
        if not state.plan.gpus:
            # The CPU is one device: it takes the replicas of one member at a time.
            is_free = all(slot.state is state for slot in slots if not slot.lease)
            return Turn(state, (), False) if is_free else None
        own = set(state.plan.placement.devices)
        in_use = {device.uuid for slot in slots for device in slot.lease}
        # With no other device of its own in use or coming back, one that never came free is better than none.
        is_last_resort = not own & in_use and not self._leases.is_releasing(own)
        allowed = tuple(uuid for uuid in state.plan.placement.devices if uuid not in reserved)
        can_take = self._leases.can_take(state.plan.gpus, allowed, is_last_resort)
        return Turn(state, allowed, is_last_resort) if can_take else None


def _is_worth_joining(state: MemberState) -> bool:
    startup = state.startup_seconds
    return startup > 0 and worth_joining(state.seconds_left, startup)


class HandOut:
    """Chunks in order, longest rows first, to whoever comes free; so replicas end within a chunk of each other.

    Args:
        slots: the workers that run, as the scheduler goes on changing them.
        time_keeper: says what still fits under a time limit; None: there is none.
    """

    def __init__(
        self, members: Sequence[MemberState], slots: Sequence[Slot], time_keeper: TimeKeeper | None
    ) -> None:
        self._members = members
        self._slots = slots
        self._time_keeper = time_keeper

    def take_chunk(self, slot: Slot) -> Chunk | None:
        """The next chunk for this worker, no longer among those that wait; None: it is to stop."""
        state = slot.state
        if not state.waiting or state.failure is not None or slot.fault is not None:
            return None
        if self._time_keeper is not None:
            return self._time_keeper.take_chunk(state, self._members, self._told_others(slot))
        chunk = self._likely_next(slot)
        state.waiting.remove(chunk)
        return chunk

    def give_hint(self, slot: Slot) -> None:
        """Let it make the token ids of its next rows while it computes or loads."""
        slot.hint = None
        if slot.state.waiting:
            slot.hint = self._likely_next(slot)
            slot.worker.send(Prepare(slot.hint.start, slot.hint.stop))

    def _likely_next(self, slot: Slot) -> Chunk:
        """The first that no other worker was told of."""
        waiting, told = slot.state.waiting, self._told_others(slot)
        return next((chunk for chunk in waiting if chunk not in told), waiting[0])

    def _told_others(self, slot: Slot) -> list[Chunk]:
        others = (other for other in self._slots if other.state is slot.state and other is not slot)
        return [other.hint for other in others if other.hint is not None]
