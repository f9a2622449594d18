"""Make the report of a run from its current state."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from ensemble.common.clock import boot_seconds
from ensemble.common.gpus import Device
from ensemble.common.host import cpu_name
from ensemble.common.version import __version__
from ensemble.members.registry import member_kind
from ensemble.pipeline.cascade import Cascades
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.results import Results, predictions_title
from ensemble.pipeline.resume import MemberWork
from ensemble.pipeline.run_dir import work_of_view
from ensemble.pipeline.run_report import (
    CascadeReport,
    Computation,
    MemberReport,
    MemoryForecast,
    NodeReport,
    ProgressReport,
    RuleReport,
    RunReport,
    Status,
    ViewReport,
    WorkerReport,
)
from ensemble.planning.cascade import When
from ensemble.planning.forecast import calibrated
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.records import Failure, NodeChange, WorkerRecord, idle_gaps
from ensemble.scheduling.state import MemberState


@dataclass
class RunState:
    """Hold the current state of a run, which ``began`` by ``boot_seconds``, and make its report.

    Attributes:
        works: by member name; empty until the work of earlier runs is looked up.
        left_out: the failures of members that were left out of the merge.
    """

    prepared: Prepared
    began: float
    status: Status = "failed"
    members: list[MemberState] = field(default_factory=list)
    works: dict[str, MemberWork] = field(default_factory=dict)
    results: Results = field(default_factory=Results)
    pool: DevicePool | None = None
    node_changes: Sequence[NodeChange] = ()
    left_out: Sequence[Failure] = ()
    explanation: str = ""
    cascades: Cascades = field(init=False)

    def report(self, status: Status) -> RunReport:
        prepared, results = self.prepared, self.results
        tuned_on = prepared.config.tuned_on
        left_out = {failure.member for failure in self.left_out}
        loaded, libc = prepared.loaded, "".join(platform.libc_ver())
        names = [model.name for model in prepared.config.models]
        gpus = self.pool.seen if self.pool else prepared.plan.gpus
        files = dict(results.files)  # a copy, because another thread may be finishing a member
        predictions = [title for title in map(predictions_title, names) if title in files]
        report = RunReport(
            status=status,
            pid=os.getpid(),
            versions=_versions(self.members),
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds_left=_seconds_left(prepared, self.members) if status == "running" else None,
            # The same as platform.platform(), which starts a process (uname -p).
            platform="-".join((platform.system(), platform.release(), platform.machine(), "with", libc)),
            devices=gpus or prepared.inventory.hosts or (Device("cpu", cpu_name(), None, 0, 0),),
            driver_version=prepared.inventory.driver_version,
            rows=prepared.table.rows,
            null_texts=dict(prepared.table.null_texts),
            timing={"total_seconds": round(boot_seconds() - self.began, 3)},
            idle_gaps=idle_gaps(worker for state in self.members for worker in state.workers),
            members=tuple(map(self._member, self.members)),
            left_out=tuple(name for name in names if name in left_out),
            merged_rows=dict(results.merged_rows),
            filled_rows=results.filled_rows,
            scores=dict(results.scores),
            answers=dict(results.answers),
            nodes=self._nodes(),
            gain=results.gain,
            on_bad_row=prepared.config.on_bad_row,
            explanation=self.explanation,
            ensemble=prepared.config.ensemble.model_dump(mode="json", exclude_none=True),
            allowed_labels=results.allowed_labels,
            rules=self._rules(),
            warnings=tuple(prepared.warnings),
            files={title: str(files[title].absolute()) for title in dict.fromkeys([*predictions, *files])},
            config=loaded.text,
            config_files=tuple(map(str, loaded.paths)),
            overrides=tuple(loaded.overrides),
            table=str(prepared.config.data.path.absolute()),
            fitted_on=results.fitted_on,
            tuned_on=None if tuned_on is None else tuned_on.model_dump(mode="json"),
        )
        redacted: RunReport = loaded.redactor.document(report)
        return redacted

    def computation(self, state: MemberState) -> Computation | None:
        """Return when and with what this run has computed rows of a member; None if it has computed none."""
        devices = {
            device: cpu_name() if device == "cpu" else worker.ready.device
            for worker in state.workers
            if worker.ready is not None and worker.counters.rows
            for device in worker.devices
        }
        if not devices:
            return None
        driver = self.prepared.inventory.driver_version
        return Computation(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(state.predicting_seconds, 3),
            versions=_versions([state]) | ({"driver": driver} if driver else {}),
            devices=devices,
        )

    def _nodes(self) -> tuple[NodeReport, ...]:
        nodes = {host.node: NodeReport(host.node, host.total_bytes) for host in self.prepared.inventory.hosts}
        for change in self.node_changes:
            if not change.is_lost:
                known = nodes.get(change.node, NodeReport(change.node, change.total_bytes))
                nodes[change.node] = replace(known, joined_after_seconds=change.after_seconds)
            elif change.node in nodes:
                nodes[change.node] = replace(
                    nodes[change.node], lost_after_seconds=change.after_seconds, why_lost=change.why
                )
        return tuple(nodes.values())

    def _rules(self) -> tuple[RuleReport, ...]:
        rules = self.prepared.post.rules
        if rules is None or "ensemble" not in self.results.files:
            return ()
        return tuple(
            RuleReport(when=rule.when, set=rule.set, mask=rule.mask, rows=int(rows.sum()))
            for rule, rows in zip(rules.rules, rules.rows, strict=True)
        )

    def _member(self, state: MemberState) -> MemberReport:
        plan, counters, work, results = state.plan, state.counters, self.works[state.plan.name], self.results
        name, model = plan.name, plan.model
        views = model.counted_views
        # If an earlier run completed the member, the report shows the workers of that run.
        is_reused = work.is_complete and not state.workers
        workers = work.workers if is_reused else tuple(map(_worker_report, state.workers))
        bad_rows = work.bad_rows_of_views(state.bad_rows)
        view_rows: Sequence[int | None] = results.view_rows.get(name, (None,) * len(views))
        may_have = self.prepared.plan.facts[name].view_rows
        at_most = [None] * len(views) if may_have is None else may_have.sum(axis=1).tolist()
        given_files = () if plan.needs_worker else member_kind(model).sources()
        if work.is_complete:
            view_rows = self._rows_of_views(work, has_final_mean=not model.views_with_when)
        return MemberReport(
            name=name,
            phase=state.phase,
            status=state.failure.outcome if state.failure else "complete" if state.finished else "unfinished",
            weight=model.weight,
            calibration={} if model.calibration is None else model.calibration.model_dump(mode="json"),
            replicas=plan.replicas,
            fingerprint=work.fingerprint.digest,
            reused_rows=state.reused_rows if plan.needs_worker else 0,
            taken_over=dict(work.rows_taken),
            work=plan.work * state.computed_cost,
            computed_as=model.computed_as,
            settings=dict(work.settings),
            speed=state.speed,
            forecast=_memory_forecast(plan, workers),
            progress=ProgressReport(
                rows_done=state.rows_done,
                share=round(state.fraction, 4),
                tokens=state.tokens_done,
                seconds=None if state.predicting_since is None else round(state.predicting_seconds, 3),
                seconds_left=round(state.seconds_left, 3) if state.computed_cost else None,
            ),
            chunks=len(plan.chunks),
            rows=counters.rows,
            tokens=counters.tokens,
            padded_tokens=counters.padded_tokens,
            real_token_share=_share(counters.tokens, counters.padded_tokens),
            lost_rows=state.speed_meter.lost_rows,
            bad_rows={str(row): bad_rows[row] for row in sorted(bad_rows)},
            faults=tuple(state.faults),
            failure=state.failure,
            workers=workers,
            cascade=None if model.when is None else self._cascade(model.when, name),
            activation=self.prepared.inspected[name].activation,
            views={
                view.name: ViewReport(view.weight, rows, most)
                for view, rows, most in zip(views, view_rows, at_most, strict=True)
            },
            view_cascades={
                views[number].name: self._cascade(when, work_of_view(model, number))
                for number, when in model.views_with_when.items()
            },
            partial_rows=results.partial_rows.get(name, 0),
            given_files=tuple(map(os.path.abspath, given_files)),
            computed=self.computation(state),
            computed_before=work.computed_before,
        )

    def _rows_of_views(self, work: MemberWork, has_final_mean: bool) -> tuple[int, ...]:
        """Return how many rows each view of a complete member has that count.

        ``has_final_mean``: all that it may have, also where nothing of an earlier run's views was read again.
        """
        counts: list[int] = []
        for part in work.views:
            is_counted = np.ones_like(part.is_done) if has_final_mean else part.is_done
            rows = self.cascades.rows_of(part.member)
            counts.append(int((is_counted if rows is None else is_counted & rows).sum()))
        return tuple(counts)

    def _cascade(self, when: When, work: str) -> CascadeReport:
        """Return what ``when`` selected for a member or view."""
        rows = self.cascades.rows_of(work)
        return CascadeReport(
            when={**when},
            rows=0 if rows is None else int(rows.sum()),
            is_selected=self.cascades.is_selected(work),
            comparison=self.results.comparisons.get(work),
        )


def _versions(members: Sequence[MemberState]) -> dict[str, str]:
    """Return versions of packages, also of torch and others that only workers import."""
    versions = {"ensemble": __version__, "python": platform.python_version()}
    for state in members:
        for worker in state.workers:
            versions |= {name: version for name, version in worker.versions.items() if version}
    return versions


def _worker_report(worker: WorkerRecord) -> WorkerReport:
    """Copy records to the fields of the same names; None if the worker did not get so far."""
    facts: dict[str, Any] = {"notes": ()}
    for part in (worker.ready, worker.closed, worker):
        if part is not None:
            facts |= vars(part)
    facts |= worker.counters.rounded(3)
    facts["forward_share"] = _share(worker.counters.forward_seconds, worker.life_seconds)
    facts["device_name"] = worker.ready.device if worker.ready else None
    facts["log"] = worker.log_path
    fields: dict[str, Any] = {name: facts.get(name) for name in WorkerReport.__dataclass_fields__}
    return WorkerReport(**fields)


def _memory_forecast(plan: MemberPlan, workers: Sequence[WorkerReport]) -> MemoryForecast | None:
    footprint = plan.placement.footprint
    if footprint is None:
        return None
    tokens = max((worker.token_budget or 0 for worker in workers), default=0) or footprint.width
    if plan.request.batch_size is not None:  # a worker's budget does not count then
        tokens = plan.request.batch_size * footprint.width
    return MemoryForecast(
        parameters=footprint.weights.parameters,
        weight_bytes=footprint.weights.bytes,
        context_bytes=footprint.context_bytes,
        peak_bytes=footprint.peak_bytes(plan.gpus, tokens),
        token_budget=tokens,
        width=footprint.width,
    )


def _seconds_left(prepared: Prepared, members: Sequence[MemberState]) -> float | None:
    """Return the seconds until the last member ends, by the speeds so far; None before any was measured."""
    # Seconds for all of a member's work on a single replica, by the chunks that are done.
    by_name = {state.plan.name: state.speed_meter.seconds_per_cost for state in members}
    measured = {name: seconds for name, seconds in by_name.items() if seconds}
    if not measured and not all(state.plan.speed.is_measured for state in members):
        return None
    seconds = calibrated({state.plan.name: state.plan.whole_seconds for state in members}, measured)
    jobs = []
    for state in members:
        if state.finished or state.failure is not None:
            continue
        whole_seconds = seconds[state.plan.name]
        if whole_seconds is None:
            return None
        startup = 0.0 if state.running else state.plan.job.startup_seconds
        compute_seconds = whole_seconds * state.work_left * state.plan.expected_share
        jobs.append(replace(state.plan.job, startup_seconds=startup, compute_seconds=compute_seconds))
    return round(prepared.plan.seconds_of(jobs), 3)


def _share(part: float, whole: float | None) -> float | None:
    return round(part / whole, 4) if whole else None
