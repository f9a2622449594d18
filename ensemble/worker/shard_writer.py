"""What came of a chunk -> its part on disk, without the rows that cannot be computed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.common.files import atomic_path, check_unchanged
from ensemble.common.protocol import Activation, Counters, Predict
from ensemble.common.shards import part_name
from ensemble.members.huggingface.scoring.classifier import good_rows, probabilities
from ensemble.members.huggingface.scoring.encode import Encoded
from ensemble.members.huggingface.scoring.forward import Computed


@dataclass(frozen=True)
class ChunkWork:
    """What a chunk took, and what came of it.

    Its counters; the part's name; rows of the table that are not in it, ascending, with the reasons.
    """

    counters: Counters
    part: str
    bad_rows: tuple[int, ...]
    bad_row_reasons: tuple[str, ...]


@dataclass(frozen=True)
class Reasons:
    """Why rows of a member cannot be computed, in words.

    ``why_not_float32`` says why its overflows cannot be run again; empty where they can, or there are none.
    """

    dtype: str
    device_name: str
    max_length: int
    why_not_float32: str
    runs_again: bool

    def too_large(self, encoded: Encoded, computed: Computed) -> dict[int, str]:
        """Rows for which there is no memory, by their places in the chunk: why, and what to do about it."""
        again = f" in float32, which it needs because it overflows {self.dtype}"
        detours = {
            **dict.fromkeys(computed.too_large, ""),
            **dict.fromkeys(computed.too_large_in_float32, again),
        }
        return {
            row: (
                f"{encoded.lengths[row]:,} tokens do not fit into the memory of {self.device_name} even alone"
                f"{detour}; lower max_length ({self.max_length}), quantize, or give it more GPUs (num_gpus)"
            )
            for row, detour in detours.items()
        }

    def not_finite(self, float32_error: str) -> str:
        """Why a row came out as no numbers, and what to do about it."""
        if self.why_not_float32:
            why = f"a float16 overflow is likely, and {self.why_not_float32}: set dtype: bfloat16"
        elif float32_error:
            why = (
                f"it overflows {self.dtype}, and this model does not run in float32 ({float32_error}); "
                "set dtype: bfloat16 or float32"
            )
        else:
            tried = "float32 gave no better numbers" if self.runs_again else "it was computed in float32"
            why = f"{tried}, so the checkpoint's weights are damaged, or it cannot compute this row"
        return f"came out as NaN, infinite or not as probabilities; {why}"


class Parts:
    """Writes a member's parts.

    Args:
        folder: where they go.
        label_order: the model's output column of each of the config's labels.
        files: the states of the files of which the model is made; no part is made of others.
    """

    def __init__(
        self,
        folder: Path,
        activation: Activation,
        label_order: tuple[int, ...],
        files: Mapping[str, Sequence[int]],
    ) -> None:
        self._files = files
        self._folder = folder
        self._activation = activation
        self._label_order = list(label_order)

    def values(self, computed: Computed) -> npt.NDArray[np.float64]:
        """Probabilities of the computed rows in the config's order of labels: [rows, labels].

        For the thread that computes: torch gives every thread that calls it a crew of its own, which would spin
        beside the forward passes.
        """
        if not len(computed.rows):
            return np.empty((0, len(self._label_order)))
        return probabilities(computed.logits, self._activation)[:, self._label_order]

    def write(
        self,
        command: Predict,
        rows: npt.NDArray[np.int64],
        encoded: Encoded,
        computed: Computed,
        values: npt.NDArray[np.float64],
        reasons: Reasons,
    ) -> ChunkWork:
        """Leave a chunk as its part.

        Args:
            rows: the chunk's rows of the table.
            values: of the computed ones, as ``values`` gives them.

        Raises:
            WriteError: the part cannot be written.
            FilesChanged: the model's files are no longer those it was to be made of; there is no part then.
        """
        good = good_rows(values, self._activation)
        bad = {
            **encoded.problems,
            **dict.fromkeys(computed.rows[~good].tolist(), reasons.not_finite(computed.float32_error)),
            **reasons.too_large(encoded, computed),
        }
        places = sorted(bad, key=rows.__getitem__)
        return ChunkWork(
            counters=replace(
                computed.counters,
                chunks=1,
                rows=len(rows),
                bad_rows=len(bad),
                truncated_rows=encoded.truncated_rows,
            ),
            part=self._write(command, rows[computed.rows[good]], values[good]),
            bad_rows=tuple(rows[places].tolist()),
            bad_row_reasons=tuple(bad[place] for place in places),
        )

    def _write(self, command: Predict, rows: npt.NDArray[np.int64], values: npt.NDArray[np.float64]) -> str:
        """Write a part; returns its name."""
        columns = [pa.array(rows)] + [pa.array(values[:, label]) for label in range(values.shape[1])]
        names = ["row"] + [f"p{label}" for label in range(values.shape[1])]
        buffer = pa.BufferOutputStream()
        pa_csv.write_csv(pa.table(columns, names=names), buffer)
        content = buffer.getvalue().to_pybytes()
        name = part_name(command.start, command.stop, content)
        with atomic_path(self._folder / name) as temporary:
            temporary.write_bytes(content)
            # Last: weights can be mapped, so that whoever writes into their file changes a loaded model.
            check_unchanged(self._files)
        return name


class Writer:
    """Runs one job after another in a thread, and brings their errors back to the thread that hands them over.

    Args:
        failed: called in that thread when a job has raised.

    Attributes:
        failed_chunk: the number of the chunk whose job raised; None while none has.
    """

    def __init__(self, failed: Callable[[], None]) -> None:
        self._failed = failed
        self.failed_chunk: int | None = None
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def hand_over(self, chunk: int, job: Callable[[], None]) -> None:
        """Have a job done, once the one before is.

        Raises:
            Exception: what an earlier job raised.
        """
        self.wait()
        self._thread = threading.Thread(target=self._do, args=(chunk, job), name="writer", daemon=True)
        self._thread.start()

    def check(self) -> None:
        """Raise what a job has raised, without waiting for the one that goes on."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait for the job that goes on.

        Raises:
            Exception: what it, or an earlier one, raised.
        """
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self.check()

    def _do(self, chunk: int, job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # whatever it is, the main thread must hear of it
            self.failed_chunk, self._error = chunk, error
            self._failed()
