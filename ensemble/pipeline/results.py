"""The results of a run: a CSV for each member as soon as it is done, then the merge, the scores and the submission.

The merge goes block by block.  This module decides where each member's rows come from, which rows are filled in and
how, and which files the merged rows go to.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import DataError, MergeError
from ensemble.common.files import atomic_path
from ensemble.common.shards import file_sha256
from ensemble.common.text import plural
from ensemble.data.csv_file import write_csv
from ensemble.data.digests import truth_sha256
from ensemble.data.predictions_csv import read_predictions
from ensemble.members.base import OutputColumns
from ensemble.members.registry import member_kind
from ensemble.merging.blocks import MergedMember, Without, block_spans, merge_blocks
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods import METHODS, merge_method
from ensemble.merging.methods.base import Members
from ensemble.merging.row_checks import RowCheck
from ensemble.merging.scoring import CascadeComparison, CascadeScoring, Gain, Resamples, Score, Scoring
from ensemble.pipeline.prepare import given_predictions
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.resume import (
    MemberWork,
    demand_unchanged,
    mean_of_views,
    values_of,
    write_manifest,
)
from ensemble.pipeline.reuse import write_bits
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import Computation, FittedOn, WorkerReport
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.state import MemberState

# The ensemble's name among the scores.
ENSEMBLE_ROW: Final = "ensemble"
_Values = npt.NDArray[np.float64]


def predictions_title(member: str) -> str:
    return f"predictions of {member}"


@dataclass
class Results:
    """What came of a run.

    Attributes:
        scores: by member name, and of the ensemble.
        gain: of the ensemble over its best member; None if no member has all rows, or there is only one.
        files: by what they are, in the order in which they were made.
        merged_rows: how many rows each merged member gave.
        filled_rows: how many rows no member gave.
        comparisons: of the ensemble with and without each member with ``when``.
        view_rows: how many rows each view has, of members that were merged before they were complete.
        partial_rows: how many rows of these members are the mean of some of their views only.
    """

    scores: dict[str, Score] = field(default_factory=dict)
    gain: Gain | None = None
    files: dict[str, Path] = field(default_factory=dict)
    merged_rows: dict[str, int] = field(default_factory=dict)
    filled_rows: int = 0
    comparisons: dict[str, CascadeComparison] = field(default_factory=dict)
    view_rows: dict[str, tuple[int, ...]] = field(default_factory=dict)
    partial_rows: dict[str, int] = field(default_factory=dict)
    fitted_on: FittedOn | None = None


class ResultWriter:
    """Writes a run's results, and what they count and score into ``results``."""

    def __init__(
        self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork], results: Results
    ) -> None:
        # Returns the rows that a member is to have, bool [rows]; None: all.
        self.rows_of: Callable[[str], npt.NDArray[np.bool_] | None] = lambda name: None
        self._prepared = prepared
        self._config = prepared.config
        self._rundir = rundir
        self._works = works
        self._labels = prepared.config.labels
        self._resamples = Resamples(prepared.table.rows)
        self.results = results

    def write_predictions(
        self, state: MemberState, workers: Sequence[WorkerReport], computed: Computation | None = None
    ) -> None:
        """Gather a finished member's shards into its CSV, and write its manifest with what the workers did.

        Rows that could not be computed get equal probabilities.

        Raises:
            MergeError: a row is missing, or the checkpoint's files changed since the run began.
        """
        name, member_work = state.plan.name, self._works[state.plan.name]
        if not member_work.is_complete:
            demand_unchanged(self._prepared, state.plan.model, member_work)
            member_work.workers = tuple(workers)
            member_work.work_bytes = state.plan.work * state.computed_cost
            for view, work in enumerate(member_work.parts):
                if not work.is_complete:
                    bad_rows = member_work.rows_of_view(state.bad_rows, view)
                    self._complete_from_shards(name, work, bad_rows, computed)
        if not member_work.is_complete:
            member_work.bad_rows = member_work.bad_rows_of_views(state.bad_rows)
            member_work.computed = computed
            views = [values_of(self._rundir, view, len(self._labels)) for view in member_work.views]
            mean = mean_of_views(views, member_work.weights)
            # From an earlier run, a view can have more rows than its member is to have now.
            mean[np.isnan(views).any(axis=(0, 2))] = np.nan
            self._complete(member_work, mean)
        self.results.files[predictions_title(name)] = self._rundir.predictions(name)

    def _complete_from_shards(
        self, member: str, work: MemberWork, bad_rows: dict[int, str], computed: Computation | None
    ) -> None:
        values, selected = work.values(len(self._labels)), self.rows_of(member)
        is_missing = np.isnan(values).any(axis=1)
        if selected is not None:
            is_missing &= selected
        missing = np.setdiff1d(np.flatnonzero(is_missing), list(bad_rows))
        if len(missing):
            shown = ", ".join(f"row {row + 1}" for row in missing[:3])
            raise MergeError(
                f"{plural(len(missing), 'row')} missing in its shards in {work.shards_dir} ({shown}): some "
                "were removed or changed; run the same command again"
            )
        values[list(bad_rows)] = self._prepared.even_value(member)
        work.bad_rows, work.computed = bad_rows, computed
        self._complete(work, values)

    def write_given(self, member: MemberPlan) -> None:
        """Write the predictions of a member that needs no worker, with their manifest."""
        columns = OutputColumns(self._config.data.id_column, self._labels)
        kind, inspected = member_kind(member.model), self._prepared.inspected[member.name]
        predictions = given_predictions(kind, inspected, self._prepared.table, columns)
        work = self._works[member.name]
        demand_unchanged(self._prepared, member.model, work)
        self._complete(work, predictions.values)
        work.is_new = True

    def _complete(self, work: MemberWork, values: _Values) -> None:
        """Write the predictions and the manifest of a work; rows with NaN are left out."""
        is_present, ids = np.asarray(~np.isnan(values).any(axis=1)), self._prepared.table.ids
        if not is_present.all():
            ids, values = ids.filter(pa.array(is_present)), values[is_present]
        with atomic_path(self._rundir.predictions(work.member)) as temporary:
            names = [self._config.data.id_column, *self._labels]
            write_csv(temporary, names, [ids, *map(pa.array, values.T)])
            sha256 = file_sha256(temporary)
        write_manifest(self._rundir, work, sha256, is_present)
        work.is_done[:] = is_present
        work.is_complete = True

    def merge(self, members: Sequence[MemberState]) -> None:
        """Merge the members' values, finished or not, score them if the truth is known, and write the files.

        A row that some of them did not reach is merged from the others; one that none reached is filled in.

        Raises:
            MergeError: the CSVs do not fit together, or rows are missing.
        """
        if not any(state.plan.model.has_weight for state in members):
            members = ()
        results = self.results
        # A first submission may have left some.
        results.scores, results.gain, results.merged_rows, results.filled_rows = {}, None, {}, 0
        results.comparisons, results.view_rows, results.partial_rows = {}, {}, {}
        rules = self._prepared.rules
        write_bits(self._rundir.rule_rows, None if rules is None else rules.rows)
        merged: list[MergedMember] = []
        gives_probabilities = METHODS.load(self._config.ensemble.method).gives_probabilities
        scoring = self._scoring(gives_probabilities) if members else None
        all_values = self._merged_values(members, merged)
        self._fill(all_values)
        if scoring is not None:
            for start, stop in block_spans(*all_values.shape):
                scoring.add(start, all_values[start:stop])
        self._write(all_values)
        for member in merged:
            results.merged_rows[member.name] = member.check.reached
            if member.scoring is None or member.check.reached != self._prepared.table.rows:
                continue
            score = member.scoring.score()
            if score is not None:
                results.scores[member.name] = score
        score = None if scoring is None else scoring.score()
        if scoring is not None and score is not None:
            # Rows that were filled in say nothing about the members.
            if results.filled_rows:
                score = replace(score, no_better_than_prior=False)
            elif gives_probabilities and len(merged) > 1:
                with_all_rows = [member for member in merged if member.name in results.scores]
                results.gain = _gain_over_best(scoring, with_all_rows)
            results.scores[ENSEMBLE_ROW] = score
        # If a member is left out, the weights are not those that were fitted.
        has_all_members = len(members) == len(self._config.models)
        results.fitted_on = self._fitted_on if has_all_members and ENSEMBLE_ROW in results.scores else None

    def _write(self, all_values: _Values) -> None:
        """Write ensemble and submission, and copy the submission to where the config wants it."""
        table, submission, path = self._prepared.table, self._config.submission, self._rundir.submission
        with atomic_path(self._rundir.ensemble) as temporary:
            names = [self._config.data.id_column, *self._labels]
            write_csv(temporary, names, [table.ids, *map(pa.array, all_values.T)])
        self.results.files["ensemble"] = self._rundir.ensemble
        sample = self._prepared.sample
        if submission is None or sample is None:
            return
        with atomic_path(path) as temporary:
            sample.write(temporary, table.ids, all_values)
        # A trial on the first rows must not replace a real submission.
        if submission.path is not None and self._config.limit is None:
            submission.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(submission.path) as temporary:
                shutil.copyfile(path, temporary)
            path = submission.path
        self.results.files["submission"] = path

    @cached_property
    def _fitted_on(self) -> FittedOn | None:
        """What the weights were fitted on, if that is this table with these labels."""
        fitted, table, truth = self._config.fitted_on, self._prepared.table, self._prepared.truth
        if fitted is None or truth is None or fitted.rows != table.rows:
            return None
        if truth_sha256(table.ids, self._labels, truth) != fitted.sha256.lower():
            return None
        return FittedOn(**fitted.model_dump())

    def _scoring(self, has_loss: bool = True) -> Scoring | None:
        truth = self._prepared.truth
        if truth is None:
            return None
        return Scoring(truth, self._prepared.activation, self._resamples, has_loss)

    def _merged_values(self, members: Sequence[MemberState], merged: list[MergedMember]) -> _Values:
        """Return the merged rows, [rows, labels], NaN where no member has them; ``merged`` takes the members."""
        table, config = self._prepared.table, self._config
        shape = table.rows, len(self._labels)
        if not members:
            all_values = np.full(shape, np.nan, order="F")
            self._apply_rules(0, all_values)
            return all_values
        names = tuple(state.plan.name for state in members)
        values_of_members = [self._values_to_merge(state) for state in members]
        activations = tuple(self._prepared.inspected[name].activation for name in names)
        rules = None if self._prepared.rules is None else self._apply_rules

        def open_members() -> list[MergedMember]:
            merged.clear()
            for state, values, activation in zip(members, values_of_members, activations, strict=True):
                name, model, work = state.plan.name, state.plan.model, self._works[state.plan.name]
                source = self._rundir.predictions(name) if work.is_complete else work.shards_dir
                has_all_rows = work.is_complete and work.is_done.all() and self.rows_of(name) is None
                check = RowCheck(str(source), activation, table.ids, may_lack_rows=not has_all_rows)
                calibrate = calibrator(model.calibration, activation, self._labels)
                scoring, ruled = self._scoring(), None if rules is None else self._scoring()
                merged.append(
                    MergedMember(name, model.weight, values, check, scoring, calibrate, rules, ruled)
                )
            return merged

        weights = tuple(state.plan.model.weight for state in members)
        facts = Members(names, activations, self._labels, weights)
        method = merge_method(config.ensemble, facts)
        truth = self._prepared.truth
        # The ensemble without a member with ``when``, by the member's number.
        without: dict[int, Without] = {}
        if truth is not None and method.gives_probabilities:
            for number, name in enumerate(names):
                if self.rows_of(name) is not None:
                    cascade_scoring = CascadeScoring(truth, self._prepared.activation, self._resamples)
                    without[number] = Without(merge_method(config.ensemble, facts), cascade_scoring)
        all_values = np.empty(shape, order="F")
        for start, values in merge_blocks(method, open_members, table.ids, table.text_bytes, without, rules):
            all_values[start : start + len(values)] = values
        for number, ensemble in without.items():
            comparison = ensemble.scoring.result()
            if comparison is not None:
                self.results.comparisons[names[number]] = comparison
        return all_values

    def _values_to_merge(self, state: MemberState) -> _Values:
        """Return the values of the rows that a member is to have, [rows, labels]; NaN in the others."""
        name, work, table = state.plan.name, self._works[state.plan.name], self._prepared.table
        selected = self.rows_of(name)
        if work.is_complete:
            is_merged = np.ones(int(work.is_done.sum()), np.bool_)
            if selected is not None:
                is_merged = selected[work.is_done]
            write_bits(self._rundir.merged_rows(name), None if is_merged.all() else is_merged)
            may_lack = not work.is_done.all()
            try:
                file = read_predictions(
                    self._rundir.predictions(name), self._config.data.id_column, self._labels, may_lack
                )
                values, _ = file.join(table.ids, may_lack=may_lack)
            except DataError as error:
                raise MergeError(error.problems) from error
        else:
            values = self._values_so_far(state)
        if selected is not None:
            values[~selected] = np.nan
        return values

    def _values_so_far(self, state: MemberState) -> _Values:
        """Return the values of a member that is not complete, [rows, labels]; NaN in rows that it does not have."""
        name, work = state.plan.name, self._works[state.plan.name]
        parts = [values_of(self._rundir, part, len(self._labels)) for part in work.parts]
        if self._config.on_bad_row == "uniform":
            for view, values in enumerate(parts):
                values[list(work.rows_of_view(state.bad_rows, view))] = self._prepared.even_value(name)
        if work.views:
            is_present = np.array([~np.isnan(values[:, 0]) for values in parts])
            is_partial = is_present.any(axis=0) & ~is_present.all(axis=0)
            self.results.view_rows[name] = tuple(is_present.sum(axis=1).tolist())
            self.results.partial_rows[name] = int(is_partial.sum())
        return mean_of_views(parts, work.weights)

    def _apply_rules(self, start: int, values: _Values, only: npt.NDArray[np.bool_] | None = None) -> None:
        """Change a block's rows by the config's rules, in place."""
        rules = self._prepared.rules
        if rules is not None:
            method = METHODS.load(self._config.ensemble.method)
            rules.apply(start, values, rules.are_exclusive(self._prepared.activation, method), only)

    def _fill(self, all_values: _Values) -> None:
        """Fill in the rows that hold NaN under a time limit, by the config's ``fill``.

        Raises:
            MergeError: there is no time limit, and such rows.
        """
        rule, table, sample = self._config.fill, self._prepared.table, self._prepared.sample
        is_empty = np.isnan(all_values[:, 0])
        if not is_empty.any():
            return
        if self._config.time_limit is None:
            missing = np.flatnonzero(is_empty)
            raise MergeError(
                f"no member with a weight has probabilities for {plural(len(missing), 'row')}, the first is id "
                f"{table.ids[int(missing[0])]}; run the same command again, or add a member that has them"
            )
        sample_values: _Values | None = None
        if rule == "sample" and sample is not None:
            sample_values = sample.values(table.ids)
        even = self._prepared.even_value(self._config.models[0].name)
        self.results.filled_rows = fill_rows(all_values, rule, sample_values, even)
        self._apply_rules(0, all_values, is_empty)


