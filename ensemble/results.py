"""What a run hands over: a CSV per member as soon as it is done, then the merge, the scores and the submission."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.merge.align import read_predictions
from ensemble.merge.combine import weighted_mean
from ensemble.merge.gather import gather_parts
from ensemble.merge.metrics import Score, score
from ensemble.prepare import Prepared, scores_make_sense
from ensemble.report.terminal import ENSEMBLE_ROW
from ensemble.rundir import RunDir, atomic_path, part_path
from ensemble.state import MemberState
from ensemble.tables.csvfile import write_csv
from ensemble.tables.submission import write_submission


@dataclass
class Results:
    """Scores by the member's name (and the ensemble's), and files by what they are, in the order they were made."""

    scores: dict[str, Score] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)


def write_predictions(prepared: Prepared, rundir: RunDir, state: MemberState, results: Results) -> None:
    """Gather a finished member's parts into its CSV.

    Raises:
        MergeError: a row is missing or came twice.
        WriteError: the disk is full or the like.
    """
    name = state.plan.name
    parts = [part_path(rundir.parts_dir(name), chunk.index) for chunk in state.plan.chunks]
    values = gather_parts(name, parts, prepared.table.rows, len(prepared.config.labels))
    path = rundir.predictions(name)
    _write_probabilities(path, prepared, values)
    results.files[f"predictions of {name}"] = path


def merge(prepared: Prepared, rundir: RunDir, results: Results) -> None:
    """Read the members' CSVs, average them, score them where the truth is known, write ensemble and submission.

    Raises:
        MergeError: the CSVs do not fit together.
        WriteError: the disk is full or the like.
    """
    config, table = prepared.config, prepared.table
    truth = table.truth if scores_make_sense(prepared.checkpoints) else None

    def members() -> Iterator[npt.NDArray[np.float64]]:
        for model in config.models:
            path = rundir.predictions(model.name)
            values = read_predictions(path, config.data.id_column, config.labels, table.ids)
            if truth is not None:
                results.scores[model.name] = score(values, truth)
            yield values
            del values  # before the next one is read

    merged = weighted_mean([model.weight for model in config.models], members())
    if truth is not None:
        results.scores[ENSEMBLE_ROW] = score(merged, truth)
    _write_probabilities(rundir.ensemble, prepared, merged)
    results.files["ensemble"] = rundir.ensemble
    _submit(prepared, rundir, merged, results)


def _write_probabilities(path: Path, prepared: Prepared, values: npt.NDArray[np.float64]) -> None:
    config = prepared.config
    columns = [pa.array(values[:, label]) for label in range(values.shape[1])]
    with atomic_path(path) as temporary:
        write_csv(temporary, [config.data.id_column, *config.labels], [prepared.table.ids, *columns])


def _submit(prepared: Prepared, rundir: RunDir, merged: npt.NDArray[np.float64], results: Results) -> None:
    config, sample = prepared.config, prepared.sample
    if config.submission is None or sample is None:
        return
    targets = [rundir.submission]
    # A trial on the first rows must not take the place of a real submission.
    if config.submission.path is not None and config.limit is None:
        config.submission.path.parent.mkdir(parents=True, exist_ok=True)
        targets.append(config.submission.path)
    for target in targets:
        with atomic_path(target) as temporary:
            write_submission(
                sample,
                prepared.table.ids,
                merged,
                config.labels,
                config.submission.columns,
                temporary,
                config.limit is not None,
            )
    results.files["submission"] = targets[-1]
