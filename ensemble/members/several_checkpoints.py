"""Describe a member whose views have checkpoints of their own, as a member of its kind for each checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import CheckpointError, EnsembleError
from ensemble.config import MemberConfig
from ensemble.members.base import (
    Assigned,
    Candidate,
    Inspection,
    MemberKind,
    OutputColumns,
    RanWith,
    Reads,
    ResourceRequest,
)
from ensemble.members.footprint import LargestMemory, MemoryEstimate

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ensemble.common.files import HubFile
    from ensemble.members.questions import Question

V = TypeVar("V")


@dataclass(frozen=True)
class InspectedCheckpoints(Inspection):
    """Hold what is known of each of a member's checkpoints, by number."""

    checkpoints: tuple[Inspection, ...]

    def of_checkpoint(self, number: int) -> Inspection:
        return self.checkpoints[number]


class SeveralCheckpoints(MemberKind[MemberConfig, InspectedCheckpoints]):
    """Ask a member of the kind for each checkpoint, and put the answers together.

    What depends on the settings alone is as the kind says of the whole member.
    """

    def __init__(self, kind: type[MemberKind[Any, Any]], settings: MemberConfig) -> None:
        super().__init__(settings)
        self._whole = kind(settings)
        numbers = range(len(settings.checkpoint_keys))
        self._kinds = [kind(settings.with_checkpoint(number)) for number in numbers]

    def of_checkpoint(self, number: int) -> MemberKind[Any, Any]:
        return self._kinds[number]

    def request(self) -> ResourceRequest:
        return self._whole.request()

    def reads(self) -> Reads:
        return self._whole.reads()

    def environment(self) -> Mapping[str, str]:
        return self._whole.environment()

    def predicted_by(self) -> dict[str, object]:
        return self._whole.predicted_by()

    def sources(self) -> tuple[str, ...]:
        return _once(kind.sources() for kind in self._kinds)

    def hub_files(self, inspected: InspectedCheckpoints) -> tuple[HubFile, ...]:
        return _once(kind.hub_files(of_kind) for kind, of_kind in self._with(inspected))

    def questions(self) -> tuple[Question, ...]:
        return tuple(question for kind in self._kinds for question in kind.questions())

    def inspect(self, columns: OutputColumns) -> InspectedCheckpoints:
        keys = self.settings.checkpoint_keys
        checkpoints: list[Inspection] = []
        problems: list[str] = []
        for key, kind in zip(keys, self._kinds, strict=True):
            try:
                checkpoints.append(kind.inspect(columns))
            except EnsembleError as error:
                name = f"{key.rpartition('.')[2]}: "
                problems += [f"{key}: {problem.removeprefix(name)}" for problem in error.problems]
        if problems:
            raise CheckpointError(problems)
        first = checkpoints[0]
        for key, other in zip(keys, checkpoints, strict=True):
            if other.activation != first.activation:
                problems.append(
                    f"{key}: its values are {other.activation}, and those of {keys[0]} {first.activation}; their "
                    "mean means nothing: make a member of each"
                )
        if problems:
            raise CheckpointError(problems)
        return InspectedCheckpoints(
            activation=first.activation,
            label_order=first.label_order,
            summary=first.summary,
            warnings=_once(checkpoint.warnings for checkpoint in checkpoints),
            checkpoints=tuple(checkpoints),
        )

    def problems(self, inspected: InspectedCheckpoints | None) -> Iterator[str]:
        yield from _once(kind.problems(of_kind) for kind, of_kind in self._with(inspected))

    def warnings(self, inspected: InspectedCheckpoints) -> Iterator[str]:
        yield from _once(kind.warnings(of_kind) for kind, of_kind in self._with(inspected))

    def packages(self, inspected: InspectedCheckpoints | None) -> Iterator[tuple[str, str]]:
        yield from _once(kind.packages(of_kind) for kind, of_kind in self._with(inspected))

    def memory(
        self, inspected: InspectedCheckpoints, lengths: npt.NDArray[np.int64], labels: int
    ) -> MemoryEstimate | None:
        estimates = []
        for kind, of_kind in self._with(inspected):
            estimate = kind.memory(of_kind, lengths, labels)
            if estimate is None:
                return None
            estimates.append(estimate)
        return LargestMemory(max(estimate.max_length for estimate in estimates), tuple(estimates))

    def fingerprint(self, inspected: InspectedCheckpoints, assigned: Assigned) -> Mapping[str, object]:
        fingerprints = [
            dict(kind.fingerprint(of_kind, assigned.of_checkpoint(number)))
            for number, (kind, of_kind) in enumerate(self._with(inspected))
        ]
        return {"checkpoints": fingerprints}

    def content(self, inspected: InspectedCheckpoints, files: FileDigests) -> Mapping[str, str]:
        contents = [kind.content(of_kind, files) for kind, of_kind in self._with(inspected)]
        return {word: digest_of([content[word] for content in contents]) for word in contents[0]}

    def candidates(
        self, inspected: InspectedCheckpoints, assigned: Assigned, ran_with: RanWith | None = None
    ) -> Sequence[Sequence[Candidate]]:
        return self._whole.candidates(inspected.of_checkpoint(0), assigned.of_checkpoint(0), ran_with)

    def _with(
        self, inspected: InspectedCheckpoints | None
    ) -> Iterator[tuple[MemberKind[Any, Any], Inspection | None]]:
        """Yield the member of each checkpoint with what is known of the checkpoint."""
        for number, kind in enumerate(self._kinds):
            yield kind, None if inspected is None else inspected.of_checkpoint(number)


def _once(groups: Iterable[Iterable[V]]) -> tuple[V, ...]:
    """Return the values of all groups, each once, in their order."""
    return tuple(dict.fromkeys(chain.from_iterable(groups)))
