"""How many threads a worker on the CPU computes with: its share of the cores that this process may use."""

from __future__ import annotations

import os

from ensemble.common.host import threads_of, usable_cpus

# The variables of all libraries that have a say in how many threads compute.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


def thread_variables(cpu_share: float) -> dict[str, str]:
    """Return the environment variables that give a worker its threads; none for a worker on a GPU.

    A worker with all cores keeps what the user has set.

    Args:
        cpu_share: of the cores, 0 for a worker on a GPU.
    """
    is_alone = cpu_share >= 1
    if cpu_share <= 0 or (is_alone and "OMP_NUM_THREADS" in os.environ):
        return {}
    count = str(threads_of(usable_cpus(), cpu_share))
    return {name: count for name in _THREADS if not is_alone or name not in os.environ}
