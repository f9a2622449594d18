"""Whose worker starts next, and on which devices it may."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from ensemble.leases import Leases
from ensemble.planning.forecast import worth_joining
from ensemble.slots import Slot
from ensemble.state import MemberState
from ensemble.timekeeper import TimeKeeper


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
