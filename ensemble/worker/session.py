"""Serve as a worker: follow commands, send events, and write one member's shards.

The child side of the member's kind, which the spec names, computes the values.
"""

from __future__ import annotations

import base64
import contextlib
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ensemble.common.files import check_unchanged
from ensemble.common.protocol import (
    ChunkDone,
    ChunkFailed,
    Closed,
    Command,
    Counters,
    Event,
    Failed,
    Load,
    Predict,
    Progress,
    Start,
    Started,
)
from ensemble.common.python_process import keep_pandas_out
from ensemble.common.redact import Redactor, guard_output
from ensemble.common.torch_errors import Verdict, classify, one_line
from ensemble.members.predictor import Prediction, Predictor, Runner, load_child
from ensemble.worker.channel import HeartbeatThread

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ensemble.data.published_table import PublishedTable


def serve(
    commands: Iterable[Command], send: Callable[[Event], None], heartbeat: HeartbeatThread, began: float
) -> int:
    """Follow commands until the end, answer with events, and return the process's exit code.

    ``began`` is when this process started, on the monotonic clock; the heartbeat's clock times the chunks.
    """
    chunk: int | None = None
    session: Session | None = None
    redact = Redactor(os.environ)

    def send_redacted(event: Event) -> None:
        send(redact.document(event))

    try:
        for command in commands:
            if isinstance(command, Start):
                redact = Redactor(os.environ, command.spec.settings)
                guard_output(redact)
                session = Session(command, send_redacted, heartbeat, began)
                continue
            assert session is not None, command
            if isinstance(command, Load):
                session.load()
            elif isinstance(command, Predict):
                chunk = command.chunk
                try:
                    computed = session.compute(command)
                except Exception as error:
                    if classify(error) is not Verdict.SOUND:
                        raise
                    session.task.check_device()
                    trace = _logged_traceback()
                    send_redacted(ChunkFailed(chunk, type(error).__name__, one_line(error, redact), trace))
                else:
                    session.write(command, computed)
                chunk = None
            else:
                session.close()
                break
    except BaseException as error:  # the parent must hear of any error before this process ends
        failure = Failed(
            error_type=type(error).__name__,
            message=one_line(error, redact),
            traceback=_logged_traceback(),
            chunk=chunk,
            can_retry=classify(error) is Verdict.SUSPECT,
        )
        send_redacted(failure)
        return 1
    return 0


class Session:
    """Compute the chunks of a member of any kind.

    The constructor imports the kind's libraries, sends ``Started``, and makes a predictor that uses no device yet.
    Methods raise ``FilesChanged``, and any error of the kind's child side.
    """

    def __init__(
        self, start: Start, send: Callable[[Event], None], heartbeat: HeartbeatThread, began: float
    ) -> None:
        self._send = send
        self._heartbeat = heartbeat
        self._common = start.spec.common
        child = load_child(start.spec.kind)
        versions = {"python": platform.python_version(), **child.import_libraries()}
        # Not earlier, because some libraries must be the first to import numpy or pyarrow.
        keep_pandas_out()
        import numpy as np

        from ensemble.common.shards import INPUTS_FILE
        from ensemble.data.published_table import PublishedTable
        from ensemble.worker.shard_writer import write_shard

        send(Started(versions, round(time.monotonic() - began, 3)))
        heartbeat.step()
        making_since = time.monotonic()
        self._write_shard = write_shard
        self._table: PublishedTable | None = None
        with self._unchanged():
            if self._common.table_path:
                self._order: npt.NDArray[np.int64] = np.asarray(
                    np.load(self._common.order_path, mmap_mode="r")
                )
                self._table = PublishedTable(
                    Path(self._common.table_path),
                    [job.columns for job in self._common.jobs],
                    Path(self._common.order_path).with_name(INPUTS_FILE),
                    self._common.input_columns,
                )
            # There is no table for jobs without rows.
            self.task = child.make_predictor(self._common, start.spec.settings, cast(Any, self._table))
        self.task.is_stopped = lambda: heartbeat.is_stopped
        self._making_seconds = time.monotonic() - making_since

    def load(self) -> None:
        """Put the member on its devices."""
        began = time.monotonic()
        with self._unchanged():
            ready = self.task.load()
        seconds = self._making_seconds + time.monotonic() - began
        self._send(replace(ready, load_seconds=round(seconds, 3)))

    def compute(self, command: Predict) -> Prediction | Counters:
        """Compute a chunk, or do a job without rows and return what was counted."""
        self._chunk_began = self._heartbeat.clock()
        last = time.monotonic()

        def report(rows: int, tokens: int = 0, padded_tokens: int = 0) -> bool:
            nonlocal last
            self._heartbeat.step()
            if time.monotonic() - last >= 0.5:
                last = time.monotonic()
                self._send(Progress(command.chunk, rows, tokens, padded_tokens))
            return not self._heartbeat.is_stopped

        if isinstance(self.task, Runner):
            return self.task.run(command.job, report)
        assert isinstance(self.task, Predictor)
        assert self._table is not None
        self._table.use_job(command.job)
        self.task.use_job(command.job)
        self.task.follow(command.choice)
        return self.task.predict(self._rows(command), report)

    def write(self, command: Predict, computed: Prediction | Counters) -> None:
        """Write a chunk's shard, without the rows that cannot be computed; there is none for a job without rows."""
        if isinstance(computed, Prediction):
            done = self._write_shard(self._common, command, self._rows(command), computed)
        else:
            done = ChunkDone(command.chunk, shard="", counters=replace(computed, chunks=1, rows=1))
        seconds = self._heartbeat.clock() - self._chunk_began
        self._send(replace(done, counters=replace(done.counters, predict_seconds=seconds)))

    def _rows(self, command: Predict) -> npt.NDArray[np.int64]:
        if command.rows is None:
            return self._order[command.start : command.stop]
        import numpy as np

        return np.frombuffer(base64.b64decode(command.rows), "<i4").astype(np.int64)

    def close(self) -> None:
        self.task.close()
        closed = Closed(
            peak_memory_bytes=_peak_memory_bytes(),
            peak_gpu_memory_bytes=self.task.peak_gpu_memory_bytes(),
            peak_gpu_allocated_bytes=self.task.peak_gpu_allocated_bytes(),
        )
        self._send(closed)

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
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("\nVmHWM:")[2].split()[0]) * 1024
