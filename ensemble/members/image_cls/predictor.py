"""Run image classifiers, and read images block by block in the background of the passes.

Each image is processed separately, so that its pixels do not depend on other images, and always by the processor
that computes with Pillow and NumPy: torchvision's rounds differently, and would give other numbers on machines that
have it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageFile, ImageOps

# From its own module: since 5.5 transformers itself exports only a placeholder if torchvision is missing.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from ensemble.common.host import usable_cpus
from ensemble.common.protocol import Counters, Ready
from ensemble.common.torch_errors import one_line
from ensemble.data.published_table import PublishedTable
from ensemble.data.row_files import FileCells, is_file
from ensemble.members.huggingface.loading.device_map import on_device
from ensemble.members.huggingface.loading.load import load_on_devices
from ensemble.members.huggingface.scoring.forward import BatchSizes, Scorer
from ensemble.members.huggingface.scoring.member import CheckpointMember
from ensemble.members.huggingface.scoring.passes import compile_model
from ensemble.members.huggingface.scoring.warmup import WarmUp
from ensemble.members.huggingface.spec import NUMBERS_OF_TOKEN, CheckpointSpec
from ensemble.members.predictor import Prediction, Report

# Bytes of a block's float32 pixels; the host has one block, and another one that is being read.
_BLOCK_BYTES = 256 << 20
_MAX_BLOCK_ROWS = 512
# Pillow's modes of one channel of 16 or 32 bits. Its conversion to three colours, which transformers uses, cuts
# their values at 255 and scales none.
_DEEP_MODES = ("I", "F")
_TORCHVISION_CLASSES = ("TorchvisionBackend", "BaseImageProcessorFast")


@dataclass(frozen=True, kw_only=True)
class ImageSpec(CheckpointSpec):
    """Add what an image classifier reads; ``image_folder`` is absolute."""

    image_column: str
    image_folder: str
    image_suffix: str
    processor_kwargs: dict[str, Any]


@dataclass(frozen=True)
class EncodedImages:
    """Hold the model's inputs for some rows.

    ``inputs[i]`` are row i's arrays by the model's names for them, such as ``pixel_values``, without a batch
    dimension.  ``lengths`` is int64 [rows]: patches of 16 by 16 pixels, by which batches are made, or 0 if the
    image cannot be read, for the reason in ``problems[i]``.  ``clipped`` counts images of 16 or 32 bits a channel.
    """

    inputs: Sequence[Mapping[str, npt.NDArray[Any]]]
    lengths: npt.NDArray[np.int64]
    problems: dict[int, str] = field(default_factory=dict)
    clipped: int = 0
    first: None = None


class ImageReader:
    """Read images in threads, which run in parallel while Pillow decodes and resizes."""

    def __init__(self, spec: ImageSpec) -> None:
        self._files = FileCells(spec.image_column, "", Path(spec.image_folder), spec.image_suffix)
        self._processor = load_processor(spec)
        # Pillow's defaults, which another library may have changed.
        ImageFile.LOAD_TRUNCATED_IMAGES = False
        Image.MAX_IMAGE_PIXELS = 1024 * 1024 * 1024 // 4 // 3
        Image.init()  # load all formats before threads need them
        self._threads = ThreadPoolExecutor(min(8, usable_cpus()), "image")

    def encode(
        self, rows: Sequence[Mapping[str, object]], step: Callable[[], None] = lambda: None
    ) -> EncodedImages:
        """Return the model's inputs for these rows; ``step`` is called after each row."""
        inputs: list[Mapping[str, npt.NDArray[Any]]] = []
        problems: dict[int, str] = {}
        clipped = 0
        for row, (result, is_clipped) in enumerate(self._threads.map(self._read, rows)):
            clipped += is_clipped
            if isinstance(result, str):
                problems[row] = result
            inputs.append({} if isinstance(result, str) else result)
            step()
        return replace(_encoded(inputs, problems), clipped=clipped)

    def prepared(self, image: Image.Image) -> dict[str, npt.NDArray[Any]]:
        """Return the model's inputs for an image."""
        batch = self._processor(images=image, return_tensors="np")
        return {name: np.asarray(array)[0] for name, array in batch.items()}

    def _read(self, row: Mapping[str, object]) -> tuple[dict[str, npt.NDArray[Any]] | str, bool]:
        """Return a row's arrays, or why there are none, and whether values of its image were cut at 255."""
        cell = row[self._files.column]
        path = self._files.path(cell)
        if path is None:
            return f"its cell in {self._files.column!r} is empty", False
        if not is_file(path):
            is_url = str(cell).startswith(("http://", "https://"))
            return f"{cell} is on the web; download it" if is_url else f"{path}: no such file", False
        try:
            with Image.open(path) as opened:
                # As transformers' pipelines do (image_utils.load_image): rotated by the EXIF tag, in three colours.
                arrays = self.prepared(ImageOps.exif_transpose(opened).convert("RGB"))
                return arrays, opened.mode.startswith(_DEEP_MODES)
        except Exception as error:  # each format has its own types of errors
            reason = f"{path} cannot be read as an image ({type(error).__name__}: {one_line(error)})"
            return reason, False


def load_processor(spec: ImageSpec) -> Any:
    """Load the image processor that computes with Pillow and NumPy, even if torchvision is installed."""
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


