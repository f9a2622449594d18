"""What a worker of an image classifier is told; parent and child share it, so it imports nothing heavy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ensemble.members.huggingface.spec import CheckpointSettings, CheckpointSpec

# Numbers of an image that count as a token: those of a patch of 16 by 16 pixels in three colours.
NUMBERS_OF_TOKEN = 16 * 16 * 3


@dataclass(frozen=True, kw_only=True)
class ImageSettings(CheckpointSettings):
    """How to load an image classifier and feed it; on the wire these are the ``settings`` of a ``WorkerSpec``.

    ``image_folder`` is where relative paths start, absolute; ``image_suffix`` stands behind each cell.
    """

    image_column: str
    image_folder: str
    image_suffix: str
    processor_kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ImageSpec(ImageSettings, CheckpointSpec):
    """The image classifier's settings and what every worker is told."""
