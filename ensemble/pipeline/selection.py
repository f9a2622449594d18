"""Select the rows of jobs with ``when``, and expect a share of the table for the plan.

The rules are in ``jobs.when``; this module applies them to predictions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError, EnsembleError
from ensemble.common.shards import bad_rows_in
from ensemble.common.text import plural, shown_path
from ensemble.config import RunConfig
from ensemble.data.predictions_csv import PredictionFile, demand_as_written, read_predictions
from ensemble.jobs.job import Decider, Model, Selection, jobs_of, member_of, selections_of
from ensemble.jobs.when import ExpectedShare, doubts, select_rows
from ensemble.jobs.work import Work, values_of
from ensemble.members.base import Inspection
from ensemble.merging.blocks import mean_of_jobs, weights_by_bin, weights_of_rows
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods.weighted_mean import scaled, weighted_mean
from ensemble.merging.post_process import PostProcess
from ensemble.pipeline.prediction_files import changed_members, changed_sentence
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.resume import MemberWork
from ensemble.pipeline.run_dir import RunDir
from ensemble.planning.plan import ModelPlan, Plan, with_job, without_done

_Rows = npt.NDArray[np.bool_]
_Values = npt.NDArray[np.float64]


class Selections:
    """Say which rows jobs are to have: of each selection once all that it waits for has ended.

    ``works`` are by member; they are looked up before ``begin``.
    """

    def __init__(self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork]) -> None:
        self._prepared = prepared
        self._rundir = rundir
        self._works = works
        self._jobs = {job.name: job for model in prepared.models for job in model.jobs}
        self._selections = _selections_in_order(prepared.models)
        # The selected rows, bool [rows], and how unsure each row is, [rows].
        self._selected: dict[str, tuple[_Rows, _Values]] = {}
        # The rows that there was time for, bool [rows], by job.
        self._computed: dict[str, _Rows] = {}
        self._left_out: set[str] = set()
        self._ended: set[str] = set()

    def begin(self) -> None:
        """Select the rows that follow from what earlier runs have done."""
        self.end(*(job.name for work in self._works.values() if work.is_complete for job in work.jobs))

    def rows_of(self, job: str) -> _Rows | None:
        """Return the rows that a job is to have, bool [rows], of a selection those selected by now; None: all."""
        return self._computed[job] if job in self._computed else self._selected_of(job)

    def wanted_of(self, job: str) -> _Rows | None:
        """Return the rows that a job would have with more time for its member's rows, bool [rows]; None: all."""
        return self._selected_of(job) if self._jobs[job].own_selection is None else self.rows_of(job)

    def _selected_of(self, job: str) -> _Rows | None:
        selection, allowed = self._jobs[job].selection, self._prepared.job_rows.get(job)
        if selection is None:
            return allowed
        rows = self._rows_in(selection)
        return rows if allowed is None else rows & allowed

    def rows_of_member(self, member: str) -> _Rows | None:
        """Return the rows that a member is to have by its own ``when``, bool [rows]; None: all."""
        if member not in self._selections or not self._selections[member].when:
            return None
        computed = [
            self._computed[job.name] for job in self._works[member].jobs if job.name in self._computed
        ]
        if self._selections[member].takes_time_left and computed:
            return np.asarray(np.any(computed, axis=0))
        return self._rows_in(self._selections[member])

    def _rows_in(self, selection: Selection) -> _Rows:
        if selection.name in self._selected:
            return self._selected[selection.name][0]
        return np.zeros(self._prepared.table.rows, dtype=np.bool_)

    def is_selected(self, name: str) -> bool:
        return name in self._selected

    def planned(self, plan: Plan, model: ModelPlan) -> ModelPlan:
        """Return a model with the chunks that are left to do of its selected rows."""
        is_done = np.array([self._is_done(job.name) for job in model.jobs])
        is_timed = self._prepared.config.time_limit is not None
        return self.with_selected(plan, without_done(model, is_done, is_timed))

    def with_selected(self, plan: Plan, model: ModelPlan) -> ModelPlan:
        """Return a model with the chunks that are left to do of jobs whose rows have been selected."""
        for number in model.undecided:
            job = model.jobs[number]
            if job.selection is not None and job.selection.name in self._selected:
                selected = self._selected[job.selection.name]
                model = with_job(plan, model, number, *selected, self._is_done(job.name))
        return model

    def _is_done(self, job: str) -> _Rows:
        """Return which rows of a job need not be computed, bool [rows]."""
        member = self._works[member_of(job)]
        return member.predictions.is_done if member.is_complete else self._work_of(job).is_done

    def _work_of(self, job: str) -> Work:
        return self._works[member_of(job)].job(job)

    def end(self, *jobs: str, is_left_out: bool = False) -> set[str]:
        """Note that jobs have ended or failed, and return the members of which rows are selected by that."""
        if is_left_out:
            self._left_out.update(map(member_of, jobs))
        else:
            self._ended.update(jobs)
        selected = set()
        for name, selection in self._selections.items():
            within = selection.within
            if name in self._selected or not (within is None or within.name in self._selected):
                continue
            deciders = [
                decider for decider in selection.deciders if decider.settings.name not in self._left_out
            ]
            awaited = [*deciders, *selection.inputs]
            if all(self._has_ended(job) for decider in awaited for job in decider.jobs):
                self._selected[name] = self._select(selection, deciders)
                selected.add(member_of(name))
        return selected

    def readers_of(self, member: str) -> set[str]:
        """Return the members that read the predictions of a member."""
        inputs = {name: [each.settings.name for each in of.inputs] for name, of in self._selections.items()}
        return {name for name, read in inputs.items() if member in read}

    def inputs_of(self, member: str) -> _Values:
        """Return the predictions that a member reads, [rows, labels of each]; NaN in rows that an input lacks."""
        return np.hstack([self._values_of_decider(each) for each in self._selections[member].inputs])

    def keep_computed(self, member: str) -> None:
        """Take away the rows of a member's jobs that there was no time for."""
        for job in self._works[member].jobs:
            selection = self._jobs[job.name].selection
            if selection is not None and selection.takes_time_left:
                self._computed[job.name] = ~np.isnan(self.values_of(job.name)[:, 0])

    def _has_ended(self, job: str) -> bool:
        """Return whether a job has all rows that it is to have."""
        selection = self._jobs[job].selection
        if selection is not None and selection.name not in self._selected:
            return False
        if job in self._ended:
            return True
        is_missing, rows = ~self._work_of(job).is_done, self.rows_of(job)
        return not (is_missing if rows is None else is_missing & rows).any()

    def _select(self, selection: Selection, deciders: Sequence[Decider]) -> tuple[_Rows, _Values]:
        prepared, table = self._prepared, self._prepared.table
        if not selection.when:
            return np.ones(table.rows, dtype=np.bool_), np.zeros(table.rows)
        ((kind, _),) = selection.when.items()
        values = [*map(self._values_of_decider, deciders)]
        doubt = _doubts(
            prepared.config, kind, deciders, values, prepared.inspected, table.text_bytes, prepared.post
        )
        if selection.within is None:
            return select_rows(selection.when, doubt), doubt
        rows, selected = self._rows_in(selection.within), np.zeros(table.rows, dtype=np.bool_)
        selected[rows] = select_rows(selection.when, doubt[rows])
        return selected, doubt

    def _values_of_decider(self, decider: Decider) -> _Values:
        mean = self._works[decider.settings.name].mean
        if mean is None or not (mean.is_complete and decider.has_all_jobs):
            return mean_of_jobs([self.values_of(job) for job in decider.jobs], decider.weights)
        values, rows = self._values_in(mean), self.rows_of_member(mean.name)
        if rows is not None:
            values[~rows] = np.nan
        return values

    def _values_in(self, work: Work) -> _Values:
        return values_of(self._rundir, work, len(self._prepared.config.labels))

    def values_of(self, job: str) -> _Values:
        """Return the values of a job, [rows, labels], as far as they are done; NaN in rows that it need not have.

        Rows that could not be computed have equal values, if the config says so.
        """
        work, rows = self._work_of(job), self.rows_of(job)
        values = self._values_in(work)
        # Another thread may complete a work at any time; complete predictions have these rows.
        if self._prepared.config.on_bad_row == "uniform":
            bad_rows = bad_rows_in(work.shards_dir, len(values))
            bad = [row for row in bad_rows if np.isnan(values[row, 0])]
            values[bad] = self._prepared.even_value(member_of(job))
        if rows is not None:
            values[~rows] = np.nan
        return values


