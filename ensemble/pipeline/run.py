"""Run the steps of a run, in order."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from ensemble.common.clock import Watch, boot_seconds
from ensemble.common.errors import Interrupted, MergeError, WriteError
from ensemble.common.extensions import call_hooks
from ensemble.common.files import atomic_path, file_state, remove_temporary_files, sync_directory, write_text
from ensemble.common.gpus import Device
from ensemble.common.protocol import CommonSpec, Start, ViewSpec, WorkerSpec
from ensemble.common.shards import CACHE_FOLDER, ORDER_FILE
from ensemble.common.text import duration, plural, shown_path
from ensemble.config import LoadedConfig, RunConfig
from ensemble.members.registry import member_kind
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.remote import demand_writable_results
from ensemble.pipeline.report_page import write_page
from ensemble.pipeline.reporting import RunState
from ensemble.pipeline.results import ResultWriter
from ensemble.pipeline.resume import (
    MemberWork,
    changed_cpu_choices,
    find_works,
    keep_cpu_choice,
    keep_rooms,
    kept_batches,
    kept_cpu_choices,
    refuse_trial,
    write_bad_rows,
)
from ensemble.pipeline.reuse import demand_reusable
from ensemble.pipeline.run_dir import (
    RunDir,
    hold,
    log,
    logging_to,
    member_of_work,
    system_errors_in,
    work_of_view,
)
from ensemble.pipeline.run_report import MERGED, RunReport
from ensemble.pipeline.signals import Signals, heed_signals
from ensemble.pipeline.wait_for_gpus import held_texts, wait_for_gpu_memory
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.deadline import Deadline, reserve_seconds, time_limit_text
from ensemble.scheduling.launchers.base import MemberFiles, WorkerStart
from ensemble.scheduling.records import Failure
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import MAX_TURN_SECONDS, Scheduler
from ensemble.scheduling.state import MemberState, RunHooks


def run(
    loaded: LoadedConfig,
    display: Display,
    fresh: bool = False,
    elapsed_seconds: float = 0.0,
    owns_process: bool = True,
    reuse: Path | None = None,
) -> RunReport:
    """Run a config from its checks to its merged files; what an earlier run did of the same work is kept.

    If the report's ``status`` is "failed", members have failed and nothing was merged; the other members' CSVs are
    complete.

    Args:
        elapsed_seconds: how much of ``time_limit`` has passed already.
        reuse: the directory of another run, from which equal rows of the same members are taken over.

    Raises:
        EnsembleError: of exit code 2 before anything is written, 3 if the directory is in use, 1 if the disk is
            full or the members' CSVs do not fit together.
        Interrupted: a signal came.
    """
    began = boot_seconds() - elapsed_seconds
    if reuse is not None:
        demand_reusable(reuse, loaded.config.output_dir)
    demand_writable_results(loaded)
    prepared = replace(prepare(loaded, is_for_run=True), reuse=reuse)
    display.say(f"{shown_path(loaded.config.data.path)}: {plural(prepared.table.rows, 'row')}")
    for remark in prepared.table.remarks:
        display.say(remark)
    return run_prepared(prepared, display, fresh, began, owns_process, has_hooks=True)


def run_prepared(
    prepared: Prepared,
    display: Display,
    fresh: bool,
    began: float,
    owns_process: bool = True,
    has_hooks: bool = False,
) -> RunReport:
    """Run what has passed the checks, and close its launcher; the run ``began`` by ``boot_seconds``.

    With ``has_hooks``, other packages' functions are called at its end, however it ends.
    """
    config, rundir = prepared.config, RunDir(prepared.config.output_dir)
    target = None if config.submission is None else config.submission.path
    with contextlib.closing(prepared.launcher), system_errors_in("the run"):
        if config.limit is not None and target is not None:
            display.say(f"a trial on the first rows: {shown_path(target)} will not be written")
        for text in (prepared.inventory.note, *prepared.warnings, *held_texts(prepared.plan.gpus)):
            if text:
                display.say(text)
        if not config.wait_for_gpu and prepared.reuse is None and not rundir.run_json.exists():
            # Before anything is written.  A run that goes on may have nothing left that needs a GPU.
            wait_for_gpu_memory(prepared.plan, prepared.launcher, lambda text: None)
        rundir.create()
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
                steps = _Run(prepared, began, rundir, display, signals)
                try:
                    return steps.go()
                finally:
                    if has_hooks and steps.members:  # otherwise run.json is that of an earlier run
                        for problem in call_hooks("ensemble.run_end", rundir.run_json.absolute()):
                            log.warning("%s", problem)
                            display.say(problem)


class _Run(RunState, RunHooks):
    """Take a run through its steps, and keep the state that they share."""

    def __init__(
        self, prepared: Prepared, began: float, rundir: RunDir, display: Display, signals: Signals
    ) -> None:
        super().__init__(prepared, began)
        self._config = prepared.config
        self._rundir = rundir
        self._display = display
        self._signals = signals
        self._writer = ResultWriter(prepared, rundir, self.works, self.results)
        self.cascades = self._writer.cascades
        # Measures how long workers take, without the time in which this process did not run.
        self._watch = Watch(MAX_TURN_SECONDS)
        self._seconds_before_workers = 0.0
        self._report_due = -math.inf

    def go(self) -> RunReport:
        """Take all steps from the work of earlier runs to the report page."""
        rundir = self._rundir
        try:
            self.works.update(find_works(self.prepared, rundir, self.say))
            self._write_predictions_without_workers()
            self.cascades.begin()
            self._take_over_cpu_choices()
            self._plan_what_is_left()
            works = self.works.values()
            self.report("running").write(rundir.run_json)
            is_work_left = any(state.has_work for state in self.members)
            # If weights of views changed, their mean is another one, with nothing to compute.
            if is_work_left or any(work.views and not work.is_complete for work in works):
                rundir.forget_results(keep_submission=self._config.time_limit is not None)
            loaded = self.prepared.loaded
            write_text(rundir.config, loaded.redactor(loaded.whole))
            reserve = 0.0
            if is_work_left or loaded.untrained:  # perhaps no member at all could be trained
                reserve = self._write_first_submission()
            if is_work_left:
                self._wait_for_gpu_memory(reserve)
                self._publish_work()
            self._run_members(reserve)
            self._merge()
            self._check_outcome(reserve)
        except Interrupted as stopped:
            self.status = "interrupted"
            log.warning("interrupted: %s", stopped)
            raise
        finally:
            if self.members:  # otherwise the report of an earlier run says more
                # An error that ended the run matters more than one of its report; a merged run needs its report.
                with contextlib.nullcontext() if self.status in MERGED else contextlib.suppress(WriteError):
                    self.results.files |= {"log": rundir.run_log, "run.json": rundir.run_json}
                    self.report(self.status).write(rundir.run_json)
        # A member that was left out can resume from its shards.
        if self.status == "complete" and not self.left_out:
            self._remove_work()
        return self._add_page(self.report(self.status))

    @property
    def _working_members(self) -> list[MemberPlan]:
        return [state.plan for state in self.members if state.has_work]

    def _publish_work(self) -> None:
        rundir = self._rundir
        needs_ids = any(member_kind(model).reads().ids for model in self._config.models)
        with atomic_path(rundir.table) as temporary:
            self.prepared.table.publish(temporary, needs_ids)
        for member in self._working_members:
            work = self.works[member.name]
            work.make_shards_dir()
            with atomic_path(work.shards_dir / ORDER_FILE) as temporary, temporary.open("wb") as file:
                np.save(file, member.order)
            if not member.gpus and self._config.launcher == "local":
                keep_cpu_choice(work.shards_dir, member)
        sync_directory(rundir.work_dir)  # so that the new folders survive a power cut

    def _remove_work(self) -> None:
        """Remove shards of this run's members; those of members that the config leaves out stay."""
        folders = [work.shards_dir for work in self.works.values()]
        if self._config.limit is None:  # a trial removes only its own
            for name, work in self.works.items():
                folders += self._rundir.shards_dirs(name)
                folders += [self._rundir.root / path for path in work.rows_taken if path.startswith("work/")]
        self._rundir.remove_work(folders)

    def _add_page(self, report: RunReport) -> RunReport:
        """Write report.html if there are results; the run's other files are complete by now."""
        if report.status not in MERGED:
            return report
        with self._signals.postponed(is_report=True):
            page = write_page(
                self._rundir,
                report,
                self._config.report,
                self._seconds_left(),
                lambda: self._signals.came is not None,
                self.say,
            )
        return report if page is None else replace(report, files={**report.files, "report": str(page)})

    def _seconds_left(self, reserve: float = 0.0) -> float:
        """Return the seconds until ``time_limit``, without the last ``reserve``; infinite if there is no limit."""
        limit = self._config.time_limit
        return math.inf if limit is None else self.began + limit - reserve - boot_seconds()

    def _write_predictions_without_workers(self) -> None:
        """Write the predictions of members that need no worker, so that the first submission has them."""
        for member in self.prepared.plan.members:
            if member.needs_worker or self.works[member.name].is_complete:
                continue
            self._rundir.forget_results(keep_submission=self._config.time_limit is not None)
            self._writer.write_given(member)

    def _take_over_cpu_choices(self) -> None:
        """Plan members on the CPU as the run began with them; nodes of a cluster have their own cores."""
        choices = kept_cpu_choices(self.works) if self._config.launcher == "local" else {}
        plan = self.prepared.plan.again(self.prepared.plan.gpus, choices) if choices else self.prepared.plan
        self.prepared = replace(self.prepared, plan=plan)
        for text in changed_cpu_choices(plan, choices):
            self.say(text)

    def _plan_what_is_left(self) -> None:
        """Reduce the plan to the chunks that are left to do."""
        plan = self.prepared.plan
        members = tuple(self._what_is_left(member) for member in plan.members)
        self.prepared = replace(self.prepared, plan=replace(plan, members=members))
        self.members = [self._new_state(member, self.works[member.name]) for member in members]
        for state in self.members:
            why_untrained = self.prepared.loaded.untrained.get(state.plan.name)
            if why_untrained is not None:
                is_out_of_time = state.plan.name in self.prepared.loaded.out_of_time
                state.fail(Failure(state.plan.name, why_untrained, is_out_of_time=is_out_of_time))

    def _new_state(self, member: MemberPlan, work: MemberWork) -> MemberState:
        return MemberState(member, work.noted_bad_rows, self._watch, kept_batches(work.shards_dir))

    def _what_is_left(self, member: MemberPlan) -> MemberPlan:
        """Return a member with the chunks that are left to do; none while its rows are not selected."""
        work = self.works[member.name]
        if not member.needs_worker:  # its file may lack rows
            return replace(member, waits_for=(), order=member.order[work.is_done[member.order]])
        return self.cascades.planned(self.prepared.plan, member)

    def _write_first_submission(self) -> float:
        """Write a submission of the rows so far, and return the seconds to reserve for the last one."""
        limit = self._config.time_limit
        if limit is None:
            return 0.0
        began = boot_seconds()
        self._writer.merge([state for state in self.members if self.works[state.plan.name].has_rows.any()])
        first = "a first submission is written; rows that no member reaches are filled in "
        first += f"(fill: {self._config.fill})"
        self.say(f"time limit {duration(limit)}: {self.results.kept_submission or first}")
        return reserve_seconds(boot_seconds() - began, len(self._config.models), limit)

    def _wait_for_gpu_memory(self, reserve: float) -> None:
        prepared = self.prepared
        seconds_left = self._seconds_left(reserve)
        plan = wait_for_gpu_memory(prepared.plan, prepared.launcher, self.say, seconds_left)
        if plan is not prepared.plan:
            self.prepared = replace(prepared, plan=plan)
            self._plan_what_is_left()
        for text in filter(None, (*plan.warnings, plan.why)):
            self.say(text)

    def _run_members(self, reserve: float) -> None:
        """Run the scheduler until all members have ended."""
        config, display, prepared = self._config, self._display, self.prepared
        launcher = prepared.launcher
        launcher.begin({member.name: self._files_of(member) for member in self._working_members})
        prepared.table.forget_columns()  # the workers have them now
        gpus = [gpu for gpu in prepared.plan.gpus if not gpu.is_held]
        deadline = None
        if config.time_limit is not None:
            on_cpu = [member.replicas for member in prepared.plan.members if not member.gpus]
            workers = len(gpus) * config.max_workers_per_gpu + max(on_cpu, default=0)
            deadline = Deadline(self.began + config.time_limit - reserve, workers, boot_seconds)
        scheduler = Scheduler(self.members, gpus, launcher, self, rules_of(config), self._watch, deadline)
        self.pool = scheduler.pool
        self.pool.hosts = prepared.plan.hosts
        self.node_changes = scheduler.node_changes
        self._seconds_before_workers = boot_seconds() - self.began
        try:
            with self._signals.postponed():
                scheduler.run()
            self._signals.check()
        finally:
            display.stop()
            launcher.close()  # before the merge, which needs no other machines
            with contextlib.suppress(OSError):
                self._rundir.tidy()  # workers that were ended may have left temporary files

    def _files_of(self, member: MemberPlan) -> MemberFiles:
        work = self.works[member.name]
        spec = worker_spec(self.prepared, self._rundir, member, work)
        # ``work.files`` has those that other settings name, such as a tokenizer's.
        sources = (*member_kind(member.model).sources(), *work.files)
        cells = self.prepared.files.get(member.name)
        if cells is None:
            return MemberFiles(spec, sources)
        folder = str((cells.folder or Path()).absolute())
        return MemberFiles(spec, sources, folder, partial(self.prepared.table.row_files, cells))

    def say(self, text: str) -> None:
        self._display.say(text)

    def worker_start(
        self, member: MemberPlan, replica: int, devices: Sequence[Device], checkpoint: int
    ) -> WorkerStart:
        """Return how to start one of a member's workers."""
        offload_folder = member.request.offload_folder
        if offload_folder is not None:
            # Each worker has its own: transformers names files after parameters, which are alike in every model.
            offload_folder = offload_folder / f"{member.name}-{replica}-{os.getpid()}"
        work = self.works[member.name]
        spec = worker_spec(self.prepared, self._rundir, member, work, offload_folder, checkpoint)
        return WorkerStart(
            command=Start(spec),
            devices=tuple(devices),
            environment=member_kind(member.model).environment() if devices else {},
            log=self._rundir.log(member.name, replica),
            cpu_share=member.host_share(devices, self.prepared.plan.gpus, self._config.max_workers_per_gpu),
            cpu_threads=member.cpu_threads,
            scratch=offload_folder,
        )

    def on_bad_rows(self, state: MemberState) -> None:
        """Write the rows of a member that could not be computed."""
        work = self.works[state.plan.name]
        for view, part in enumerate(work.parts):
            bad_rows = work.rows_of_view(state.bad_rows, view)
            if bad_rows:
                write_bad_rows(part, bad_rows)

    def on_rooms(self, state: MemberState) -> None:
        """Write how much memory a member's batches may take, for runs that go on with it."""
        keep_rooms(self.works[state.plan.name].shards_dir, state.batches)

    def on_finished(self, state: MemberState) -> None:
        """Write the predictions of a member that has all of its rows."""
        shutil.rmtree(self.works[state.plan.name].shards_dir / CACHE_FOLDER, ignore_errors=True)
        self._writer.write_predictions(state, self.computation(state))

    def on_views_done(self, state: MemberState) -> None:
        """Select rows of a member's next view, unless that waits for other members, too."""
        views = range(min(state.plan.undecided_views))
        self._begin_selected(self.cascades.end(*(work_of_view(state.plan.model, view) for view in views)))

    def on_ended(self, state: MemberState) -> None:
        """Begin members and views whose rows can be selected now that a member has finished or failed."""
        failure, may_go_on = state.failure, self._config.on_member_failure == "continue"
        if failure is not None and not failure.is_dropped and not may_go_on:
            return  # members that wait for it go on in a later run, which has its rows
        self._begin_selected(self.cascades.end(state.plan.name, is_left_out=failure is not None))

    def _begin_selected(self, works: Collection[str]) -> None:
        """Queue the chunks of members and views whose rows have been selected."""
        members = {member_of_work(work) for work in works}
        for state in self.members:
            if state.plan.name in members and state.is_undecided:
                state.begin(self.cascades.planned(self.prepared.plan, state.plan))
            elif state.plan.name in members and state.failure is None:
                state.extend(self.cascades.with_selected_views(self.prepared.plan, state.plan))

    def on_change(self, members: Sequence[MemberState]) -> None:
        """Show the members, and write the report if it is due."""
        self._display.update(members)
        began = boot_seconds()
        if began >= self._report_due:
            with contextlib.suppress(WriteError):  # a full disk ends the run when a result cannot be written
                self.report("running").write(self._rundir.run_json)
            now = boot_seconds()
            # At most 5 % of the time is for reports, which are large if there are hundreds of workers.
            self._report_due = now + max(5.0, 20 * (now - began))
        self._signals.check()

    def _merge(self) -> None:
        """Merge the members, unless one has failed that the run may not go on without."""
        self._end_early()
        good = [state for state in self.members if state.failure is None]
        failures = [state.failure for state in self.members if state.failure is not None]
        may_go_on = self._config.on_member_failure == "continue"
        is_timed = self._config.time_limit is not None
        weighted = [state for state in good if state.plan.model.has_weight]
        out_of_time = [failure for failure in failures if failure.is_out_of_time]
        if not weighted and failures and failures == out_of_time:  # the first submission stands
            self.left_out, self.status = failures, "time_limit"
            return
        excused = [
            failure for failure in failures if failure.is_dropped or may_go_on or failure in out_of_time
        ]
        if not weighted or excused != failures:
            if is_timed and any(state.rows_done for state in weighted):
                self._writer.merge(good)  # better than the first submission, which is there in any case
                names = ", ".join(failure.member for failure in failures)
                self.say(f"the submission holds what there is, without {names}")
            return
        self._writer.merge(good)
        self.left_out = failures
        # The shards of a member whose CSV was not written in time must stay.
        is_unfinished = is_timed and not all(self.works[state.plan.name].is_complete for state in good)
        is_unfinished = is_unfinished or bool(out_of_time)
        self.status = "time_limit" if is_unfinished else "complete"

    def _end_early(self) -> None:
        """Complete the members that lack nothing but rows of which they have as many as there was time for."""
        for state in self.members:
            # Bad rows would fail the member; so it stays unfinished, as at any end of the time.
            is_bad = state.bad_rows and self._config.on_bad_row != "uniform"
            if is_bad or not state.may_end_early:
                continue
            self.cascades.keep_computed(state.plan.name)
            state.end_early()
            try:
                self.on_finished(state)
            except MergeError as error:
                state.fail(Failure(state.plan.name, str(error)))

    def _check_outcome(self, reserve: float) -> None:
        """Warn if the table has changed, and explain where the time went if the limit left none to compute rows."""
        path, limit = self._config.data.path, self._config.time_limit
        if file_state(path) != self.prepared.table_state:
            self.say(
                f"{shown_path(path)} changed during the run; the results are of the rows as they were read at its "
                "start: run the same command again for the rows that are new"
            )
        for copy in self.prepared.loaded.copies:
            if copy.has_changed():
                self.say(
                    f"{copy.address} changed since it was copied, and the results are of the copy: run the same "
                    "command again for what is new"
                )
        # Merged rows include those that a worker wrote too late to report them.
        merged_rows = self.results.merged_rows
        has_new_rows = any(
            max(merged_rows.get(state.plan.name, 0), state.rows_done) > state.reused_rows
            for state in self.members
        )
        if limit is not None and self.status == "time_limit" and not has_new_rows:
            text = time_limit_text(self.members, limit, self._seconds_before_workers, reserve)
            self.explanation = "; ".join(filter(None, [self.results.kept_submission, text]))
            log.warning("%s", self.explanation)


