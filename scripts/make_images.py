"""Make what configs/image.yaml runs: pictures of coloured discs, their table, and a tiny ResNet that knows them.

    python scripts/make_images.py runs/images

A folder of about 600 kB, made within seconds: images/*.png, test.csv and the checkpoint model.  Everything is drawn
and trained here from a seed; nothing is fetched.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from transformers import ResNetConfig, ResNetForImageClassification

LABELS = ("red", "green", "blue")
_SIZE, _TRAINING, _STEPS, _BATCH = 32, 600, 40, 32
# As the image processor of the checkpoint does.
_PROCESSOR = {
    "image_processor_type": "ViTImageProcessor",
    "size": {"height": _SIZE, "width": _SIZE},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def draw(label: str, chooser: random.Random) -> Image.Image:
    """A disc of about that colour on grey, with some noise."""
    grey = chooser.randrange(60, 200)
    image = Image.new("RGB", (_SIZE, _SIZE), (grey, grey, grey))
    x, y, radius = (chooser.uniform(*span) for span in ((8, 24), (8, 24), (4, 10)))
    colour = [chooser.randrange(0, 110) for _ in range(3)]
    colour[LABELS.index(label)] = chooser.randrange(120, 256)
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=tuple(colour))
    noise = np.random.default_rng(chooser.randrange(1 << 30)).normal(0, 12, (_SIZE, _SIZE, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


def train(chooser: random.Random) -> ResNetForImageClassification:
    """A ResNet of some thousand parameters after some passes over pictures of its own."""
    torch.manual_seed(0)
    config = ResNetConfig(
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
        id2label=dict(enumerate(LABELS)),
        label2id={label: index for index, label in enumerate(LABELS)},
    )
    model = ResNetForImageClassification(config)
    labels = [chooser.randrange(len(LABELS)) for _ in range(_TRAINING)]
    pixels = np.stack([np.asarray(draw(LABELS[label], chooser)) for label in labels])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1
    truth = torch.tensor(labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, _STEPS)
    for _ in range(_STEPS):
        batch = torch.tensor(chooser.sample(range(_TRAINING), _BATCH))
        model(pixel_values=images[batch], labels=truth[batch]).loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def main(folder: Path, rows: int = 120) -> None:
    chooser = random.Random(0)
    train(chooser).save_pretrained(folder / "model")
    (folder / "model" / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR), encoding="utf-8")
    (folder / "images").mkdir(exist_ok=True)
    with (folder / "test.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["id", "image", "label"])
        for row in range(rows):
            label, name = chooser.choice(LABELS), f"images/{row:03}.png"
            draw(label, chooser).save(folder / name)
            table.writerow([row, name, label])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