def _selections_in_order(models: Sequence[Model]) -> dict[str, Selection]:
    """Return all selections by their names; those that decide about others come before them."""
    members = dict.fromkeys(model.member for model in models)
    return selections_of(job for member in members for job in jobs_of(models, member))


def expected_shares(
    config: RunConfig,
    models: Sequence[Model],
    inspected: Mapping[str, Inspection],
    values: Mapping[str, PredictionFile],
    folder: Path,
    place: str = "",
    is_named: bool = False,
) -> dict[str, ExpectedShare]:
    """Estimate the share of each member and job with ``when`` by predictions of the jobs before it.

    All labels count as possible in each row.

    Args:
        values: of members that need no worker.
        folder: the directory of a run, of these rows or of others, such as a labelled sample.
        place: what messages call the directory; empty: its path.
        is_named: the user has named the directory: predictions in it that are not by this config are a DataError;
            otherwise they are left out.
    """
    place = place or f"in {shown_path(folder)}"
    selections = _selections_in_order(models)
    deciders = {
        name
        for selection in selections.values()
        if "share" not in selection.when
        for decider in selection.deciders
        for name in decider.files
    }
    files = dict(values)
    try:
        files |= _prediction_files(config, deciders, folder)
    except EnsembleError:
        if is_named:
            raise
    return {
        name: _expected_share(config, selection, inspected, files, place)
        for name, selection in selections.items()
        if selection.when
    }


