"""Processes of this very Python: how one starts, ends with the one that started it, imports and computes faster."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_PR_SET_PDEATHSIG = 1
# malloc.h of the GNU C library.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4
_THREADS = "OPENBLAS_NUM_THREADS"
# The user's ways to say how long threads of OpenMP spin before they sleep: in turns of a loop (GNU's library), in
# milliseconds (Intel's and LLVM's), and by a word that all of them know.
WAITING = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")


def python_command(module: str) -> list[str]:
    """What runs ``module.main()`` in a fresh exec of this very Python; the module's arguments go behind it."""
    # -P: a `torch.py` or `datasets/` in the user's working directory is not the library.
    return [sys.executable, "-P", "-c", f"from {module} import main; main()"]


def python_environment() -> dict[str, str]:
    """Return what the process of ``python_command`` needs in its environment, beyond this process's own."""
    environment = {
        **_short_waits(),
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        # transformers would look for weights that a bot has made of a pickle, in no revision that the user named.
        "DISABLE_SAFETENSORS_CONVERSION": "1",
    }
    # The child must find this very package, also when it was started from a checkout.
    package_root = Path(__file__).resolve().parents[2]
    if package_root.name not in ("site-packages", "dist-packages"):
        paths = [str(package_root), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def _short_waits() -> dict[str, str]:
    """Let threads wait for each other only shortly before they sleep, unless the user has set how they wait.

    By default a thread keeps its core for milliseconds.  Beside another program, it keeps the core from the very
    thread that it waits for: the process then takes ten times as long.
    """
    if any(name in os.environ for name in WAITING):
        return {}
    return {"GOMP_SPINCOUNT": "1000", "KMP_BLOCKTIME": "1"}


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux for SIGKILL when the parent is gone; the end of standard input covers other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the request was made
        os._exit(1)


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


def keep_pandas_out() -> None:
    """Keep pandas out of pyarrow in a process of our own, not a notebook's; call before any other use of pyarrow.

    pyarrow imports pandas the first time it turns a Python object into an Arrow value: 0.6 s and 60 MB for a
    library that no run uses.  It tries once per process; this makes that one try find nothing.
    """
    import pyarrow as pa

    def find_spec(name: str, path: object = None, target: object = None) -> None:
        if name == "pandas":
            raise ImportError("pandas is not needed here")

    if "pandas" not in sys.modules:
        finder: Any = SimpleNamespace(find_spec=find_spec)
        sys.meta_path.insert(0, finder)
        try:
            pa.array([0])
        finally:
            sys.meta_path.remove(finder)


@contextlib.contextmanager
def one_thread_for_numpy() -> Iterator[None]:
    """If numpy is imported within, in a process of our own, it gets no thread per CPU for its matrices.

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
