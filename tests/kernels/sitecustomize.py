"""On PYTHONPATH: another CPU, as far as Python and bitsandbytes can ask for it.

ENSEMBLE_TEST_CPUS is how many there are.  ENSEMBLE_TEST_AVX512_BF16, 0 or 1, is what bitsandbytes hears of them:
it asks its library (``has_avx512bf16_cpu``) whether to repack 4-bit weights for a kernel in bfloat16.
With 1 on a CPU that lacks it the repacking can be tried, and what it refuses; its kernel itself would be an
illegal instruction.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

if (count := os.environ.get("ENSEMBLE_TEST_CPUS")) is not None:
    cpus = set(range(int(count)))
    os.cpu_count = lambda: len(cpus)
    os.sched_getaffinity = lambda _pid: cpus

_ASKED = "has_avx512bf16_cpu"
_look_up = ctypes.CDLL.__getattr__


def _pretend(library: ctypes.CDLL, name: str) -> Any:
    answer = os.environ.get("ENSEMBLE_TEST_AVX512_BF16")
    if name != _ASKED or answer is None:
        return _look_up(library, name)
    return lambda: answer == "1"


ctypes.CDLL.__getattr__ = _pretend  # type: ignore[method-assign]
