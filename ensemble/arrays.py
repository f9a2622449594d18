"""numpy without the threads of its matrix library: a third of its import, and they would never get any work."""

from __future__ import annotations

import os

_THREADS = "OPENBLAS_NUM_THREADS"


def import_numpy() -> None:
    """Call before any other import of numpy; what the user set in the environment holds."""
    if _THREADS in os.environ:
        return
    os.environ[_THREADS] = "1"  # read once, when the library is loaded
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[_THREADS]  # workers inherit this environment, and have matrices to multiply
