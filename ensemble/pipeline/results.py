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

from ensemble.common.errors import DataError, MergeError
from ensemble.common.files import atomic_path, is_parquet
from ensemble.common.shards import file_sha256, write_bits
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig
from ensemble.config.schema import FittingConfig
from ensemble.data.answers import scored_together
from ensemble.data.csv_file import write_csv
from ensemble.data.digests import truth_sha256
from ensemble.data.submission import Sample
from ensemble.jobs.job import Model, jobs_of
from ensemble.jobs.work import Computation, Work, values_of, write_manifest
from ensemble.members.base import OutputColumns
from ensemble.merging.blocks import MergedMember, RowCheck, Without, mean_of_jobs, merge_blocks
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods import METHODS, merge_method
from ensemble.merging.methods.base import Members, block_spans
from ensemble.merging.metrics import answer_scores
from ensemble.merging.post_process import RowRules
from ensemble.merging.scoring import CascadeScoring, Gain, Resamples, Score, Scoring
from ensemble.pipeline.prepare import given_predictions
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.resume import MemberWork, demand_unchanged
from ensemble.pipeline.run_dir import RunDir
from ensemble.pipeline.run_report import AllowedLabelsReport, Results
from ensemble.pipeline.selection import Selections

# The ensemble's name among the scores.
ENSEMBLE_ROW: Final = "ensemble"
_Values = npt.NDArray[np.float64]


def predictions_title(member: str) -> str:
    return f"predictions of {member}"


