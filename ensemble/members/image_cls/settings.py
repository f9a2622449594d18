"""Define the keys of an image classifier."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar, Literal

from pydantic import Field

from ensemble.config.document import Problem
from ensemble.config.values import (
    Column,
    Folder,
    LabelMap,
    ProblemType,
    Settings,
    Source,
    Text,
    same_label_problems,
)
from ensemble.members.huggingface.settings import HuggingFaceSettings


class ImageClassifierSettings(HuggingFaceSettings):
    """An image classifier of transformers (AutoModelForImageClassification)."""

    task_type: Literal["image_cls"] = "image_cls"
    adapter_name_or_path: Source | None = None  # none here: merge it into its base first
    image_column: Column = Field(examples=["image"])  # names each row's file
    image_folder: Folder | None = None  # where relative paths start; None: the table's folder
    image_suffix: Text | None = None  # stands behind each cell in the file's name, such as .jpg
    processor_kwargs: Settings = Field(default_factory=dict)  # for the image processor's from_pretrained
    problem_type: ProblemType | None = None  # how logits become probabilities; None: the checkpoint's own
    label_map: LabelMap = Field(default_factory=dict)  # the checkpoint's label -> the config's

    older_keys: ClassVar[Mapping[str, str]] = {
        **HuggingFaceSettings.older_keys,
        "image_column": "image images path_column file_column filename",
        "image_folder": "image_dir image_root root data_dir",
        "image_suffix": "extension ext suffix",
        "processor_kwargs": "image_processor_kwargs feature_extractor_kwargs",
        "label_map": "label_mapping id2label label2id",
    }

    def broken_rules(self, labels: Sequence[str]) -> Iterator[Problem]:
        yield from super().broken_rules(labels)
        yield from same_label_problems("label_map", self.label_map, labels)
        if self.adapter_name_or_path is not None:
            yield (
                ("adapter_name_or_path",),
                "image classifiers load no adapters; merge it into its base (peft: merge_and_unload), name that",
            )
