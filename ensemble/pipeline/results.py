"""What a run hands over: a CSV per member as soon as it is done, then the merge, the scores and the submission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import MergeError
from ensemble.common.files import atomic_path
from ensemble.common.shards import file_sha256
from ensemble.common.text import plural
from ensemble.data.csv_file import write_csv
from ensemble.members.base import OutputColumns
from ensemble.members.registry import member_kind
from ensemble.pipeline.merge import Merge, Results
from ensemble.pipeline.resume import MemberWork, demand_unchanged, write_manifest
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import WorkerReport
from ensemble.pipeline.validate import Prepared, given_predictions
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.state import MemberState


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
        """Gather a finished member's shards into its CSV, and complete it with its manifest.

        Rows that could not be computed get equal probabilities.

        Args:
            workers: what its workers did, for the manifest.

        Raises:
            MergeError: a row is missing, or the checkpoint's files changed since the run began.
            WriteError: the disk is full or the like.
        """
        name, work = state.plan.name, self._works[state.plan.name]
        if not work.is_complete:
            values = work.values(len(self._prepared.config.labels))
            missing = np.setdiff1d(np.flatnonzero(np.isnan(values).any(axis=1)), list(state.bad_rows))
            if len(missing):
                shown = ", ".join(f"row {row + 1}" for row in missing[:3])
                raise MergeError(
                    f"{plural(len(missing), 'row')} missing in its shards in {work.shards_dir} ({shown}): some "
                    "were removed or changed; run the same command again"
                )
            values[list(state.bad_rows)] = self._prepared.even_value(name)
            self._complete(state.plan, values, state.bad_rows, workers, state.plan.work * state.computed_cost)
        self.results.files[f"predictions of {name}"] = self._rundir.predictions(name)

    def write_given(self, member: MemberPlan) -> None:
        """Write the predictions of a member that needs no worker, with their manifest.

        Raises:
            DataError: they cannot be had, or are no probabilities.
            MergeError: a file that they are made of changed since the run began.
            WriteError: the disk is full or the like.
        """
        prepared, work = self._prepared, self._works[member.name]
        columns = OutputColumns(prepared.config.data.id_column, prepared.config.labels)
        inspected = prepared.inspected[member.name]
        given = given_predictions(member_kind(member.model), inspected, prepared.table, columns)
        self._complete(member, given.values, {}, [], 0.0)
        work.is_new = True

    def _complete(
        self,
        member: MemberPlan,
        values: npt.NDArray[np.float64],
        bad_rows: Mapping[int, str],
        workers: Sequence[WorkerReport],
        worked: float,
    ) -> None:
        config, work = self._prepared.config, self._works[member.name]
        demand_unchanged(self._prepared, member.model, work)
        columns = [self._prepared.table.ids, *map(pa.array, values.T)]
        with atomic_path(self._rundir.predictions(member.name)) as temporary:
            write_csv(temporary, [config.data.id_column, *config.labels], columns)
            sha256 = file_sha256(temporary)
        write_manifest(self._rundir, work, sha256, bad_rows, workers, worked)
        work.is_done[:] = True
        work.is_complete = True

    def merge(self, members: Sequence[MemberState]) -> None:
        """Merge the members' values, score them where the truth is known, write ensemble and submission.

        A row that some of them did not reach is merged from the others; one that none reached is filled in.

        Args:
            members: those to merge, finished or not; none of them, and every row is filled in.

        Raises:
            MergeError: the CSVs do not fit together.
            WriteError: the disk is full or the like.
        """
        self.results = Results(files=self.results.files)  # nothing of a first submission but its files
        Merge(self._prepared, self._rundir, self._works, self.results).write(members)
