"""The road of a run, in order, and nothing else."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from ensemble.common.clock import Watch, boot_seconds
from ensemble.common.errors import RESUMES, DataError, EnsembleError, Interrupted, MergeError, WriteError
from ensemble.common.files import (
    FileState,
    atomic_path,
    file_state,
    remove_temporary_files,
    sync_directory,
    write_text,
)
from ensemble.common.gpus import Device, driver_session
from ensemble.common.protocol import CommonSpec, Start, ViewSpec, WorkerSpec
from ensemble.common.shards import order_path
from ensemble.common.text import duration, plural, shown_path
from ensemble.config import LoadedConfig
from ensemble.members.registry import member_kind
from ensemble.pipeline.cascade import Cascades
from ensemble.pipeline.cpu_choices import changed_cpu_choices, keep_cpu_choice, kept_cpu_choices
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.report_page import write_page
from ensemble.pipeline.reporting import RunState, worker_reports
from ensemble.pipeline.results import ResultWriter
from ensemble.pipeline.resume import find_works, refuse_trial, reopen, write_bad_rows
from ensemble.pipeline.reuse import demand_reusable
from ensemble.pipeline.run_dir import RunDir, hold, log, logging_to, remove_cache
from ensemble.pipeline.run_report import MERGED, RunReport
from ensemble.pipeline.signals import Signals, heed_signals
from ensemble.pipeline.wait_for_gpus import held_texts, wait_for_room
from ensemble.planning.plan import MemberPlan, without_done
from ensemble.scheduling.deadline import Deadline, reserve_seconds, time_limit_text
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.launchers.base import MemberFiles, WorkerStart
from ensemble.scheduling.records import Failure
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import MAX_TURN_SECONDS, Scheduler
from ensemble.scheduling.state import MemberState, Phase

# How old what ``status`` shows of a running run may be; short enough for people, long enough for slow disks.  With
# hundreds of workers a report takes a good part of a second: no more than this share of the time, or ten times as
# much where a member has got to another phase.
_REPORT_SECONDS, _REPORT_SHARE, _REPORT_MAX_SECONDS = 5.0, 0.005, 60.0


@driver_session()
def run(
    loaded: LoadedConfig,
    display: Display,
    fresh: bool = False,
    elapsed_seconds: float = 0.0,
    clock: Callable[[], float] = boot_seconds,
    owns_process: bool = True,
    reuse: Path | None = None,
) -> RunReport:
    """Run a config from its checks to its merged files; what an earlier run did of the same work is kept.

    Where members failed and the report's ``status`` is "failed", nothing was merged, and the others' CSVs stand.

    Args:
        fresh: start over, whatever an earlier run did.
        elapsed_seconds: how much of ``time_limit`` is over already.
        clock: what the limit goes by, in seconds; it goes on while nobody runs.
        owns_process: as :func:`heed_signals` takes it.
        reuse: the directory of another run, of which the same rows by the same members are taken over.

    Raises:
        EnsembleError: of exit code 2 before anything is written, 3 when the directory is in use, 1 when
            the disk was full or the members' CSVs do not fit together.
        Interrupted: a signal came.
    """
    began = clock() - elapsed_seconds
    if reuse is not None:
        demand_reusable(reuse, loaded.config.output_dir)
    prepared = replace(prepare(loaded, is_for_run=True), reuse=reuse)
    for text in (
        f"{shown_path(loaded.config.data.path)}: {plural(prepared.table.rows, 'row')}",
        *prepared.table.remarks,
    ):
        display.say(text)
    return run_prepared(prepared, display, fresh, began, clock, owns_process)


def run_prepared(
    prepared: Prepared,
    display: Display,
    fresh: bool,
    began: float,
    clock: Callable[[], float] = boot_seconds,
    owns_process: bool = True,
) -> RunReport:
    """What :func:`run` does once the checks are passed; the run began at ``began`` by ``clock``.

    The caller holds a :func:`driver_session`, from its checks on.  The launcher is closed in the end.
    """
    try:
        return _run_prepared(prepared, display, fresh, began, clock, owns_process)
    finally:
        prepared.launcher.close()


def _run_prepared(
    prepared: Prepared,
    display: Display,
    fresh: bool,
    began: float,
    clock: Callable[[], float],
    owns_process: bool,
) -> RunReport:
    config, rundir = prepared.config, RunDir(prepared.config.output_dir)
    target = None if config.submission is None else config.submission.path
    said: list[str] = []
    if config.limit is not None and target is not None:
        said.append(f"a trial on the first rows: {shown_path(target)} will not be written")
    said += [prepared.inventory.note, *prepared.warnings, *held_texts(prepared.plan.gpus)]
    for text in filter(None, said):
        display.say(text)
    if not config.wait_for_gpu and prepared.reuse is None and not rundir.run_json.exists():
        # Before anything is written; a run that goes on may have nothing left that needs a GPU.
        wait_for_room(prepared.plan, prepared.launcher, lambda text: None)
    rundir.create()
    try:
        with hold(rundir), heed_signals(owns_process) as signals:
            refuse_trial(prepared, rundir)
            if fresh:
                rundir.clear()
            rundir.tidy()
            if target is not None:
                remove_temporary_files(target)
            with logging_to(rundir.run_log, prepared.loaded.redactor):
                for ignored in signals.ignored:
                    log.info("%s is ignored: this process was started so", ignored.name)
                return _Run(prepared, began, clock, rundir, display, signals).go()
    except OSError as error:  # outside of the writing of a file, such as in the making of a folder
        if error.filename is None:  # not of a file: a socket, a process
            raise EnsembleError(
                f"the run ended with an error of the system ({type(error).__name__}: {error}); {RESUMES}"
            ) from error
        raise WriteError(
            f"cannot write to {error.filename} ({error.strerror}); free it or change output_dir"
        ) from error


class _Run(RunState):
    """One run, with what its steps share beside its report."""

    def __init__(
        self,
        prepared: Prepared,
        began: float,
        clock: Callable[[], float],
        rundir: RunDir,
        display: Display,
        signals: Signals,
    ) -> None:
        super().__init__(prepared, began, clock)
        self._config = prepared.config
        self._rundir = rundir
        self._display = display
        self.say = display.say
        self._signals = signals
        self._not_given: dict[str, Failure] = {}
        self._writer = ResultWriter(prepared, rundir, self.works, self.results)
        # What workers are given goes by this one, and what is told of them.
        self._watch = Watch(MAX_TURN_SECONDS)
        self._phases: list[Phase] = []
        self._before_seconds = 0.0  # until workers could start
        self._report_due = self._change_due = -math.inf

    def go(self) -> RunReport:
        rundir, config, writer = self._rundir, self._config, self._writer
        try:
            if config.time_limit is not None and config.hash_weights and not rundir.ensemble.exists():
                writer.merge([])  # to read all weights can take minutes
            self.works.update(find_works(self.prepared, rundir, self.say))
            self._take_given()
            self._take_over_cpu_choices()
            self._plan_what_is_left()
            rundir.remove_caches([one.shards_dir for one in self.works.values() if not one.has_rows.all()])
            self.report("running").write(rundir.run_json)
            is_work_left = any(state.has_work for state in self.members)
            # The mean of views may be another with nothing to compute.
            if is_work_left or any(one.views and not one.is_complete for one in self.works.values()):
                rundir.forget_results()
            loaded = self.prepared.loaded
            write_text(rundir.config, loaded.redactor(loaded.whole))
            reserve = self._first_submission() if is_work_left else 0.0
            if is_work_left:
                self._wait_for_room(reserve)
                wants_ids = any(member_kind(one).reads().ids for one in self.prepared.config.models)
                with atomic_path(rundir.table) as temporary:
                    self.prepared.table.publish(temporary, wants_ids)
                for member in self.prepared.plan.members:
                    if member.chunks or member.waits_for:
                        work = self.works[member.name]
                        work.make_shards_dir()
                        with (
                            atomic_path(order_path(work.shards_dir)) as temporary,
                            temporary.open("wb") as file,
                        ):
                            np.save(file, member.order)
                        if not member.gpus and config.launcher == "local":
                            keep_cpu_choice(work.shards_dir, member)
                sync_directory(rundir.work_dir)  # so that the new folders are there after a power cut
            self._run_members(reserve)
            self._merge()
            self._look_back(reserve)
        except Interrupted as stopped:
            self.status = "interrupted"
            log.warning("interrupted: %s", stopped)
            raise
        finally:
            if self.members:  # else the report of an earlier run says more
                # What ended the run says more than this; what nothing ended is not done without its report.
                with contextlib.nullcontext() if self.status in MERGED else contextlib.suppress(WriteError):
                    self.results.files |= {"log": rundir.run_log, "report": rundir.run_json}
                    self.report(self.status).write(rundir.run_json)
        if self.status == "complete":
            rundir.remove_caches(())
        if self.status == "complete" and not self.left_out:  # who was left out can resume from its shards
            # Not those of members that this config leaves out, which another run may resume; of a trial its own.
            done = [work.shards_dir for work in self.works.values()]
            for name, work in self.works.items() if config.limit is None else ():
                done += rundir.shards_dirs(name)
                done += [rundir.root / place for place in work.rows_taken if place.startswith("work/")]
            rundir.remove_work(done)
        return self._with_page(self.report(self.status))

    def _with_page(self, report: RunReport) -> RunReport:
        """Have report.html written, if results stand; the run's own files are complete by now."""
        if report.status not in MERGED:
            return report
        config = self._config
        left = math.inf if config.time_limit is None else self.began + config.time_limit - self.clock()
        with self._signals.postponed(is_report=True):
            page = write_page(self._rundir, report, config.report, left, lambda: self._signals.came, self.say)
        return report if page is None else replace(report, files={**report.files, "report page": str(page)})

    def _take_given(self) -> None:
        """Write the predictions of members that need no worker: first, so that the first submission has them."""
        for member in self.prepared.plan.members:
            if member.needs_worker or self.works[member.name].is_complete:
                continue
            self._signals.check()
            self._rundir.forget_results()
            try:
                self._writer.write_given(member)
            except (DataError, MergeError) as error:
                log.error("%s failed: %s", member.name, error)
                self._not_given[member.name] = Failure(member.name, "; ".join(error.problems))

    def _take_over_cpu_choices(self) -> None:
        """Plan members on the CPU as the run began with them; nodes of a cluster have cores of their own."""
        kept = kept_cpu_choices(self.works) if self._config.launcher == "local" else {}
        if kept:
            plan = self.prepared.plan
            self.prepared = replace(self.prepared, plan=plan.again(plan.gpus, kept))
            for text in changed_cpu_choices(self.prepared.plan, kept):
                self.say(text)

    def _plan_what_is_left(self) -> None:
        plan = self.prepared.plan
        is_timed = self._config.time_limit is not None
        if self.cascades is None and any(member.waits_for for member in plan.members):
            self.cascades = Cascades(self.prepared, self._rundir, self.works)
            self._writer.rows_of = self.cascades.rows_of
        members = tuple(self._what_is_left(member, is_timed) for member in plan.members)
        self.prepared = replace(self.prepared, plan=replace(plan, members=members))
        self.members = [
            MemberState(member, self.works[member.name].noted_bad_rows, self._watch) for member in members
        ]
        for state in self.members:
            if (failure := self._not_given.get(state.plan.name)) is not None:
                state.fail(failure)

    def _what_is_left(self, member: MemberPlan, is_timed: bool) -> MemberPlan:
        """Return a member with the chunks that are left to do; none while its rows are not selected."""
        work = self.works[member.name]
        if not member.needs_worker:
            member = replace(member, waits_for=())
            if not work.is_complete:
                return member
            return replace(member, order=member.order[work.is_done[member.order]])  # its file may lack rows
        if self.cascades is None or not member.waits_for:
            return without_done(member, work.has_rows | work.is_complete, is_timed)
        if not self.cascades.is_covered(member.name):
            if work.is_complete:
                kept = plural(int(work.has_rows.sum()), "row")
                self.say(f"{member.name}: it may need other rows than it has; {kept} are kept")
            reopen(self.prepared, self._rundir, work)
        if self.cascades.is_selected(member.name):
            return self.cascades.planned(self.prepared.plan, member)
        return replace(member, chunks=(), order=member.order[:0])

    def _first_submission(self) -> float:
        """Under a time limit: a submission of what there is; returns the seconds to keep for the last one."""
        limit = self._config.time_limit
        if limit is None:
            return 0.0
        began = self.clock()
        self._writer.merge([one for one in self.members if self.works[one.plan.name].has_rows.any()])
        self.say(
            f"time limit {duration(limit)}: a first submission is written; rows that no member reaches are filled "
            f"in (fill: {self._config.fill})"
        )
        return reserve_seconds(self.clock() - began, len(self._config.models), limit)

    def _wait_for_room(self, reserve: float) -> None:
        limit = self._config.time_limit
        left = math.inf if limit is None else self.began + limit - reserve - self.clock()
        prepared = self.prepared
        plan = wait_for_room(prepared.plan, prepared.launcher, self.say, left)
        if plan is not prepared.plan:
            self.prepared = replace(prepared, plan=plan)
            self._plan_what_is_left()
        for text in filter(None, (*plan.warnings, plan.why)):
            self.say(text)

    def _run_members(self, reserve: float) -> None:
        config, display, prepared = self._config, self._display, self.prepared
        launcher = prepared.launcher
        working = [member for member in prepared.plan.members if member.chunks or member.waits_for]
        launcher.begin({member.name: self._files_of(member) for member in working})
        prepared.table.forget_columns()  # the workers have them now
        gpus = [gpu for gpu in prepared.plan.gpus if not gpu.is_held]
        self.pool = DevicePool(
            gpus, config.max_workers_per_gpu, config.release_timeout, launcher, display.say, self._watch
        )
        self.pool.hosts = prepared.plan.hosts
        rules = Rules(
            retries=config.retries,
            on_bad_row=config.on_bad_row,
            hang_timeout=config.hang_timeout,
            standby=config.standby,
            workers_per_gpu=config.max_workers_per_gpu,
            devices=config.devices,
        )
        deadline = None
        if config.time_limit is not None:
            on_cpu = [member.replicas for member in prepared.plan.members if not member.gpus]
            workers = len(gpus) * config.max_workers_per_gpu + max(on_cpu, default=0)
            deadline = Deadline(self.began + config.time_limit - reserve, workers, self.clock)
        scheduler = Scheduler(self.members, self.pool, launcher, self, rules, self._watch, deadline)
        self.gaps, self.node_changes = scheduler.gaps.measured, scheduler.node_changes
        self._before_seconds = self.clock() - self.began
        try:
            with self._signals.postponed():
                scheduler.run()
            self._signals.check()
        finally:
            display.stop()
            launcher.close()  # before the merge: what it holds of other machines is not needed any more

    def _files_of(self, member: MemberPlan) -> MemberFiles:
        work = self.works[member.name]
        spec = worker_spec(self.prepared, self._rundir, member, work.shards_dir, None, {})
        # Files that settings name besides, such as a tokenizer's, are among those that must stay as they are.
        sources = (*member_kind(member.model).sources(), *work.files)
        if (cells := self.prepared.files.get(member.name)) is None:
            return MemberFiles(spec, sources)
        folder = str((cells.folder or Path()).absolute())
        return MemberFiles(spec, sources, folder, partial(self.prepared.table.row_files, cells))

    def worker_start(self, member: MemberPlan, replica: int, devices: Sequence[Device]) -> WorkerStart:
        work, folder = self.works[member.name], None
        if member.request.offload_folder is not None:
            # transformers names its files there after parameters, which are alike in every model.
            folder = member.request.offload_folder / f"{member.name}-{replica}-{os.getpid()}"
        files = {path: seen.state for path, seen in work.files.items()}
        spec = worker_spec(self.prepared, self._rundir, member, work.shards_dir, folder, files)
        if work.views:
            views = tuple(
                ViewSpec(one.shards_dir.name, view.columns, view.label_order(self._config.labels))
                for one, view in zip(work.views, member.model.counted_views, strict=True)
            )
            spec = replace(spec, common=replace(spec.common, views=views))
        return WorkerStart(
            command=Start(spec),
            devices=tuple(devices),
            environment=member_kind(member.model).environment() if devices else {},
            log=self._rundir.log(member.name, replica),
            cpu_share=member.cpu_share,
            cpu_threads=member.cpu_threads,
            scratch=folder,
        )

    def on_bad_rows(self, state: MemberState) -> None:
        work = self.works[state.plan.name]
        for view, one in enumerate(work.parts):
            if own := work.rows_of_view(state.bad_rows, view):
                write_bad_rows(one, own)

    def on_finished(self, state: MemberState) -> None:
        remove_cache(self.works[state.plan.name].shards_dir)
        self._writer.write_predictions(state, worker_reports(state), self.computation(state))

    def on_ended(self, state: MemberState) -> None:
        if self.cascades is None:
            return
        failure, may_go_on = state.failure, self._config.on_member_failure == "continue"
        if failure is not None and not failure.is_dropped and not may_go_on:
            return  # members that wait for it go on in the run that has it
        selected = self.cascades.end(state.plan.name, is_left_out=failure is not None)
        for waiting in self.members:
            if waiting.plan.name in selected and waiting.is_undecided:
                waiting.begin(self.cascades.planned(self.prepared.plan, waiting.plan))

    def on_change(self, members: Sequence[MemberState]) -> None:
        self._display.update(members)
        phases = [state.phase for state in members]
        due = self._change_due if phases != self._phases else self._report_due
        if self.clock() >= due:
            self._phases, began = phases, time.thread_time()
            with contextlib.suppress(WriteError):  # a full disk ends the run when a result cannot be written
                self.report("running").write(self._rundir.run_json)
            wait = min((time.thread_time() - began) / _REPORT_SHARE, _REPORT_MAX_SECONDS)
            self._report_due = self.clock() + max(_REPORT_SECONDS, wait)
            self._change_due = self.clock() + wait / 10
        self._signals.check()

    def _merge(self) -> None:
        """Merge what may be merged."""
        good = [state for state in self.members if state.failure is None]
        failures = [state.failure for state in self.members if state.failure is not None]
        may_go_on = self._config.on_member_failure == "continue"
        is_timed = self._config.time_limit is not None
        counting = [state for state in good if state.plan.model.has_weight]
        if not counting or not all(failure.is_dropped or may_go_on for failure in failures):
            if is_timed and any(state.rows_done for state in counting):
                self._writer.merge(good)  # better than the first submission, which is there in any case
                names = ", ".join(failure.member for failure in failures)
                self.say(f"the submission holds what there is, without {names}")
            return
        self._writer.merge(good)
        self.left_out = failures
        # One whose CSV was not written in time has its shards, which must stay.
        unfinished = is_timed and not all(self.works[state.plan.name].is_complete for state in good)
        self.status = "time_limit" if unfinished else "complete"

    def _look_back(self, reserve: float) -> None:
        """Say that the table changed, and where the time went of a limit that left none to compute anything."""
        path, limit = self._config.data.path, self._config.time_limit
        if file_state(path) != self.prepared.table_state:
            self.say(
                f"{shown_path(path)} changed during the run; the results are of the rows as they were read at its "
                "start: run the same command again for the rows that are new"
            )
        # What a worker wrote in its last moment counts, though nobody heard of it.
        reached = self.results.merged_rows
        has_got_further = any(
            reached.get(one.plan.name, 0) > one.reused_rows or one.rows_done > one.reused_rows
            for one in self.members
        )
        if limit is not None and self.status == "time_limit" and not has_got_further:
            self.explanation = time_limit_text(self.members, limit, self._before_seconds, reserve)
            log.warning("%s", self.explanation)


