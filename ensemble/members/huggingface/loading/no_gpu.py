"""Refuse to compute on the CPU what was planned for a GPU, which would take weeks instead of hours."""

from __future__ import annotations

import os

import torch

from ensemble.common.device_trials import unusable_gpu
from ensemble.common.gpus import driver_cuda_version
from ensemble.common.text import first_line

# The environment variable with which this project's tests say that their driver's GPUs are simulated.
SIMULATED = "ENSEMBLE_SIMULATED_GPUS"


def instead_of_gpu() -> str:
    """Return the note of a member that computes on the CPU because its GPUs are simulated.

    Raises:
        ValueError: the GPUs are real, and torch cannot use them.
    """
    if os.environ.get(SIMULATED) == "1":
        return f"{SIMULATED}: the GPUs are simulated, running on the CPU"
    reason = "it sees no GPU"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]  # is_available() swallows the reason
    except (AssertionError, RuntimeError) as error:
        reason = first_line(error)
    problem, advice = unusable_gpu(torch.__version__, torch.version.cuda, reason, driver_cuda_version())
    raise ValueError(f"a GPU was planned, but {problem}; {advice}")
