"""Estimate the memory of an image classifier's replica from the files of its checkpoint."""

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
from ensemble.members.huggingface.memory.estimate import CheckpointMemory, whole_tensors
from ensemble.members.huggingface.memory.sizes import DTYPE_BYTES
from ensemble.members.huggingface.settings import HuggingFaceSettings
from ensemble.members.huggingface.spec import NUMBERS_OF_TOKEN

_NO_LIMIT = 1 << 20
# Tokens for the whole image, in addition to the patches.
_MORE_TOKENS = 2


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
        activation = Activation((Stage(image_bytes / self.max_length, 0.0),), layers.fixed_bytes)
        return replace(footprint, activation=activation, width=self.max_length)


def image_memory(model: HuggingFaceSettings, checkpoint: Checkpoint, rows: int, labels: int) -> ImageMemory:
    """Return what the files of an image classifier's checkpoint tell about its memory."""
    described = checkpoint.described
    size, patch = described.numbers.get("image_size"), described.numbers.get("patch_size")
    # A plain transformer has one table of positions, with a row for each patch.
    tables = [shape[-2] for name, shape in described.parameters.items() if "position_embedding" in name]
    patches = numbers = 0
    if isinstance(size, int) and isinstance(patch, int) and len(tables) == 1:
        grid = (size // max(1, patch)) ** 2
        if grid <= tables[0] <= grid + _MORE_TOKENS:
            patches = grid + _MORE_TOKENS + int(described.numbers.get("num_register_tokens") or 0)
            numbers = 3 * size * size
    return ImageMemory(
        settings=model,
        lengths=np.ones(rows, dtype=np.int64),
        num_labels=labels,
        tensors=whole_tensors(model, checkpoint.folder),
        architecture=read_architecture(read_json(checkpoint.folder / "config.json"), described),
        max_length=math.ceil(numbers / NUMBERS_OF_TOKEN) or _NO_LIMIT,
        patches=patches,
        numbers=numbers,
    )
