"""Select the rows of members and jobs with ``when``, and expect a share of the table for the plan.

The rules are in ``planning.cascade``; this module applies them to the members' predictions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DataError, EnsembleError
from ensemble.common.shards import bad_rows_in
from ensemble.common.text import plural, shown_path
from ensemble.config import MemberConfig, RunConfig
from ensemble.config.schema import deciding_members
from ensemble.config.values import takes_time_left
from ensemble.data.predictions_csv import PredictionFile, demand_as_written, read_predictions
from ensemble.jobs.job import job_name, member_of
from ensemble.members.base import Inspection
from ensemble.merging.blocks import weights_by_bin, weights_of_rows
from ensemble.merging.calibration import calibrator
from ensemble.merging.methods.weighted_mean import scaled, weighted_mean
from ensemble.merging.post_process import PostProcess
from ensemble.pipeline.fingerprint import changed_members, changed_sentence
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.resume import MemberWork, mean_of_jobs, values_of
from ensemble.pipeline.run_dir import RunDir
from ensemble.planning.cascade import ExpectedShare, When, doubts, select_rows
from ensemble.planning.plan import ModelPlan, Plan, with_job, with_rows, without_done

_Rows = npt.NDArray[np.bool_]
_Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Decider:
    """Name the works whose mean counts as a member's values where rows are selected: its own, or some jobs'."""

    model: MemberConfig
    works: tuple[str, ...]
    weights: tuple[float, ...] = (1.0,)

    def mean(self, values_of: Callable[[str], _Values]) -> _Values:
        """Return the mean of the works, [rows, labels]; ``values_of`` gives an array of its own for each."""
        return mean_of_jobs([values_of(work) for work in self.works], self.weights)


@dataclass(frozen=True)
class _Rule:
    """Say for which work, a member's or a job's, ``when`` selects rows, and who decides."""

    work: str
    member: str
    when: When
    deciders: tuple[_Decider, ...]


def _rules(config: RunConfig) -> Iterator[_Rule]:
    """Yield the rules in the order of members and views: those before decide about those behind.

    Rows that are computed only if time is left decide nothing: a member that has them in its last views decides by
    its other views, if there are any.
    """
    for number, model in enumerate(config.models):
        members = map(_decider, deciding_members(config.models[:number]))
        before = tuple(decider for decider in members if decider.works)
        if model.when is not None:
            yield _Rule(model.name, model.name, model.when, before)
        for view, when in model.views_with_when.items():
            deciders = before
            if view:
                own = model if model.has_weight else model.model_copy(update={"weight": 1.0})
                views = _views_before(own, view)
                deciders = (*before, views) if views.works else before
            yield _Rule(job_name(model.name, model.counted_views[view].name), model.name, when, deciders)


def _decider(model: MemberConfig) -> _Decider:
    timed = [view for view, when in model.views_with_when.items() if takes_time_left(when)]
    return _views_before(model, min(timed)) if timed else _Decider(model, (model.name,))


def _views_before(model: MemberConfig, stop: int) -> _Decider:
    numbers = [number for number in range(stop) if not takes_time_left(model.views_with_when.get(number))]
    views = [model.counted_views[number] for number in numbers]
    works = tuple(job_name(model.name, view.name) for view in views)
    return _Decider(model, works, tuple(view.weight for view in views))


class Cascades:
    """Select the rows of each member or job with ``when``, once all that it waits for has ended.

    Works are named as their predictions are: a member's, or a job's.
    """

    def __init__(self, prepared: Prepared, rundir: RunDir, works: Mapping[str, MemberWork]) -> None:
        self._prepared = prepared
        self._rundir = rundir
        self._works = works
        self._rules = {rule.work: rule for rule in _rules(prepared.config)}
        # The rows that a work is to have, bool [rows], and how unsure each row is, [rows].
        self._selections: dict[str, tuple[_Rows, _Values]] = {}
        self._left_out: set[str] = set()
        self._ended: set[str] = set()

    def begin(self) -> None:
        """Select the rows that follow from what earlier runs have done, once the works are looked up."""
        self._parts = {part.name: part for work in self._works.values() for part in (work, *work.jobs)}
        self.end(*(name for name, work in self._works.items() if work.is_complete))

    def own_rows_of(self, work: str) -> _Rows | None:
        """Return the rows that a work may have, with ``when`` those that are selected by now; None: all."""
        allowed = self._prepared.job_rows.get(work)
        if work in self._selections:
            rows = self._selections[work][0]
        elif work in self._rules:
            rows = np.zeros(self._prepared.table.rows, dtype=np.bool_)
        else:
            return allowed
        return rows if allowed is None else rows & allowed

    def rows_of(self, work: str) -> _Rows | None:
        """Return the rows that a work is to have, by its own ``when`` and its member's; None: all."""
        rows, of_member = self.own_rows_of(work), self.own_rows_of(member_of(work))
        if rows is None or of_member is None:
            return of_member if rows is None else rows
        return rows & of_member

    def is_selected(self, work: str) -> bool:
        return work in self._selections

    def planned(self, plan: Plan, model: ModelPlan) -> ModelPlan:
        """Return a model with the chunks that are left to do of its selected rows."""
        is_timed = self._prepared.config.time_limit is not None and not model.is_undecided
        if model.is_undecided:
            if not self.is_selected(model.member):
                return replace(model, chunks=(), order=model.order[:0])
            model = with_rows(plan, model, *self._selections[model.member])
        is_done = np.array([self._is_done(model.member, job.name) for job in model.jobs])
        return self.with_selected_jobs(plan, without_done(model, is_done, is_timed))

    def with_selected_jobs(self, plan: Plan, model: ModelPlan) -> ModelPlan:
        """Return a model with the chunks that are left to do of jobs whose rows have been selected."""
        for number in model.undecided:
            job = model.jobs[number].name
            if job in self._selections:
                is_done = self._is_done(model.member, job)
                model = with_job(plan, model, number, *self._selections[job], is_done)
        return model

    def _is_done(self, member: str, job: str) -> _Rows:
        """Return which rows of a job need not be computed, bool [rows]."""
        whole = self._works[member]
        return whole.is_done if whole.is_complete else self._parts[job].is_done

    def end(self, *works: str, is_left_out: bool = False) -> list[str]:
        """Note that works have ended or failed, and return those whose rows are selected by that."""
        (self._left_out if is_left_out else self._ended).update(works)
        return self._select()

    def keep_computed(self, member: str) -> None:
        """Take away the rows of a member and its jobs that there was no time for."""
        timed = {work for work, rule in self._rules.items() if takes_time_left(rule.when)}
        parts = [part.name for part in self._works[member].parts if {part.name, member} & timed]
        computed = {part: ~np.isnan(self._values_of(part)[:, 0]) for part in parts}
        if member in timed:
            computed[member] = np.any([*computed.values()], axis=0)
        for work, rows in computed.items():
            self._selections[work] = rows, np.zeros(len(rows))

    def _select(self) -> list[str]:
        selected = []
        for rule in self._rules.values():
            if rule.work in self._selections or (
                rule.work != rule.member and self._is_undecided(rule.member)
            ):
                continue
            deciders = [decider for decider in rule.deciders if decider.model.name not in self._left_out]
            if all(self._has_ended(work) for decider in deciders for work in decider.works):
                self._selections[rule.work] = self._selection_of(rule, deciders)
                selected.append(rule.work)
        return selected

    def _is_undecided(self, work: str) -> bool:
        return work in self._rules and work not in self._selections

    def _has_ended(self, work: str) -> bool:
        """Return whether a work has all rows that it is to have."""
        member = member_of(work)
        if self._is_undecided(work) or self._is_undecided(member):
            return False
        if work in self._ended or member == work:
            return work in self._ended
        is_missing, rows = ~self._parts[work].is_done, self.rows_of(work)
        return not (is_missing if rows is None else is_missing & rows).any()

    def _selection_of(self, rule: _Rule, deciders: Sequence[_Decider]) -> tuple[_Rows, _Values]:
        ((kind, _),) = rule.when.items()
        prepared, table = self._prepared, self._prepared.table
        doubt = _doubts(
            prepared.config,
            kind,
            deciders,
            self._values_of,
            prepared.inspected,
            table.text_bytes,
            prepared.post,
        )
        of_member = self.rows_of(rule.member) if rule.work != rule.member else None
        if of_member is None:
            return select_rows(rule.when, doubt), doubt
        selected = np.zeros(table.rows, dtype=np.bool_)
        selected[of_member] = select_rows(rule.when, doubt[of_member])
        return selected, doubt

    def _values_of(self, work: str) -> _Values:
        """Return the values of a work that has ended, [rows, labels], NaN in rows that it is not to have."""
        part, rows = self._parts[work], self.rows_of(work)
        values = values_of(self._rundir, part, len(self._prepared.config.labels))
        # Another thread may complete a work at any time; complete predictions have these rows.
        if self._prepared.config.on_bad_row == "uniform":
            bad_rows = bad_rows_in(part.shards_dir, len(values))
            bad = [row for row in bad_rows if np.isnan(values[row, 0])]
            values[bad] = self._prepared.even_value(member_of(work))
        if rows is not None:
            values[~rows] = np.nan
        return values


