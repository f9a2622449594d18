"""Describe backbones with a head of their own, on the parent's side."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Gt, Le, Lt
from pydantic import AllowInfNan, BeforeValidator, Field, model_validator

from ensemble.common.digests import FileDigests
from ensemble.common.errors import CheckpointError
from ensemble.config import MemberConfig
from ensemble.config.document import Problem
from ensemble.config.schema import TrainConfig
from ensemble.config.values import File, Labels, MustBe, ProblemType, as_label
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.footprint import MemoryEstimate
from ensemble.members.huggingface.checkpoint.digests import weight_samples
from ensemble.members.huggingface.checkpoint.facts import Facts
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint, read_checkpoint
from ensemble.members.huggingface.checkpoint.labels import activation_of
from ensemble.members.huggingface.memory import checkpoint_memory
from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.huggingface.settings import TO_BE_TRAINED, TextSettings, TextView
from ensemble.members.huggingface.spec import BACKBONE, CHILD, HEAD_FILE
from ensemble.members.pooled_cls.head import LAYER_NORM, Head, read_head

Layer = Annotated[
    str, BeforeValidator(as_label), MustBe("the name of a layer in the file, or of an activation")
]
Layers = Annotated[
    tuple[Layer, ...],
    MustBe("a list of layers in the file and of activations, such as [dense, tanh, out_proj]", list),
]
Epsilon = Annotated[float, Gt(0), Le(1), AllowInfNan(False), MustBe("a number of more than 0, up to 1")]
Dropout = Annotated[float, Ge(0), Lt(1), MustBe("a number from 0 to less than 1")]


class PooledView(TextView):
    """A view of each row for a backbone with a head of its own: also with another head."""

    head: File | None = None  # instead of the member's own head; heads of one backbone share a worker

    @property
    def changes(self) -> dict[str, Any]:
        return super().changes if self.head is None else {**super().changes, "head": self.head}


PooledViews = Annotated[tuple[PooledView, ...], MustBe("a list of views", list)]


class PooledSettings(TextSettings):
    """A backbone whose last hidden states are pooled, with a linear or MLP head from a safetensors file."""

    task_type: Literal["pooled_cls"] = "pooled_cls"
    head: File = Field(examples=["head.safetensors"])  # its layers' weights, in safetensors; train makes it
    # Over a row's own tokens: their mean, the first (cls), or the last.
    pooling_mode: Literal["mean", "cls", "lasttoken"] = Field(examples=["mean"])
    # The file's layers in their order, with activations between; may be left out for a single linear layer.
    head_layers: Layers | None = None
    head_layer_norm_eps: Epsilon = 1e-5  # epsilon of a layer norm in the head
    head_labels: Labels | None = None  # the labels in the order of the head's outputs; None: that of labels
    head_dropout: Dropout = 0.1  # dropout before the head while train.base_model is trained with it
    # Ways in which it gets each row, each with a name of its own; left out: every row once, as it is.
    views: PooledViews | None = Field(
        default=None, examples=["[{name: fold0}, {name: fold1, head: fold1/head.safetensors}]"]
    )
    # How its outputs become probabilities; None: by softmax, and a single output stays a plain number.
    problem_type: ProblemType | None = None

    training_methods: ClassVar[tuple[str, ...]] = ("full", "lora", "qlora", "head")
    older_keys: ClassVar[Mapping[str, str]] = {
        **TextSettings.older_keys,
        "head": "head_path head_file classifier classifier_path",
        "pooling_mode": "pooling pooler pooling_type pooling_strategy",
        "head_layers": "head_activation layers",
        "head_labels": "label_map label_mapping id2label label2id",
    }

    @model_validator(mode="before")
    @classmethod
    def _leave_the_head_to_its_training(cls, values: Any) -> Any:
        """Let ``head`` be left out beside ``train``."""
        is_left_out = isinstance(values, dict) and values.get("train") and values.get("head") is None
        return {**values, "head": TO_BE_TRAINED} if is_left_out else values

    @property
    def has_head(self) -> bool:
        """Return whether the head is there already; else its training makes it."""
        return str(self.head) != TO_BE_TRAINED

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        if self.train is not None:
            yield from self._broken_heads(self.train)
        if self.head_labels and labels and sorted(self.head_labels) != sorted(labels):
            yield ("head_labels",), f"must name each of the {len(labels)} labels once"

    def _broken_heads(self, train: TrainConfig) -> Iterator[Problem]:
        """Find heads, and keys about them, beside those that a training makes."""
        makes_linear = train.base_model is not None
        for key in ("head_layers", "head_labels", *(["head"] if self.has_head else [])):
            if makes_linear and getattr(self, key) is not None:
                yield (key,), "the training makes the head, a linear layer in the order of labels; drop this"
        if makes_linear and "pooling_mode" in train.model_fields_set:
            yield ("train", "pooling_mode"), "the member's own pooling_mode counts; drop this"
        for number, view in enumerate(self.views or ()):
            if view.head is not None and (makes_linear or not self.has_head):
                yield ("views", number, "head"), "with train the training makes the member's heads; drop this"
        if train.predict_with == "average" and not self.has_head:
            sentence = "each fold has a head of its own beside its adapter; choose folds or refit"
            yield ("train", "predict_with"), sentence


class PooledClassification(TextCheckpoint[PooledSettings]):
    """Describe a checkpoint that is loaded without its head, and a file with another head."""

    Settings: ClassVar[type[MemberConfig]] = PooledSettings
    child: ClassVar[str] = f"{CHILD}:ensemble.members.pooled_cls.predictor.PooledMember"
    activation_key: ClassVar[str] = "problem_type"
    auto_class: ClassVar[str] = BACKBONE
    examples: ClassVar[str] = "ensemble.members.pooled_cls.training:PooledExamples"

    def sources(self) -> tuple[str, ...]:
        return (*super().sources(), *dict.fromkeys(str(view.settings.head) for view in self._with_heads()))

    def _with_heads(self) -> Iterator["PooledClassification"]:
        """Yield the member as each of its views knows it, or as it is."""
        model = self.settings
        for view in model.counted_views:
            yield PooledClassification(model.as_view(view))
        if not model.counted_views:
            yield self

    def inspect(self, columns: OutputColumns) -> Checkpoint:
        model, labels = self.settings, columns.labels
        checkpoint = read_checkpoint(model, self.auto_class)
        for view in self._with_heads():
            view._read_head(checkpoint.facts, len(labels))
        head_labels = model.head_labels or labels
        label_order = tuple(head_labels.index(label) for label in labels)
        activation = activation_of(model.problem_type, len(labels))
        return replace(checkpoint, activation=activation, label_order=label_order)

    def _read_head(self, facts: Facts, labels: int) -> Head:
        """Read the head's file, for a backbone with these facts."""
        model = self.settings
        return read_head(model.head, model.head_layers, facts.width, model.model_name_or_path, labels)

    def _inspected_head(self, inspected: Checkpoint) -> Head:
        return self._read_head(inspected.facts, len(inspected.label_order))

    def memory(
        self, inspected: Checkpoint, lengths: npt.NDArray[np.int64], labels: int
    ) -> MemoryEstimate | None:
        head = self._inspected_head(inspected).tensors
        return checkpoint_memory(self.settings, inspected, lengths, labels, head=head)

    def fingerprint(self, inspected: Checkpoint, assigned: Assigned) -> Mapping[str, object]:
        model, steps = self.settings, self._inspected_head(inspected).steps
        return {
            **super().fingerprint(inspected, assigned),
            "pooling_mode": model.pooling_mode,
            "head_steps": steps,
            "head_layer_norm_eps": model.head_layer_norm_eps if LAYER_NORM in dict(steps) else None,
        }

    def content(self, inspected: Checkpoint, files: FileDigests) -> Mapping[str, str]:
        head = self.settings.head
        return {**super().content(inspected, files), "head": files.digest(head, weight_samples(head))}

    def worker_settings(
        self, inspected: Checkpoint, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        model = self.settings
        return {
            **super().worker_settings(inspected, assigned, offload_folder),
            "job_heads": [
                (str(job.settings.head), job._inspected_head(inspected).steps)
                for job in self._with_heads()
                if job.settings.has_head
            ],
            "head_layer_norm_eps": model.head_layer_norm_eps,
            "pooling_mode": model.pooling_mode,
        }

    def training_settings(self, labels: Sequence[str]) -> Mapping[str, Any]:
        return {**super().training_settings(labels), "head_dropout": self.settings.head_dropout}

    def trained_settings(self, folder: Path) -> Mapping[str, str]:
        """Return also the head that a training leaves beside its backbone or adapter, or alone."""
        model, head = self.settings, folder / HEAD_FILE
        if model.has_head:
            return super().trained_settings(folder)
        if not head.is_file():
            raise CheckpointError(
                f"{folder} has no {HEAD_FILE}; let the command write the head's tensors there, or name the head in "
                "the config (head)"
            )
        is_alone = not any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
        if is_alone and model.model_name_or_path == TO_BE_TRAINED:
            raise CheckpointError(
                f"{folder} has a head alone; name its backbone in the config (model_name_or_path)"
            )
        backbone = (
            {"model_name_or_path": model.model_name_or_path} if is_alone else super().trained_settings(folder)
        )
        return {**backbone, "head": str(head)}