def share_of_job(selection: Selection | None, shares: Mapping[str, float]) -> float:
    """Return the share of the rows that a job is expected to compute, from the shares of selections."""
    return math.prod(shares.get(each.name, 1.0) for each in (() if selection is None else selection.chain))


def _expected_share(
    config: RunConfig,
    selection: Selection,
    inspected: Mapping[str, Inspection],
    files: Mapping[str, PredictionFile],
    place: str,
) -> ExpectedShare:
    ((kind, limit),) = selection.when.items()
    if isinstance(limit, str):
        return ExpectedShare(0.0, "as far as time_limit allows", is_timed=True)
    if kind == "share":
        return ExpectedShare(limit, "as when says")
    if any(isinstance(decider.settings.weight, tuple) for decider in selection.deciders):
        return ExpectedShare(1.0, "all are assumed: weights by length bin are not looked up")
    names = [name for decider in selection.deciders for name in decider.files]
    missing = [name for name in names if name not in files or member_of(name) not in inspected]
    if missing:
        why = f"all are assumed, as there are no predictions of {' and '.join(missing)} {place}"
        return ExpectedShare(1.0, why)
    ids = max((files[name].ids for name in names), key=len)

    def values_of(name: str) -> _Values:
        return files[name].join(ids, may_lack=True, may_have_others=True)[0].copy(order="F")

    values = [
        mean_of_jobs([values_of(name) for name in decider.files], decider.weights)
        for decider in selection.deciders
    ]
    text_bytes, post = np.zeros(len(ids), np.int64), PostProcess()
    doubt = _doubts(config, kind, selection.deciders, values, inspected, text_bytes, post)
    selected = select_rows(selection.when, doubt)
    return ExpectedShare(float(selected.mean()), f"by the predictions of {plural(len(ids), 'row')} {place}")


def _prediction_files(config: RunConfig, names: Iterable[str], folder: Path) -> dict[str, PredictionFile]:
    """Return predictions in a run's directory; a DataError says that they are not by this config."""
    rundir = RunDir(folder)
    paths = {name: rundir.predictions(name) for name in names if rundir.predictions(name).exists()}
    for path in paths.values():
        demand_as_written(path)
    changed = changed_members(config, {*map(member_of, paths)}, folder) if paths else {}
    if changed:
        raise DataError(
            f"--predictions-from: {folder}: {changed_sentence(changed)}; run the config there with these settings "
            "first, or leave the option out"
        )
    return {name: read_predictions(path, labels=config.labels) for name, path in paths.items()}


def _doubts(
    config: RunConfig,
    kind: str,
    deciders: Sequence[Decider],
    values: Sequence[_Values],
    inspected: Mapping[str, Inspection],
    text_bytes: npt.NDArray[np.int64],
    post: PostProcess,
) -> _Values:
    """Return how unsure the weighted mean of members, as they are merged, is of each row, [rows].

    ``values`` are those of the deciders, [rows, labels], which this changes.
    """
    members = [decider.settings for decider in deciders]
    activations = [inspected[member.name].activation for member in members]
    is_present = np.array([~np.isnan(of_member[:, 0]) for of_member in values])
    is_exclusive = set(activations) <= {"softmax"}
    for member, activation, of_member in zip(members, activations, values, strict=True):
        post.member(0, of_member, activation, calibrator(member.calibration, activation, config.labels))
    edges = config.ensemble.length_bins or ()
    weights = weights_by_bin([member.weight for member in members], config.labels, len(edges) + 1)
    mean = np.full((len(text_bytes), len(config.labels)), np.nan)
    if members:
        mean = weighted_mean(weights_of_rows(weights, edges, text_bytes), values, is_present)
    if weights.shape[2] > 1 and is_exclusive:
        mean = scaled(mean)
    return doubts(kind, mean, is_exclusive)