def worker_spec(
    prepared: Prepared,
    rundir: RunDir,
    member: MemberPlan,
    shards_dir: Path,
    offload_folder: Path | None,
    files: Mapping[str, FileState],
) -> WorkerSpec:
    """What a worker is told of its member; ``offload_folder`` is for it alone, ``files`` must stay as they are."""
    kind, inspected = member_kind(member.model), prepared.inspected[member.name]
    # A worker's share of a GPU that it does not have to itself, without what CUDA takes of it.
    memory_limit = None
    if member.gpus and (sharing := prepared.config.max_workers_per_gpu) > 1:
        gpus = [gpu for gpu in prepared.plan.gpus if gpu.uuid in member.placement.devices]
        free = min(gpu.total_bytes - gpu.used_bytes for gpu in gpus)
        memory_limit = free * member.placement.places // sharing
        if (needed := member.placement.footprint) is not None:
            memory_limit -= needed.context_bytes
    common = CommonSpec(
        labels=prepared.config.labels,
        activation=inspected.activation,
        gpus=member.gpus,
        memory_limit_bytes=memory_limit,
        seed=prepared.config.seed,
        table_path=rundir.resolved(rundir.table),
        order_path=rundir.resolved(order_path(shards_dir)),
        shards_dir=rundir.resolved(shards_dir),
        files=dict(files),
    )
    settings = kind.worker_settings(inspected, member.placement, offload_folder)
    return WorkerSpec(common, kind.child, dict(settings))


class Display(Protocol):
    """Shows a run; ``update`` is called a few times a second with every member's state."""

    def say(self, text: str) -> None: ...
    def update(self, members: Sequence[MemberState]) -> None: ...
    def stop(self) -> None: ...
