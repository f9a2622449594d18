"""Writes docs/report.png, the README's picture of a report: ``python scripts/report_picture.py [HTML]``.

Wide and light beside a phone in the dark; needs Chromium, and the demo's run (``make run``).
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.analysis.report.browser import browser  # noqa: E402

TARGET = ROOT / "docs" / "report.png"
WIDE, PHONE, HEIGHT, GAP, COLOURS = 800, 390, 1_150, 16, 256


def main() -> None:
    page = ROOT / "runs" / "demo" / "report.html" if len(sys.argv) < 2 else Path(sys.argv[1])
    picture = Image.new("RGB", (WIDE + GAP + PHONE, HEIGHT), "white")
    with tempfile.TemporaryDirectory() as folder, browser(Path(folder)) as tab:
        for left, width, is_dark in ((0, WIDE, False), (WIDE + GAP, PHONE, True)):
            shot = Path(folder) / f"{width}.png"
            tab.open(page.resolve(), width, is_dark)
            tab.screenshot(shot)
            with Image.open(shot) as taken:
                picture.paste(taken.convert("RGB").crop((0, 0, width, HEIGHT)), (left, 0))
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(TARGET, optimize=True)
    print(f"{TARGET}: {TARGET.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main()
