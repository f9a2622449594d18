"""Make the report of a run from its current state."""

from __future__ import annotations

import copy
import os
import platform
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Literal

import numpy as np
import numpy.typing as npt

from ensemble.common.clock import boot_seconds
from ensemble.common.gpus import Device
from ensemble.common.host import cpu_name
from ensemble.common.protocol import Counters
from ensemble.common.version import __version__
from ensemble.jobs.job import Job, When, jobs_of
from ensemble.jobs.work import Computation
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.results import predictions_title
from ensemble.pipeline.resume import MemberWork
from ensemble.pipeline.run_report import (
    SCHEMA,
    CascadeReport,
    MemberProgress,
    MemberReport,
    MemoryForecast,
    Results,
    RuleReport,
    RunReport,
    Status,
    ViewReport,
)
from ensemble.pipeline.selection import Selections
from ensemble.planning.forecast import Speed, calibrated
from ensemble.planning.plan import ModelPlan
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.records import Failure, NodeChange, WorkerRecord, idle_gaps
from ensemble.scheduling.state import ModelState, Phase

# Of a member's models, what the furthest one does tells most.
_MOST_TELLING: tuple[Phase, ...] = (
    "failed",
    "predicting",
    "loading",
    "starting",
    "paused",
    "waiting",
    "done",
)


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
    selections: Selections = field(init=False)

    def report(self, status: Status) -> RunReport:
        prepared = self.prepared
        config, loaded, libc = prepared.config, prepared.loaded, "".join(platform.libc_ver())
        left_out = {failure.member for failure in self.left_out}
        names = [model.name for model in config.models]
        gpus = self.pool.seen if self.pool else prepared.plan.gpus
        # Copies, because another thread may be finishing a member.
        results = {name: copy.copy(value) for name, value in vars(self.results).items()}
        titles = [*filter(results["files"].get, map(predictions_title, names)), *results["files"]]
        results["files"] = {title: results["files"][title] for title in titles}
        report = RunReport(
            **results,
            schema=SCHEMA,
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
            members=tuple(map(self._member, by_member(self.models))),
            left_out=tuple(name for name in names if name in left_out),
            nodes=tuple(self.node_changes),
            on_bad_row=config.on_bad_row,
            explanation=self.explanation,
            ensemble=config.ensemble.model_dump(mode="json", exclude_none=True),
            rules=self._rules(),
            warnings=tuple(prepared.warnings),
            config=loaded.text,
            config_files=tuple(map(str, loaded.paths)),
            overrides=tuple(loaded.overrides),
            table=str(config.data.path.absolute()),
            metrics=config.metrics or (),
            tuned_on=None if config.tuned_on is None else config.tuned_on.model_dump(mode="json"),
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

    def _rules(self) -> tuple[RuleReport, ...]:
        rules = self.prepared.post.rules
        if rules is None or "ensemble" not in self.results.files:
            return ()
        return tuple(
            RuleReport(when=rule.when, set=rule.set, mask=rule.mask, rows=int(rows.sum()))
            for rule, rows in zip(rules.rules, rules.rows, strict=True)
        )

    def _member(self, states: Sequence[ModelState]) -> MemberReport:
        progress, plan = progress_of(states), states[0].plan
        name, work = progress.name, self.works[progress.name]
        settings = next(model for model in self.prepared.config.models if model.name == name)
        # If an earlier run completed the member, the report shows the workers of that run.
        is_reused = work.is_complete and not progress.workers
        workers = work.workers if is_reused else progress.workers
        bad_rows = work.bad_rows
        given_files = () if plan.needs_worker else plan.loaded.kind.sources()
        jobs = [job for job in jobs_of(self.prepared.models, name) if job.view]
        outcome: Literal["complete", "unfinished"] = (
            "complete" if all(state.finished for state in states) else "unfinished"
        )
        return MemberReport(
            **{**vars(progress), "workers": workers},
            status=outcome if progress.failure is None else progress.failure.outcome,
            weight=settings.weight,
            calibration={} if settings.calibration is None else settings.calibration.model_dump(mode="json"),
            fingerprint=work.predictions.causes.digest,
            taken_over=dict(sum((Counter(job.rows_taken) for job in work.jobs), Counter())),
            work=sum(state.plan.work * state.computed_cost for state in states),
            computed_as=settings.computed_as,
            speed=_speed_of(states),
            forecast=_memory_forecast(plan, workers),
            counters=sum((state.counters for state in states), Counters()),
            bad_rows={str(row): bad_rows[row] for row in sorted(bad_rows)},
            inputs=settings.input_names,
            cascade=self._cascade(settings.when, name, self.selections.rows_of_member(name)),
            activation=self.prepared.inspected[name].activation,
            views={job.view: self._view(work, job) for job in jobs},
            given_files=tuple(map(os.path.abspath, given_files)),
            computed=self.computation(states),
            computed_before=work.predictions.computed_before,
        )

    def _view(self, work: MemberWork, job: Job) -> ViewReport:
        """Return how many rows a job has that count; of a complete member all that it may have.

        Nothing of an earlier run's jobs was read again then, unless some of them may lack rows.
        """
        rows = self.results.job_rows.get(job.name)
        job_work = work.job(job.name)
        selected = self.selections.rows_of(job.name)
        if work.is_complete:
            is_counted = np.ones_like(job_work.is_done) if job.has_all_rows else job_work.is_done
            rows = int((is_counted if selected is None else is_counted & selected).sum())
        when = None if job.own_selection is None else job.own_selection.when
        return ViewReport(job.weight, rows, job_work.causes.digest, self._cascade(when, job.name, selected))

    def _cascade(
        self, when: When | None, name: str, rows: npt.NDArray[np.bool_] | None
    ) -> CascadeReport | None:
        """Return what ``when`` of a member or job selected."""
        if when is None:
            return None
        return CascadeReport(
            {**when}, 0 if rows is None else int(rows.sum()), self.selections.is_selected(name)
        )


def by_member(models: Sequence[ModelState]) -> list[list[ModelState]]:
    """Return the models of each member, in the order of their first models."""
    members: dict[str, list[ModelState]] = {}
    for state in models:
        members.setdefault(state.plan.member, []).append(state)
    return [*members.values()]


def progress_of(states: Sequence[ModelState]) -> MemberProgress:
    """Return how far a member is, by the states of its models."""
    first, phases = states[0].plan, {state.phase for state in states}
    shares = [1.0]  # of the member's work
    if len(states) > 1:
        work = sum(state.plan.work for state in states) or 1.0
        shares = [state.plan.work / work for state in states]
    fraction = sum(share * state.fraction for share, state in zip(shares, states, strict=True))
    computed = sum(share * state.computed_cost for share, state in zip(shares, states, strict=True))
    has_begun = any(state.predicting_since is not None for state in states)
    seconds = sum(state.predicting_seconds for state in states)
    seconds_left = states[0].seconds_left
    if len(states) > 1 and computed:
        left = sum(share * state.work_left for share, state in zip(shares, states, strict=True))
        seconds_left = seconds * left / computed
    return MemberProgress(
        name=first.member,
        phase=next(phase for phase in _MOST_TELLING if phase in phases),
        replicas=max(state.plan.replicas for state in states),
        has_rows=first.has_rows,
        has_when=first.model.when is not None,
        jobs=sum(len(state.plan.jobs) for state in states),
        chunks=sum(len(state.plan.chunks) for state in states),
        rows=sum(state.rows for state in states),
        reused_rows=sum(state.reused_rows for state in states if state.plan.needs_worker),
        rows_done=sum(state.rows_done for state in states),
        tokens_done=sum(state.tokens_done for state in states),
        fraction=fraction,
        computed_share=computed,
        seconds=seconds if has_begun else None,
        seconds_left=seconds_left if computed else None,
        lost_rows=sum(state.speed_meter.lost_rows for state in states),
        batch_size=first.request.batch_size,
        in_hand=tuple(text for state in states for text in state.in_hand_texts),
        faults=tuple(fault for state in states for fault in state.faults),
        failure=next((state.failure for state in states if state.failure is not None), None),
        workers=tuple(worker for state in states for worker in state.workers),
    )


def members_of(models: Sequence[ModelState]) -> list[MemberProgress]:
    """Return the progress of each member, in the order of their first models."""
    return [*map(progress_of, by_member(models))]


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


def _memory_forecast(plan: ModelPlan, workers: Sequence[WorkerRecord]) -> MemoryForecast | None:
    footprint = plan.placement.footprint
    if footprint is None:
        return None
    budgets = [worker.ready.token_budget or 0 for worker in workers if worker.ready is not None]
    tokens = max(budgets, default=0) or footprint.width
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
        compute_seconds = whole_seconds * state.work_left
        demands.append(replace(state.plan.demand, startup_seconds=startup, compute_seconds=compute_seconds))
    return round(prepared.plan.seconds_of(demands), 3)
