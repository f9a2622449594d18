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
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ensemble.common.gpus import Device, worker_environment
from ensemble.common.protocol import with_tuples
from ensemble.common.python_process import python_command, python_environment

CPU = Device("cpu", "the CPU", None, 0, 0)
# The first import of torch from a cold network disk takes a minute and more.
TIMEOUT_SECONDS = 120.0
_MAX_PROCESSES = 4  # each takes a core and half a GiB while it imports
_ALLOCATE_BYTES = 256 << 20
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class DeviceReport:
    """The report of a test process."""

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
    seconds: float
    report: DeviceReport | None = None
    ending: str = ""  # a sentence on why there is no report
    signal_number: int | None = None  # the signal that ended the process, unless we sent it


def run_trials(
    devices: Sequence[Device],
    imports: Sequence[str] = (),
    host_bytes: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    flash_attention: bool = False,
) -> list[DeviceTrial]:
    """Try torch on each device, a few at the same time; return a trial for each device, in their order.

    Args:
        devices: GPUs, MIG slices or ``CPU``.
        imports: modules that the first process imports, too.
        host_bytes: free memory of the host; None if it is unknown.
        timeout_seconds: for each process; a slower one is ended, with its children.
        flash_attention: try flash-attention 2, too.
    """
    options = ["--flash-attention"] if flash_attention else []
    first_options = [f"--import={name}" for name in imports]
    trials: list[Future[DeviceTrial]] = []
    processes: list[subprocess.Popen[bytes]] = []
    with ThreadPoolExecutor(_MAX_PROCESSES) as pool:
        for device in devices:
            size = _ALLOCATE_BYTES
            if not device.is_gpu and host_bytes is not None:
                size = min(size, host_bytes // 4)
            all_options = [*options, *first_options, f"--allocate-bytes={size}"]
            trials.append(pool.submit(_try, device, all_options, timeout_seconds, processes))
            first_options = []
        try:
            return [trial.result() for trial in trials]
        except BaseException:  # such as Ctrl-C: do not wait for the processes
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                if process.returncode is None:
                    _kill(process)
            raise


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process with its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _try(
    device: Device,
    options: Sequence[str],
    timeout_seconds: float,
    processes: list[subprocess.Popen[bytes]],
) -> DeviceTrial:
    began = time.monotonic()
    # The process ends itself after that time if this one is gone.
    limits = [f"--parent-pid={os.getpid()}", f"--seconds={int(timeout_seconds + _GRACE_SECONDS) + 1}"]
    on_gpu = ["--on-gpu"] if device.is_gpu else []
    process = subprocess.Popen(
        [*python_command("ensemble.worker.probe"), *limits, *on_gpu, *options],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **python_environment(), **worker_environment([device])},
        start_new_session=True,
    )
    processes.append(process)
    signal_number = None
    try:
        output, errors = process.communicate(timeout=timeout_seconds)
        # The last line, because other code, such as a sitecustomize, may have printed before.
        with contextlib.suppress(IndexError, ValueError, TypeError, AttributeError):
            report = DeviceReport(**with_tuples(json.loads(output.splitlines()[-1])))
            return DeviceTrial(device, time.monotonic() - began, report)
        code = process.returncode
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            ending = f"the test process was ended by {names.get(-code, f'signal {-code}')}"
            signal_number = -code
        else:
            lines = errors.decode("utf-8", "replace").strip().splitlines()
            last_line = f": {lines[-1].strip()[:200]}" if lines else ""
            ending = f"the test process ended with exit code {code}{last_line}"
    except subprocess.TimeoutExpired:
        ending = f"the test process gave no answer within {timeout_seconds:g} s and was ended"
        _kill(process)
        try:
            process.communicate(timeout=_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            ending = f"test process {process.pid} hangs inside the driver and cannot be ended"
    return DeviceTrial(device, time.monotonic() - began, None, ending, signal_number)
