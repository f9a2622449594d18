"""Describe backbones with a head of their own, on the parent's side."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Gt, Le
from pydantic import AllowInfNan, BeforeValidator, Field

from ensemble.common.digests import FileDigests
from ensemble.config import MemberConfig
from ensemble.config.document import Problem
from ensemble.config.values import File, Labels, MustBe, ProblemType, as_label
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.footprint import MemoryEstimate
from ensemble.members.huggingface.checkpoint.digests import weight_samples
from ensemble.members.huggingface.checkpoint.facts import Facts
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint, read_checkpoint
from ensemble.members.huggingface.checkpoint.labels import activation_of
from ensemble.members.huggingface.memory import checkpoint_memory
from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.huggingface.settings import TextSettings, TextView
from ensemble.members.huggingface.spec import BACKBONE, CHILD
from ensemble.members.pooled_cls.head import LAYER_NORM, Head, read_head

Layer = Annotated[
    str, BeforeValidator(as_label), MustBe("the name of a layer in the file, or of an activation")
]
Layers = Annotated[
    tuple[Layer, ...],
    MustBe("a list of layers in the file and of activations, such as [dense, tanh, out_proj]", list),
]
Epsilon = Annotated[float, Gt(0), Le(1), AllowInfNan(False), MustBe("a number of more than 0, up to 1")]


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
    head: File = Field(examples=["head.safetensors"])  # its layers' weights, in safetensors
    # Over a row's own tokens: their mean, the first (cls), or the last.
    pooling_mode: Literal["mean", "cls", "lasttoken"] = Field(examples=["mean"])
    # The file's layers in their order, with activations between; may be left out for a single linear layer.
    head_layers: Layers | None = None
    head_layer_norm_eps: Epsilon = 1e-5  # epsilon of a layer norm in the head
    head_labels: Labels | None = None  # the labels in the order of the head's outputs; None: that of labels
    # Ways in which it gets each row, each with a name of its own; left out: every row once, as it is.
    views: PooledViews | None = Field(
        default=None, examples=["[{name: fold0}, {name: fold1, head: fold1/head.safetensors}]"]
    )
    # How its outputs become probabilities; None: by softmax, and a single output stays a plain number.
    problem_type: ProblemType | None = None

    older_keys: ClassVar[Mapping[str, str]] = {
        **TextSettings.older_keys,
        "head": "head_path head_file classifier classifier_path",
        "pooling_mode": "pooling pooler pooling_type pooling_strategy",
        "head_layers": "head_activation layers",
        "head_labels": "label_map label_mapping id2label label2id",
    }

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        if self.head_labels and labels and sorted(self.head_labels) != sorted(labels):
            yield ("head_labels",), f"must name each of the {len(labels)} labels once"


class PooledClassification(TextCheckpoint[PooledSettings]):
    """Describe a checkpoint that is loaded without its head, and a file with another head."""

    Settings: ClassVar[type[MemberConfig]] = PooledSettings
    child: ClassVar[str] = f"{CHILD}:ensemble.members.pooled_cls.predictor.PooledMember"
    activation_key: ClassVar[str] = "problem_type"
    auto_class: ClassVar[str] = BACKBONE

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
                (str(job.settings.head), job._inspected_head(inspected).steps) for job in self._with_heads()
            ],
            "head_layer_norm_eps": model.head_layer_norm_eps,
            "pooling_mode": model.pooling_mode,
        }
