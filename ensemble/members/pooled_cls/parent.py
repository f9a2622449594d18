"""Describe backbones with a head of their own, on the parent's side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from ensemble.common.digests import FileDigests
from ensemble.common.errors import CheckpointError
from ensemble.common.files import read_json
from ensemble.config import MemberConfig
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.footprint import MemoryEstimate
from ensemble.members.huggingface.checkpoint.architecture import read_architecture, text_settings
from ensemble.members.huggingface.checkpoint.description import Description
from ensemble.members.huggingface.checkpoint.digests import weight_samples
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint, read_checkpoint
from ensemble.members.huggingface.checkpoint.labels import activation_of
from ensemble.members.huggingface.memory.estimate import checkpoint_memory
from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.huggingface.spec import BACKBONE, CHILD
from ensemble.members.pooled_cls.head import LAYER_NORM, Head, read_head
from ensemble.members.pooled_cls.settings import PooledSettings


class PooledClassification(TextCheckpoint[PooledSettings]):
    """Describe a checkpoint that is loaded without its head, and a file with another head."""

    Settings: ClassVar[type[MemberConfig]] = PooledSettings
    child: ClassVar[str] = f"{CHILD}:ensemble.members.pooled_cls.predictor.PooledMember"
    activation_key: ClassVar[str] = "problem_type"
    auto_class: ClassVar[str] = BACKBONE

    def sources(self) -> tuple[str, ...]:
        return (*super().sources(), *dict.fromkeys(str(view.settings.head) for view in self._with_heads()))

    def _with_heads(self) -> Iterator[PooledClassification]:
        """Yield the member as each of its views knows it, or as it is."""
        model = self.settings
        for view in model.counted_views:
            yield PooledClassification(model.as_view(view))
        if not model.counted_views:
            yield self

    def inspect(self, columns: OutputColumns) -> Checkpoint:
        model, labels = self.settings, columns.labels
        files = read_checkpoint(model, self.auto_class)
        if files.config.get("is_encoder_decoder"):
            raise CheckpointError(
                f"{model.model_name_or_path} is an encoder with a decoder; pooled_cls runs models that are one of "
                "the two"
            )
        for view in self._with_heads():
            view._read_head(files.config, files.described, len(labels))
        head_labels = model.head_labels or labels
        label_order = tuple(head_labels.index(label) for label in labels)
        return files.checkpoint(model, activation_of(model.problem_type, len(labels)), label_order)

    def _read_head(self, config: Mapping[str, Any], described: Description, labels: int) -> Head:
        """Read the head's file; ``config`` is the backbone's ``config.json``."""
        model, architecture = self.settings, read_architecture(config, described)
        width = architecture.hidden if architecture is not None else None
        # Some OPT models end with a projection to the size of the embeddings.
        projected = text_settings(config).get("word_embed_proj_dim")
        width = projected if isinstance(projected, int) else width
        return read_head(model.head, model.head_layers, width, model.model_name_or_path, labels)

    def _inspected_head(self, inspected: Checkpoint) -> Head:
        config = read_json(inspected.folder / "config.json")
        return self._read_head(config, inspected.described, len(inspected.label_order))

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
            "head": str(model.head),
            "head_steps": self._inspected_head(inspected).steps,
            "view_heads": [
                (str(view.settings.head), view._inspected_head(inspected).steps)
                for view in (self._with_heads() if model.counted_views else ())
            ],
            "head_layer_norm_eps": model.head_layer_norm_eps,
            "pooling_mode": model.pooling_mode,
        }
