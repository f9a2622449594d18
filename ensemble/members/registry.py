"""Register the kinds of members by their ``task_type``: each is a folder and a line.

Installed packages add kinds by entry points of the group ``ensemble.member_kinds``.
"""

from __future__ import annotations

from typing import Any

from ensemble.common.extensions import Registry
from ensemble.config import MemberConfig
from ensemble.members.base import MemberKind
from ensemble.members.several_checkpoints import SeveralCheckpoints
from ensemble.members.to_be_trained import ToBeTrained

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
    },
)


def member_kind(settings: MemberConfig) -> MemberKind[Any, Any]:
    """Return a member of the kind that its settings name."""
    kind = KINDS.load(settings.task_type)
    return SeveralCheckpoints(kind, settings) if settings.view_checkpoints else kind(settings)


def kind_for_checks(settings: MemberConfig) -> MemberKind[Any, Any]:
    """Return the same for the checks of a run, which a member that is not trained yet passes without files."""
    kind = member_kind(settings)
    return kind if settings.training is None else ToBeTrained(kind)
