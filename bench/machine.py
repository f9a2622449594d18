"""The machine and the versions that figures belong to, in words."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from ensemble.common.host import cpu_name

_PACKAGES = ("torch", "transformers", "tokenizers", "sentence-transformers", "numpy", "pyarrow")


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine() -> str:
    """Processor, cores, memory and system, in one line."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / (1 << 30)
    return f"{cpu_name()}, {cores()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def versions() -> str:
    """Python and the packages that are measured, in one line."""
    return ", ".join([f"Python {platform.python_version()}", *_installed()])


def _installed() -> Iterator[str]:
    for name in _PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
