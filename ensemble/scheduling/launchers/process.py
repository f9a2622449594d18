"""Starts a worker's process, sends it commands, and ends what it has started."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from ensemble.common.protocol import Command, encode
from ensemble.common.python_process import python_command, python_environment

# An environment variable that says to which worker a process belongs, in whatever session it is.
_MARK = "ENSEMBLE_WORKER"
# How often to look for processes of a worker: those of one look may have started others before they were killed.
_LOOKS = 5


@dataclass(frozen=True)
class WorkerProcess:
    """A worker's process on this machine.

    Attributes:
        process: leads a session of its own.
        mark: is in the environment of all processes that it starts.
        events_fd: this process's end of the pipe for its events.
    """

    process: subprocess.Popen[bytes]
    events_fd: int
    mark: str

    def send(self, command: Command) -> None:
        """Send a command; a process that has ended does not get it."""
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(encode(command).encode())
                self.process.stdin.flush()

    def kill_detached(self) -> None:
        """End what it has started in other sessions, such as by ``setsid``; called once it has ended itself."""
        entry = f"{_MARK}={self.mark}".encode()
        for _ in range(_LOOKS):
            marked = []
            for folder in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # another user's, or ended
                    if entry in (folder / "environ").read_bytes().split(b"\0"):
                        marked.append(int(folder.name))
            for pid in marked:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            if not marked:
                return


def spawn(environment: Mapping[str, str], output: IO[bytes]) -> WorkerProcess:
    """Start a worker process.

    Args:
        environment: added to this process's environment, such as CUDA_VISIBLE_DEVICES.
        output: gets everything that it prints.

    Raises:
        OSError: it could not be started.
    """
    events_fd, write_end = os.pipe()
    mark = secrets.token_hex(8)
    try:
        # A list of arguments, no shell and no fork of this process's state.  The new session keeps the
        # terminal's Ctrl-C away: this process decides how its workers end.
        process = subprocess.Popen(
            [
                *python_command("ensemble.worker.__main__"),
                f"--events-fd={write_end}",
                f"--parent-pid={os.getpid()}",
            ],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, **python_environment(), **environment, _MARK: mark},
            pass_fds=(write_end,),
            start_new_session=True,
        )
    except BaseException:
        os.close(events_fd)
        raise
    finally:
        os.close(write_end)
    os.set_blocking(events_fd, False)
    return WorkerProcess(process, events_fd, mark)
