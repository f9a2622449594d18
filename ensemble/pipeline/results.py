"""What a run hands over: a CSV per member as soon as it is done, then the merge, the scores and the submission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import MergeError
from ensemble.common.files import atomic_path
from ensemble.common.shards import file_sha256, gather_parts
from ensemble.common.text import plural
from ensemble.data.csv_file import write_csv
from ensemble.members.base import OutputColumns
from ensemble.members.registry import member_kind
from ensemble.merging.metrics import Score
from ensemble.pipeline.merge import Merge, MergeInput
from ensemble.pipeline.resume import MemberWork, demand_unchanged, seal
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import WorkerReport
from ensemble.pipeline.validate import Prepared, given_predictions
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.state import MemberState


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

    def write_predictions(self, state: MemberState, workers: Sequence[WorkerReport]) -> None:
        """Gather a finished member's parts into its CSV, and seal it.

        Rows that could not be computed get equal probabilities.

        Args:
            workers: what its workers did, for the seal.

        Raises:
            MergeError: a row is missing, or the checkpoint's files changed since the run began.
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
                f"{plural(len(missing), 'row')} missing in its parts in {work.parts_dir} ({shown}): some were "
                "removed or changed; run the same command again"
            )
        values[list(state.bad_rows)] = self._even(name)
        demand_unchanged(self._prepared, state.plan.model, work)
        sha256 = self._write_probabilities(path, values)
        seal(self._rundir, work, sha256, state.bad_rows, workers, state.plan.work * state.computed_cost)
        work.is_sealed = True
        self.results.files[what] = path

    def write_given(self, member: MemberPlan) -> None:
        """Write and seal the predictions of a member that needs no worker.

        Raises:
            DataError: they cannot be had, or are no probabilities.
            MergeError: a file that they are made of changed since the run began.
            WriteError: the disk is full or the like.
        """
        prepared, name, work = self._prepared, member.name, self._works[member.name]
        columns = OutputColumns(prepared.config.data.id_column, prepared.config.labels)
        given = given_predictions(
            member_kind(member.model), prepared.inspected[name], prepared.table, columns
        )
        demand_unchanged(prepared, member.model, work)
        sha256 = self._write_probabilities(self._rundir.predictions(name), given.values)
        seal(self._rundir, work, sha256, {}, [], 0.0)
        work.is_done[:] = True
        work.is_sealed = True

    def merge(self, members: Sequence[MemberState]) -> None:
        """Merge the members' values, score them where the truth is known, write ensemble and submission.

        A row that some of them did not reach is merged from the others; one that none reached is filled in.

        Args:
            members: those to merge, finished or not; none of them, and every row is filled in.

        Raises:
            MergeError: the CSVs do not fit together.
            WriteError: the disk is full or the like.
        """
        self.results.scores, self.results.merged_rows = {}, {}  # those of a first submission
        even = self._even(self._prepared.config.models[0].name)
        merge = Merge(self._prepared, self._rundir, even)
        merged = merge.write([self._input(state) for state in members])
        self.results.scores, self.results.merged_rows = merged.scores, merged.rows
        self.results.filled_rows = merged.filled_rows
        self.results.files.update(merged.files)

    def _input(self, state: MemberState) -> MergeInput:
        name = state.plan.name
        work, path = self._works[name], self._rundir.predictions(name)
        return MergeInput(
            name,
            state.plan.model.weight,
            path if work.is_sealed else None,
            lambda: self._unfinished(state),
            path if work.is_sealed else work.parts_dir,
        )

    def _unfinished(self, state: MemberState) -> npt.NDArray[np.float64]:
        values = self._gathered(self._works[state.plan.name])
        if self._prepared.config.on_bad_row == "uniform":
            values[list(state.bad_rows)] = self._even(state.plan.name)
        return values

    def _gathered(self, work: MemberWork) -> npt.NDArray[np.float64]:
        return gather_parts(work.parts(), self._prepared.table.rows, len(self._prepared.config.labels))

    def _even(self, member: str) -> float:
        labels = len(self._prepared.config.labels)
        return 0.5 if self._prepared.inspected[member].activation == "sigmoid" else 1 / labels

    def _write_probabilities(self, path: Path, values: npt.NDArray[np.float64]) -> str:
        """Write a CSV of ids and labels; returns its SHA-256."""
        config = self._prepared.config
        columns = [pa.array(column) for column in values.T]
        with atomic_path(path) as temporary:
            write_csv(
                temporary, [config.data.id_column, *config.labels], [self._prepared.table.ids, *columns]
            )
            return file_sha256(temporary)
