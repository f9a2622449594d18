"""Start processes of this Python, end them with their parent, and make their imports and computing faster."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

# An environment variable that says to which worker a process belongs.
WORKER_MARK: Final = "ENSEMBLE_WORKER"
# How often to look for processes of a worker: those of one look may have started others before they were killed.
_LOOKS = 5
_THREADS = "OPENBLAS_NUM_THREADS"
# Variables by which users set how long OpenMP's threads spin before they sleep: in turns of a loop (GNU's library),
# in milliseconds (Intel's and LLVM's), and by a word that all of them know.
WAITING = ("GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_WAIT_POLICY")


def python_command(module: str) -> list[str]:
    """Return the command that runs ``module.main()`` by this Python; add the module's arguments to it."""
    # -P, so that a `torch.py` or `datasets/` in the user's working directory does not replace the library.
    return [sys.executable, "-P", "-c", f"from {module} import main; main()"]


def python_environment() -> dict[str, str]:
    """Return what the process of ``python_command`` needs in its environment, in addition to this process's."""
    environment = {
        "PYTHONSAFEPATH": "1",
        "PYTHONUNBUFFERED": "1",
        # Otherwise transformers looks for weights that a bot has converted, in a revision that no user named.
        "DISABLE_SAFETENSORS_CONVERSION": "1",
    }
    if sys.flags.optimize > 1:  # transformers reads docstrings when it is imported
        environment["PYTHONOPTIMIZE"] = "1"
    # By default a thread that waits keeps its core for milliseconds. Beside another program, it keeps the core from
    # the very thread that it waits for: the process then takes ten times as long.
    if not any(name in os.environ for name in WAITING):
        environment |= {"GOMP_SPINCOUNT": "10000", "KMP_BLOCKTIME": "1"}
    # The child must find this package, also in a checkout.
    package_root = Path(__file__).resolve().parents[2]
    if package_root.name not in ("site-packages", "dist-packages"):
        paths = [str(package_root), os.environ.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return environment


def path_of_commands() -> str:
    """Return the PATH for users' commands, on which ``python`` and its programs are those of this Python."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH") or os.defpath])


def environment_of_commands() -> dict[str, str | None]:
    """Return what undoes ``python_environment`` for a user's command beneath such a process; None: not set."""
    changed = {*python_environment()} - {"PYTHONUNBUFFERED"}
    return {**{name: os.environ.get(name) for name in changed}, "PATH": path_of_commands()}


def die_with_parent(parent_pid: int, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux for a signal when the parent is gone; on other systems standard input ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, by)  # PR_SET_PDEATHSIG
    if os.getppid() != parent_pid:  # the parent ended before the request
        os._exit(1)


def end_marked(mark: str, spared: Collection[int] = ()) -> None:
    """Kill processes with this value of ``WORKER_MARK`` in any session, and the groups that they lead."""
    entry = f"{WORKER_MARK}={mark}".encode()
    for _ in range(_LOOKS):
        marked = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # another user's, or ended
                if entry in (folder / "environ").read_bytes().split(b"\0"):
                    marked.append(int(folder.name))
        marked = [pid for pid in marked if pid not in spared]
        for pid in marked:
            with contextlib.suppress(OSError):
                kill = os.killpg if os.getpgid(pid) == pid else os.kill
                kill(pid, signal.SIGKILL)
        if not marked:
            return


def keep_freed_memory() -> None:
    """Let the C library keep freed memory for the next forward pass, instead of giving it back to the kernel.

    Each forward pass allocates megabytes for its activations and frees them. Memory that was given back must be
    found and cleared by the kernel again. The peak stays the same. Other C libraries than GNU's are left alone
    (mallopt(3)).
    """
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(-4, 0)  # M_MMAP_MAX of malloc.h
        library.mallopt(-1, -1)  # M_TRIM_THRESHOLD


def keep_pandas_out() -> None:
    """Keep pyarrow from importing pandas; call this before any other use of pyarrow, and not in a notebook.

    pyarrow imports pandas when it first turns a Python object into an Arrow value: 0.6 s and 60 MB for a library
    that no run uses. It tries once in each process; this makes the one try fail.
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
    """Give numpy, if it is imported within, one thread for matrices, unless the user has set their number."""
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = "1"  # read once, when the library is loaded
    try:
        yield
    finally:
        del os.environ[_THREADS]  # because workers inherit this environment and multiply matrices