class ImageClassifier(Scorer[EncodedImages]):
    """Run a loaded image classifier: pixels -> logits."""

    def logits(
        self, encoded: EncodedImages, rows: npt.NDArray[np.int64], with_mask: bool = False
    ) -> torch.Tensor:
        # A pass for each size of image.
        groups: dict[str, list[int]] = {}
        for position, row in enumerate(rows.tolist()):
            shapes = sorted((name, array.shape) for name, array in encoded.inputs[row].items())
            groups.setdefault(str(shapes), []).append(position)
        batches = []
        for positions in groups.values():
            inputs = [encoded.inputs[row] for row in rows[positions].tolist()]
            batches.append(
                {name: self._tensor(np.stack([arrays[name] for arrays in inputs])) for name in inputs[0]}
            )
        with self._spread.forward_pass(), torch.inference_mode():
            parts: list[torch.Tensor] = [self._model(**batch).logits.float() for batch in batches]
            if len(parts) == 1:
                return parts[0]
            order = torch.tensor([*chain(*groups.values())]).argsort()
            return torch.cat(parts)[order.to(parts[0].device)]

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = on_device(array, self._device)
        return tensor.to(self._model.dtype) if tensor.is_floating_point() else tensor


class ImageClassifierMember(CheckpointMember[ImageSpec, EncodedImages]):
    """Predict with an image classifier and its image processor."""

    Spec: ClassVar[type[CheckpointSpec]] = ImageSpec
    packages: ClassVar[tuple[str, ...]] = ("pillow",)

    def __init__(self, spec: ImageSpec, table: PublishedTable) -> None:
        self._reader = ImageReader(spec)
        super().__init__(spec, table)
        # For the warm-up.
        first = self._reader.encode(table.take(np.arange(min(4, table.rows)))).inputs
        readable = [arrays for arrays in first if arrays]
        if not readable:
            noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
            readable = [self._reader.prepared(Image.fromarray(noise))]
        self._warmup = _encoded(readable if len(readable) > 1 else readable * 2, {})
        image_bytes = max(sum(array.nbytes for array in arrays.values()) for arrays in readable)
        self._block_rows = min(_MAX_BLOCK_ROWS, max(1, _BLOCK_BYTES // image_bytes))

    def load(self) -> Ready:
        spec = self._spec
        loaded = load_on_devices(spec)
        self._set_modes(loaded)
        self._classifier = ImageClassifier(loaded.model)
        notes = list(loaded.notes)
        warm_up = WarmUp(self._classifier, self._warmup, self._values, self._is_exact, self._in_float32)
        with self._passes(first=True):
            # Out of memory: the first chunk will fail with a better message.
            with contextlib.suppress(torch.OutOfMemoryError):
                self._classifier.logits(self._warmup, np.arange(len(self._warmup.lengths)))
            is_asked = "attn_implementation" in spec.asked
            not_compared = warm_up.check_attention(loaded.model, loaded.dtype, is_asked)
            if not_compared:
                notes.append(not_compared)
        if spec.torch_compile:
            compile_model(loaded.model, warm_up.run)
        self._sizes = BatchSizes(loaded.token_budget, spec.batch_size, True, loaded.memory)
        return Ready(
            device=loaded.device_name,
            dtype=loaded.dtype,
            attn_implementation=loaded.attn_implementation,
            parameters=loaded.parameters,
            notes=tuple(notes),
            room_bytes=self._choice().room_bytes,
            max_room_bytes=loaded.max_room_bytes,
        )

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        parts: list[Prediction] = []
        bad_rows: dict[int, str] = {}
        done = clipped = 0

        def report_more(rows: int, tokens: int = 0, padded_tokens: int = 0) -> None:
            report(done + rows)  # a block's batches are made of all of its images: it is finished in any case

        for encoded in self._blocks(rows, lambda: report_more(0)):
            part = self._score(self._classifier, encoded, report_more)
            bad_rows |= {done + row: reason for row, reason in part.bad_rows.items()}
            parts.append(part)
            done += len(encoded.lengths)
            clipped += encoded.clipped
            if report(done) is False:
                break
        values = np.full((len(rows), parts[0].values.shape[1]), np.nan)
        values[:done] = np.concatenate([part.values for part in parts])
        counters = sum((part.counters for part in parts), Counters())
        return Prediction(
            values=values,
            bad_rows=bad_rows,
            counters=replace(counters, tokens=0, padded_tokens=0, clipped_images=clipped),  # no tokens
            advice=next((part.advice for part in parts if np.isnan(part.values).any()), parts[-1].advice),
            choice=parts[-1].choice,
            is_partial=done < len(rows),
        )

    def _read(self, rows: npt.NDArray[np.int64], step: Callable[[], None]) -> EncodedImages:
        return self._reader.encode(self._table.take(rows), step)

    def _blocks(self, rows: npt.NDArray[np.int64], step: Callable[[], None]) -> Iterator[EncodedImages]:
        """Yield the images of the rows in blocks; on a GPU the next block is read while one is computed."""
        blocks = [rows[start : start + self._block_rows] for start in range(0, len(rows), self._block_rows)]
        if not self._spec.gpus:  # on a CPU both would need the same cores
            yield from (self._read(block, step) for block in blocks)
            return
        with ThreadPoolExecutor(1, "reading") as reading:
            following = reading.submit(self._read, blocks[0], step)
            for next_block in blocks[1:]:
                encoded = following.result()
                following = reading.submit(self._read, next_block, lambda: None)
                yield encoded
            yield following.result()

    def _too_large(self, encoded: EncodedImages, row: int, in_float32: str) -> str:
        size = " x ".join(map(str, encoded.inputs[row]["pixel_values"].shape[-2:]))
        return (
            f"its image of {size} pixels does not fit into the memory of {self._loaded.device_name} even "
            f"alone{in_float32}; quantize, or give it more GPUs (num_gpus)"
        )
