"""Small packages that extend this one: made as someone else would, and installed by pip or as pip leaves them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.waiting import PATIENCE_SECONDS


def pip_install(site: Path, *sources: Path) -> None:
    """Build and install projects into a folder of their own, without a network."""
    options = ["--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, "--target", str(site), *map(str, sources)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def lay_out(site: Path, package: str, group: str, entries: Mapping[str, str], **modules: str) -> None:
    """What an installed package leaves in a folder: its modules, and beside them what it says of itself."""
    about = site / f"{package.replace('-', '_')}-0.1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
    lines = [f"{name} = {value}\n" for name, value in entries.items()]
    (about / "entry_points.txt").write_text(f"[{group}]\n{''.join(lines)}")
    for name, content in modules.items():
        (site / f"{name}.py").write_text(content)
