"""Faster imports in processes that are this program's own: the command line and the workers.

Nothing of this is for the Python API: what these leave behind lasts as long as the process, and a notebook has
other uses for pandas and for numpy's threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_THREADS = "OPENBLAS_NUM_THREADS"


class _NoPandas(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == "pandas":
            raise ImportError("pandas is not needed here")
        return None


def keep_pandas_out() -> None:
    """Keep pandas out of pyarrow; call before any other use of pyarrow.

    pyarrow imports pandas the first time it turns a Python object into an Arrow value: 0.6 s and 60 MB for a
    library that no run uses.  It tries once per process; this makes that one try find nothing.
    """
    import pyarrow as pa

    if "pandas" in sys.modules:
        return
    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(finder)


@contextlib.contextmanager
def one_thread_for_numpy() -> Iterator[None]:
    """If numpy is imported within, it gets no thread per CPU for its matrices.

    What the user set in the environment holds.
    """
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = "1"  # read once, when the library is loaded
    try:
        yield
    finally:
        del os.environ[_THREADS]  # workers inherit this environment, and have matrices to multiply
