"""From a run as it stands to its report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ensemble.common.gpus import Device
from ensemble.common.host import cpu_name
from ensemble.common.version import __version__
from ensemble.pipeline.cascade import Cascades
from ensemble.pipeline.prepared import Prepared
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
    SpeedReport,
    Status,
    ViewReport,
    WorkerReport,
)
from ensemble.planning.forecast import calibrated
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.gaps import Gap
from ensemble.scheduling.records import Failure, NodeChange
from ensemble.scheduling.state import MemberState


@dataclass
class RunState:
    """A run as it stands.

    Attributes:
        began: when, by ``clock``, in seconds.
        works: by member name, as far as it is known yet.
        pool: None before there is one.
        left_out: members that the others were merged without.
        explanation: see ``RunReport``.
    """

    prepared: Prepared
    began: float
    clock: Callable[[], float]
    status: Status = "failed"
    members: list[MemberState] = field(default_factory=list)
    works: dict[str, MemberWork] = field(default_factory=dict)
    results: Results = field(default_factory=Results)
    pool: DevicePool | None = None
    gaps: Sequence[Gap] = ()
    node_changes: Sequence[NodeChange] = ()
    left_out: Sequence[Failure] = ()
    explanation: str = ""
    cascades: Cascades | None = None

    def report(self, status: Status) -> RunReport:
        """Its report; no text in it is a secret."""
        prepared, results = self.prepared, self.results
        loaded, libc = prepared.loaded, "".join(platform.libc_ver())
        names = [model.name for model in prepared.config.models]
        gpus = self.pool.seen if self.pool else prepared.plan.gpus
        report = RunReport(
            status=status,
            pid=os.getpid(),
            versions=_versions(self.members),
            written_at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds_left=_seconds_left(prepared, self.members) if status == "running" else None,
            # As platform.platform() has it, which starts a process (uname -p) to know less.
            platform="-".join((platform.system(), platform.release(), platform.machine(), "with", libc)),
            devices=gpus or prepared.inventory.hosts or (Device("cpu", cpu_name(), None, 0, 0),),
            driver_version=prepared.inventory.driver_version,
            rows=prepared.table.rows,
            null_texts=dict(prepared.table.null_texts),
            timing={"total_seconds": round(self.clock() - self.began, 3)},
            idle_gaps=tuple(self.gaps),
            releases=tuple(self.pool.releases) if self.pool else (),
            device_memory=dict(self.pool.curves) if self.pool else {},
            device_telemetry=dict(self.pool.telemetry) if self.pool else {},
            members=tuple(
                replace(
                    _member(state, self.works.get(state.plan.name)),
                    cascade=self._cascade(state.plan.name),
                    activation=prepared.inspected[state.plan.name].activation,
                    views=self._views(state),
                    partial_rows=results.partial_rows.get(state.plan.name, 0),
                    computed=self.computation(state),
                )
                for state in self.members
            ),
            left_out=tuple(name for name in names if any(one.member == name for one in self.left_out)),
            merged_rows=dict(results.merged_rows),
            filled_rows=results.filled_rows,
            scores=dict(results.scores),
            nodes=self._nodes(),
            gain=results.gain,
            on_bad_row=prepared.config.on_bad_row,
            explanation=self.explanation,
            ensemble=prepared.config.ensemble.model_dump(mode="json", exclude_none=True),
            rules=self._rules(),
            warnings=tuple(prepared.warnings),
            # A copy: members are finished in another thread meanwhile.
            files=_members_first(dict(results.files), names),
            config=loaded.text,
            config_files=tuple(map(str, loaded.paths)),
            overrides=tuple(loaded.overrides),
            table=str(prepared.config.data.path.absolute()),
            fitted_on=results.fitted_on,
            tuned_on=None if (tuned := prepared.config.tuned_on) is None else tuned.model_dump(mode="json"),
        )
        redacted: RunReport = loaded.redactor.document(report)
        return redacted

    def computation(self, state: MemberState) -> Computation | None:
        """Say what this run computed rows of a member with by now; None where it computed none."""
        devices, driver = dict[str, str](), self.prepared.inventory.driver_version
        for worker in state.workers:
            if worker.ready is not None and worker.counters.rows:
                devices |= dict.fromkeys(worker.devices, worker.ready.device)
        if not devices:
            return None
        return Computation(
            at=datetime.now(UTC).isoformat(timespec="seconds"),
            seconds=round(state.predicting_seconds, 3),
            versions=_versions([state]) | ({"driver": driver} if driver else {}),
            devices=devices | ({"cpu": cpu_name()} if "cpu" in devices else {}),
        )

    def _nodes(self) -> tuple[NodeReport, ...]:
        nodes = {one.node: NodeReport(one.node, one.total_bytes) for one in self.prepared.inventory.hosts}
        for change in self.node_changes:
            if not change.is_lost:
                nodes[change.node] = NodeReport(change.node, change.total_bytes, change.after_seconds)
            elif (node := nodes.get(change.node)) is not None:
                nodes[change.node] = replace(
                    node, lost_after_seconds=change.after_seconds, why_lost=change.why
                )
        return tuple(nodes.values())

    def _rules(self) -> tuple[RuleReport, ...]:
        rules = self.prepared.rules
        if rules is None or "ensemble" not in self.results.files:
            return ()
        return tuple(
            RuleReport(one.when, one.set, one.mask, int(rows.sum()))
            for one, rows in zip(rules.rules, rules.rows, strict=True)
        )

    def _views(self, state: MemberState) -> dict[str, ViewReport]:
        name, views = state.plan.name, state.plan.model.counted_views
        work, rows = self.works.get(name), self.results.view_rows.get(name)
        if work is not None and work.is_complete:
            rows = (int(work.is_done.sum()),) * len(views)
        return {
            view.name: ViewReport(view.weight, None if rows is None else rows[number])
            for number, view in enumerate(views)
        }

    def _cascade(self, member: str) -> CascadeReport | None:
        model = next(one for one in self.prepared.config.models if one.name == member)
        if model.when is None or self.cascades is None:
            return None
        rows = self.cascades.rows_of(member)
        return CascadeReport(
            when=dict(model.when),
            rows=0 if rows is None else int(rows.sum()),
            is_selected=self.cascades.is_selected(member),
            comparison=self.results.comparisons.get(member),
        )


def _versions(members: Sequence[MemberState]) -> dict[str, str]:
    """Versions of what runs: the parent never imports torch, so that its workers say what they run with."""
    versions = {"ensemble": __version__, "python": platform.python_version()}
    for worker in (worker for state in members for worker in state.workers):
        versions |= {name: version for name, version in worker.versions.items() if version}
    return versions


def worker_reports(state: MemberState) -> tuple[WorkerReport, ...]:
    """What a member's workers did."""
    reports = []
    for record in state.workers:
        ready, life, counters = record.ready, record.life_seconds, record.counters
        sources = (
            (record, ("replica", "devices", "process", "exit_code", "start_seconds", "load_seconds")),
            (record, ("started_after_seconds", "leased_after_seconds", "life_seconds")),
            (ready, ("dtype", "attn_implementation", "parameters", "max_length", "token_budget")),
            (record.closed, ("peak_memory_bytes", "peak_gpu_memory_bytes")),
        )
        fields: dict[str, Any] = {
            name: getattr(source, name, None) for source, names in sources for name in names
        }
        fields |= {"device_name": ready.device if ready else None, "notes": ready.notes if ready else ()}
        fields |= {"forward_share": _share(counters.forward_seconds, life), "log": record.log_path}
        reports.append(WorkerReport(**fields, **counters.rounded(3)))
    return tuple(reports)