def expected_shares(
    config: RunConfig,
    inspected: Mapping[str, Inspection],
    values: Mapping[str, PredictionFile],
    folder: Path,
    place: str = "",
    is_named: bool = False,
) -> dict[str, ExpectedShare]:
    """Estimate the share of each member with ``when`` by predictions of the members before it, if there are any.

    Args:
        values: of members that need no worker.
        folder: the directory of a run, of these rows or of others, such as a labelled sample.
        place: what messages call the directory; empty: its path.
        is_named: the user has named the directory: predictions in it that are not by this config are a DataError;
            otherwise they are left out.
    """
    place = place or f"in {shown_path(folder)}"
    rules = [*_rules(config)]
    deciders = {
        work
        for rule in rules
        if "share" not in rule.when
        for decider in rule.deciders
        for work in decider.works
    }
    files = dict(values)
    try:
        files |= _prediction_files(config, deciders, folder)
    except EnsembleError:
        if is_named:
            raise
    return {rule.work: _expected_share(config, rule, inspected, files, place) for rule in rules}


def _expected_share(
    config: RunConfig,
    rule: _Rule,
    inspected: Mapping[str, Inspection],
    files: Mapping[str, PredictionFile],
    place: str,
) -> ExpectedShare:
    """Estimate the share of a member or view with ``when`` by the predictions of the works before it.

    All labels count as possible in each row.
    """
    ((kind, limit),) = rule.when.items()
    if isinstance(limit, str):
        return ExpectedShare(0.0, "as far as time_limit allows", is_timed=True)
    if kind == "share":
        return ExpectedShare(limit, "as when says")
    models = [decider.model for decider in rule.deciders]
    if any(isinstance(model.weight, tuple) for model in models):
        return ExpectedShare(1.0, "all are assumed: weights by length bin are not looked up")
    works = [work for decider in rule.deciders for work in decider.works]
    missing = [work for work in works if work not in files or member_of(work) not in inspected]
    if missing:
        why = f"all are assumed, as there are no predictions of {' and '.join(missing)} {place}"
        return ExpectedShare(1.0, why)
    ids = max((files[work].ids for work in works), key=len)

    def values_of(work: str) -> _Values:
        return files[work].join(ids, may_lack=True, may_have_others=True)[0].copy(order="F")

    text_bytes, post = np.zeros(len(ids), np.int64), PostProcess()
    doubt = _doubts(config, kind, rule.deciders, values_of, inspected, text_bytes, post)
    selected = select_rows(rule.when, doubt)
    return ExpectedShare(float(selected.mean()), f"by the predictions of {plural(len(ids), 'row')} {place}")