class ResultWriter:
    """Write a run's results, and their counts and scores into ``results``.

    ``works`` are by member; ``selections`` say which rows of their jobs count.
    """

    def __init__(
        self,
        prepared: Prepared,
        rundir: RunDir,
        works: Mapping[str, MemberWork],
        selections: Selections,
        results: Results,
    ) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._rundir = rundir
        self._works = works
        self._labels = prepared.config.labels
        self._resamples = Resamples(prepared.table.rows)
        self._selections = selections
        self.results = results

    def write_predictions(
        self, model: Model, by_model: Computation | None = None, by_member: Computation | None = None
    ) -> None:
        """Gather a finished model's shards into a CSV for each job, with what the model computed in this run.

        Once all jobs of its member have theirs, their mean is the member's, with what all of its models computed.
        Rows that could not be computed get equal probabilities.

        Raises:
            MergeError: a row is missing, or the model's files changed since the run began.
        """
        member = self._works[model.member]
        if not member.is_complete:
            works = [member.job(job.name) for job in model.jobs]
            demand_unchanged(self._prepared, model, works)
            for work in works:
                if not work.is_complete:
                    self._complete(work, self._values_in_shards(work, model.member), by_model)
            if not all(job.is_complete for job in member.jobs):
                return
            if member.mean is not None:
                member.mean.bad_rows = member.bad_rows
                self._complete(member.mean, self._mean(member), by_member)
        path = str(self._rundir.predictions(member.name).absolute())
        self.results.files[predictions_title(member.name)] = path

    def _mean(self, member: MemberWork) -> _Values:
        """Return the mean of a member's jobs, [rows, labels], as far as they are done; NaN in rows without any."""
        weights = [job.weight for job in jobs_of(self._prepared.models, member.name)]
        values = [self._selections.values_of(job.name) for job in member.jobs]
        if member.mean is not None:
            self._count_jobs(member, np.array([~np.isnan(of_job[:, 0]) for of_job in values]))
        return mean_of_jobs(values, weights)

    def _values_in_shards(self, work: Work, member: str) -> _Values:
        """Return the values of a job that is done, [rows, labels]; NaN in rows that it need not have."""
        values = values_of(self._rundir, work, len(self._labels))
        selected = self._selections.rows_of(work.name)
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

    def write_given(self, model: Model) -> None:
        """Write the predictions of a member that needs no worker, with their manifest."""
        columns = OutputColumns(self._config.data.id_column, self._labels)
        inspected = self._prepared.of_models[model.name]
        predictions = given_predictions(model.kind, inspected, self._prepared.table, columns)
        work = self._works[model.member].predictions
        demand_unchanged(self._prepared, model, [work])
        self._complete(work, predictions.values)

    def _complete(self, work: Work, values: _Values, computed: Computation | None = None) -> None:
        """Write the predictions and the manifest of a work; rows with NaN are left out."""
        is_present, ids = np.asarray(~np.isnan(values).any(axis=1)), self._prepared.table.ids
        if not is_present.all():
            ids, values = ids.filter(pa.array(is_present)), values[is_present]
        with atomic_path(self._rundir.predictions(work.name)) as temporary:
            names = [self._config.data.id_column, *self._labels]
            write_csv(temporary, names, [[ids, *map(pa.array, values.T)]])
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
        results.comparisons, results.job_rows, results.metric_remarks = {}, {}, ()
        partial_rows = results.partial_rows.items()
        results.partial_rows = {name: rows for name, rows in partial_rows if self._works[name].is_complete}
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
        if prepared.sample is not None and prepared.labelled is not None:
            for column, answer in scored_together(prepared.sample.answers).items():
                results.answers[column] = answer_scores(answer, prepared.labelled, all_values)
        for member in merged:
            results.merged_rows[member.name] = member.check.reached
            if member.scoring is None or member.check.reached != prepared.table.rows:
                continue
            values = member.values
            if prepared.metrics:
                values, activation = values.copy(order="K"), member.check.activation
                prepared.post.member(0, values, activation, member.calibrate)
            if score := self._with_metrics(member.scoring.score(), values):
                results.scores[member.name] = score
        score = None
        if scoring is not None:
            score = self._with_metrics(scoring.score(), all_values, gives_probabilities)
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

    def _with_metrics(self, score: Score | None, values: _Values, has_all: bool = True) -> Score | None:
        """Return the score with the config's metrics; merged ranks and votes have but some of them."""
        known, metrics, remarks = self._prepared.labelled, dict[str, float](), list[str]()
        for metric in self._prepared.metrics:
            if known is None or not (has_all or metric.kind in ("ranks", "own")):
                continue
            try:  # a metric of the user's may fail, and the results stand
                metrics[metric.name] = metric.value(known, values)
                partition = metric.partition(known, values)
                remarks += [] if partition is None else [f"{metric.name}: {partition.text}"]
            except DataError as error:
                remarks += error.problems
        self.results.metric_remarks = tuple(dict.fromkeys((*self.results.metric_remarks, *remarks)))
        if metrics and score is None:
            score = Score(None, None, len(values), prior_log_loss=None, no_better_than_prior=False)
        return score and replace(score, metrics=metrics)

    def _write(self, all_values: _Values) -> None:
        """Write ensemble and submission, and copy the submission to where the config wants it."""
        table, submission, path = self._prepared.table, self._config.submission, self._rundir.submission
        with atomic_path(self._rundir.ensemble) as temporary:
            names = [self._config.data.id_column, *self._labels]
            write_csv(temporary, names, [[table.ids, *map(pa.array, all_values.T)]])
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
        known = self._prepared.labelled
        return None if known is None else Scoring(known, self._resamples, has_loss)

    def _merge_into(self, all_values: _Values, members: Sequence[MemberConfig]) -> Sequence[MergedMember]:
        """Merge members into ``all_values``, [rows, labels], NaN where no member has a row, and return them."""
        table, config, known = self._prepared.table, self._config, self._prepared.labelled
        names = tuple(member.name for member in members)
        activations = tuple(self._prepared.inspected[name].activation for name in names)
        merged: list[MergedMember] = []
        for member, activation in zip(members, activations, strict=True):
            name, work = member.name, self._works[member.name].predictions
            source = self._rundir.predictions(name) if work.is_complete else work.shards_dir
            selected = self._selections.rows_of_member(name)
            has_all_rows = work.is_complete and work.is_done.all() and selected is None
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
                CascadeScoring(known, self._resamples),
            )
            for number, name in enumerate(names)
            if known is not None
            and method.gives_probabilities
            and self._selections.rows_of_member(name) is not None
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
        member, selected = self._works[name], self._selections.rows_of_member(name)
        if not member.is_complete:
            return self._mean(member)
        work = member.predictions
        is_merged = None if selected is None else selected[work.is_done]
        has_others = is_merged is not None and not is_merged.all()
        write_bits(self._rundir.merged_rows(name), is_merged if has_others else None)
        values = values_of(self._rundir, work, len(self._labels))
        if selected is not None:
            values[~selected] = np.nan
        return values

    def _count_jobs(self, member: MemberWork, is_present: npt.NDArray[np.bool_]) -> None:
        """Count the rows that jobs have, bool [jobs, rows], and the rows that lack some of the jobs."""
        is_missing = ~is_present
        for job, of_job in zip(member.jobs, is_missing, strict=True):
            rows = self._selections.wanted_of(job.name)
            if rows is not None:
                of_job &= rows
        is_partial = is_present.any(axis=0) & is_missing.any(axis=0)
        counts = zip(member.jobs, is_present.sum(axis=1).tolist(), strict=True)
        self.results.job_rows |= {job.name: rows for job, rows in counts}
        self.results.partial_rows[member.name] = int(is_partial.sum())

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
