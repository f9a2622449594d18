"""Define the settings of an image classifier's worker.

Parent and child share this file, so it imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ensemble.members.huggingface.spec import CheckpointSettings, CheckpointSpec

# This many numbers of an image count as a token: a patch of 16 by 16 pixels in three colours.
NUMBERS_OF_TOKEN = 16 * 16 * 3


@dataclass(frozen=True, kw_only=True)
class ImageSettings(CheckpointSettings):
    """State how to load and feed an image classifier; sent as the ``settings`` of a ``WorkerSpec``.

    Relative paths start at ``image_folder``, which is absolute; ``image_suffix`` is added to each cell.
    """

    image_column: str
    image_folder: str
    image_suffix: str
    processor_kwargs: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class ImageSpec(ImageSettings, CheckpointSpec):
    """Join an image classifier's settings with those of every worker."""
