"""Try torch on each device, in a fresh process that is pinned to it as a worker would be.

``ensemble.worker.probe`` is what these processes do; the doctor and the planner judge their reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from ensemble.common.clock import Watch
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
class Report:
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
class Trial:
    """How a test process ended."""

    device: Device
    seconds: float
    report: Report | None = None
    ending: str = ""  # a sentence on why there is no report
    signal_number: int | None = None  # the signal that ended the process, unless we sent it


def run_trials(
    devices: Sequence[Device],
    imports: Sequence[str] = (),
    host_bytes: int | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    flash_attention: bool = False,
) -> list[Trial]:
    """Try torch on each device, a few at the same time.

    Args:
        devices: GPUs, MIG slices or ``CPU``.
        imports: modules that the first process imports, too.
        host_bytes: free memory of the host; None if it is unknown.
        timeout_seconds: for each process; a slower one is ended, with its children.
        flash_attention: try flash-attention 2, too.

    Returns:
        a trial for each device, in their order.
    """
    to_start = list(devices)
    running: list[_Process] = []
    done: dict[str, Trial] = {}
    try:
        while to_start or running:
            while to_start and len(running) < _MAX_PROCESSES:
                device = to_start.pop(0)
                size = _ALLOCATE_BYTES
                if not device.is_gpu and host_bytes is not None:
                    size = min(size, host_bytes // 4)
                options = [f"--allocate-bytes={size}"]
                if device.is_gpu:
                    options.append("--on-gpu")
                if device is devices[0]:
                    options += [f"--import={name}" for name in imports]
                if flash_attention:
                    options.append("--flash-attention")
                running.append(_Process(device, options, timeout_seconds))
            for process in list(running):
                trial = process.poll()
                if trial is not None:
                    done[process.device.uuid] = trial
                    running.remove(process)
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()
    return [done[device.uuid] for device in devices]


class _Process:
    def __init__(self, device: Device, options: Sequence[str], timeout_seconds: float) -> None:
        self.device = device
        self._timeout_seconds = timeout_seconds
        self._watch = Watch(1.0)  # the loop looks many times a second
        self._began = self._watch()
        # Files, because a full pipe that nobody reads stops its writer.
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        limits = (f"--parent-pid={os.getpid()}", f"--seconds={int(timeout_seconds + _GRACE_SECONDS) + 1}")
        self._process = subprocess.Popen(
            [*python_command("ensemble.worker.probe"), *limits, *options],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            env={**os.environ, **python_environment(), **worker_environment([device])},
            start_new_session=True,
        )

    def poll(self) -> Trial | None:
        """Return how the process ended; None while it runs within its time."""
        seconds = self._watch() - self._began
        # WNOWAIT: until the process is reaped, no other group can get its number.
        is_running = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        if is_running and seconds <= self._timeout_seconds:
            return None
        if not self.kill():
            ending = f"test process {self._process.pid} hangs inside the driver and cannot be ended"
            return Trial(self.device, seconds, ending=ending)
        texts = []
        for file in (self._output, self._errors):
            with file:
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace").strip())
        if is_running:
            ending = f"the test process gave no answer within {self._timeout_seconds:g} s and was ended"
            return Trial(self.device, seconds, ending=ending)
        # The last line, because other code, such as a sitecustomize, may have printed before.
        with contextlib.suppress(IndexError, ValueError, TypeError, AttributeError):
            report = Report(**with_tuples(json.loads(texts[0].splitlines()[-1])))
            return Trial(self.device, seconds, report)
        code = self._process.returncode
        if code < 0:
            names = {number.value: number.name for number in signal.Signals}
            ending = f"the test process was ended by {names.get(-code, f'signal {-code}')}"
            return Trial(self.device, seconds, ending=ending, signal_number=-code)
        last_line = f": {texts[1].splitlines()[-1].strip()[:200]}" if texts[1] else ""
        return Trial(self.device, seconds, ending=f"the test process ended with exit code {code}{last_line}")

    def kill(self) -> bool:
        """End the process and its children; return False if it hangs in the kernel and cannot be ended."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(timeout=_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                return False
        return True
