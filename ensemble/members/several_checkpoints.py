"""Describe a member whose views have checkpoints of their own, as a member of its kind for each checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
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

if TYPE_CHECKING:
    from ensemble.common.files import HubFile
    from ensemble.members.questions import Question

V = TypeVar("V")


class SeveralCheckpoints(MemberKind[MemberConfig, Inspection]):
    """Ask a member of the kind for each checkpoint, and put the answers together.

    What depends on keys of the member alone, the kind says of the whole member.
    """

    def __init__(self, kind: type[MemberKind[Any, Any]], settings: MemberConfig) -> None:
        super().__init__(settings)
        self._whole = kind(settings)
        numbers = range(1 + max(settings.view_checkpoints))
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

    def hub_files(self, inspected: Inspection) -> tuple[HubFile, ...]:
        return _once(kind.hub_files(of_kind) for kind, of_kind in self._with(inspected))

    def questions(self) -> tuple[Question, ...]:
        return tuple(question for kind in self._kinds for question in kind.questions())

    def inspect(self, columns: OutputColumns) -> Inspection:
        checkpoints: list[Inspection] = []
        problems: list[str] = []
        for number, kind in enumerate(self._kinds):
            key = self.settings.checkpoint_key(number)
            try:
                checkpoints.append(kind.inspect(columns))
            except EnsembleError as error:
                name = f"{key.rpartition('.')[2]}: "
                problems += [f"{key}: {problem.removeprefix(name)}" for problem in error.problems]
                continue
            ours, first = checkpoints[-1].activation, checkpoints[0].activation
            if ours != first:
                problems.append(
                    f"{key}: gives {ours} values, others {first}, which have no mean; make it a member"
                )
        if problems:
            raise CheckpointError(problems)
        warnings = _once(checkpoint.warnings for checkpoint in checkpoints)
        return replace(checkpoints[0], warnings=warnings, checkpoints=tuple(checkpoints))

    def problems(self, inspected: Inspection | None) -> Iterator[str]:
        yield from _once(kind.problems(of_kind) for kind, of_kind in self._with(inspected))

    def warnings(self, inspected: Inspection) -> Iterator[str]:
        yield from _once(kind.warnings(of_kind) for kind, of_kind in self._with(inspected))

    def prompt_warnings(self, prompt: str) -> Iterator[str]:
        return self._whole.prompt_warnings(prompt)

    def packages(self, inspected: Inspection | None) -> Iterator[tuple[str, str]]:
        yield from _once(kind.packages(of_kind) for kind, of_kind in self._with(inspected))

    def fingerprint(self, inspected: Inspection, assigned: Assigned) -> Mapping[str, object]:
        return self._whole.fingerprint(inspected.of_checkpoint(0), assigned.of_checkpoint(0))

    def content(self, inspected: Inspection, files: FileDigests) -> Mapping[str, str]:
        contents = [kind.content(of_kind, files) for kind, of_kind in self._with(inspected)]
        return {word: digest_of([content[word] for content in contents]) for word in contents[0]}

    def candidates(
        self, inspected: Inspection, assigned: Assigned, ran_with: RanWith | None = None
    ) -> Sequence[Sequence[Candidate]]:
        return self._whole.candidates(inspected.of_checkpoint(0), assigned.of_checkpoint(0), ran_with)

    def _with(self, inspected: Inspection | None) -> Iterator[tuple[MemberKind[Any, Any], Inspection | None]]:
        """Yield the member of each checkpoint with what is known of the checkpoint."""
        for number, kind in enumerate(self._kinds):
            yield kind, None if inspected is None else inspected.of_checkpoint(number)


def _once(groups: Iterable[Iterable[V]]) -> tuple[V, ...]:
    """Return the values of all groups, each once, in their order."""
    return tuple(dict.fromkeys(chain.from_iterable(groups)))
