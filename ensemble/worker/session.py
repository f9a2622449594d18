"""A worker's session: follow commands, send events, and write one member's shards.

The child side of the member's kind, which the spec names, computes the values.
"""

from __future__ import annotations

import base64
import contextlib
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
from typing import TYPE_CHECKING

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
from ensemble.members.predictor import load_child
from ensemble.worker.channel import CommandReader, HeartbeatThread

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PROGRESS_SECONDS = 0.5


def serve(
    commands: CommandReader, send: Callable[[Event], None], heartbeat: HeartbeatThread, began: float
) -> int:
    """Follow commands until the end, answer with events, and return the process's exit code.

    Args:
        heartbeat: notes every step; its clock times the chunks.
        began: when this process started, on the monotonic clock, in seconds.
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
    except BaseException as error:  # the parent must hear of any error before this process ends
        trace = _logged_traceback()
        if session is not None:
            # Writing a shard takes a moment; an unfinished one would leave a temporary file.
            with contextlib.suppress(Exception):
                session.wait()
            if session.unwritten_chunk is not None:
                chunk = session.unwritten_chunk
        failure = Failed(
            error_type=type(error).__name__,
            message=one_line(error, redact),
            traceback=trace,
            chunk=chunk,
            can_retry=classify(error) is Verdict.SUSPECT,
        )
        send_redacted(failure)
        return 1
    return 0


class Session:
    """A member in this process, of any kind.

    The constructor imports the kind's libraries, sends ``Started``, and makes a predictor that uses no device yet.

    Args:
        failed: called by another thread if a shard cannot be written; ``predict`` and ``close`` raise the error.

    Attributes:
        predictor: the kind's.
        unwritten_chunk: the number of the chunk whose shard could not be written, or None.

    Raises:
        FilesChanged: the member's files have changed since the run began.
        Exception: any error of the kind's child side.
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
        child = load_child(start.spec.kind)
        versions = {"python": platform.python_version(), **child.import_libraries()}
        # Not earlier, because some libraries must be the first to import numpy or pyarrow.
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
        """Put the member on its devices; raises as the constructor does."""
        began = time.monotonic()
        with self._unchanged():
            ready = self.predictor.load()
        seconds = self._making_seconds + time.monotonic() - began
        self._send(replace(ready, load_seconds=round(seconds, 3)))

    def predict(self, command: Predict) -> None:
        """Compute a chunk; a thread writes its shard, without the rows that cannot be computed.

        This returns when the device has finished the chunk. At most one shard is written while the next chunk is
        computed.

        Raises:
            WriteError: an earlier shard could not be written; ``unwritten_chunk`` says which.
            Exception: any error of the predictor; the row to blame is unknown.
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
            except BaseException:  # the main thread must hear of any error
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
        """Wait until the last shard is complete; raise the error if it could not be written."""
        if self._writing is not None:
            self._writing.result()

    def close(self) -> None:
        """Close the predictor once the last shard is complete; raises as ``wait`` does."""
        self.wait()
        self.predictor.close()
        self._send(Closed(_peak_memory_bytes(), self.predictor.peak_gpu_memory_bytes()))

    @contextlib.contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Raise FilesChanged if the member's files have changed since the run began."""
        try:
            yield
        finally:  # reading a changed file may raise an error that does not say so
            check_unchanged(self._common.files)


def _logged_traceback() -> str:
    text = traceback.format_exc()
    with contextlib.suppress(OSError):  # even if the disk is full, the parent must hear of the error
        print(text, file=sys.stderr, flush=True)  # noqa: T201
    return text


def _peak_memory_bytes() -> int:
    # Not ru_maxrss, which on Linux survives the exec and can be the parent's peak.
    with contextlib.suppress(OSError, IndexError):
        status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
        return int(status.partition("\nVmHWM:")[2].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
