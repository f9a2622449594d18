"""Worker processes on this machine: a fresh exec of the same Python, a session and process group of its own.

Owns starting, talking to and ending one process.  Does not know what the messages mean.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ensemble.common.files import open_log
from ensemble.common.protocol import Command, decode, encode
from ensemble.common.python_process import python_command, python_environment

_READ_BYTES = 1 << 16
_REAP_SECONDS = 10.0


class LocalWorker:
    """One worker process and the two ends of its line.

    Args:
        environment: added to this process's environment, such as CUDA_VISIBLE_DEVICES.
        log: file that takes everything the process prints.
    """

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        self._buffer = b""
        read_end, write_end = os.pipe()
        try:
            with open_log(log) as output:
                # A list of arguments, no shell and no fork of this process's state.  The new session keeps the
                # terminal's Ctrl-C away: this process decides how its workers end.
                self._process = subprocess.Popen(
                    [
                        *python_command("ensemble.worker.__main__"),
                        f"--events-fd={write_end}",
                        f"--parent-pid={os.getpid()}",
                    ],
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env={**os.environ, **python_environment(), **environment},
                    pass_fds=(write_end,),
                    start_new_session=True,
                )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        os.set_blocking(read_end, False)
        self.events_fd = read_end

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: Command) -> None:
        """Send one command; a process that is gone shows by its exit code, not here."""
        assert self._process.stdin is not None
        if self._process.stdin.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(encode(command).encode())
            self._process.stdin.flush()

    def receive(self) -> tuple[list[Any], bool]:
        """The events that have arrived, and whether the line is still open."""
        is_open = True
        while True:
            try:
                data = os.read(self.events_fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                is_open = False
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return [decode(line.decode("utf-8", "replace")) for line in lines], is_open

    def has_exited(self) -> bool:
        """Whether the process has ended; it stays a zombie until ``close``, so that its group keeps its number."""
        if self._process.returncode is not None:
            return True
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self._process.pid, options) is not None

    def terminate(self) -> None:
        """Ask the process and all it started to end."""
        self._signal_group(signal.SIGTERM)

    def abort(self) -> None:
        """End a process that hangs: SIGABRT, upon which it writes its threads' stacks to its log."""
        self._signal_group(signal.SIGABRT)

    def close(self) -> int:
        """End at once whatever still runs of the process and its group, reap it, close the line.

        Returns:
            The exit code; negative for the signal that ended it.
        """
        # Before the reaping, while the group's number cannot belong to anybody else.
        self._signal_group(signal.SIGKILL)
        try:
            code = self._process.wait(_REAP_SECONDS)
        except subprocess.TimeoutExpired:
            # Stuck in the kernel, as with a broken driver or file server: nobody can end it, and nobody waits.
            code = -signal.SIGKILL
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self.events_fd >= 0:
            os.close(self.events_fd)
            self.events_fd = -1
        return code

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, number)
