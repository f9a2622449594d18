"""Describe image classifiers on the parent's side, without torch."""

# No "from __future__ import annotations": pydantic would evaluate every annotation from its text again.

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field

from ensemble.common.digests import FileDigests, digest_of
from ensemble.common.errors import CheckpointError
from ensemble.config import MemberConfig
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
from ensemble.data.row_files import FileCells
from ensemble.members.base import Assigned, Draft, OutputColumns, Reads
from ensemble.members.footprint import Activation, Capability, Footprint, MemoryEstimate
from ensemble.members.huggingface.checkpoint.digests import hub_commit
from ensemble.members.huggingface.checkpoint.hub import how_to_install, read_config
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint, inspect_checkpoint
from ensemble.members.huggingface.checkpoint.labels import label_names, saved_as
from ensemble.members.huggingface.memory import DTYPE_BYTES, CheckpointMemory, whole_tensors
from ensemble.members.huggingface.parent import HuggingFaceMember
from ensemble.members.huggingface.settings import HuggingFaceSettings
from ensemble.members.huggingface.spec import (
    CHILD,
    IMAGE_CLASSIFIER,
    NUMBERS_OF_TOKEN,
    CheckpointSettings,
    without_fetching,
)

# Where transformers looks for the image processor's settings (image_processing_auto.py).
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
_NO_LIMIT = 1 << 20


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


@dataclass(frozen=True)
class ImageCheckpoint(Checkpoint):
    """Add the folder where relative paths start, as an absolute path."""

    image_folder: Path = Path()


@dataclass(frozen=True, kw_only=True)
class ImageMemory(CheckpointMemory):
    """Estimate the memory of an image classifier.

    A plain transformer's layers count as those of an unknown family: up to about three times their real size, never
    less.  For other models, such as convolutions, only the type is known, and there is no footprint.

    Attributes:
        patches: tokens of an image in the model; 0: not known.
        numbers: of an image's pixels, in three colours.
    """

    patches: int
    numbers: int

    def footprint(
        self, gpus: int, capability: Capability | None, quantization: Mapping[str, Any] | None = None
    ) -> Footprint | None:
        footprint = super().footprint(gpus, capability, quantization) if self.patches else None
        if footprint is None:
            return None
        layers = footprint.activation
        # Pixels as float32, in the type of the weights, and in the patches' product.
        pixel_bytes = self.numbers * (4 + 2 * DTYPE_BYTES[footprint.dtype])
        image_bytes = layers.bytes(self.patches, self.patches) - layers.fixed_bytes + pixel_bytes
        # Batches count an image by its pixels, whatever the model's patches are.
        activation = Activation(image_bytes / self.max_length, fixed_bytes=layers.fixed_bytes)
        return replace(footprint, activation=activation, width=self.max_length)


class ImageClassification(HuggingFaceMember[ImageClassifierSettings, ImageCheckpoint]):
    """Describe an image classifier, which transformers loads."""

    Settings: ClassVar[type[MemberConfig]] = ImageClassifierSettings
    child: ClassVar[str] = f"{CHILD}:ensemble.members.image_cls.predictor.ImageClassifierMember"
    activation_key: ClassVar[str] = "problem_type"
    auto_class: ClassVar[str] = IMAGE_CLASSIFIER

    @classmethod
    def draft(cls, source: str, id_column: str) -> Draft | None:
        folder = Path(source)
        if not (folder / "config.json").is_file():
            return None
        config = read_config(folder / "config.json", f"{source}: its config.json")
        if not saved_as(config).endswith("ForImageClassification"):
            return None
        names = label_names(config, source)
        return Draft(
            settings={"task_type": "image_cls", "model_name_or_path": source},
            labels=tuple(names),
            are_named=not all(re.fullmatch(r"LABEL_\d+", name) for name in names),
            reads_text=False,
            file_keys=("image_column", "image_folder", "image_suffix"),
        )

    def reads(self) -> Reads:
        model = self.settings
        files = FileCells(
            model.image_column,
            key="image_column",
            folder=model.image_folder,
            suffix=model.image_suffix or "",
            advice="relative paths start at image_folder, by default at the table's folder; image_suffix stands "
            "behind each cell",
        )
        # 224 by 224 pixels are 196 patches, which take as much work as tokens of 4 bytes each.
        return Reads((model.image_column,), files=files, row_bytes=784)

    def inspect(self, columns: OutputColumns) -> ImageCheckpoint:
        model = self.settings
        checkpoint = inspect_checkpoint(
            model, columns.labels, model.label_map, model.problem_type, IMAGE_CLASSIFIER
        )
        if find_spec("PIL") is None:
            raise CheckpointError(
                f"image_column needs Pillow, which is not installed: {how_to_install('pillow')}"
            )
        image_folder = (model.image_folder or columns.table.parent).absolute()
        return ImageCheckpoint(**vars(checkpoint), image_folder=image_folder)

    def packages(self, inspected: ImageCheckpoint | None) -> Iterator[tuple[str, str]]:
        yield from super().packages(inspected)
        yield "pillow", ".image_column"

    def memory(
        self, inspected: ImageCheckpoint, lengths: npt.NDArray[np.int64], labels: int
    ) -> MemoryEstimate | None:
        facts = inspected.facts
        return ImageMemory(
            settings=self.settings,
            lengths=np.ones(len(lengths), dtype=np.int64),
            num_labels=labels,
            tensors=whole_tensors(self.settings, inspected.folder),
            architecture=facts.architecture,
            max_length=math.ceil(facts.image_numbers / NUMBERS_OF_TOKEN) or _NO_LIMIT,
            patches=facts.patches,
            numbers=facts.image_numbers,
        )

    def fingerprint(self, inspected: ImageCheckpoint, assigned: Assigned) -> Mapping[str, object]:
        model = self.settings
        return {
            **super().fingerprint(inspected, assigned),
            "image_column": model.image_column,
            "processor_kwargs": without_fetching(model.processor_kwargs),
        }

    def content(self, inspected: ImageCheckpoint, files: FileDigests) -> Mapping[str, str]:
        """Return the digests of the weights and of the image processor's settings."""
        folder = inspected.folder
        commit = hub_commit(self.settings.model_name_or_path, folder)
        paths = [] if commit else [folder / name for name in _PROCESSOR_FILES]
        processor = files.together(folder, dict.fromkeys(path for path in paths if path.is_file()))
        return {**super().content(inspected, files), "processor": digest_of([commit, processor])}

    def worker_settings(
        self, inspected: ImageCheckpoint, assigned: Assigned, offload_folder: Path | None
    ) -> Mapping[str, Any]:
        model = self.settings
        return {
            **self._loading(CheckpointSettings, inspected, assigned, offload_folder),
            "image_column": model.image_column,
            "image_folder": str(inspected.image_folder),
            "image_suffix": model.image_suffix or "",
            "processor_kwargs": model.processor_kwargs,
        }
