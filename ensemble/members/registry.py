"""Register the kinds of members by their ``task_type``: each is a folder and a line.

Installed packages add kinds by entry points of the group ``ensemble.member_kinds``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from ensemble.common.digests import FileDigests
from ensemble.common.extensions import Registry
from ensemble.config import MemberConfig
from ensemble.members.base import Assigned, Inspection, MemberKind, OutputColumns, Reads, ResourceRequest


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
        labels = len(columns.labels)
        return Inspection(
            activation=self._kind.learned_activation(labels),
            label_order=tuple(range(labels)),
            summary="not trained yet",
        )

    def problems(self, inspected: Inspection | None) -> Iterator[str]:
        return self._kind.problems(None)

    def packages(self, inspected: Inspection | None) -> Iterator[tuple[str, str]]:
        return self._kind.packages(None)

    def fingerprint(self, inspected: Inspection, assigned: Assigned) -> Mapping[str, object]:
        return {"training": None}  # so that nothing can be its work

    def content(self, inspected: Inspection, files: FileDigests) -> Mapping[str, str]:
        return {}


KINDS: Registry[MemberKind[Any, Any]] = Registry(
    group="ensemble.member_kinds",
    what="task_type",
    base=MemberKind,  # type: ignore[type-abstract]
    package=__package__,
    built_in={
        "seq_cls": ".seq_cls.parent:SequenceClassification",
        "pooled_cls": ".pooled_cls.parent:PooledClassification",
        "causal_lm": ".causal_lm.parent:CausalLanguageModel",
        "image_cls": ".image_cls.parent:ImageClassification",
        "csv": ".csv.parent:CsvPredictions",
        "python": ".python.parent:PythonFunction",
        "command": ".command.parent:Command",
        "endpoint": ".endpoint.parent:Endpoint",
    },
)


def member_kind(settings: MemberConfig) -> MemberKind[Any, Any]:
    """Return a member of the kind that its settings name."""
    return KINDS.load(settings.task_type)(settings)


def kind_for_checks(settings: MemberConfig) -> MemberKind[Any, Any]:
    """Return the same for the checks of a run, which a member that is not trained yet passes without files."""
    kind = member_kind(settings)
    return kind if settings.training is None else ToBeTrained(kind)
