"""Rows of the table -> pixels: files read with Pillow and processed by the checkpoint's image processor.

Each image is processed separately, so that its pixels do not depend on other images, and always by the processor
that computes with Pillow and NumPy: torchvision's rounds differently, and would give other numbers on machines that
have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageFile, ImageOps

# From its own module: since 5.5 transformers itself exports only a placeholder if torchvision is missing.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from ensemble.common.host import usable_cpus
from ensemble.common.torch_errors import one_line
from ensemble.data.row_files import FileCells, is_file
from ensemble.members.image_cls.spec import NUMBERS_OF_TOKEN, ImageSpec

_MAX_THREADS = 8
_TORCHVISION_CLASSES = ("TorchvisionBackend", "BaseImageProcessorFast")


@dataclass(frozen=True)
class EncodedImages:
    """The model's inputs for some rows.

    ``inputs[i]`` are row i's arrays by the model's names for them, such as ``pixel_values``, without a batch
    dimension.  ``lengths`` is int64 [rows]: patches of 16 by 16 pixels, by which batches are made, or 0 if the
    image cannot be read, for the reason in ``problems[i]``.
    """

    inputs: Sequence[Mapping[str, npt.NDArray[Any]]]
    lengths: npt.NDArray[np.int64]
    problems: dict[int, str] = field(default_factory=dict)
    first: None = None

    def size(self, row: int) -> str:
        """Return the size of a row's image as text."""
        return " x ".join(map(str, self.inputs[row]["pixel_values"].shape[-2:]))


class ImageReader:
    """Read images in threads, which run in parallel while Pillow decodes and resizes.

    Raises:
        OSError: the image processor's settings cannot be read.
        ValueError: transformers has no image processor for the checkpoint, or only one that needs torchvision.
    """

    def __init__(self, spec: ImageSpec) -> None:
        self._files = FileCells(spec.image_column, "", Path(spec.image_folder), spec.image_suffix)
        self._processor = load_processor(spec)
        # Pillow's defaults, which another library may have changed.
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        Image.MAX_IMAGE_PIXELS = 1024 * 1024 * 1024 // 4 // 3
        Image.init()  # load all formats before threads need them
        self._threads = ThreadPoolExecutor(min(_MAX_THREADS, usable_cpus()), "image")

    def encode(
        self, rows: Sequence[Mapping[str, object]], step: Callable[[], None] = lambda: None
    ) -> EncodedImages:
        """Return the model's inputs for these rows; ``step`` is called after each row."""
        inputs: list[Mapping[str, npt.NDArray[Any]]] = []
        problems: dict[int, str] = {}
        for row, result in enumerate(self._threads.map(self._read, rows)):
            if isinstance(result, str):
                problems[row] = result
                inputs.append({})
            else:
                inputs.append(result)
            step()
        return _encoded(inputs, problems)

    def encode_images(self, images: Sequence[Image.Image]) -> EncodedImages:
        """Return the model's inputs for these images."""
        return _encoded([self._prepared(image) for image in images], {})

    def _read(self, row: Mapping[str, object]) -> dict[str, npt.NDArray[Any]] | str:
        """Return a row's arrays; or why there are none, with the file's path."""
        cell = row[self._files.column]
        path = self._files.path(cell)
        if path is None:
            return f"its cell in {self._files.column!r} is empty"
        if not is_file(path):
            is_url = str(cell).startswith(("http://", "https://"))
            return f"{cell} is on the web; download it" if is_url else f"{path}: no such file"
        try:
            with Image.open(path) as opened:
                # As transformers' pipelines do (image_utils.load_image): rotated by the EXIF tag, in three colours.
                image = ImageOps.exif_transpose(opened).convert("RGB")
            return self._prepared(image)
        except Exception as error:  # each format has its own types of errors
            return f"{path} cannot be read as an image ({type(error).__name__}: {one_line(error)})"

    def _prepared(self, image: Image.Image) -> dict[str, npt.NDArray[Any]]:
        batch = self._processor(images=image, return_tensors="np")
        return {name: np.asarray(array)[0] for name, array in batch.items()}


def load_processor(spec: ImageSpec) -> Any:
    """Load the checkpoint's image processor that computes with Pillow and NumPy, even if torchvision is installed.

    Raises:
        OSError: its settings cannot be read.
        ValueError: there is none.
    """
    # transformers 5.0 has a class of each kind, later releases have backends (5.5 accepts only this option).
    has_backends = find_spec("transformers.image_processing_backends") is not None
    backend: dict[str, Any] = {"backend": "pil"} if has_backends else {"use_fast": False}
    processor = AutoImageProcessor.from_pretrained(
        spec.model_name_or_path,
        revision=spec.revision or "main",
        trust_remote_code=spec.trust_remote_code,
        **backend,
        **spec.processor_kwargs,
    )
    if any(base.__name__ in _TORCHVISION_CLASSES for base in type(processor).__mro__):
        raise ValueError(
            f"the image processor of {spec.model_name_or_path} ({type(processor).__name__}) needs torchvision, "
            "which is not used here; name a checkpoint whose processor runs with Pillow"
        )
    return processor


def _encoded(inputs: Sequence[Mapping[str, npt.NDArray[Any]]], problems: dict[int, str]) -> EncodedImages:
    tokens = [math.ceil(arrays["pixel_values"].size / NUMBERS_OF_TOKEN) if arrays else 0 for arrays in inputs]
    return EncodedImages(inputs, np.array(tokens, dtype=np.int64), problems)
