"""A worker's session: commands in, events out, one member's shards on disk in between.

Knows nothing of what a member is: that is its kind's, whose child side the spec names.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import platform
import resource
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ensemble.common.files import check_unchanged
from ensemble.common.protocol import (
    ChunkFailed,
    Closed,
    Computed,
    Event,
    Failed,
    Load,
    Predict,
    Progress,
    Start,
    Started,
    Stop,
)
from ensemble.common.python_process import keep_pandas_out
from ensemble.common.redact import Redactor, guard_output
from ensemble.common.torch_errors import Verdict, classify, one_line
from ensemble.members.predictor import Child
from ensemble.worker.channel import CommandReader, HeartbeatThread

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PROGRESS_SECONDS = 0.5


class Terminated(BaseException):
    """SIGTERM has come; raised in the main thread, wherever it is."""


def serve(
    commands: CommandReader, send: Callable[[Event], None], heartbeat: HeartbeatThread, began: float
) -> int:
    """Do as the commands say until the end, and answer with events; returns the process's exit code.

    Args:
        heartbeat: is told of every step; its clock times the chunks.
        began: when this process started, on the monotonic clock, in seconds.

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
        for command in arriving:
            if isinstance(command, Stop):
                break
            if isinstance(command, Load):
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
    except BaseException as error:  # whatever it is, the parent must hear of it before this process ends
        is_told_to_end = isinstance(error, Terminated)
        trace = "" if is_told_to_end else _logged_traceback()
        if session is not None:
            # A shard that is being written takes a moment, and no half of it is left behind.
            with contextlib.suppress(Exception):
                session.wait()
            if session.unwritten_chunk is not None:
                chunk = session.unwritten_chunk
        if is_told_to_end:
            raise
        can_retry = classify(error) is Verdict.SUSPECT
        send_redacted(Failed(type(error).__name__, one_line(error, redact), trace, chunk, can_retry))
        return 1
    return 0


class Session:
    """A member in this process, whatever its kind: what comes before, between and after its predictions.

    Made, it has imported the kind's libraries, said so, and holds a predictor that needs no device yet.

    Args:
        failed: called by another thread when a shard could not be written; ``predict`` and ``close`` raise why.

    Attributes:
        predictor: the kind's.
        unwritten_chunk: the number of the chunk whose shard could not be written; None: there is none.

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
        self._failed = failed
        self._common = start.spec.common
        self.unwritten_chunk: int | None = None
        self._writer = ThreadPoolExecutor(1, "writer")
        self._writing: Future[None] | None = None
        child = cast(Child, importlib.import_module(start.spec.kind))
        versions = {"python": platform.python_version(), **child.import_libraries()}
        # Not before: some libraries must be the first to import numpy or pyarrow.
        keep_pandas_out()
        import numpy as np

        from ensemble.data.published_table import PublishedTable
        from ensemble.worker.shard_writer import write_shard

        send(Started(versions, round(time.monotonic() - began, 3)))
        heartbeat.step()
        making_since = time.monotonic()
        self._write_shard = write_shard
        self._order: npt.NDArray[np.int64] = np.asarray(np.load(self._common.order_path, mmap_mode="r"))
        with self._unchanged():
            views = [view.columns for view in self._common.views]
            table = PublishedTable(Path(self._common.table_path), views)
            self._table_rows = table.rows
            self.predictor = child.make_predictor(self._common, start.spec.settings, table)
        self._making_seconds = time.monotonic() - making_since

    def load(self) -> None:
        """Put the member on its devices; raises what making a session does."""
        began = time.monotonic()
        with self._unchanged():
            ready = self.predictor.load()
        seconds = self._making_seconds + time.monotonic() - began
        self._send(replace(ready, load_seconds=round(seconds, 3)))

    def predict(self, command: Predict) -> None:
        """Compute a chunk; a thread writes its shard, without the rows that cannot be computed.

        Returns when the device has nothing left to do for the chunk.  No more than one shard is being written while
        the next chunk is computed.

        Raises:
            WriteError: an earlier shard could not be written; ``unwritten_chunk`` says which.
            Exception: whatever comes out of the predictor; which row is to blame is not known then.
        """
        began, last = self._heartbeat.clock(), time.monotonic()

        def report(rows: int, tokens: int = 0, padded_tokens: int = 0) -> None:
            nonlocal last
            self._heartbeat.step()
            if time.monotonic() - last >= PROGRESS_SECONDS:
                last = time.monotonic()
                self._send(Progress(command.chunk, rows, tokens, padded_tokens))

        def write() -> None:
            try:
                done = self._write_shard(self._common, command, rows, prediction, self._table_rows)
                self._heartbeat.end_write()
                seconds = self._heartbeat.clock() - began
                self._send(replace(done, counters=replace(done.counters, predict_seconds=seconds)))
            except BaseException:  # whatever it is, the main thread must hear of it
                self.unwritten_chunk = command.chunk
                self._failed()
                raise

        if self.unwritten_chunk is not None:
            self.wait()
        rows = self._rows(command)
        prediction = self.predictor.predict(rows, report)
        self.wait()
        self._heartbeat.begin_write()
        self._send(Computed(command.chunk))
        self._writing = self._writer.submit(write)

    def _rows(self, command: Predict) -> npt.NDArray[np.int64]:
        if command.rows is None:
            return self._order[command.start : command.stop]
        import numpy as np

        return np.frombuffer(base64.b64decode(command.rows), "<i4").astype(np.int64)

    def wait(self) -> None:
        """Until the last shard stands under its name; raises why it could not be written."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """There is nothing left to do; raises as ``wait`` does."""
        self.wait()
        self.predictor.close()
        self._send(Closed(_peak_memory_bytes(), self.predictor.peak_gpu_memory_bytes()))

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Whatever is read of the member's files meanwhile is of the files that the run has begun with."""
        try:
            yield
        finally:  # half a new file ends in an error that does not say so
            check_unchanged(self._common.files)


def _logged_traceback() -> str:
    text = traceback.format_exc()
    with contextlib.suppress(OSError):  # the disk may be full, and the parent must hear of it all the same
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    return text


def _peak_memory_bytes() -> int:
    # Not ru_maxrss first: on Linux it survives the exec and can be the parent's peak.
    with contextlib.suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("\nVmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
