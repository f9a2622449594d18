"""Test processes: a fresh process per device, pinned as a worker would be, that tries torch there.

Owns starting, timing out and ending them.  What they try is in ``ensemble.worker.probe``; what it means is the
doctor's and the plan's to say.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ensemble.common.clock import Watch
from ensemble.common.gpus import Device, worker_environment
from ensemble.common.python_process import python_command, python_environment

CPU = Device("cpu", "the CPU", None, 0, 0)
# The first import of torch from a cold network disk takes a minute and more.
TIMEOUT_SECONDS = 120.0
_MAX_PROCESSES = 4  # each takes a core and half a GiB while it imports
_ALLOCATE_BYTES = 256 << 20
_GRACE_SECONDS = 5.0


@dataclass(frozen=True)
class Report:
    """What a test process has to say; ``errors`` go by what was tried, ``free_bytes`` are the GPU's."""

    torch: str | None = None
    cuda: str | None = None
    sees_gpu: bool = False
    architectures: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    free_bytes: int | None = None
    passed: tuple[str, ...] = ()
    has_flash_attention: bool = False
    errors: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Trial:
    """How a test process ended: with a report, or with ``ending``, a sentence on why there is none.

    ``signal_number`` is the signal that ended it, None where it was none or our own.
    """

    device: Device
    seconds: float
    report: Report | None = None
    ending: str = ""
    signal_number: int | None = None


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
        imports: modules that the first of the processes imports besides.
        host_bytes: memory that is free on the host, None where it is not known.
        timeout_seconds: for each process; one that takes longer is ended, with all it started.
        flash_attention: try flash-attention 2, too.

    Returns:
        A trial per device, in their order.
    """
    host_share = _ALLOCATE_BYTES if host_bytes is None else min(_ALLOCATE_BYTES, host_bytes // 4)
    waiting, running = list(devices), list[_Process]()
    done: dict[str, Trial] = {}
    try:
        while waiting or running:
            while waiting and len(running) < _MAX_PROCESSES:
                device = waiting.pop(0)
                names = imports if device is devices[0] else ()
                size = _ALLOCATE_BYTES if device.is_gpu else host_share
                running.append(_Process(device, names, size, timeout_seconds, flash_attention))
            for process in list(running):
                if process.has_exited() or process.is_late():
                    done[process.device.uuid] = process.end()
                    running.remove(process)
            time.sleep(0.02)
    finally:
        for process in running:
            process.kill()
    return [done[device.uuid] for device in devices]


class _Process:
    def __init__(
        self, device: Device, imports: Sequence[str], allocate: int, timeout: float, flash_attention: bool
    ) -> None:
        self.device = device
        self._timeout_seconds = timeout
        self._watch = Watch(1.0)  # the loop looks many times a second
        self._began = self._watch()
        # Files, because a pipe that nobody reads in time stops the one who writes.
        self._output, self._errors = tempfile.TemporaryFile(), tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [
                *python_command("ensemble.worker.probe"),
                f"--parent-pid={os.getpid()}",
                f"--allocate-bytes={allocate}",
                f"--seconds={int(timeout + _GRACE_SECONDS) + 1}",
                *(["--on-gpu"] if device.is_gpu else []),
                *(f"--import={name}" for name in imports),
                *(["--flash-attention"] if flash_attention else []),
            ],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._errors,
            env={**os.environ, **python_environment(), **worker_environment([device])},
            start_new_session=True,
        )

    def has_exited(self) -> bool:
        # Not reaped here: until then its group's number cannot belong to anybody else.
        return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def is_late(self) -> bool:
        return self._watch() - self._began > self._timeout_seconds

    def kill(self) -> bool:
        """End it with all it started; False where it hangs in the kernel and cannot be."""
        if self._process.returncode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(timeout=_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                return False
        return True

    def end(self) -> Trial:
        """End it, and judge how it ended."""
        seconds, is_late = self._watch() - self._began, not self.has_exited()
        if not self.kill():
            ending = f"test process {self._process.pid} hangs inside the driver and cannot be ended"
            return Trial(self.device, seconds, None, ending)
        texts = []
        for file in (self._output, self._errors):
            with file:
                file.seek(0)
                texts.append(file.read().decode("utf-8", "replace").strip())
        report, code = _report(texts[0]), self._process.returncode
        if is_late:
            ending = f"the test process gave no answer within {self._timeout_seconds:g} s and was ended"
            return Trial(self.device, seconds, None, ending)
        if report is not None:
            return Trial(self.device, seconds, report)
        if code < 0:
            name = {one.value: one.name for one in signal.Signals}.get(-code, f"signal {-code}")
            return Trial(self.device, seconds, None, f"the test process was ended by {name}", -code)
        last_line = f": {texts[1].splitlines()[-1].strip()[:200]}" if texts[1] else ""
        return Trial(self.device, seconds, None, f"the test process ended with exit code {code}{last_line}")


def _report(output: str) -> Report | None:
    # What runs before the probe, such as a sitecustomize, may have printed too: its line is the last.
    try:
        facts = json.loads(output.splitlines()[-1])
        values: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in facts.items()
        }
        return Report(**values)
    except (IndexError, ValueError, TypeError, AttributeError):
        return None
