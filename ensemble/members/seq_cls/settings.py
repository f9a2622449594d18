"""Define the keys of a sequence classifier."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ensemble.config.document import Problem
from ensemble.config.values import Column, LabelMap, ProblemType, same_label_problems
from ensemble.members.huggingface.settings import TextSettings


class SequenceClassifierSettings(TextSettings):
    """A checkpoint with a classification head."""

    task_type: Literal["seq_cls"] = "seq_cls"
    problem_type: ProblemType | None = None  # how logits become probabilities; None: the checkpoint's own
    label_map: LabelMap = Field(default_factory=dict)  # the checkpoint's label -> the config's
    # Column with a JSON list of each row's own texts; the labels are their positions: "0", "1" and so on. Each text
    # is read in the list's place, by a head of one output, and softmax is taken over the row's texts.
    choices: Column | None = None

    training_methods: ClassVar[tuple[str, ...]] = ("full", "lora", "qlora", "head")
    older_keys: ClassVar[Mapping[str, str]] = {
        **TextSettings.older_keys,
        "label_map": "label_mapping id2label label2id",
    }

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        is_exclusive = self.problem_type in (None, "single_label_classification") and len(labels) != 1
        if self.train is not None and self.train.method == "head" and (self.choices or not is_exclusive):
            sentence = "head is a regression of labels that exclude each other; choose full or lora"
            yield ("train", "method"), sentence
        if self.train is not None and self.train.base_model is not None and self.choices is not None:
            yield ("train",), "a member with choices is trained by a command only; give train.command"
        if self.choices is None:
            yield from same_label_problems("label_map", self.label_map, labels)
            return
        yield from self.label_problems(labels)
        for key in ("label_map", "problem_type"):
            if getattr(self, key):
                yield (
                    (key,),
                    "choices are scored by a head of one output, and softmax is taken over them; drop this",
                )
