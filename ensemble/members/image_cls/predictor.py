"""Image classifiers, which read images block by block in the background of the passes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from ensemble.common.protocol import Counters, Ready
from ensemble.data.published_table import PublishedTable
from ensemble.members.huggingface.loading.device_map import input_device, last_device
from ensemble.members.huggingface.loading.load import load_on_devices
from ensemble.members.huggingface.loading.spread import Spread
from ensemble.members.huggingface.scoring.classifier import on_device
from ensemble.members.huggingface.scoring.compiled import compile_model
from ensemble.members.huggingface.scoring.forward import BatchSizes
from ensemble.members.huggingface.scoring.member import CheckpointMember
from ensemble.members.huggingface.scoring.warmup import check_attention
from ensemble.members.huggingface.spec import CheckpointSpec
from ensemble.members.image_cls.scoring.images import EncodedImages, ImageReader
from ensemble.members.image_cls.spec import ImageSpec
from ensemble.members.predictor import Prediction, Report

# Bytes of a block's float32 pixels; the host has one block, and another one that is being read.
_BLOCK_BYTES = 256 << 20
_MAX_BLOCK_ROWS = 512
# Rows of the table whose images are used for the warm-up.
_FIRST_ROWS = 4


class ImageClassifier:
    """A loaded image classifier: pixels -> logits; a ``Scorer`` of ``scoring.forward``.

    Args:
        model: as ``AutoModelForImageClassification`` loads it.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._device = input_device(model)
        self.last_device = last_device(model)
        self._spread = Spread(model)
        self.stages = self._spread.stages

    def skipped_tokens(self, encoded: EncodedImages) -> npt.NDArray[np.int64]:
        return np.zeros_like(encoded.lengths)

    def logits(
        self,
        encoded: EncodedImages,
        rows: npt.NDArray[np.int64],
        with_mask: bool = False,
        timing: AbstractContextManager[None] | None = None,
    ) -> torch.Tensor:
        """Run a forward pass over rows as a batch, or one for each size of image; see ``Classifier.logits``."""
        positions_by_shape: dict[tuple[object, ...], list[int]] = {}
        for position, row in enumerate(rows.tolist()):
            shapes = sorted((name, array.shape) for name, array in encoded.inputs[row].items())
            positions_by_shape.setdefault(tuple(shapes), []).append(position)
        batches = []
        for positions in positions_by_shape.values():
            inputs = [encoded.inputs[row] for row in rows[positions].tolist()]
            stacked = {name: np.stack([arrays[name] for arrays in inputs]) for name in inputs[0]}
            batches.append({name: self._tensor(array) for name, array in stacked.items()})
        with timing or nullcontext(), self._spread.forward_pass(), torch.inference_mode():
            parts: list[torch.Tensor] = [self._model(**batch).logits.float() for batch in batches]
            if len(parts) == 1:
                return parts[0]
            order = torch.tensor(
                [position for positions in positions_by_shape.values() for position in positions]
            )
            return torch.cat(parts)[order.argsort().to(parts[0].device)]

    def _tensor(self, array: npt.NDArray[Any]) -> torch.Tensor:
        tensor = on_device(array, self._device)
        return tensor.to(self._model.dtype) if tensor.is_floating_point() else tensor