def _prediction_files(config: RunConfig, works: Iterable[str], folder: Path) -> dict[str, PredictionFile]:
    """Return the predictions of works in a run's directory; a DataError says that they are not by this config."""
    rundir = RunDir(folder)
    paths = {name: rundir.predictions(name) for name in works if rundir.predictions(name).exists()}
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
    deciders: Sequence[_Decider],
    values_of: Callable[[str], _Values],
    inspected: Mapping[str, Inspection],
    text_bytes: npt.NDArray[np.int64],
    post: PostProcess,
) -> _Values:
    """Return how unsure the weighted mean of members, as they are merged, is of each row, [rows].

    ``values_of`` gives an array of its own for each work, which this changes.
    """
    models = [decider.model for decider in deciders]
    activations = [inspected[model.name].activation for model in models]
    values = [decider.mean(values_of) for decider in deciders]
    is_present = np.array([~np.isnan(member_values[:, 0]) for member_values in values])
    is_exclusive = set(activations) <= {"softmax"}
    for model, activation, member_values in zip(models, activations, values, strict=True):
        post.member(0, member_values, activation, calibrator(model.calibration, activation, config.labels))
    edges = config.ensemble.length_bins or ()
    weights = weights_by_bin([model.weight for model in models], config.labels, len(edges) + 1)
    mean = np.full((len(text_bytes), len(config.labels)), np.nan)
    if models:
        mean = weighted_mean(weights_of_rows(weights, edges, text_bytes), values, is_present)
    if weights.shape[2] > 1 and is_exclusive:
        mean = scaled(mean)
    return doubts(kind, mean, is_exclusive)
