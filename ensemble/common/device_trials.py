"""Try torch on each device, in a fresh process that is pinned to it as a worker would be.

``ensemble.worker.probe`` is what these processes do; the doctor and the planner judge their reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ensemble.common.gpus import Device, worker_environment
from ensemble.common.protocol import with_tuples
from ensemble.common.python_process import python_command, python_environment

INSTALL_TORCH = "see https://pytorch.org/get-started/locally/"
CPU = Device("cpu", "the CPU", None, 0, 0)
# The first import of torch from a cold network disk takes a minute and more.
TIMEOUT_SECONDS = 120.0
_MAX_PROCESSES = 4  # each takes a core and half a GiB while it imports


@dataclass(frozen=True)
class DeviceReport:
    """Hold the report of a test process."""

    torch: str | None = None
    cuda: str | None = None
    sees_gpu: bool = False
    architectures: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    free_bytes: int | None = None  # of the GPU
    passed: tuple[str, ...] = ()
    has_flash_attention: bool = False
    errors: dict[str, str] = field(default_factory=dict)  # by what was tried


@dataclass(frozen=True)
class DeviceTrial:
    """Tell how a test process ended."""

    device: Device
    report: DeviceReport | None = None
    ending: str = ""  # a sentence on why there is no report
    signal_number: int | None = None  # the signal that ended the process, unless we sent it


def run_trials(
    devices: Sequence[Device],
    imports: Sequence[str] = (),
    host_bytes: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    flash_attention: bool = False,
    environment: Mapping[str, str] | None = None,
) -> list[DeviceTrial]:
    """Try torch on each device, a few at the same time; return a trial for each device, in their order.

    Args:
        imports: modules that the first process imports, too.
        host_bytes: free memory of the host; None if it is unknown.
        timeout_seconds: for each process; a slower one is ended, with its children.
        environment: what workers on GPUs have in addition, such as settings of torch's allocator.
    """
    # The processes end themselves after that time if this one is gone.
    options = [f"--parent-pid={os.getpid()}", f"--seconds={int(timeout_seconds) + 6}"]
    options += ["--flash-attention"] if flash_attention else []
    shared_environment = {**os.environ, **(environment or {}), **python_environment()}
    trials: list[DeviceTrial] = []
    for start in range(0, len(devices), _MAX_PROCESSES):
        batch = devices[start : start + _MAX_PROCESSES]
        deadline = time.monotonic() + timeout_seconds
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for device in batch:
                size = 256 << 20
                if not device.is_gpu and host_bytes is not None:
                    size = min(size, host_bytes // 4)
                device_options = [*options, f"--allocate-bytes={size}"]
                device_options += ["--on-gpu"] if device.is_gpu else []
                if device is devices[0]:
                    device_options += [f"--import={name}" for name in imports]
                process = subprocess.Popen(
                    [*python_command("ensemble.worker.probe"), *device_options],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    env={**shared_environment, **worker_environment([device])},
                    start_new_session=True,
                )
                processes.append(process)
            for device, process in zip(batch, processes, strict=True):
                trials.append(_trial(device, process, deadline, timeout_seconds))
        finally:
            for process in processes:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                        os.killpg(process.pid, signal.SIGKILL)  # with its children
                        process.communicate(timeout=5)  # more only if it hangs inside the driver
    return trials


def unusable_gpu(
    torch: str | None, cuda: str | None, reason: str, driver_cuda: tuple[int, int] | None
) -> tuple[str, str]:
    """Say that torch cannot use a GPU that the driver shows, and what to do: two parts of a sentence.

    Args:
        torch, cuda: torch's version, and that of the CUDA it is built for; None: a build without CUDA.
        reason: torch's own.
        driver_cuda: the newest CUDA that the driver knows; None: it does not say.
    """
    build = "is a build without CUDA" if cuda is None else f"is built for CUDA {cuda}"
    driver, version = "the driver shows a GPU", ""
    if driver_cuda is not None:
        driver = f"the driver knows CUDA up to {driver_cuda[0]}.{driver_cuda[1]}"
        version = f" for CUDA {driver_cuda[0]}"
    return (
        f"torch {torch} {build}, and {driver} ({reason})",
        f"install a build of torch{version} ({INSTALL_TORCH}), or update the driver; if nvidia-smi fails, too, "
        "restart; to compute on the CPU set num_gpus: 0, or CUDA_VISIBLE_DEVICES=-1, which hides the GPU",
    )


def _trial(
    device: Device, process: subprocess.Popen[bytes], deadline: float, timeout_seconds: float
) -> DeviceTrial:
    """Wait for a test process, and return how it ended."""
    try:
        # Another process may have taken all of the time; what this one has answered is still read.
        output, errors = process.communicate(timeout=max(1.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        ending = f"the test process gave no answer within {timeout_seconds:g} s and was ended"
        return DeviceTrial(device, ending=ending)
    # The last line, because other code, such as a sitecustomize, may have printed before.
    with contextlib.suppress(IndexError, ValueError, TypeError, AttributeError):
        return DeviceTrial(device, DeviceReport(**with_tuples(json.loads(output.splitlines()[-1]))))
    code = process.returncode
    if code < 0:
        names = {number.value: number.name for number in signal.Signals}
        ending = f"the test process was ended by {names.get(-code, f'signal {-code}')}"
        return DeviceTrial(device, ending=ending, signal_number=-code)
    lines = errors.decode("utf-8", "replace").strip().splitlines()
    last_line = f": {lines[-1].strip()[:200]}" if lines else ""
    return DeviceTrial(device, ending=f"the test process ended with exit code {code}{last_line}")
