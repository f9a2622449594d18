"""Checkpoints with a single score, cut into ordered labels: the parent's side."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ensemble.common.errors import CheckpointError
from ensemble.members.base import Assigned, OutputColumns
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint, read_checkpoint
from ensemble.members.huggingface.checkpoint.labels import label_names
from ensemble.members.huggingface.parent import TextCheckpoint
from ensemble.members.huggingface.settings import TextSettings
from ensemble.members.huggingface.spec import CHILD, CLASSIFIER


class OrdinalSettings(TextSettings):
    task_type: Literal["ordinal"] = "ordinal"
    cut_points: list[float]  # ascending, in units of the score; one fewer than labels


class Ordinal(TextCheckpoint[OrdinalSettings]):
    Settings = OrdinalSettings
    child = f"{CHILD}:ensemble_ordinal.predictor.OrdinalMember"
    auto_class = CLASSIFIER

    def inspect(self, columns: OutputColumns) -> Checkpoint:
        model, labels = self.settings, len(columns.labels)
        checkpoint = read_checkpoint(model, self.auto_class)
        problems = []
        if (scores := len(label_names(checkpoint.config, model.model_name_or_path))) != 1:
            problems.append(f"{model.model_name_or_path} has {scores} outputs; ordinal needs a single score")
        if len(model.cut_points) != labels - 1 or model.cut_points != sorted(set(model.cut_points)):
            problems.append(f"cut_points: must be {labels - 1} ascending numbers for {labels} labels")
        if problems:
            raise CheckpointError(problems)
        return replace(checkpoint, activation="softmax", label_order=tuple(range(labels)))

    def fingerprint(self, inspected: Checkpoint, assigned: Assigned) -> Mapping[str, object]:
        return {**super().fingerprint(inspected, assigned), "cut_points": self.settings.cut_points}

    def worker_settings(
        self, inspected: Checkpoint, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        settings = super().worker_settings(inspected, assigned, offload_folder)
        return {**settings, "cut_points": self.settings.cut_points}
