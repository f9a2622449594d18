"""Decides how many threads a worker on the CPU has: its share of the cores that this process may use."""

from __future__ import annotations

import os

from ensemble.common.host import asked_threads, threads_of, usable_cpus

# The variables by which libraries decide how many threads compute.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


def worker_threads(cpu_share: float) -> int:
    """Return how many threads a worker with this share of the cores computes with.

    A worker with all cores has as many as the user says.
    """
    threads = asked_threads()
    if threads is not None and cpu_share >= 1:
        return threads
    return threads_of(usable_cpus(), cpu_share)


def thread_variables(cpu_share: float, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables that give a worker its threads; none for a worker on a GPU.

    A worker with all cores keeps what the user has set.

    Args:
        cpu_share: of the cores, 0 for a worker on a GPU.
        threads: how many; None: as many as its share of the cores.
    """
    is_alone = cpu_share >= 1 and threads is None
    if cpu_share <= 0 or (is_alone and "OMP_NUM_THREADS" in os.environ):
        return {}
    count = str(threads or worker_threads(cpu_share))
    return {name: count for name in _THREADS if not is_alone or name not in os.environ}
