"""Put the states of a member's models together, for displays and reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ensemble.config import MemberConfig
from ensemble.planning.plan import ModelPlan
from ensemble.scheduling.records import Failure, WorkerRecord
from ensemble.scheduling.state import ModelState, Phase

# Of a member's models, what the furthest one does tells most.
_MOST_TELLING: tuple[Phase, ...] = (
    "failed",
    "predicting",
    "loading",
    "starting",
    "paused",
    "waiting",
    "done",
)


@dataclass(frozen=True)
class MemberProgress:
    """Show how far a member is; rows count once for each job.

    Attributes:
        models: the states of its models, in their order.
    """

    models: Sequence[ModelState]

    @property
    def plan(self) -> ModelPlan:
        """Return the plan of the first model."""
        return self.models[0].plan

    @property
    def name(self) -> str:
        return self.plan.member

    @property
    def settings(self) -> MemberConfig:
        """Return the settings of the first model; keys of the merge are the member's."""
        return self.plan.model

    @property
    def jobs(self) -> int:
        return sum(len(state.plan.jobs) for state in self.models)

    @property
    def phase(self) -> Phase:
        phases = {state.phase for state in self.models}
        return next(phase for phase in _MOST_TELLING if phase in phases)

    @property
    def failure(self) -> Failure | None:
        return next((state.failure for state in self.models if state.failure is not None), None)

    @property
    def finished(self) -> bool:
        return all(state.finished for state in self.models)

    @property
    def may_end_early(self) -> bool:
        """Return whether the member lacks nothing but rows that are computed only if time is left."""
        left = [state for state in self.models if not state.finished]
        return bool(left) and all(state.may_end_early for state in left)

    @property
    def workers(self) -> list[WorkerRecord]:
        return [worker for state in self.models for worker in state.workers]

    @property
    def in_hand_texts(self) -> list[str]:
        return [text for state in self.models for text in state.in_hand_texts]

    @property
    def rows(self) -> int:
        return sum(state.rows for state in self.models)

    @property
    def reused_rows(self) -> int:
        return sum(state.reused_rows for state in self.models)

    @property
    def rows_done(self) -> int:
        return sum(state.rows_done for state in self.models)

    @property
    def tokens_done(self) -> int:
        return sum(state.tokens_done for state in self.models)

    @property
    def fraction(self) -> float:
        """Return the share of the member's work that is done."""
        return self._mean(lambda state: state.fraction)

    @property
    def computed_cost(self) -> float:
        """Return the share of the member's work that this run has done."""
        return self._mean(lambda state: state.computed_cost)

    @property
    def predicting_since(self) -> float | None:
        began = [state.predicting_since for state in self.models if state.predicting_since is not None]
        return min(began, default=None)

    @property
    def predicting_seconds(self) -> float:
        """Return how long the member's models have been computing, one behind the other; never 0."""
        return sum(state.predicting_seconds for state in self.models)

    @property
    def seconds_left(self) -> float:
        """Return how long the member still needs at the speed so far; 0 before it has done anything."""
        if len(self.models) == 1:
            return self.models[0].seconds_left
        computed = self.computed_cost
        return self.predicting_seconds * (1.0 - self.fraction) / computed if computed else 0.0

    def _mean(self, value: Callable[[ModelState], float]) -> float:
        """Return the mean over the models, by their work."""
        if len(self.models) == 1:
            return value(self.models[0])
        work = sum(state.plan.work for state in self.models) or 1.0
        return sum(value(state) * state.plan.work for state in self.models) / work


def members_of(models: Sequence[ModelState]) -> list[MemberProgress]:
    """Return the progress of each member, in the order of their first models."""
    by_member: dict[str, list[ModelState]] = {}
    for state in models:
        by_member.setdefault(state.plan.member, []).append(state)
    return [MemberProgress(states) for states in by_member.values()]
