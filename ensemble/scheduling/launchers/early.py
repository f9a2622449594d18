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
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import IO

from ensemble.common.gpus import worker_environment
from ensemble.common.protocol import Command, Expect, encode
from ensemble.common.python_process import python_command, python_environment
from ensemble.scheduling.launchers.cores import Cores


@dataclass(frozen=True)
class Spawned:
    """A worker process.

    Attributes:
        events_fd: this process's end of the pipe that its events come by.
        kind: what it was begun for, before its member was known; empty: it was known.
        since: when it was started, on the monotonic clock, in seconds.
        printed: what it prints until it has a log.
    """

    process: subprocess.Popen[bytes]
    events_fd: int
    kind: str = ""
    since: float = 0.0
    printed: IO[bytes] | None = None

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
        # One that is stuck in the kernel, as with a broken file server, is not waited for.
        with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
            self.process.communicate(timeout=REAP_SECONDS)
        os.close(self.events_fd)
        if self.printed is not None:
            self.printed.close()


REAP_SECONDS = 10.0
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
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        printed = opened.enter_context(tempfile.TemporaryFile(buffering=0))
        since = time.monotonic()
        made = spawn({**Cores(1.0).environment, **worker_environment(())}, printed)
        _begun = replace(made, kind=kind, since=since, printed=printed)
        opened.pop_all()
        _begun.send(Expect(kind))
    try:
        yield
    finally:
        end()


def end() -> None:
    """There is none any more, unless it was taken."""
    if (left := take()) is not None:
        left.kill()


def take(kind: str | None = None) -> Spawned | None:
    """The one that has begun, which is the caller's now; None: there is none, or it has ended.

    Args:
        kind: only if it was begun for this one.
    """
    global _begun
    if kind is not None and _begun is not None and _begun.kind != kind:
        return None
    taken, _begun = _begun, None
    if taken is not None and taken.process.poll() is not None:
        taken.kill()
        return None
    return taken
