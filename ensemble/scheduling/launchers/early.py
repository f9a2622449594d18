"""A worker process that begins before its member is known: it imports libraries while the parent reads the table.

It becomes the first worker on the CPU of its process's local launcher.  What differs between workers from their
start, such as a log and cores of its own, it gets then.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import IO

from ensemble.common.gpus import worker_environment
from ensemble.common.protocol import Command, Expect, encode
from ensemble.common.python_process import python_command, python_environment


@dataclass(frozen=True)
class Spawned:
    """A worker process, with this process's end of the pipe that its events come by."""

    process: subprocess.Popen[bytes]
    events_fd: int

    def send(self, command: Command) -> None:
        """Send a command; one that has ended, or is about to, does not get it."""
        assert self.process.stdin is not None
        if not self.process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write(encode(command).encode())
                self.process.stdin.flush()

    def kill(self) -> None:
        """End it and what it has started; the end of one that nobody takes."""
        if self.process.returncode is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate()
        os.close(self.events_fd)


# The one that has begun and that nobody has taken.
_begun: Spawned | None = None


def spawn(environment: Mapping[str, str], output: IO[bytes]) -> Spawned:
    """Start a worker process.

    Args:
        environment: added to this process's environment, such as CUDA_VISIBLE_DEVICES.
        output: takes everything that it prints.

    Raises:
        OSError: it could not be started.
    """
    events_fd, write_end = os.pipe()
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
            env={**os.environ, **python_environment(), **environment},
            pass_fds=(write_end,),
            start_new_session=True,
        )
    except BaseException:
        os.close(events_fd)
        raise
    finally:
        os.close(write_end)
    os.set_blocking(events_fd, False)
    return Spawned(process, events_fd)


@contextlib.contextmanager
def begun_early(kind: str) -> Iterator[None]:
    """Have a worker process import the libraries of a member kind, by the module of its child side.

    Where none can be started there is none.  It does not outlive the block, unless it was taken.
    """
    global _begun
    with contextlib.suppress(OSError), tempfile.TemporaryFile(buffering=0) as output:
        _begun = spawn(worker_environment(()), output)
        _begun.send(Expect(kind))
    try:
        yield
    finally:
        if (left := take()) is not None:
            left.kill()


def take() -> Spawned | None:
    """The one that has begun, which is the caller's now; None: there is none, or it has ended."""
    global _begun
    taken, _begun = _begun, None
    if taken is not None and taken.process.poll() is not None:
        taken.kill()
        return None
    return taken
