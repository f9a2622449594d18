"""Describe sequence classifiers on the parent's side, without torch."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from pydantic import Field

from ensemble.common.errors import CheckpointError
from ensemble.config import MemberConfig
from ensemble.config.document import Problem
from ensemble.config.values import Column, LabelMap, ProblemType, same_label_problems
from ensemble.members.base import Assigned, Draft, OutputColumns, Reads
from ensemble.members.huggingface.checkpoint.adapter_files import inspect_adapter
from ensemble.members.huggingface.checkpoint.hub import find_file, read_config
from ensemble.members.huggingface.checkpoint.inspect import (
    Checkpoint,
    inspect_checkpoint,
    is_language_model,
    row_limit,
)
from ensemble.members.huggingface.checkpoint.labels import label_names, saved_as
from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.huggingface.settings import TextSettings
from ensemble.members.huggingface.spec import CHILD, CLASSIFIER, HEAD_FILE

# Of checkpoints that read no text.
_OTHER_HEADS = ("ForImageClassification", "ForAudioClassification", "ForVideoClassification")


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


class SequenceClassification(TextCheckpoint[SequenceClassifierSettings]):
    """Describe a checkpoint with a classification head, which transformers loads."""

    Settings: ClassVar[type[MemberConfig]] = SequenceClassifierSettings
    child: ClassVar[str] = f"{CHILD}:ensemble.members.seq_cls.predictor.SequenceClassifier"
    activation_key: ClassVar[str] = "problem_type"
    auto_class: ClassVar[str] = CLASSIFIER

    @classmethod
    def draft(cls, source: str, id_column: str) -> Draft | None:
        base, head_rows = source, None
        folder = Path(source)
        if folder.is_file():
            return None
        settings = {}
        if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
            adapter = inspect_adapter(source)
            if adapter.base is None:
                raise CheckpointError(f"{source}: its adapter_config.json does not name its base")
            # The base may have moved since training; often it is copied beside the adapter.
            beside = folder.parent / Path(adapter.base).name
            base = str(beside) if not Path(adapter.base).is_dir() and beside.is_dir() else adapter.base
            settings, head_rows = {"adapter_name_or_path": source}, adapter.head_rows
        path = find_file(base, "config.json")
        config = read_config(path, f"{base}: its config.json")
        if not settings and is_language_model(config, path.parent):
            return None
        if saved_as(config).endswith(_OTHER_HEADS):
            return None
        names = label_names(config, base)
        if head_rows is not None and head_rows != len(names):
            names = [f"LABEL_{index}" for index in range(head_rows)]
        return Draft(
            settings={"model_name_or_path": base, **settings},
            labels=tuple(names),
            are_named=not all(re.fullmatch(r"LABEL_\d+", name) for name in names),
            max_length=row_limit(config, path.parent),
        )

    def reads(self) -> Reads:
        choices = self.settings.choices
        return replace(super().reads(), choices=choices, one_choice=choices is not None)

    def inspect(self, columns: OutputColumns) -> Checkpoint:
        model = self.settings
        if model.choices is not None:
            # The problem says that the config has one label, and names it.
            checkpoint = inspect_checkpoint(model, ["a score for each choice"], {}, "regression")
            return replace(checkpoint, activation="softmax")
        return inspect_checkpoint(model, columns.labels, model.label_map, model.problem_type)

    def trained_settings(self, folder: Path) -> Mapping[str, str]:
        train = self.settings.train
        if train is None or train.method != "head" or train.base_model is None:
            return super().trained_settings(folder)
        return {
            "task_type": "pooled_cls",
            "model_name_or_path": train.base_model,
            "head": str(folder / HEAD_FILE),
            "pooling_mode": train.pooling_mode,
        }

    def worker_settings(
        self, inspected: Checkpoint, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        settings = super().worker_settings(inspected, assigned, offload_folder)
        return {**settings, "choices": self.settings.choices}