def rules_of(config: RunConfig) -> Rules:
    return Rules(
        retries=config.retries,
        on_bad_row=config.on_bad_row,
        hang_timeout=config.hang_timeout,
        standby=config.standby,
        workers_per_gpu=config.max_workers_per_gpu,
        release_timeout=config.release_timeout,
        devices=config.devices,
    )


def worker_spec(
    prepared: Prepared,
    rundir: RunDir,
    member: MemberPlan,
    work: MemberWork,
    offload_folder: Path | None = None,
    checkpoint: int = 0,
) -> WorkerSpec:
    """Return what a worker with one of the member's checkpoints must know."""
    config, inspected, shards_dir = prepared.config, prepared.inspected[member.name], work.shards_dir
    assigned = member.placement.of_checkpoint(checkpoint)
    # The worker's share of a GPU that several share, without the memory that CUDA takes.
    memory_limit = None
    if member.gpus and config.max_workers_per_gpu > 1:
        gpus = [gpu for gpu in prepared.plan.gpus if gpu.uuid in member.placement.devices]
        free = min(gpu.total_bytes - gpu.used_bytes for gpu in gpus)
        memory_limit = free * member.placement.places // config.max_workers_per_gpu
        footprint = assigned.footprint
        if footprint is not None:
            memory_limit -= footprint.context_bytes
    common = CommonSpec(
        labels=config.labels,
        activation=inspected.activation,
        gpus=member.gpus,
        memory_limit_bytes=memory_limit,
        seed=config.seed,
        table_path=str(rundir.table.resolve()),
        order_path=str((shards_dir / ORDER_FILE).resolve()),
        shards_dir=str(shards_dir.resolve()),
        files={path: seen.state for path, seen in work.files.items()},
        views=tuple(
            ViewSpec(of_view.shards_dir.name, view.columns, view.label_order(config.labels))
            for of_view, view in zip(work.views, member.model.counted_views, strict=True)
        ),
    )
    kind = member_kind(member.model).of_checkpoint(checkpoint)
    settings = kind.worker_settings(inspected.of_checkpoint(checkpoint), assigned, offload_folder)
    return WorkerSpec(common, kind.child, dict(settings))


class Display(Protocol):
    """Show a run; ``update`` is called with every member's state, a few times a second."""

    def say(self, text: str) -> None: ...
    def update(self, members: Sequence[MemberState]) -> None: ...
    def stop(self) -> None: ...
