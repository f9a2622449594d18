"""What a run hands over: a CSV per member as soon as it is done, then the merge, the scores and the submission."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.errors import MergeError
from ensemble.merge.align import read_predictions
from ensemble.merge.combine import weighted_mean
from ensemble.merge.fill import fill_rows
from ensemble.merge.gather import gather_parts
from ensemble.merge.metrics import Score, score
from ensemble.merge.probabilities import refuse_no_probabilities
from ensemble.prepare import Prepared, scores_make_sense
from ensemble.report.terminal import ENSEMBLE_ROW
from ensemble.rundir import RunDir, atomic_path
from ensemble.state import MemberState
from ensemble.store import MemberWork, file_sha256, seal
from ensemble.tables.csvfile import write_csv
from ensemble.tables.submission import sample_values, write_submission


@dataclass
class Results:
    """Scores by the member's name (and the ensemble's), and files by what they are, in the order they were made.

    ``merged_rows`` counts the rows that each merged member gave, ``filled_rows`` those that none did.
    """

    scores: dict[str, Score] = field(default_factory=dict)
    files: dict[str, Path] = field(default_factory=dict)
    merged_rows: dict[str, int] = field(default_factory=dict)
    filled_rows: int = 0


class Handover:
    """Writes a run's results.

    Args:
        works: by member name.
    """

    def __init__(self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork]) -> None:
        self._prepared = prepared
        self._rundir = rundir
        self._works = works
        self.results = Results()

    def write_predictions(self, state: MemberState, workers: Sequence[Mapping[str, Any]]) -> None:
        """Gather a finished member's parts into its CSV, and seal it.

        Rows that could not be computed get equal probabilities.

        Args:
            workers: what its workers did, for the seal.

        Raises:
            MergeError: a row is missing.
            WriteError: the disk is full or the like.
        """
        name, work = state.plan.name, self._works[state.plan.name]
        path, what = self._rundir.predictions(name), f"predictions of {name}"
        if work.is_sealed:
            self.results.files[what] = path
            return
        values = self._gathered(work)
        missing = np.setdiff1d(np.flatnonzero(np.isnan(values).any(axis=1)), list(state.bad_rows))
        if len(missing):
            shown = ", ".join(f"row {row + 1}" for row in missing[:3])
            raise MergeError(
                f"{len(missing):,} rows are missing in its parts in {work.parts_dir} ({shown}), which have "
                "been removed or changed; run the same command again"
            )
        values[list(state.bad_rows)] = self._even(name)
        sha256 = self._write_probabilities(path, values)
        seal(self._rundir, work, sha256, state.bad_rows, workers, state.plan.work * state.computed_cost)
        work.is_sealed = True
        self.results.files[what] = path

    def merge(self, members: Sequence[MemberState]) -> None:
        """Average the members' values, score them where the truth is known, write ensemble and submission.

        A row that some of them did not reach is the mean of the others; one that none reached is filled in.

        Args:
            members: those to merge, finished or not; none of them, and every row is filled in.

        Raises:
            MergeError: the CSVs do not fit together.
            WriteError: the disk is full or the like.
        """
        self.results.scores.clear()  # those of a first submission
        self.results.merged_rows.clear()
        table = self._prepared.table
        weights = [state.plan.model.weight for state in members]
        if members and any(weights):
            merged = weighted_mean(weights, self._values(members))
        else:
            merged = np.full((table.rows, len(self._prepared.config.labels)), np.nan, order="F")
        self.results.filled_rows = self._fill(merged)
        if missing := int(np.isnan(merged[:, 0]).sum()):
            raise MergeError(
                f"{missing:,} rows have no probabilities of any member; run the same command again"
            )
        if self._truth is not None and members:
            self.results.scores[ENSEMBLE_ROW] = score(merged, self._truth)
        self._write_probabilities(self._rundir.ensemble, merged)
        self.results.files["ensemble"] = self._rundir.ensemble
        self._submit(merged)

    @property
    def _truth(self) -> npt.NDArray[np.int64] | None:
        prepared = self._prepared
        return prepared.table.truth if scores_make_sense(prepared.checkpoints) else None

    def _values(self, members: Sequence[MemberState]) -> Iterator[npt.NDArray[np.float64]]:
        config, table = self._prepared.config, self._prepared.table
        for state in members:
            name = state.plan.name
            work = self._works[name]
            path = self._rundir.predictions(name) if work.is_sealed else work.parts_dir
            if work.is_sealed:
                values = read_predictions(path, config.data.id_column, config.labels, table.ids)
            else:
                values = self._gathered(work)
                if self._prepared.config.on_bad_row == "uniform":
                    values[list(state.bad_rows)] = self._even(name)
            activation = self._prepared.checkpoints[name].activation
            refuse_no_probabilities(str(path), values, activation, table.ids)
            reached = table.rows - int(np.isnan(values[:, 0]).sum())
            self.results.merged_rows[name] = reached
            if self._truth is not None and reached == table.rows:
                self.results.scores[name] = score(values, self._truth)
            yield values
            del values  # before the next one is read

    def _gathered(self, work: MemberWork) -> npt.NDArray[np.float64]:
        return gather_parts(work.parts(), self._prepared.table.rows, len(self._prepared.config.labels))

    def _even(self, member: str) -> float:
        labels = len(self._prepared.config.labels)
        return 0.5 if self._prepared.checkpoints[member].activation == "sigmoid" else 1 / labels

    def _fill(self, merged: npt.NDArray[np.float64]) -> int:
        config, sample = self._prepared.config, self._prepared.sample
        if config.time_limit is None or not np.isnan(merged[:, 0]).any():
            return 0
        given = None
        if config.fill == "sample" and sample is not None and config.submission is not None:
            given = sample_values(
                sample,
                config.submission.sample,
                self._prepared.table.ids,
                config.labels,
                config.submission.columns,
            )
        return fill_rows(merged, config.fill, given, self._even(config.models[0].name))

    def _write_probabilities(self, path: Path, values: npt.NDArray[np.float64]) -> str:
        """Write a CSV of ids and labels; returns its SHA-256."""
        config = self._prepared.config
        columns = [pa.array(values[:, label]) for label in range(values.shape[1])]
        with atomic_path(path) as temporary:
            write_csv(
                temporary, [config.data.id_column, *config.labels], [self._prepared.table.ids, *columns]
            )
            return file_sha256(temporary)

    def _submit(self, merged: npt.NDArray[np.float64]) -> None:
        config, sample = self._prepared.config, self._prepared.sample
        if config.submission is None or sample is None:
            return
        targets = [self._rundir.submission]
        # A trial on the first rows must not take the place of a real submission.
        if config.submission.path is not None and config.limit is None:
            config.submission.path.parent.mkdir(parents=True, exist_ok=True)
            targets.append(config.submission.path)
        for target in targets:
            with atomic_path(target) as temporary:
                write_submission(
                    sample,
                    self._prepared.table.ids,
                    merged,
                    config.labels,
                    config.submission.columns,
                    temporary,
                    config.limit is not None,
                )
        self.results.files["submission"] = targets[-1]
