"""Keeps pandas out of pyarrow, in the parent and in the workers.

Where pandas is installed (it is on Kaggle), pyarrow imports it the first time it turns a Python object into an
Arrow value: 0.6 s and 60 MB for a library that nothing here uses.  pyarrow tries once per process; this makes
that one try find nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ImportError("pandas is not needed here")
        return None


def keep_pandas_out() -> None:
    """Call before any other use of pyarrow; does nothing where pandas is imported already."""
    import pyarrow as pa

    if "pandas" in sys.modules:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(finder)


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
