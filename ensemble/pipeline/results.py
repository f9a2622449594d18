"""Write a run's results: a CSV for each member when it is done, then the merge, the scores and the submission.

The merge goes block by block.  This module decides where each member's rows come from, which rows are filled in and
how, and which files get the merged rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import MergeError
from ensemble.common.files import atomic_path, is_parquet
from ensemble.common.shards import file_sha256
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig
from ensemble.config.schema import FittingConfig
from ensemble.data.csv_file import write_csv
from ensemble.data.digests import truth_sha256
from ensemble.data.submission import Sample
from ensemble.jobs.job import jobs_of
from ensemble.members.base import OutputColumns
from ensemble.merging.blocks import MergedMember, RowCheck, Without, block_spans, merge_blocks
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods import METHODS, merge_method
from ensemble.merging.methods.base import Members
from ensemble.merging.post_process import RowRules
from ensemble.merging.scoring import CascadeScoring, Gain, Resamples, Scoring
from ensemble.pipeline.cascade import Cascades
from ensemble.pipeline.prepare import given_predictions
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.resume import MemberWork, demand_unchanged, mean_of_jobs, values_of, write_manifest
from ensemble.pipeline.reuse import write_bits
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import AllowedLabelsReport, Computation, Results
from ensemble.planning.plan import ModelPlan

# The ensemble's name among the scores.
ENSEMBLE_ROW: Final = "ensemble"
_Values = npt.NDArray[np.float64]


def predictions_title(member: str) -> str:
    return f"predictions of {member}"


class ResultWriter:
    """Write a run's results, and their counts and scores into ``results``."""

    def __init__(
        self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork], results: Results
    ) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._rundir = rundir
        self._works = works
        self._labels = prepared.config.labels
        self._resamples = Resamples(prepared.table.rows)
        self.cascades = Cascades(prepared, rundir, works)
        self.results = results

    def write_predictions(
        self, plan: ModelPlan, by_model: Computation | None = None, by_member: Computation | None = None
    ) -> None:
        """Gather a finished model's shards into a CSV for each job, with what the model computed in this run.

        Once all jobs of its member have theirs, their mean is the member's, with what all of its models computed.
        Rows that could not be computed get equal probabilities.

        Raises:
            MergeError: a row is missing, or the model's files changed since the run began.
        """
        name, work = plan.member, self._works[plan.member]
        if not work.is_complete:
            parts = {part.name: part for part in work.parts}
            demand_unchanged(self._prepared, plan, [parts[job.name] for job in plan.jobs])
            for job in plan.jobs:
                part = parts[job.name]
                if not part.is_complete:
                    self._complete(part, self._values_in_shards(name, part), by_model)
        if not work.is_complete:
            if not all(part.is_complete for part in work.parts):
                return
            self._complete(work, self._mean_of_complete(name), by_member)
        self.results.files[predictions_title(name)] = str(self._rundir.predictions(name).absolute())

    def _mean_of_complete(self, member: str) -> _Values:
        """Return the mean of a member's jobs, [rows, labels]; NaN in rows that the member is not to have."""
        work = self._works[member]
        work.bad_rows = work.bad_rows_of_jobs()
        values_of_jobs = [self._values_of_job(part) for part in work.jobs]
        mean = mean_of_jobs(values_of_jobs, self._weights(member))
        # An earlier run may have computed more rows of this job than the member needs now.
        for part, values in zip(work.jobs, values_of_jobs, strict=True):
            if self.cascades.own_rows_of(part.name) is None:
                mean[np.isnan(values).any(axis=1)] = np.nan
        return mean

    def _weights(self, member: str) -> list[float]:
        return [job.weight for job in jobs_of(self._prepared.models, member)]

    def _values_in_shards(self, member: str, work: MemberWork) -> _Values:
        """Return the values of a work that is done, [rows, labels]; NaN in rows that it need not have."""
        values = values_of(self._rundir, work, len(self._labels))
        selected = self.cascades.rows_of(work.name)
        values[list(work.bad_rows)] = self._prepared.even_value(member)
        is_missing = np.isnan(values).any(axis=1)
        if selected is not None:
            is_missing &= selected
        missing = np.flatnonzero(is_missing)
        if len(missing):
            shown = ", ".join(f"row {row + 1}" for row in missing[:3])
            raise MergeError(
                f"{plural(len(missing), 'row')} missing in its shards in {work.shards_dir} ({shown}): some "
                "were removed or changed; run the same command again"
            )
        return values

    def _values_of_job(self, work: MemberWork) -> _Values:
        """Return the values of a job, [rows, labels]; NaN in rows that its ``when`` leaves out."""
        values = values_of(self._rundir, work, len(self._labels))
        rows = self.cascades.own_rows_of(work.name)
        if rows is not None:
            values[~rows] = np.nan
        return values

    def write_given(self, plan: ModelPlan) -> None:
        """Write the predictions of a member that needs no worker, with their manifest."""
        columns = OutputColumns(self._config.data.id_column, self._labels)
        kind, inspected = plan.loaded.kind, self._prepared.of_models[plan.name]
        predictions = given_predictions(kind, inspected, self._prepared.table, columns)
        work = self._works[plan.member]
        demand_unchanged(self._prepared, plan, [work])
        self._complete(work, predictions.values)

    def _complete(self, work: MemberWork, values: _Values, computed: Computation | None = None) -> None:
        """Write the predictions and the manifest of a work; rows with NaN are left out."""
        is_present, ids = np.asarray(~np.isnan(values).any(axis=1)), self._prepared.table.ids
        if not is_present.all():
            ids, values = ids.filter(pa.array(is_present)), values[is_present]
        with atomic_path(self._rundir.predictions(work.name)) as temporary:
            names = [self._config.data.id_column, *self._labels]
            write_csv(temporary, names, [ids, *map(pa.array, values.T)])
            sha256 = file_sha256(temporary)
        work.is_done[:] = is_present
        write_manifest(self._rundir, work, sha256, computed)
        work.is_complete = True

    def merge(self, members: Sequence[MemberConfig]) -> None:
        """Merge the members' values, finished or not, score them if the truth is known, and write the files.

        A row that some of them did not reach is merged from the others; one that none reached is filled in.
        """
        prepared, config, results = self._prepared, self._config, self.results
        # A first submission may have left some.
        results.scores, results.gain, results.merged_rows, results.kept_submission = {}, None, {}, ""
        results.comparisons, results.job_rows, results.partial_rows = {}, {}, {}
        rules, allowed, path = prepared.post.rules, prepared.post.allowed, self._rundir.allowed_labels
        write_bits(self._rundir.rule_rows, None if rules is None else rules.rows)
        write_bits(path, None if allowed is None else allowed.flags.T)
        if allowed is not None:
            results.allowed_labels = AllowedLabelsReport(allowed.source, allowed.text, file_sha256(path))
        merged: Sequence[MergedMember] = ()
        scoring: Scoring | None = None
        gives_probabilities = METHODS.load(config.ensemble.method).gives_probabilities
        all_values = np.full((prepared.table.rows, len(self._labels)), np.nan, order="F")
        if any(member.has_weight for member in members):
            scoring = self._scoring(gives_probabilities)
            merged = self._merge_into(all_values, members)
        results.filled_rows = self._fill(all_values)
        if scoring is not None:
            for start, stop in block_spans(*all_values.shape):
                scoring.add(start, all_values[start:stop])
        self._write(all_values)
        if prepared.sample is not None and prepared.truth is not None:
            for column, answer in prepared.sample.answers.items():
                results.answers[column] = answer.scores(prepared.truth, all_values, prepared.activation)
        for member in merged:
            results.merged_rows[member.name] = member.check.reached
            if member.scoring is None or member.check.reached != prepared.table.rows:
                continue
            score = member.scoring.score()
            if score is not None:
                results.scores[member.name] = score
        score = None if scoring is None else scoring.score()
        results.fitted_on = None
        if scoring is not None and score is not None:
            # Rows that were filled in say nothing about the members.
            if results.filled_rows:
                score = replace(score, no_better_than_prior=False)
            elif gives_probabilities and len(merged) > 1:
                with_all_rows = [member for member in merged if member.name in results.scores]
                results.gain = _gain_over_best(scoring, with_all_rows)
            results.scores[ENSEMBLE_ROW] = score
            # If a member is left out, the weights are not those that were fitted.
            if len(members) == len(config.models):
                results.fitted_on = self._fitted_on()

    def _write(self, all_values: _Values) -> None:
        """Write ensemble and submission, and copy the submission to where the config wants it."""
        table, submission, path = self._prepared.table, self._config.submission, self._rundir.submission
        with atomic_path(self._rundir.ensemble) as temporary:
            names = [self._config.data.id_column, *self._labels]
            write_csv(temporary, names, [table.ids, *map(pa.array, all_values.T)])
        self.results.files["ensemble"] = str(self._rundir.ensemble.absolute())
        sample = self._prepared.sample
        if submission is None or sample is None:
            return
        with atomic_path(path) as temporary:
            sample.write(temporary, table.ids, all_values)
            self._keep_earlier(sample, path, temporary)
        # A trial on the first rows must not replace a real submission.
        if submission.path is not None and self._config.limit is None:
            submission.path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(submission.path) as temporary:
                if is_parquet(submission.path):
                    sample.write(temporary, table.ids, all_values, as_parquet=True)
                else:
                    shutil.copyfile(path, temporary)
                self._keep_earlier(sample, submission.path, temporary)
            path = submission.path
        self.results.files["submission"] = str(path.absolute())

    def _keep_earlier(self, sample: Sample, path: Path, temporary: Path) -> None:
        """Put a submission that stands there in place of a new one in which no member has predicted a row."""
        table = self._prepared.table
        if self.results.filled_rows == table.rows and sample.is_in(path, table.ids):
            shutil.copyfile(path, temporary)  # of the new one only the time that it takes is needed
            text = "of an earlier run stays until a member has predicted a row; remove it for filled-in rows"
            self.results.kept_submission = f"{shown_path(path)} {text}"

    def _fitted_on(self) -> FittingConfig | None:
        """Return what the weights were fitted on, if that is this table with these labels."""
        fitted, table, truth = self._config.fitted_on, self._prepared.table, self._prepared.truth
        if fitted is None or truth is None or fitted.rows != table.rows:
            return None
        if truth_sha256(table.ids, self._labels, truth) != fitted.sha256.lower():
            return None
        return fitted

    def _scoring(self, has_loss: bool = True) -> Scoring | None:
        truth, possible = self._prepared.truth, self._prepared.post.possible
        if truth is None:
            return None
        return Scoring(truth, self._prepared.activation, self._resamples, has_loss, possible)

    def _merge_into(self, all_values: _Values, members: Sequence[MemberConfig]) -> Sequence[MergedMember]:
        """Merge members into ``all_values``, [rows, labels], NaN where no member has a row, and return them."""
        table, config, truth = self._prepared.table, self._config, self._prepared.truth
        names = tuple(member.name for member in members)
        activations = tuple(self._prepared.inspected[name].activation for name in names)
        merged: list[MergedMember] = []
        for member, activation in zip(members, activations, strict=True):
            name, work = member.name, self._works[member.name]
            source = self._rundir.predictions(name) if work.is_complete else work.shards_dir
            has_all_rows = work.is_complete and work.is_done.all() and self.cascades.rows_of(name) is None
            merged.append(
                MergedMember(
                    name=name,
                    weight=member.weight,
                    values=self._values_to_merge(name),
                    check=RowCheck(str(source), activation, table.ids, may_lack_rows=not has_all_rows),
                    scoring=self._scoring(),
                    calibrate=calibrator(member.calibration, activation, self._labels),
                    ruled=None if self._prepared.post.rules is None else self._scoring(),
                )
            )
        facts = Members(names, activations, self._labels, tuple(member.weight for member in members))
        method = merge_method(config.ensemble, facts)
        # The ensemble without a member with ``when``, by the member's number.
        without = {
            number: Without(
                merge_method(config.ensemble, facts),
                CascadeScoring(truth, self._prepared.activation, self._resamples),
            )
            for number, name in enumerate(names)
            if truth is not None and method.gives_probabilities and self.cascades.rows_of(name) is not None
        }
        blocks = merge_blocks(
            method, merged, table.ids, table.text_bytes, self._prepared.post, self._exclusive, without
        )
        for start, values in blocks:
            all_values[start : start + len(values)] = values
        for number, ensemble in without.items():
            comparison = ensemble.scoring.result()
            if comparison is not None:
                self.results.comparisons[names[number]] = comparison
        return merged

    def _values_to_merge(self, name: str) -> _Values:
        """Return the values of the rows that a member is to have, [rows, labels]; NaN in the others."""
        work, selected = self._works[name], self.cascades.rows_of(name)
        if work.is_complete:
            values = values_of(self._rundir, work, len(self._labels))
            is_merged = None if selected is None else selected[work.is_done]
            has_others = is_merged is not None and not is_merged.all()
            write_bits(self._rundir.merged_rows(name), is_merged if has_others else None)
        else:
            parts = [self._values_of_job(part) for part in work.parts]
            if self._config.on_bad_row == "uniform":
                for part, of_job in zip(work.parts, parts, strict=True):
                    of_job[list(part.bad_rows)] = self._prepared.even_value(name)
            if work.jobs:
                is_present = np.array([~np.isnan(of_job[:, 0]) for of_job in parts])
                is_missing = ~is_present
                for part, missing in zip(work.jobs, is_missing, strict=True):
                    rows = self.cascades.own_rows_of(part.name)
                    if rows is not None:
                        missing &= rows
                is_partial = is_present.any(axis=0) & is_missing.any(axis=0)
                self.results.job_rows |= {
                    part.name: int(rows) for part, rows in zip(work.jobs, is_present.sum(axis=1), strict=True)
                }
                self.results.partial_rows[name] = int(is_partial.sum())
            values = mean_of_jobs(parts, self._weights(name))
        if selected is not None:
            values[~selected] = np.nan
        return values

    @property
    def _exclusive(self) -> bool:
        method = METHODS.load(self._config.ensemble.method)
        return RowRules.are_exclusive(self._prepared.activation, method)

    def _fill(self, all_values: _Values) -> int:
        """Fill in the rows that hold NaN, and return how many; without a time limit they are an error."""
        table, sample = self._prepared.table, self._prepared.sample
        is_empty = np.isnan(all_values[:, 0])
        if not is_empty.any():
            return 0
        if self._config.time_limit is None:
            missing = np.flatnonzero(is_empty)
            raise MergeError(
                f"no member with a weight has probabilities for {plural(len(missing), 'row')}, the first is id "
                f"{table.ids[int(missing[0])]}; run the same command again, or add a member that has them"
            )
        sample_values: _Values | None = None
        if self._config.fill == "sample" and sample is not None:
            sample_values = sample.values(table.ids)
        even = self._prepared.even_value(self._config.models[0].name)
        filled = fill_rows(all_values, self._config.fill, sample_values, even)
        self._prepared.post.merged(0, all_values, self._exclusive, is_empty)
        return filled


def _gain_over_best(scoring: Scoring, members: Sequence[MergedMember]) -> Gain | None:
    """Return the gain over the member with the least loss; None if there are no members."""
    scorings = [(member.ruled or member.scoring, member.name) for member in members]
    losses = [(other.loss, other, name) for other, name in scorings if other is not None]
    if not losses:
        return None
    _, best, name = min(losses, key=itemgetter(0))
    return scoring.gain_over(best, name)


def fill_rows(
    values: _Values, rule: Literal["uniform", "prior", "sample"], sample_values: _Values | None, even: float
) -> int:
    """Fill the rows that hold NaN, in place, and return how many; the others stay as they are, bit for bit.

    ``uniform`` gives ``even`` in each column, ``prior`` the mean of the other rows (``even`` if there are none),
    ``sample`` the row of ``sample_values``; values are float64 [rows, labels].
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
