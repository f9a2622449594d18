"""Predicted memory of image classifiers against what real ones allocate; and the type that they compute in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ensemble.members.base import OutputColumns
from ensemble.members.huggingface.memory import COMPILER_BYTES
from ensemble.members.image_cls.parent import (
    ImageCheckpoint,
    ImageClassification,
    ImageClassifierSettings,
    ImageMemory,
)
from tests.checkpoints import make_image_checkpoint

LABELS = ("a", "b", "c")
SIZES = {"hidden_size": 192, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 768}
IMAGES = {"image_size": 112, "patch_size": 14}


def inspected(folder: Path, **keys: Any) -> tuple[ImageClassification, ImageCheckpoint]:
    given = {"name": "eyes", "model_name_or_path": str(folder), "image_column": "image", **keys}
    kind = ImageClassification(ImageClassifierSettings.model_validate(given))
    return kind, kind.inspect(OutputColumns("id", LABELS, folder))


def estimate(folder: Path, **keys: Any) -> ImageMemory:
    kind, result = inspected(folder, **keys)
    memory = kind.memory(result, np.full(10, 784), len(LABELS))
    assert isinstance(memory, ImageMemory)
    return memory


def test_a_compiler_takes_memory_of_the_host_alone(tmp_path: Path) -> None:
    make_image_checkpoint(tmp_path, "vit", LABELS)
    for gpus, more in ((0, COMPILER_BYTES), (1, 0)):
        plain, compiled = (
            estimate(tmp_path, torch_compile=asked).footprint(gpus, (9, 0)) for asked in (False, True)
        )
        assert plain is not None
        assert compiled is not None
        assert compiled.context_bytes - plain.context_bytes == more


@pytest.mark.parametrize("architecture", ["vit", "dinov2", "siglip"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_an_image_takes_no_more_than_is_planned(architecture: str, attention: str, tmp_path: Path) -> None:
    import torch
    import transformers

    from ensemble.members.image_cls.predictor import EncodedImages, ImageClassifier, _encoded
    from tests.planning.tracking.tracker import PeakTracker

    own = {**SIZES, **IMAGES}
    text = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100}
    settings = own if architecture != "siglip" else {"vision_config": own, "text_config": text}
    config = transformers.AutoConfig.for_model(
        architecture, **settings, id2label=dict(enumerate(LABELS)), attn_implementation=attention
    )
    model = transformers.AutoModelForImageClassification.from_config(config).eval()
    make_image_checkpoint(tmp_path, "vit", LABELS)  # for its image processor
    model.save_pretrained(tmp_path)
    footprint = estimate(tmp_path, attn_implementation=attention).footprint(0, None)
    assert footprint is not None
    rows = 8
    pixels = [{"pixel_values": np.zeros((3, 112, 112), np.float32)} for _ in range(rows)]
    encoded: EncodedImages = _encoded(pixels, {})
    tracker = PeakTracker()
    with tracker, torch.inference_mode():
        ImageClassifier(model).logits(encoded, np.arange(rows))
    tokens = int(encoded.lengths.sum())
    assert footprint.width == encoded.lengths[0], "both count an image alike"
    planned = footprint.activation.bytes(tokens, footprint.width)
    assert tracker.peak_bytes <= planned <= 3 * tracker.peak_bytes
    assert footprint.weights.bytes == pytest.approx(model.num_parameters() * 4, rel=0.02)


def test_of_convolutions_only_the_type_is_known(tmp_path: Path) -> None:
    memory = estimate(make_image_checkpoint(tmp_path, "resnet", LABELS))
    assert memory.footprint(1, (8, 0)) is None
    # Told to all workers, and part of the fingerprint: a CPU computes in another than a GPU.
    stored = [memory.dtype(*where) for where in ((0, None), (1, (7, 5)), (1, (8, 0)))]
    assert stored == ["float32", "float16", "float32"]
    assert estimate(tmp_path, dtype="bfloat16").dtype(0, None) == "bfloat16"
