"""Images of every odd kind, made with Pillow."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

# How each is saved: its mode and its format.
KINDS = {
    "colours.png": "RGB",
    "photo.jpg": "RGB",
    "grey.png": "L",
    "palette.gif": "P",
    "transparent.png": "RGBA",
    "half transparent.png": "LA",
    "bits.png": "1",
    "print.jpg": "CMYK",
    "sixteen bits.png": "I;16",
    "turned.jpg": "EXIF 6",
    "wörter 🐈.webp": "RGB",
}


def make_image(path: Path, mode: str = "RGB", seed: int = 0, size: tuple[int, int] = (60, 44)) -> Path:
    """A picture of a few soft shapes; ``mode`` is one of Pillow's, or EXIF with an orientation."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (5, 6, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    path.parent.mkdir(parents=True, exist_ok=True)
    if mode.startswith("EXIF"):
        exif = Image.Exif()
        exif[0x0112] = int(mode.split()[1])
        image.save(path, exif=exif)
        return path
    if mode == "I;16":
        grey = np.asarray(image.convert("L")).astype(np.uint16)
        image = Image.fromarray(grey * 257)
    elif mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(random.integers(0, 256, size[::-1], dtype=np.uint8)))
        image = image.convert(mode)
    else:
        image = image.convert(mode)
    image.save(path)
    return path
