"""What came of a chunk -> its part on disk, without the rows that cannot be computed, while the next one runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.common.files import atomic_path, check_unchanged
from ensemble.common.protocol import Activation, ChunkDone, CommonSpec, Predict
from ensemble.common.shards import part_name
from ensemble.members.predictor import Prediction


class ShardWriter:
    """Writes one part after another in a thread, and brings its errors back to the thread that hands them over.

    Args:
        spec: says where parts go, what the numbers in them are, and which files must not change.
        failed: called in that thread when a part could not be written.

    Attributes:
        failed_chunk: the number of the chunk whose part could not be written; None: there is none.
    """

    def __init__(self, spec: CommonSpec, failed: Callable[[], None]) -> None:
        self._spec = spec
        self._failed = failed
        self.failed_chunk: int | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(
        self,
        command: Predict,
        rows: npt.NDArray[np.int64],
        prediction: Prediction,
        written: Callable[[ChunkDone], None],
    ) -> None:
        """Begin to write a part; call ``wait`` first.

        Args:
            rows: the chunk's rows of the table.
            prediction: of these.
            written: called in the writing thread when the part stands under its name.
        """
        job = (command, rows, prediction, written)
        self._thread = threading.Thread(target=self._write, args=job, name="writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what has gone wrong so far, without waiting for a part that is being written."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the part that is being written.

        Raises:
            WriteError: it, or an earlier one, could not be written.
            FilesChanged: the member's files are no longer those it was to be made of; there is no part then.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _write(
        self,
        command: Predict,
        rows: npt.NDArray[np.int64],
        prediction: Prediction,
        written: Callable[[ChunkDone], None],
    ) -> None:
        try:
            written(self._done(command, rows, prediction))
        except BaseException as error:  # whatever it is, the main thread must hear of it
            self.failed_chunk, self._error = command.chunk, error
            self._failed()

    def _done(self, command: Predict, rows: npt.NDArray[np.int64], prediction: Prediction) -> ChunkDone:
        values = np.asarray(prediction.values, dtype=np.float64)
        expected = (len(rows), len(self._spec.labels))
        if values.shape != expected:
            raise ValueError(f"it predicted an array of shape {values.shape}, and {expected} was asked for")
        good = good_rows(values, self._spec.activation)
        good[list(prediction.bad_rows)] = False
        reason = "came out as NaN, infinite or not as probabilities"
        reason += f"; {prediction.advice}" if prediction.advice else ""
        bad = dict.fromkeys(np.flatnonzero(~good).tolist(), reason) | dict(prediction.bad_rows)
        places = sorted(bad, key=rows.__getitem__)
        counters = replace(prediction.counters, chunks=1, rows=len(rows), bad_rows=len(bad))
        return ChunkDone(
            chunk=command.chunk,
            part=self._part(command, rows[good], values[good]),
            counters=counters,
            bad_rows=tuple(rows[places].tolist()),
            bad_row_reasons=tuple(bad[place] for place in places),
        )

    def _part(self, command: Predict, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> str:
        """Write it; returns its name."""
        columns = [pa.array(rows)] + [pa.array(values[:, label]) for label in range(values.shape[1])]
        names = ["row"] + [f"p{label}" for label in range(values.shape[1])]
        buffer = pa.BufferOutputStream()
        pa_csv.write_csv(pa.table(columns, names=names), buffer)
        content = buffer.getvalue().to_pybytes()
        name = part_name(command.start, command.stop, content)
        with atomic_path(Path(self._spec.parts_dir) / name) as temporary:
            temporary.write_bytes(content)
            # Last: weights can be mapped, so that whoever writes into their file changes a loaded model.
            check_unchanged(self._spec.files)
        return name


def good_rows(values: npt.NDArray[np.float64], activation: Activation) -> npt.NDArray[np.bool_]:
    """Which rows are good: finite, and for probabilities within 0..1, summing to 1 where they exclude each other.

    Args:
        values: float64 [rows, labels].

    Returns:
        bool [rows].
    """
    good = np.isfinite(values).all(axis=1)
    if activation != "none":
        with np.errstate(invalid="ignore"):
            good &= ((values >= 0) & (values <= 1)).all(axis=1)
    if activation == "softmax":
        with np.errstate(invalid="ignore"):
            good &= np.abs(values.sum(axis=1, dtype=np.float64) - 1) < 1e-3
    return np.asarray(good)
