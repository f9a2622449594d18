"""A worker's session: commands in, events out, one member's parts on disk in between.

Knows nothing of what a member is: that is its kind's, whose child side the spec names.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from ensemble.common.files import check_unchanged
from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    Closed,
    Command,
    Computed,
    Event,
    Failed,
    Load,
    Predict,
    Prepare,
    Progress,
    Start,
    Started,
    Stop,
)
from ensemble.common.python_process import keep_pandas_out
from ensemble.common.redact import Redactor, guard_output
from ensemble.common.torch_errors import Verdict, classify, one_line
from ensemble.members.predictor import Child
from ensemble.worker.heartbeat import HeartbeatThread
from ensemble.worker.shutdown import Terminated

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PROGRESS_SECONDS = 0.5


class Commands(Protocol):
    """Where commands come from; see ``channel.CommandReader``."""

    def __iter__(self) -> Iterator[Command]: ...
    def on_prepare(self, callback: Callable[[Prepare], None]) -> None: ...
    def stop(self) -> None: ...


def serve(commands: Commands, send: Callable[[Event], None], heartbeat: HeartbeatThread, began: float) -> int:
    """Do as the commands say until the end, and answer with events.

    Args:
        send: takes events, from any thread.
        heartbeat: is told of every step; its clock times the chunks.
        began: when this process started, on the monotonic clock, in seconds.

    Returns:
        The process's exit code.

    Raises:
        Terminated: SIGTERM has come.
    """
    chunk: int | None = None
    session: Session | None = None
    redact = Redactor(os.environ)

    def send_redacted(event: Event) -> None:
        send(redact.document(event))

    try:
        arriving = iter(commands)
        start = next(arriving)
        assert isinstance(start, Start), start
        redact = Redactor(os.environ, start.spec.settings)
        guard_output(redact)
        session = Session(start, send_redacted, heartbeat, began, commands.stop)
        commands.on_prepare(session.prepare)
        for command in arriving:
            if isinstance(command, Stop):
                break
            if isinstance(command, Prepare):
                session.prepare(command)
            elif isinstance(command, Load):
                session.load()
            elif isinstance(command, Predict):
                chunk = command.chunk
                try:
                    session.predict(command)
                except Exception as error:
                    if classify(error) is not Verdict.SOUND or session.unwritten_chunk is not None:
                        raise
                    session.predictor.check_device()
                    trace = _logged_traceback()
                    send_redacted(ChunkFailed(chunk, type(error).__name__, one_line(error, redact), trace))
                chunk = None
        session.close()
    except Terminated:
        _let_writing_end(session)
        raise
    except BaseException as error:  # whatever it is, the parent must hear of it before this process ends
        trace = _logged_traceback()
        _let_writing_end(session)
        if session is not None and session.unwritten_chunk is not None:
            chunk = session.unwritten_chunk
        can_retry = classify(error) is Verdict.SUSPECT
        send_redacted(Failed(type(error).__name__, one_line(error, redact), trace, chunk, can_retry))
        return 1
    return 0


class Session:
    """A member in this process, whatever its kind: what comes before, between and after its predictions.

    Made, it has imported the kind's libraries, said so, and holds a predictor that needs no device yet.

    Args:
        failed: called by another thread when a part could not be written; ``predict`` and ``close`` raise why.

    Raises:
        FilesChanged: the member's files are no longer those that the run has begun with.
        Exception: whatever the kind's child side raises.
    """

    def __init__(
        self,
        start: Start,
        send: Callable[[Event], None],
        heartbeat: HeartbeatThread,
        began: float,
        failed: Callable[[], None],
    ) -> None:
        self._send = send
        self._heartbeat = heartbeat
        self._common = start.spec.common
        child = cast(Child, importlib.import_module(start.spec.kind))
        versions = {"python": platform.python_version(), **child.import_libraries()}
        # Not before: some libraries must be the first to import numpy or pyarrow.
        keep_pandas_out()
        import numpy as np

        from ensemble.data.published_table import PublishedTable
        from ensemble.worker.shard_writer import ShardWriter

        send(Started(versions, round(time.monotonic() - began, 3)))
        heartbeat.step()
        making_since = time.monotonic()
        self._order: npt.NDArray[np.int64] = np.asarray(np.load(self._common.order_path, mmap_mode="r"))
        self._writer = ShardWriter(self._common, failed)
        with self._unchanged():
            table = PublishedTable(Path(self._common.table_path))
            self.predictor = child.make_predictor(self._common, start.spec.settings, table)
        if start.preload_bytes:
            self.predictor.preload(start.preload_bytes)
        self._making_seconds = time.monotonic() - making_since

    @property
    def unwritten_chunk(self) -> int | None:
        """The number of the chunk whose part could not be written; None: there is none."""
        return self._writer.failed_chunk

    def prepare(self, hint: Prepare) -> None:
        """Pass a hint on; from any thread."""
        self.predictor.prepare(self._rows(hint))

    def load(self) -> None:
        """Put the member on its devices.

        Raises:
            FilesChanged: its files are no longer those that the run has begun with.
        """
        began = time.monotonic()
        with self._unchanged():
            ready = self.predictor.load()
        seconds = self._making_seconds + time.monotonic() - began
        self._send(replace(ready, load_seconds=round(seconds, 3)))

    def predict(self, command: Predict) -> None:
        """Compute a chunk; a thread leaves it as its part, without the rows that cannot be computed.

        Returns when the device has nothing left to do for the chunk.  No more than one part is being written while
        the next chunk is computed.

        Raises:
            WriteError: an earlier part could not be written; ``unwritten_chunk`` says which.
            Exception: whatever comes out of the predictor; which row is to blame is not known then.
        """
        began, last = self._heartbeat.clock(), time.monotonic()

        def report(rows: int, tokens: int = 0, padded_tokens: int = 0) -> None:
            nonlocal last
            self._heartbeat.step()
            if time.monotonic() - last >= PROGRESS_SECONDS:
                last = time.monotonic()
                self._send(Progress(command.chunk, rows, tokens, padded_tokens))

        def written(done: ChunkDone) -> None:
            self._heartbeat.end_write()
            seconds = self._heartbeat.clock() - began
            self._send(replace(done, counters=replace(done.counters, predict_seconds=seconds)))

        self._writer.check()
        rows = self._rows(command)
        prediction = self.predictor.predict(rows, report)
        self._writer.wait()
        self._heartbeat.begin_write()
        self._send(Computed(command.chunk))
        self._writer.start(command, rows, prediction, written)

    def wait(self) -> None:
        """Until the last part stands under its name.

        Raises:
            WriteError: it could not be written; ``unwritten_chunk`` says which.
        """
        self._writer.wait()

    def close(self) -> None:
        """There is nothing left to do; raises as ``wait`` does."""
        self.wait()
        self.predictor.close()
        self._send(Closed(_peak_memory_bytes(), self.predictor.peak_gpu_memory_bytes()))

    def _rows(self, command: Prepare | Predict) -> npt.NDArray[np.int64]:
        return self._order[command.start : command.stop]

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Whatever is read of the member's files meanwhile is of the files that the run has begun with."""
        try:
            yield
        finally:  # half a new file ends in an error that does not say so
            check_unchanged(self._common.files)


def _let_writing_end(session: Session | None) -> None:
    # A part that is being written takes a moment, and no half of it is left behind.
    if session is not None:
        with contextlib.suppress(Exception):
            session.wait()


def _logged_traceback() -> str:
    text = traceback.format_exc()
    with contextlib.suppress(OSError):  # the disk may be full, and the parent must hear of it all the same
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    return text


def _peak_memory_bytes() -> int:
    """The most resident memory this process ever had."""
    # Not ru_maxrss first: on Linux it survives the exec and can be the parent's peak.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
