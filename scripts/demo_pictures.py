"""The part of the demo that is pictures: each gloss as one, and the small classifier that has learned them.

A picture has 27 by 27 pixels, a row and a column for each letter and for all else: how bright one is says how
often the row's letter is followed by the column's. It is drawn from the gloss alone, so that what the classifier
knows of a topic it knows from there. For `make_demo.py`, which says where; torch is imported inside functions.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from demo_data import PICTURE_ROWS, TOPICS, Gloss, Split, Trained
from PIL import Image

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import ViTForImageClassification

SIDE = 27
EPOCHS = 12
BATCH = 128
LEARNING_RATE = 3e-3
# As `pixels` has it: nothing is resized, and 0 to 255 become -1 to 1.
PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "do_resize": False,
    "size": {"height": SIDE, "width": SIDE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def draw(text: str) -> np.ndarray:
    """A text's picture, uint8 [27, 27]: 0 for letters that never follow each other, 127 for once, 170 for twice."""
    letters = [ord(one) - ord("a") + 1 if "a" <= one <= "z" else 0 for one in f" {text.lower()} "]
    counts = np.zeros((SIDE, SIDE))
    np.add.at(counts, (letters[:-1], letters[1:]), 1)
    return (255 * counts / (counts + 1)).astype(np.uint8)


def write_pictures(glosses: Sequence[Gloss], directory: Path) -> None:
    """`<id>.png` of each of the first `PICTURE_ROWS` glosses."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for gloss in glosses[:PICTURE_ROWS]:
        Image.fromarray(draw(gloss.text)).save(directory / f"{gloss.id}.png", optimize=True)


def pixels(pictures: Tensor) -> Tensor:
    """What the model reads, float32 [pictures, 3, 27, 27], of uint8 [pictures, 27, 27]."""
    return (pictures.float() / 127.5 - 1).unsqueeze(1).expand(-1, 3, -1, -1)


def train_pictures(data: Split, directory: Path) -> Trained:
    """Train the classifier on the pictures of all training glosses and save it; runs in its own process."""
    import torch
    from torch.nn import functional
    from transformers import ViTConfig, ViTForImageClassification

    started = time.monotonic()
    torch.set_num_threads(1)
    torch.manual_seed(4)
    labels = sorted(TOPICS.values())
    (rows, truth), (validation_rows, validation_truth) = (
        (
            torch.from_numpy(np.stack([draw(gloss.text) for gloss in glosses])),
            torch.tensor([labels.index(gloss.topic) for gloss in glosses]),
        )
        for glosses in (data.train, data.validation)
    )
    config = ViTConfig(
        image_size=SIDE,
        patch_size=9,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        hidden_dropout_prob=0.1,
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
    )
    model: ViTForImageClassification = ViTForImageClassification(config)
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, weight_decay=0.05)
    steps = EPOCHS * -(-len(rows) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for epoch in range(1, EPOCHS + 1):
        model.train()
        for batch in torch.randperm(len(rows)).split(BATCH):  # type: ignore[no-untyped-call]
            loss = functional.cross_entropy(model(pixel_values=pixels(rows[batch])).logits, truth[batch])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        model.eval()
        with torch.inference_mode():
            logits = model(pixel_values=pixels(validation_rows)).logits
        validation_loss = functional.cross_entropy(logits, validation_truth).item()
        print(
            f"vit: epoch {epoch} of {EPOCHS}, validation log loss {validation_loss:.4f}, "
            f"{time.monotonic() - started:.0f} s",
            flush=True,
        )
    shutil.rmtree(directory, ignore_errors=True)
    model.to(torch.float16).save_pretrained(directory)
    (directory / "model.safetensors").chmod(0o644)  # it is written for its owner's eyes only
    (directory / "preprocessor_config.json").write_text(
        json.dumps(PROCESSOR, indent=2) + "\n", encoding="utf-8"
    )
    return Trained(
        name="vit",
        architecture=type(model).__name__,
        tokenizer=f"reads pictures of {SIDE} by {SIDE} pixels",
        parameters=sum(p.numel() for p in model.parameters()),
        epoch=EPOCHS,
        validation_loss=validation_loss,
        temperature=1.0,
    )


def picture_probabilities(directory: Path, texts: Sequence[str]) -> Iterator[dict[str, float]]:
    """What the saved classifier says of texts' pictures, through plain transformers in float32."""
    import torch
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    processor = AutoImageProcessor.from_pretrained(directory)
    model = AutoModelForImageClassification.from_pretrained(directory, dtype=torch.float32).eval()
    for text in texts:
        inputs = processor(Image.fromarray(draw(text)).convert("RGB"), return_tensors="pt")
        with torch.inference_mode():
            probabilities = model(**inputs).logits.softmax(-1)[0].tolist()
        yield {model.config.id2label[index]: p for index, p in enumerate(probabilities)}
