"""Tell for which GPUs the installed torch has code, without importing it or starting CUDA.

Builds differ: those for CUDA 12.6 have code for a P100, those for CUDA 12.8 have none since torch 2.7 (pytorch's
RELEASE.md, "PyTorch CUDA Support Matrix", and .ci/manywheel/build_cuda.sh).
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

# For tests: the driver's GPUs are simulated, so torch needs no code for them.
SIMULATED = "ENSEMBLE_SIMULATED_GPUS"
_ARCHITECTURES = re.compile(rb"sm_\d+[a-z]?(?: (?:sm|compute)_\d+[a-z]?)*(?=\0)")


@cache  # it reads 30 MB, in a tenth of a second
def built_for() -> tuple[str, ...]:
    """Return what ``torch.cuda.get_arch_list()`` returns, from the library that holds it; empty: not known."""
    spec = None if os.environ.get(SIMULATED) == "1" else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ()
    library = Path(spec.origin).parent / "lib" / "libtorch_python.so"
    if not library.is_file():
        return ()
    return tuple(b" ".join(_ARCHITECTURES.findall(library.read_bytes())).decode().split())


def torch_problem(capability: tuple[int, int] | None, built: Sequence[str], has_failed: bool = False) -> str:
    """Return why torch cannot compute on a GPU, with advice; empty if it can, or if that is not known.

    Code for sm_86 runs on 8.6 and newer 8.x, that for compute_86 on all newer GPUs (CUDA C++ Programming Guide,
    "Binary Compatibility" and "PTX Compatibility"). The GPUs of sm_101 are 11.0 since CUDA 13.
    """
    if capability is None or not (built or has_failed):
        return ""
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(built)):
        wanted = int(major), int(minor)
        is_near = kind == "compute" or wanted[0] == capability[0] or wanted == (10, 1)
        if is_near and wanted <= capability and not has_failed:
            return ""
    advice = "choose another GPU (devices), or a build of torch that has sm_{}{}".format(*capability)
    if "KAGGLE_KERNEL_RUN_TYPE" in os.environ:
        advice = "choose T4 x 2 as the notebook's accelerator"
    only = f", only for {', '.join(built)}" if built else ""
    return "torch has no code for capability {}.{}{}; {}".format(*capability, only, advice)
