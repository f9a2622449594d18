"""A fresh process of this very Python: how it is started, and how it ends with the one that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path


def python_command(module: str) -> list[str]:
    """What runs ``module.main()`` in a fresh exec of this very Python; the module's arguments go behind it."""
    # -P: a `torch.py` or `datasets/` in the user's working directory is not the library.
    return [sys.executable, "-P", "-c", f"from {module} import main; main()"]


def python_environment() -> dict[str, str]:
    """What ``python_command`` needs in its environment, beyond this process's own."""
    # The child must find this very package, also when it was started from a checkout.
    package_root = Path(__file__).resolve().parents[2]
    # transformers would look for weights that a bot has made of a pickle, in no revision that the user named.
    no_conversion = {"DISABLE_SAFETENSORS_CONVERSION": "1"}
    environment = {"PYTHONSAFEPATH": "1", "PYTHONUNBUFFERED": "1", **no_conversion}
    if package_root.name not in ("site-packages", "dist-packages"):
        inherited = os.environ.get("PYTHONPATH")
        paths = [str(package_root), *([inherited] if inherited else [])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask Linux for SIGKILL when the parent is gone; the end of standard input covers other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it went before the request was made
        os._exit(1)
