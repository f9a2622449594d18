"""Start workers on this machine: fresh execs of the same Python, each the leader of its session."""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import shutil
import signal
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ensemble.common.files import open_log
from ensemble.common.gpus import worker_environment
from ensemble.common.host import asked_threads, oom_kills, threads_of, usable_cpus
from ensemble.common.protocol import Command, Event, decode, encode
from ensemble.common.python_process import WORKER_MARK, end_marked, python_command, python_environment
from ensemble.scheduling.launchers.base import Exit, Handle, Launcher, WorkerStart

_READ_BYTES = 1 << 16
_REAP_SECONDS = 10.0
# The variables by which libraries decide how many threads compute.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


def worker_threads(cpu_share: float) -> int:
    """Return how many threads a worker with this share of the cores has; with all, as many as the user says."""
    threads = asked_threads()
    if threads is not None and cpu_share >= 1:
        return threads
    return threads_of(usable_cpus(), cpu_share)


def thread_variables(cpu_share: float, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables that give a worker its threads; none for a share of 0.

    A worker with all cores keeps what the user has set, unless ``threads`` says otherwise.
    """
    is_alone = cpu_share >= 1 and threads is None
    if cpu_share <= 0 or (is_alone and "OMP_NUM_THREADS" in os.environ):
        return {}
    count = str(threads or worker_threads(cpu_share))
    return {name: count for name in _THREADS if not is_alone or name not in os.environ}


class LocalLauncher(Launcher):
    """Start workers on this machine; there are no settings."""

    def start(self, start: WorkerStart) -> LocalWorker:
        if start.scratch is not None:
            start.scratch.mkdir(parents=True)
        environment = {
            **thread_variables(start.cpu_share, start.cpu_threads),
            **worker_environment(start.devices),
            **start.environment,
        }
        worker = LocalWorker(environment, start.log, start.scratch)
        worker.send(start.command)
        return worker

    def wait(self, handles: Sequence[Handle], timeout_seconds: float) -> Collection[Handle]:
        with selectors.DefaultSelector() as selector:
            for handle in handles:
                assert isinstance(handle, LocalWorker)
                # A process closes its channel some time before it has ended and its GPU is free.
                awaited = handle.events_fd if handle.is_open else handle.exit_fd
                if awaited >= 0:
                    selector.register(awaited, selectors.EVENT_READ, handle)
            return [key.data for key, _ in selector.select(timeout_seconds)]


class LocalWorker(Handle):
    """Hold a worker process and the two ends of its channel; raises OSError if it could not be started.

    Args:
        environment: added to this process's environment, such as CUDA_VISIBLE_DEVICES.
        scratch: a folder that is removed after its end.

    Attributes:
        exit_fd: becomes readable when the process has ended; -1 where the kernel has no such descriptors.
    """

    def __init__(self, environment: Mapping[str, str], log: Path, scratch: Path | None = None) -> None:
        self.log = log
        self._scratch = scratch
        self._buffer = b""
        # If the count goes up until the process is killed, the kernel has probably killed it.
        self._oom_kills = oom_kills()
        self._mark = secrets.token_hex(8)  # in the environment of all processes that it starts
        self.events_fd, write_end = os.pipe()
        try:
            # A list of arguments, no shell and no fork of this process's state.  The new session keeps the
            # terminal's Ctrl-C away: this process decides how its workers end.
            with open_log(log) as output:
                self._process = subprocess.Popen(
                    [
                        *python_command("ensemble.worker.__main__"),
                        f"--events-fd={write_end}",
                        f"--parent-pid={os.getpid()}",
                    ],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **python_environment(), **environment, WORKER_MARK: self._mark},
                    pass_fds=(write_end,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(self.events_fd)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(self.events_fd, False)
        self.process = str(self._process.pid)
        self.exit_fd = -1
        with contextlib.suppress(AttributeError, OSError):  # not Linux, a kernel before 5.3, or a sandbox
            self.exit_fd = os.pidfd_open(self._process.pid)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(encode(command).encode())
                self._process.stdin.flush()

    def receive(self) -> list[Event]:
        while self.is_open:
            try:
                data = os.read(self.events_fd, _READ_BYTES)
            except BlockingIOError:
                break
            self.is_open = bool(data)
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [decode(line.decode("utf-8", "replace")) for line in lines]

    def has_exited(self) -> bool:
        """Return whether the process has ended.  It stays a zombie until ``close``: its group keeps its number."""
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return self._process.returncode is not None or os.waitid(os.P_PID, self.pid, options) is not None

    def terminate(self) -> None:
        self._signal_group(signal.SIGTERM)

    def abort(self) -> None:
        self._signal_group(signal.SIGABRT)

    def close(self) -> Exit:
        # Before the process is reaped, while the number cannot belong to another group.
        self._signal_group(signal.SIGKILL)
        try:
            code = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            # Stuck in the kernel, as with a broken driver or file server: it cannot be ended.
            code = -signal.SIGKILL
        end_marked(self._mark)  # what the process has started in other sessions, such as by ``setsid``
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        for descriptor in (self.events_fd, self.exit_fd):
            if descriptor >= 0:
                os.close(descriptor)
        self.events_fd, self.exit_fd, self.is_open = -1, -1, False
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        if code == -signal.SIGKILL and oom_kills() > self._oom_kills:
            text = (
                "was killed, probably by the kernel because the host ran out of memory (RAM, not the GPU's)"
            )
            return Exit(code, text, is_out_of_memory=True)
        if code >= 0:
            return Exit(code, f"ended with exit code {code}")
        names = {number.value: number.name for number in signal.Signals}
        return Exit(code, f"was killed by signal {-code} ({names.get(-code, 'unknown')})")

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
