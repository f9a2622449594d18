"""Which of the packages that this project needs are missing, asked before any of them is imported."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Commands draw no pictures and fit no weights on a GPU machine.
_NOT_NEEDED = frozenset({"pandas", "scikit-learn", "scipy", "matplotlib"})


def missing_packages() -> list[str]:
    """Return the packages of pyproject.toml that a run needs and this Python lacks."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [re.split(r"[^\w.-]", line)[0] for line in project["dependencies"]]
    return [name for name in names if name not in _NOT_NEEDED and not is_installed(name)]


def is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def why_not() -> str:
    """Return why nothing can run with this Python, and what to do; empty where all packages are there."""
    missing = missing_packages()
    if not missing:
        return ""
    if "torch" in missing:
        return (
            f"{sys.executable} has no torch; take the Python whose torch can use the GPU (PYTHON= with make)"
        )
    also = "" if is_installed("bitsandbytes") else " (bitsandbytes is missing, too: no 4 and 8 bits)"
    others = "".join(f" --also {name}" for name in missing if name != "pydantic")
    python = ".".join(map(str, sys.version_info[:2]))
    command = f"python scripts/gpu_kit.py --python {python} --cuda VERSION{others} FOLDER"
    return (
        f"{sys.executable} has no {', '.join(missing)}{also}; where there is a package index, `{command}` makes "
        "a folder of what is missing: copy it here, and set PYTHONPATH=FOLDER"
    )
