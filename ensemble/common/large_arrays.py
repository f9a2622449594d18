"""Arrays of a large table that need not stay in memory: they are mapped from files without a name.

The kernel writes such pages to the file where memory is short and takes them back; the files are gone when nobody
has them open, however the process ends.  They stand where ``tempfile`` puts its own (TMPDIR).
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ensemble.common.files import free_bytes

# What is smaller stays in memory.
MAPPED_BYTES = 128 << 20
# Left to others, where there is less room an array stays in memory, too.
_LEFT_BYTES = 1 << 30


def large_array(
    shape: tuple[int, ...], dtype: npt.DTypeLike, order: Literal["C", "F"] = "C"
) -> npt.NDArray[Any]:
    """A new array, whatever stands in it; in memory where it is small, or where there is no room on the disk.

    Args:
        order: "C", or "F" for columns in one piece.
    """
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    is_large = size >= MAPPED_BYTES and hasattr(os, "posix_fallocate")  # macOS lacks it
    with contextlib.suppress(OSError):  # such as that no folder takes temporary files
        free = free_bytes(Path(tempfile.gettempdir())) if is_large else None
        if free is not None and free >= size + _LEFT_BYTES:
            with tempfile.TemporaryFile() as file:
                # Reserved: a page that finds no room on the disk later would end the process.
                os.posix_fallocate(file.fileno(), 0, size)
                buffer = mmap.mmap(file.fileno(), size)
                return np.ndarray(shape, kind, buffer, order=order)
    return np.empty(shape, kind, order)