class ImageClassifierMember(CheckpointMember[ImageSpec, EncodedImages]):
    """An image classifier with its image processor.

    Args:
        spec: what to load, and the images' folder.
        table: has the rows.

    Raises:
        OSError: the image processor's settings cannot be read.
        ValueError: there is no image processor that runs here.
    """

    Spec: ClassVar[type[CheckpointSpec]] = ImageSpec
    packages: ClassVar[tuple[str, ...]] = ("pillow",)

    def __init__(self, spec: ImageSpec, table: PublishedTable) -> None:
        self._reader = ImageReader(spec)
        super().__init__(spec, lambda rows, step: self._reader.encode(table.take(rows), step))
        self._warmup = self._first_images(table)
        image_bytes = max(sum(array.nbytes for array in arrays.values()) for arrays in self._warmup.inputs)
        self._block_rows = min(_MAX_BLOCK_ROWS, max(1, _BLOCK_BYTES // image_bytes))

    def _first_images(self, table: PublishedTable) -> EncodedImages:
        """Return the readable ones of the table's first images; an image of noise if there are none."""
        encoded = self._reader.encode(table.take(np.arange(min(_FIRST_ROWS, table.rows))))
        readable = np.flatnonzero(encoded.lengths)
        if len(readable):
            return EncodedImages(
                [encoded.inputs[row] for row in readable.tolist()], encoded.lengths[readable]
            )
        noise = np.random.default_rng(0).integers(0, 256, (224, 224, 3), dtype=np.uint8)
        return self._reader.encode_images([Image.fromarray(noise)])

    def load(self) -> Ready:
        spec = self._spec
        loaded = load_on_devices(spec)
        self._set_modes(loaded)
        self._classifier = ImageClassifier(loaded.model)
        notes = list(loaded.notes)

        def logits_of(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
            return np.asarray(self._classifier.logits(self._warmup, rows).cpu().double().numpy())

        logits = partial(logits_of, np.arange(len(self._warmup.lengths)))

        with self._passes(first=True):
            with contextlib.suppress(
                torch.OutOfMemoryError
            ):  # the first chunk will fail with a better message
                logits()
            not_compared = check_attention(
                logits, loaded.model, loaded.dtype, self._is_exact, self._in_float32
            )
            if not_compared:
                notes.append(not_compared)
        if spec.torch_compile:
            compile_model(loaded.model, lambda: [logits_of(np.array(batch)) for batch in ([0, 0], [0])])
        self._sizes = BatchSizes(loaded.token_budget, spec.batch_size, True, loaded.memory)
        return Ready(
            device=loaded.device_name,
            dtype=loaded.dtype,
            attn_implementation=loaded.attn_implementation,
            parameters=loaded.parameters,
            notes=tuple(notes),
        )

    def predict(self, rows: npt.NDArray[np.int64], report: Report) -> Prediction:
        parts: list[Prediction] = []
        bad_rows: dict[int, str] = {}
        done = 0

        def report_more(rows: int, tokens: int = 0, padded_tokens: int = 0) -> None:
            report(done + rows)

        for encoded in self._blocks(rows, lambda: report_more(0)):
            part = self._score(self._classifier, encoded, report_more)
            bad_rows |= {done + row: reason for row, reason in part.bad_rows.items()}
            parts.append(part)
            done += len(encoded.lengths)
        counters = sum((part.counters for part in parts), Counters())
        return Prediction(
            values=np.concatenate([part.values for part in parts]),
            bad_rows=bad_rows,
            counters=replace(counters, tokens=0, padded_tokens=0),  # images have no tokens
            advice=next((part.advice for part in parts if np.isnan(part.values).any()), parts[-1].advice),
        )

    def _blocks(self, rows: npt.NDArray[np.int64], step: Callable[[], None]) -> Iterator[EncodedImages]:
        """Yield the images of the rows in blocks; on a GPU the next block is read while one is computed.

        Args:
            step: called after each image that the computing thread waits for.
        """
        blocks = [rows[start : start + self._block_rows] for start in range(0, len(rows), self._block_rows)]
        if not self._spec.gpus:  # on a CPU both would need the same cores
            yield from (self._encode_rows(block, step) for block in blocks)
            return
        is_waiting = False

        def report_step() -> None:
            if is_waiting:
                step()

        with ThreadPoolExecutor(1, "reading") as reading:
            reads = [reading.submit(self._encode_rows, blocks[0], report_step)]
            for next_block in (*blocks[1:], None):
                is_waiting = True
                encoded = reads.pop().result()
                is_waiting = False
                if next_block is not None:
                    reads.append(reading.submit(self._encode_rows, next_block, report_step))
                yield encoded

    def _too_large(self, encoded: EncodedImages, row: int, in_float32: str) -> str:
        return (
            f"its image of {encoded.size(row)} pixels does not fit into the memory of "
            f"{self._loaded.device_name} even alone{in_float32}; quantize, or give it more GPUs (num_gpus)"
        )
