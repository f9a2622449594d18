"""A worker process that begins before its member is known: it imports libraries while the parent reads the table.

It becomes the first worker on the CPU of its process's local launcher.  What differs between workers from their
start, such as a log and cores of its own, it gets then.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace

from ensemble.common.gpus import worker_environment
from ensemble.common.protocol import Expect
from ensemble.scheduling.launchers.cores import Cores
from ensemble.scheduling.launchers.process import WorkerProcess, spawn

# The one that has begun and that nobody has taken.
_begun: WorkerProcess | None = None


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


def take(kind: str | None = None) -> WorkerProcess | None:
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
