"""Define the keys of a backbone with a head of its own."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Gt, Le, Len
from pydantic import AllowInfNan, BeforeValidator, Field

from ensemble.config.document import Problem
from ensemble.config.values import File, Labels, MustBe, ProblemType, as_label
from ensemble.members.huggingface.settings import TextSettings, TextView

Layer = Annotated[
    str, BeforeValidator(as_label), MustBe("the name of a layer in the file, or of an activation")
]
Layers = Annotated[
    tuple[Layer, ...],
    Len(1),
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
