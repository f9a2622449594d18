"""The keys of a sequence classifier."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Collection, Iterator, Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from ensemble.config.document import Problem, place
from ensemble.config.values import LabelMap, ProblemType, label_items
from ensemble.members.huggingface.settings import TextSettings


class SequenceClassifierSettings(TextSettings):
    """A checkpoint with a classification head.

    Raises:
        ValidationError: a value is of the wrong type or out of range, or two keys do not go together.
    """

    task_type: Literal["seq_cls"] = "seq_cls"
    problem_type: ProblemType | None = None  # how logits become probabilities; None: the checkpoint's own
    label_map: LabelMap = Field(default_factory=dict)  # the checkpoint's label -> the config's

    older_keys: ClassVar[Mapping[str, str]] = {
        **TextSettings.older_keys,
        "label_map": "label_mapping id2label label2id",
    }

    @classmethod
    def broken_rules(cls, values: Mapping[str, Any], labels: Collection[str]) -> Iterator[Problem]:
        yield from super().broken_rules(values, labels)
        given: dict[str, str] = {}
        for key, label in label_items(values.get("label_map")):
            if labels and label not in labels:
                yield ("label_map", key), "must be one of the labels"
            elif given.setdefault(label, key) != key:
                yield ("label_map", key), f"the same label as {place(('label_map', given[label]))} has"
