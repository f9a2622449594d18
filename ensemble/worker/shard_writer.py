"""Write a chunk's predictions as a shard, without the rows that cannot be computed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv as pa_csv

from ensemble.common.files import atomic_path, check_unchanged
from ensemble.common.protocol import SUM_TOLERANCE, Activation, ChunkDone, CommonSpec, Predict
from ensemble.common.shards import shard_name
from ensemble.members.predictor import Prediction


def write_shard(
    spec: CommonSpec, command: Predict, rows: npt.NDArray[np.int64], prediction: Prediction
) -> ChunkDone:
    """Write the shard of a chunk of these rows of the table.

    Labels that the job has reordered are in the config's order again. If the member's files have changed since the
    run began, there is no shard, and FilesChanged is raised.
    """
    values = np.asarray(prediction.values, dtype=np.float64)
    expected = (len(rows), len(spec.labels))
    if values.shape != expected:
        raise ValueError(f"it predicted an array of shape {values.shape}, and {expected} was asked for")
    good = _good_rows(values, spec.activation)
    good[list(prediction.bad_rows)] = False
    reason = "came out as NaN, infinite or not as probabilities"
    if prediction.advice:
        reason += f"; {prediction.advice}"
    is_done = np.ones(len(rows), dtype=np.bool_)
    if prediction.is_partial:
        is_done &= np.isfinite(values).all(axis=1)
        is_done[list(prediction.bad_rows)] = True
    bad = dict.fromkeys(np.flatnonzero(~good & is_done).tolist(), reason) | dict(prediction.bad_rows)
    bad_places = sorted(bad, key=rows.__getitem__)

    job = spec.jobs[command.job]
    folder = f"{job.folder}/" if job.folder else ""
    if job.label_order:
        values = values[:, list(job.label_order)]
    columns = {"row": pa.array(rows[good])}
    columns |= {f"p{label}": pa.array(numbers) for label, numbers in enumerate(values[good].T)}
    buffer = pa.BufferOutputStream()
    pa_csv.write_csv(pa.table(columns), buffer)
    content = buffer.getvalue().to_pybytes()
    done = int(is_done.sum())
    name = folder + shard_name(command.start, command.start + done, content, prediction.choice.in_float32)
    if folder:  # may be missing on a machine that is not the run's
        (Path(spec.shards_dir) / folder).mkdir(parents=True, exist_ok=True)
    with atomic_path(Path(spec.shards_dir) / name) as temporary:
        temporary.write_bytes(content)
        # Last, because weights can be mapped: writing into their file changes a loaded model.
        check_unchanged(spec.files)
    return ChunkDone(
        chunk=command.chunk,
        shard=name,
        counters=replace(prediction.counters, chunks=1, rows=done, bad_rows=len(bad)),
        bad_rows=tuple(rows[bad_places].tolist()),
        bad_row_reasons=tuple(bad[place] for place in bad_places),
        choice=prediction.choice,
    )


def _good_rows(values: npt.NDArray[np.float64], activation: Activation) -> npt.NDArray[np.bool_]:
    """Return which rows are finite, and if they are probabilities, valid ones, [rows]."""
    good = np.isfinite(values).all(axis=1)
    with np.errstate(invalid="ignore"):
        if activation != "none":
            good &= ((values >= 0) & (values <= 1)).all(axis=1)
        if activation == "softmax":
            good &= np.abs(values.sum(axis=1) - 1) < SUM_TOLERANCE
    return np.asarray(good)
