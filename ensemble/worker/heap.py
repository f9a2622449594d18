"""The C library's heap of a worker that computes on the CPU."""

from __future__ import annotations

import contextlib
import ctypes

# malloc.h of the GNU C library.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def keep_freed_memory() -> None:
    """Let the C library keep what is freed, for the next pass, instead of giving it back to the kernel.

    A forward pass frees its activations, megabytes each, and the next one wants as much again; what was given back
    comes as new pages, each of which the kernel must find and clear.  The peak stays what it was.  Does nothing
    where the C library is another one (mallopt(3)).
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, -1)