def _gain_over_best(scoring: Scoring, members: Sequence[MergedMember]) -> Gain | None:
    """Return the gain over the member with the least loss; None if there are no members."""
    scorings: dict[str, Scoring] = {}
    for member in members:
        member_scoring = member.ruled or member.scoring
        if member_scoring is not None:
            scorings[member.name] = member_scoring
    if not scorings:
        return None
    best = min(scorings, key=lambda name: scorings[name].loss)
    return scoring.gain_over(scorings[best], best)


def fill_rows(
    values: _Values,
    rule: Literal["uniform", "prior", "sample"],
    sample_values: _Values | None,
    even: float,
) -> int:
    """Fill the rows that hold NaN, in place, and return how many; the others stay as they are, bit for bit.

    Args:
        values: float64 [rows, labels].
        rule: ``uniform``: ``even`` in each column; ``prior``: the mean of the other rows, ``even`` if there are
            none; ``sample``: the row of ``sample_values``, [rows, labels].
    """
    is_empty = np.isnan(values).any(axis=1)
    if rule == "sample" and sample_values is not None:
        values[is_empty] = sample_values[is_empty]
    elif rule == "prior" and not is_empty.all():
        # Column by column, so that the rows need not be copied.
        values[is_empty] = [column.mean(where=~is_empty) for column in values.T]
    else:
        values[is_empty] = even
    return int(is_empty.sum())