def speed_report(state: MemberState) -> SpeedReport:
    """What was measured of a member by now, for the next plan; see ``forecast.measured_speeds``."""
    speed = state.speed
    return SpeedReport(speed.startup_seconds or None, speed.seconds_per_work or None, speed.cpu_share)


def _members_first(files: dict[str, Path], names: Sequence[str]) -> dict[str, str]:
    """Return the absolute paths of results, the members' first, in the order of ``names``."""
    predictions = [title for title in map(predictions_title, names) if title in files]
    return {title: str(files[title].absolute()) for title in dict.fromkeys([*predictions, *files])}


def _member(state: MemberState, work: MemberWork | None) -> MemberReport:
    plan, counters, needed, forecast = state.plan, state.counters, state.plan.placement.footprint, None
    # Of a member that an earlier run did, what that run's workers did.
    is_reused = work is not None and work.is_complete and not state.workers
    workers = work.workers if work is not None and is_reused else worker_reports(state)
    if needed is not None:
        tokens = max(filter(None, (worker.token_budget for worker in workers)), default=needed.width)
        forecast = MemoryForecast(
            parameters=needed.weights.parameters,
            weight_bytes=needed.weights.bytes,
            context_bytes=needed.context_bytes,
            peak_bytes=needed.peak_bytes(plan.gpus, tokens),
            token_budget=tokens,
            width=needed.width,
        )
    return MemberReport(
        name=plan.name,
        phase=state.phase,
        status="failed" if state.failure else "complete" if state.finished else "unfinished",
        weight=plan.model.weight,
        calibration={} if plan.model.calibration is None else plan.model.calibration.model_dump(mode="json"),
        gpus_per_replica=plan.gpus,
        replicas=plan.replicas,
        first_replicas=plan.first_replicas,
        fingerprint=work.fingerprint.digest if work is not None else None,
        reused_rows=0 if work is not None and work.is_new else state.reused_rows,
        taken_over=dict(work.rows_taken) if work is not None else {},
        work=work.work_bytes if work is not None and is_reused else plan.work * state.computed_cost,
        computed_as=plan.model.computed_as,
        settings={} if work is None else dict(work.settings),
        speed=speed_report(state),
        forecast=forecast,
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
        bad_rows={
            str(row): reason
            for row, reason in sorted(
                (state.bad_rows if work is None else work.bad_rows_of_views(state.bad_rows)).items()
            )
        },
        faults=tuple(state.faults),
        failure=state.failure,
        workers=workers,
        computed_before=() if work is None else work.computed_before,
    )


def _seconds_left(prepared: Prepared, members: Sequence[MemberState]) -> float | None:
    """Until the last member ends, by the speeds so far; None before there is one."""
    measured = {}
    for state in members:
        whole = state.seconds_per_cost  # what all of its work would take one replica
        if whole is None and state.computed_cost:
            whole = state.predicting_seconds * max(1, state.running) / state.computed_cost
        if whole:
            measured[state.plan.name] = whole
    if not measured and not all(state.plan.speed.is_measured for state in members):
        return None
    guessed = {one.plan.name: one.plan.whole_seconds for one in members}
    seconds = calibrated(guessed, measured)
    jobs = []
    for state in members:
        if state.finished or state.failure is not None:
            continue
        whole = seconds[state.plan.name]
        if whole is None:
            return None
        startup = 0.0 if state.running else state.plan.job.startup_seconds
        left = whole * (1.0 - state.fraction) * state.plan.expected_share
        jobs.append(replace(state.plan.job, startup_seconds=startup, compute_seconds=left))
    return round(prepared.plan.seconds_of(jobs), 3)


def _share(part: float, whole: float | None) -> float | None:
    return round(part / whole, 4) if whole else None
