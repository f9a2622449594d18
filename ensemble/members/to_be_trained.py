"""Describe a member whose checkpoint is still to be made, as far as its settings tell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ensemble.common.digests import FileDigests
from ensemble.config import MemberConfig
from ensemble.members.base import Assigned, Inspection, MemberKind, OutputColumns, Reads, ResourceRequest
from ensemble.members.huggingface.checkpoint.labels import activation_of


class ToBeTrained(MemberKind[MemberConfig, Inspection]):
    """Stand for a member in the checks before it is trained; it has no files, and cannot run."""

    Settings: ClassVar[type[MemberConfig]] = MemberConfig

    def __init__(self, kind: MemberKind[Any, Any]) -> None:
        super().__init__(kind.settings)
        self._kind = kind

    def request(self) -> ResourceRequest:
        return self._kind.request()

    def reads(self) -> Reads:
        return self._kind.reads()

    def inspect(self, columns: OutputColumns) -> Inspection:
        problem_type = getattr(self.settings, "problem_type", None)
        labels = len(columns.labels)
        return Inspection(
            activation=activation_of(problem_type, labels),
            label_order=tuple(range(labels)),
            summary="not trained yet",
            warnings=(),
        )

    def problems(self, inspected: Inspection | None) -> Iterator[str]:
        return self._kind.problems(None)

    def packages(self, inspected: Inspection | None) -> Iterator[tuple[str, str]]:
        return self._kind.packages(None)

    def fingerprint(self, inspected: Inspection, assigned: Assigned) -> Mapping[str, object]:
        raise NotImplementedError

    def content(self, inspected: Inspection, files: FileDigests) -> Mapping[str, str]:
        raise NotImplementedError
