"""Puts files out of the page cache, as after a machine's start: then a run reads its libraries from the disk."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def forget(*folders: str) -> None:
    """Put all files below these folders out of the page cache, but for pages that a process has mapped just now."""
    for folder in folders:
        for parent, _, names in os.walk(Path(folder)):
            for name in names:
                with contextlib.suppress(OSError), Path(parent, name).open("rb") as file:
                    os.fsync(file.fileno())  # what is not on the disk yet stays
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
