"""Decide which trainings a time limit leaves time for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ensemble.planning.chunks import Chunk
from ensemble.scheduling.deadline import SAFETY, Deadline, Rank
from ensemble.scheduling.state import MemberState


@dataclass(frozen=True)
class TrainingDeadline(Deadline):
    """Give the time to members in their order, as a member that lacks a training cannot predict.

    A member whose trainings cannot all end in time, at the speed of those that have ended, begins no more of them.
    """

    def ranks(self, members: Sequence[MemberState]) -> dict[str, Rank]:
        """Return the ranks of the members that may begin a training, by name."""
        ranks: dict[str, Rank] = {}
        needed_seconds = 0.0
        for state in members:
            chunks = [] if state.failure is not None else state.chunks.left
            seconds = sum(_seconds_of(state, chunk) for chunk in chunks)
            if not chunks or needed_seconds + seconds > self.workers * self.seconds_left:
                continue
            needed_seconds += seconds
            if state.chunks.pending:
                ranks[state.plan.name] = Rank(turn=len(ranks))
        return ranks

    def may_start(self, state: MemberState, members: Sequence[MemberState], checkpoint: int = 0) -> bool:
        return self.first_fitting(state, members) is not None

    def first_fitting(
        self,
        state: MemberState,
        members: Sequence[MemberState],
        checkpoint: int = 0,
        startup_seconds: float = 0.0,
    ) -> tuple[Chunk, int] | None:
        """Return the member's next training if it can end in time, and where its row begins."""
        if not state.chunks.pending or self.is_over:
            return None
        chunk = state.chunks.pending[0]
        fits = SAFETY * _seconds_of(state, chunk) <= self.seconds_left
        return (chunk, chunk.start) if fits else None


def _seconds_of(state: MemberState, chunk: Chunk) -> float:
    """Return how long a training takes by those of the member that have ended; 0 before the first has."""
    return (state.speed_meter.seconds_per_cost or 0.0) * chunk.cost
