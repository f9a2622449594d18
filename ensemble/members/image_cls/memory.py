"""The memory one replica of an image classifier takes, by the files of its checkpoint."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ensemble.common.files import read_json
from ensemble.members.footprint import Activation, Capability, Footprint, Stage
from ensemble.members.huggingface.checkpoint.architecture import read_architecture
from ensemble.members.huggingface.checkpoint.inspect import Checkpoint
from ensemble.members.huggingface.memory.estimate import CheckpointMemory, supports_sdpa, whole_tensors
from ensemble.members.huggingface.memory.sizes import DTYPE_BYTES
from ensemble.members.huggingface.settings import HuggingFaceSettings
from ensemble.members.huggingface.spec import IMAGE_CLASSIFIER
from ensemble.members.image_cls.spec import NUMBERS_OF_TOKEN

# One size of image and of patch, and layers like those of text models: see tests/planning/test_image_memory.py.
_PLAIN_TRANSFORMERS = ("deit", "dinov2", "dinov2_with_registers", "siglip", "vit")
_NO_LIMIT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ImageMemory(CheckpointMemory):
    """The same of an image classifier.

    A plain transformer's layers count as those of a family that nobody has looked at: up to about three times what
    they take, never less.  Of others, such as convolutions, only the type is known, and there is no footprint.

    Attributes:
        patches: tokens of an image in the model, 0 where nobody knows them.
        numbers: of an image's pixels, in three colours.
    """

    patches: int
    numbers: int

    def footprint(
        self, gpus: int, capability: Capability | None, quantization: Mapping[str, Any] | None = None
    ) -> Footprint | None:
        found = super().footprint(gpus, capability, quantization) if self.patches else None
        if found is None:
            return None
        layers = found.activation
        # Pixels as they come, in the type of the weights, and in the patches' product.
        pixels = self.numbers * (4 + 2 * DTYPE_BYTES[found.dtype])
        of_image = layers.bytes(self.patches, self.patches) - layers.fixed_bytes + pixels
        # Batches count an image by its pixels, whatever the model's patches are.
        tokens = self.max_length
        return replace(
            found, activation=Activation((Stage(of_image / tokens, 0.0),), layers.fixed_bytes), width=tokens
        )


def image_memory(model: HuggingFaceSettings, checkpoint: Checkpoint, rows: int, labels: int) -> ImageMemory:
    """What the files of one image classifier's checkpoint tell.

    Raises:
        CheckpointError: a weight file is broken.
    """
    config = read_json(checkpoint.folder / "config.json")
    vision = config.get("vision_config")
    own = {**config, **vision, "model_type": checkpoint.model_type} if isinstance(vision, dict) else config
    own = {key: value for key, value in own.items() if key != "text_config"}
    size, patch = own.get("image_size"), own.get("patch_size")
    patches = numbers = 0
    if checkpoint.model_type in _PLAIN_TRANSFORMERS and isinstance(size, int) and isinstance(patch, int):
        numbers = 3 * size * size
        # Beside the patches what stands for the whole image.
        patches = (size // max(1, patch)) ** 2 + 2 + int(own.get("num_register_tokens") or 0)
    # Without a vocabulary nothing is taken for an architecture.
    architecture = read_architecture({**own, "vocab_size": 1})
    if architecture is not None and patches:
        architecture = replace(architecture, inner_copies=2)  # their MLP has no gate
    return ImageMemory(
        settings=model,
        lengths=np.ones(rows, dtype=np.int64),
        num_labels=labels,
        tensors=whole_tensors(model, checkpoint.folder),
        architecture=architecture,
        max_length=math.ceil(numbers / NUMBERS_OF_TOKEN) or _NO_LIMIT,
        supports_sdpa=supports_sdpa(checkpoint.model_type, IMAGE_CLASSIFIER),
        patches=patches,
        numbers=numbers,
    )
