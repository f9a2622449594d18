"""Make the report of a run from its current state."""

from __future__ import annotations

import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from ensemble.common.clock import boot_seconds
from ensemble.common.gpus import Device
from ensemble.common.host import cpu_name
from ensemble.common.protocol import Counters
from ensemble.common.version import __version__
from ensemble.jobs.job import Job, jobs_of
from ensemble.pipeline.cascade import Cascades
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.progress import MemberProgress, members_of
from ensemble.pipeline.results import Results, predictions_title
from ensemble.pipeline.resume import MemberWork
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
from ensemble.planning.forecast import Speed, calibrated
from ensemble.planning.plan import ModelPlan
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.records import Failure, NodeChange, WorkerRecord, idle_gaps
from ensemble.scheduling.state import ModelState


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
    models: list[ModelState] = field(default_factory=list)
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
            versions=_versions(self.models),
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds_left=_seconds_left(prepared, self.models) if status == "running" else None,
            # The same as platform.platform(), which starts a process (uname -p).
            platform="-".join((platform.system(), platform.release(), platform.machine(), "with", libc)),
            devices=gpus or prepared.inventory.hosts or (Device("cpu", cpu_name(), None, 0, 0),),
            driver_version=prepared.inventory.driver_version,
            rows=prepared.table.rows,
            null_texts=dict(prepared.table.null_texts),
            timing={"total_seconds": round(boot_seconds() - self.began, 3)},
            idle_gaps=idle_gaps(worker for state in self.models for worker in state.workers),
            members=tuple(map(self._member, members_of(self.models))),
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

    def computation(self, models: Sequence[ModelState]) -> Computation | None:
        """Return when and with what this run has computed rows of models; None if it has computed none."""
        devices = {
            device: cpu_name() if device == "cpu" else worker.ready.device
            for state in models
            for worker in state.workers
            if worker.ready is not None and worker.counters.rows
            for device in worker.devices
        }
        if not devices:
            return None
        driver = self.prepared.inventory.driver_version
        return Computation(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(sum(state.predicting_seconds for state in models), 3),
            versions=_versions(models) | ({"driver": driver} if driver else {}),
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

    def _member(self, member: MemberProgress) -> MemberReport:
        name, work, results, plan = member.name, self.works[member.name], self.results, member.plan
        settings = next(model for model in self.prepared.config.models if model.name == name)
        states = member.models
        counters = sum((state.counters for state in states), Counters())
        # If an earlier run completed the member, the report shows the workers of that run.
        is_reused = work.is_complete and not member.workers
        workers = work.workers if is_reused else tuple(map(_worker_report, member.workers))
        bad_rows = work.bad_rows if work.is_complete else work.bad_rows_of_jobs()
        given_files = () if plan.needs_worker else plan.loaded.kind.sources()
        jobs = [job for job in jobs_of(self.prepared.models, name) if job.view]
        outcome: Literal["complete", "unfinished"] = "complete" if member.finished else "unfinished"
        return MemberReport(
            name=name,
            phase=member.phase,
            status=outcome if member.failure is None else member.failure.outcome,
            weight=settings.weight,
            calibration={} if settings.calibration is None else settings.calibration.model_dump(mode="json"),
            replicas=max(state.plan.replicas for state in states),
            fingerprint=work.fingerprint.digest,
            reused_rows=member.reused_rows if plan.needs_worker else 0,
            taken_over=dict(sum((Counter(part.rows_taken) for part in work.parts), Counter())),
            work=sum(state.plan.work * state.computed_cost for state in states),
            computed_as=settings.computed_as,
            settings=dict(work.settings),
            speed=_speed_of(states),
            forecast=_memory_forecast(plan, workers),
            progress=ProgressReport(
                rows_done=member.rows_done,
                share=round(member.fraction, 4),
                tokens=member.tokens_done,
                seconds=None if member.predicting_since is None else round(member.predicting_seconds, 3),
                seconds_left=round(member.seconds_left, 3) if member.computed_cost else None,
            ),
            chunks=sum(len(state.plan.chunks) for state in states),
            rows=counters.rows,
            tokens=counters.tokens,
            padded_tokens=counters.padded_tokens,
            real_token_share=_share(counters.tokens, counters.padded_tokens),
            lost_rows=sum(state.speed_meter.lost_rows for state in states),
            bad_rows={str(row): bad_rows[row] for row in sorted(bad_rows)},
            faults=tuple(fault for state in states for fault in state.faults),
            failure=member.failure,
            workers=workers,
            cascade=None if settings.when is None else self._cascade(settings.when, name),
            activation=self.prepared.inspected[name].activation,
            views={job.view: self._view(work, job) for job in jobs},
            view_cascades={
                job.view: self._cascade(job.when, job.name) for job in jobs if job.when is not None
            },
            partial_rows=results.partial_rows.get(name, 0),
            given_files=tuple(map(os.path.abspath, given_files)),
            computed=self.computation(states),
            computed_before=work.computed_before,
        )

    def _view(self, work: MemberWork, job: Job) -> ViewReport:
        """Return how many rows a job has that count; of a complete member all that it may have.

        Nothing of an earlier run's jobs was read again then, unless some of them may lack rows.
        """
        may_have = self.prepared.job_rows.get(job.name)
        rows = self.results.job_rows.get(job.name)
        (part,) = (part for part in work.jobs if part.name == job.name)
        if work.is_complete:
            is_counted = part.is_done if job.may_lack_rows else np.ones_like(part.is_done)
            selected = self.cascades.rows_of(job.name)
            rows = int((is_counted if selected is None else is_counted & selected).sum())
        at_most = None if may_have is None else int(may_have.sum())
        return ViewReport(job.weight, rows, at_most, part.fingerprint.digest)

    def _cascade(self, when: When, work: str) -> CascadeReport:
        """Return what ``when`` selected for a member or view."""
        rows = self.cascades.rows_of(work)
        return CascadeReport(
            when={**when},
            rows=0 if rows is None else int(rows.sum()),
            is_selected=self.cascades.is_selected(work),
            comparison=self.results.comparisons.get(work),
        )


def _versions(models: Sequence[ModelState]) -> dict[str, str]:
    """Return versions of packages, also of torch and others that only workers import."""
    versions = {"ensemble": __version__, "python": platform.python_version()}
    for state in models:
        for worker in state.workers:
            versions |= {name: version for name, version in worker.versions.items() if version}
    return versions


def _speed_of(models: Sequence[ModelState]) -> Speed:
    """Return the speed of a member: that of its model of which most is known, and the slowest start."""
    speeds = [state.speed for state in models]
    best = max(speeds, key=lambda speed: (speed.is_measured, speed.is_startup_measured))
    return replace(best, startup_seconds=max(speed.startup_seconds for speed in speeds))


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


def _memory_forecast(plan: ModelPlan, workers: Sequence[WorkerReport]) -> MemoryForecast | None:
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


def _seconds_left(prepared: Prepared, models: Sequence[ModelState]) -> float | None:
    """Return the seconds until the last model ends, by the speeds so far; None before any was measured."""
    # Seconds for all of a model's work on a single replica, by the chunks that are done.
    by_name = {state.plan.name: state.speed_meter.seconds_per_cost for state in models}
    measured = {name: seconds for name, seconds in by_name.items() if seconds}
    if not measured and not all(state.plan.speed.is_measured for state in models):
        return None
    seconds = calibrated({state.plan.name: state.plan.whole_seconds for state in models}, measured)
    demands = []
    for state in models:
        if state.finished or state.failure is not None:
            continue
        whole_seconds = seconds[state.plan.name]
        if whole_seconds is None:
            return None
        startup = 0.0 if state.running else state.plan.demand.startup_seconds
        compute_seconds = whole_seconds * state.work_left * state.plan.expected_share
        demands.append(replace(state.plan.demand, startup_seconds=startup, compute_seconds=compute_seconds))
    return round(prepared.plan.seconds_of(demands), 3)


def _share(part: float, whole: float | None) -> float | None:
    return round(part / whole, 4) if whole else None
