"""Which chunk a worker gets next, and which it is told of beforehand."""

from __future__ import annotations

from collections.abc import Sequence

from ensemble.planning.chunks import Chunk
from ensemble.protocol import Prepare
from ensemble.slots import Slot
from ensemble.state import MemberState
from ensemble.timekeeper import TimeKeeper


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
