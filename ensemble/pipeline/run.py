"""Run the steps of a run, in order."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
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
from ensemble.common.protocol import CommonSpec, JobSpec, Start, WorkerSpec
from ensemble.common.shards import CACHE_FOLDER, INPUTS_FILE, ORDER_FILE
from ensemble.common.text import duration, plural, shown_path
from ensemble.config import LoadedConfig, RunConfig
from ensemble.data.published_table import write_inputs
from ensemble.jobs.work import Work, write_bad_rows
from ensemble.members.registry import member_kind
from ensemble.pipeline.prepare import prepare
from ensemble.pipeline.prepared import Prepared
from ensemble.pipeline.remote import demand_writable_results
from ensemble.pipeline.report_page import write_page
from ensemble.pipeline.reporting import RunState, by_member, members_of
from ensemble.pipeline.results import ResultWriter
from ensemble.pipeline.resume import (
    Choices,
    changed_cpu_choices,
    cpu_choice_of,
    demand_reusable,
    find_works,
    kept_batches,
    refuse_trial,
)
from ensemble.pipeline.run_dir import RunDir, hold, log, logging_to, system_errors_in
from ensemble.pipeline.run_report import MERGED, MemberProgress, RunReport
from ensemble.pipeline.selection import Selections
from ensemble.pipeline.signals import Signals, heed_signals
from ensemble.pipeline.trackers import tell_trackers
from ensemble.pipeline.wait_for_gpus import held_texts, wait_for_gpu_memory
from ensemble.planning.plan import CpuChoice, ModelPlan
from ensemble.scheduling.deadline import Deadline, reserve_seconds, time_limit_text
from ensemble.scheduling.launchers.base import MemberFiles, WorkerStart
from ensemble.scheduling.records import Failure
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import MAX_TURN_SECONDS, Scheduler
from ensemble.scheduling.state import ModelState, RunHooks


def run(
    loaded: LoadedConfig,
    display: Display,
    fresh: bool = False,
    elapsed_seconds: float = 0.0,
    owns_process: bool = True,
    reuse: Path | None = None,
    held: Signals | None = None,
) -> RunReport:
    """Run a config from its checks to its merged files; what an earlier run did of the same work is kept.

    If the report's ``status`` is "failed", members have failed and nothing was merged; the other members' CSVs are
    complete.

    Args:
        elapsed_seconds: how much of ``time_limit`` has passed already.
        reuse: the directory of another run, from which equal rows of the same members are taken over.
        held: as for ``run_prepared``.

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
    return run_prepared(prepared, display, fresh, began, owns_process, has_hooks=True, held=held)


def run_prepared(
    prepared: Prepared,
    display: Display,
    fresh: bool,
    began: float,
    owns_process: bool = True,
    has_hooks: bool = False,
    held: Signals | None = None,
) -> RunReport:
    """Run what has passed the checks, and close its launcher; the run ``began`` by ``boot_seconds``.

    Args:
        has_hooks: other packages' functions are called at its end, however it ends, and trackers are told.
        held: how the caller, who holds the directory, handles signals; None: the run does both itself.
    """
    config, rundir = prepared.config, RunDir(prepared.config.output_dir)
    target = None if config.submission is None else config.submission.path
    with contextlib.closing(prepared.launcher), system_errors_in("the run"):
        if config.limit is not None and target is not None:
            display.say(f"a trial on the first rows: {shown_path(target)} stays as it is")
        for text in (prepared.inventory.note, *prepared.warnings, *held_texts(prepared.plan.gpus)):
            if text:
                display.say(text)
        if not config.wait_for_gpu and prepared.reuse is None and not rundir.run_json.exists():
            # Before anything is written.  A run that goes on may have nothing left that needs a GPU.
            wait_for_gpu_memory(prepared.plan, prepared.launcher, lambda text: None)
        with contextlib.nullcontext(held) if held else held_directory(rundir, owns_process) as signals:
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
                    if has_hooks and steps.models:  # otherwise run.json is that of an earlier run
                        for problem in steps.tell():
                            log.warning("%s", problem)
                            display.say(problem)


@contextlib.contextmanager
def held_directory(rundir: RunDir, owns_process: bool) -> Iterator[Signals]:
    """Make the directory and hold it, and handle signals."""
    rundir.create()
    with hold(rundir), heed_signals(owns_process) as signals:
        yield signals


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
        self.selections = Selections(prepared, rundir, self.works)
        self._writer = ResultWriter(prepared, rundir, self.works, self.selections, self.results)
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
            self.selections.begin()
            self._take_over_cpu_choices()
            self._plan_what_is_left()
            works = self.works.values()
            self.report("running").write(rundir.run_json)
            is_work_left = any(state.has_work for state in self.models)
            # If weights of views changed, their mean is another one, with nothing to compute.
            if is_work_left or any(work.mean is not None and not work.is_complete for work in works):
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
            if self.models:  # otherwise the report of an earlier run says more
                # An error that ended the run matters more than one of its report; a merged run needs its report.
                with contextlib.nullcontext() if self.status in MERGED else contextlib.suppress(WriteError):
                    logs = {"log": rundir.run_log, "run.json": rundir.run_json}
                    self.results.files |= {title: str(path.absolute()) for title, path in logs.items()}
                    self.report(self.status).write(rundir.run_json)
        # A member that was left out can resume from its shards.
        if self.status == "complete" and not self.left_out:
            self._remove_work()
        return self._add_page(self.report(self.status))

    @property
    def _working_models(self) -> list[ModelPlan]:
        return [state.plan for state in self.models if state.has_work]

    def _works_of(self, plan: ModelPlan) -> list[Work]:
        """Return the works of a model's jobs, in their order."""
        works = {work.name: work for work in self.works[plan.member].jobs}
        return [works[job.name] for job in plan.jobs]

    def _publish_work(self) -> None:
        rundir = self._rundir
        needs_ids = any(member_kind(model).reads().ids for model in self._config.models)
        with atomic_path(rundir.table) as temporary:
            self.prepared.table.publish(temporary, needs_ids)
        for plan in self._working_models:
            works = self._works_of(plan)
            for work in works:
                work.make_shards_dir()
            folder = works[0].shards_dir
            with atomic_path(folder / ORDER_FILE) as temporary, temporary.open("wb") as file:
                np.save(file, plan.order)
            self._write_inputs(plan)
            if not plan.gpus and self._config.launcher == "local":
                folders = [work.shards_dir for work in works]
                replace(Choices.read(folders), cpu=cpu_choice_of(plan)).write(folders)
        sync_directory(rundir.work_dir)  # so that the new folders survive a power cut

    def _write_inputs(self, plan: ModelPlan) -> None:
        """Write the predictions that a model reads beside its order, once its inputs have ended."""
        columns = plan.model.input_columns(self._config.labels)
        if columns and self.selections.is_selected(plan.member):
            path = self._works_of(plan)[0].shards_dir / INPUTS_FILE
            write_inputs(path, columns, self.selections.inputs_of(plan.member))

    def _remove_work(self) -> None:
        """Remove shards of this run's members; those of members that the config leaves out stay."""
        works = [job for work in self.works.values() for job in work.jobs]
        folders = [work.shards_dir for work in works]
        if self._config.limit is None:  # a trial removes only its own
            folders += [folder for name in self.works for folder in self._rundir.shards_dirs(name)]
            for work in works:
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

    def tell(self) -> Iterator[str]:
        """Tell other packages and trackers of the run, whose files are complete by now; yield what failed."""
        yield from call_hooks("ensemble.run_end", self._rundir.run_json.absolute())
        loaded, report, left = self.prepared.loaded, self.report(self.status), self._seconds_left()
        with self._signals.postponed(is_report=True):
            yield from tell_trackers(loaded, report, left, lambda: self._signals.came is not None)

    def _seconds_left(self, reserve: float = 0.0) -> float:
        """Return the seconds until ``time_limit``, without the last ``reserve``; infinite if there is no limit."""
        limit = self._config.time_limit
        return math.inf if limit is None else self.began + limit - reserve - boot_seconds()

    def _write_predictions_without_workers(self) -> None:
        """Write the predictions of members that need no worker, so that the first submission has them."""
        for plan in self.prepared.plan.models:
            if plan.needs_worker or self.works[plan.member].is_complete:
                continue
            self._rundir.forget_results(keep_submission=self._config.time_limit is not None)
            self._writer.write_given(plan.loaded)

    def _take_over_cpu_choices(self) -> None:
        """Plan members on the CPU as the run began with them; nodes of a cluster have their own cores."""
        choices: dict[str, CpuChoice] = {}
        for model in self.prepared.plan.models if self._config.launcher == "local" else ():
            kept = Choices.read(work.shards_dir for work in self._works_of(model)).cpu
            if kept is not None and not self.works[model.member].is_complete:
                choices[model.name] = kept
        plan = self.prepared.plan.again(self.prepared.plan.gpus, choices) if choices else self.prepared.plan
        self.prepared = replace(self.prepared, plan=plan)
        for text in changed_cpu_choices(plan, choices):
            self.say(text)

    def _plan_what_is_left(self) -> None:
        """Reduce the plan to the chunks that are left to do."""
        plan = self.prepared.plan
        models = tuple(self._what_is_left(model) for model in plan.models)
        self.prepared = replace(self.prepared, plan=replace(plan, models=models))
        self.models = [self._new_state(model) for model in models]
        for state in self.models:
            name = state.plan.member
            why_untrained = self.prepared.loaded.untrained.get(name)
            if why_untrained is not None:
                is_out_of_time = name in self.prepared.loaded.out_of_time
                state.fail(Failure(name, why_untrained, is_out_of_time=is_out_of_time))

    def _new_state(self, plan: ModelPlan) -> ModelState:
        works = self._works_of(plan)
        bad_rows = {
            (job, row): reason for job, work in enumerate(works) for row, reason in work.bad_rows.items()
        }
        return ModelState(plan, bad_rows, self._watch, kept_batches([work.shards_dir for work in works]))

    def _what_is_left(self, plan: ModelPlan) -> ModelPlan:
        """Return a model with the chunks that are left to do; none while its rows are not selected."""
        if not plan.needs_worker:  # its file may lack rows
            work = self.works[plan.member].predictions
            return replace(plan, undecided={}, order=plan.order[work.is_done[plan.order]])
        return self.selections.planned(self.prepared.plan, plan)

    def _write_first_submission(self) -> float:
        """Write a submission of the rows so far, and return the seconds to reserve for the last one."""
        limit = self._config.time_limit
        if limit is None:
            return 0.0
        began = boot_seconds()
        self._writer.merge([member for member in self._config.models if self.works[member.name].has_any_rows])
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
        config, display, prepared = self.prepared.plan.config, self._display, self.prepared
        launcher = prepared.launcher
        launcher.begin({plan.name: self._files_of(plan) for plan in self._working_models})
        prepared.table.forget_columns()  # the workers have them now
        gpus = [gpu for gpu in prepared.plan.gpus if not gpu.is_held]
        deadline = None
        if config.time_limit is not None:
            on_cpu = [model.replicas for model in prepared.plan.models if not model.gpus]
            workers = len(gpus) * config.workers_per_gpu + max(on_cpu, default=0)
            deadline = Deadline(self.began + config.time_limit - reserve, workers, boot_seconds)
        scheduler = Scheduler(self.models, gpus, launcher, self, rules_of(config), self._watch, deadline)
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

    def _files_of(self, plan: ModelPlan) -> MemberFiles:
        works = self._works_of(plan)
        spec = worker_spec(self.prepared, self._rundir, plan, works)
        # ``work.files`` has those that other settings name, such as a tokenizer's.
        sources = (*plan.loaded.kind.sources(), *works[0].files)
        cells = self.prepared.files.get(plan.member)
        if cells is None:
            return MemberFiles(spec, sources)
        folder = str((cells.folder or Path()).absolute())
        return MemberFiles(spec, sources, folder, partial(self.prepared.table.row_files, cells))

    def say(self, text: str) -> None:
        self._display.say(text)

    def worker_start(self, model: ModelPlan, replica: int, devices: Sequence[Device]) -> WorkerStart:
        """Return how to start one of a model's workers."""
        plan, offload_folder = self.prepared.plan, model.request.offload_folder
        if offload_folder is not None:
            # Each worker has its own: transformers names files after parameters, which are alike in every model.
            offload_folder = offload_folder / f"{model.name}-{replica}-{os.getpid()}"
        spec = worker_spec(self.prepared, self._rundir, model, self._works_of(model), offload_folder)
        return WorkerStart(
            command=Start(spec),
            devices=tuple(devices),
            environment=model.loaded.kind.environment() if devices else {},
            log=self._rundir.log(model.name, replica),
            cpu_share=model.host_share(devices, plan.gpus, plan.config.workers_per_gpu),
            cpu_threads=model.cpu_threads,
            scratch=offload_folder,
        )

    def on_bad_rows(self, state: ModelState) -> None:
        """Note the rows of a model that could not be computed, and write them."""
        for job, work in enumerate(self._works_of(state.plan)):
            work.bad_rows = state.bad_rows_of(job)
            if work.bad_rows:
                write_bad_rows(work, work.bad_rows)

    def on_rooms(self, state: ModelState) -> None:
        """Write how much memory a model's batches may take, for runs that go on with it."""
        folders = [work.shards_dir for work in self._works_of(state.plan)]
        replace(Choices.read(folders), rooms=state.batches.rooms).write(folders)

    def on_finished(self, state: ModelState) -> None:
        """Write the predictions of a model that has all of its rows."""
        shutil.rmtree(self._works_of(state.plan)[0].shards_dir / CACHE_FOLDER, ignore_errors=True)
        states = [other for other in self.models if other.plan.member == state.plan.member]
        self._writer.write_predictions(state.plan.loaded, self.computation([state]), self.computation(states))

    def on_jobs_done(self, state: ModelState) -> None:
        """Select rows of a model's next job, unless that waits for other models, too."""
        jobs = state.plan.jobs[: min(state.plan.undecided)]
        self._begin_selected(self.selections.end(*(job.name for job in jobs)))

    def on_ended(self, state: ModelState) -> None:
        """Begin jobs whose rows can be selected now that a model has finished or failed."""
        failure, may_go_on = state.failure, self._config.on_member_failure == "continue"
        if failure is not None and not failure.is_dropped and not may_go_on:
            return  # members that wait for it go on in a later run, which has its rows
        if failure is not None:
            self._leave_out_readers(failure)
        jobs = [job.name for job in state.plan.jobs]
        self._begin_selected(self.selections.end(*jobs, is_left_out=failure is not None))

    def _leave_out_readers(self, failure: Failure) -> None:
        """Leave out the members that read the predictions of one that has failed."""
        readers = self.selections.readers_of(failure.member)
        for state in self.models:
            if state.plan.member in readers and state.failure is None:
                state.fail(failure.of_reader(state.plan.member))

    def _begin_selected(self, members: Collection[str]) -> None:
        """Queue the chunks of members of which rows have been selected."""
        for state in self.models:
            if state.plan.member in members and state.failure is None:
                plan = self.selections.with_selected(self.prepared.plan, state.plan)
                self._write_inputs(plan)
                state.extend(plan)

    def on_change(self, models: Sequence[ModelState]) -> None:
        """Show the members, and write the report if it is due."""
        self._display.update(members_of(models))
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
        members = members_of(self.models)
        failures = [progress.failure for progress in members if progress.failure is not None]
        failed = {progress.name for progress in members if progress.failure is not None}
        good = [member for member in self._config.models if member.name not in failed]
        may_go_on = self._config.on_member_failure == "continue"
        is_timed = self._config.time_limit is not None
        weighted = [member for member in good if member.has_weight]
        out_of_time = [failure for failure in failures if failure.is_out_of_time]
        if not weighted and failures and failures == out_of_time:  # the first submission stands
            self.left_out, self.status = failures, "time_limit"
            return
        excused = [
            failure for failure in failures if failure.is_dropped or may_go_on or failure in out_of_time
        ]
        if not weighted or excused != failures:
            rows_done = {progress.name: progress.rows_done for progress in members}
            if is_timed and any(rows_done[member.name] for member in weighted):
                self._writer.merge(good)  # better than the first submission, which is there in any case
                names = ", ".join(failure.member for failure in failures)
                self.say(f"the submission holds what there is, without {names}")
            return
        self._writer.merge(good)
        self.left_out = failures
        # The shards of a member whose CSV was not written in time must stay.
        is_unfinished = is_timed and not all(self.works[member.name].is_complete for member in good)
        is_unfinished = is_unfinished or bool(out_of_time)
        self.status = "time_limit" if is_unfinished else "complete"

    def _end_early(self) -> None:
        """Complete the members that lack nothing but rows of which they have as many as there was time for."""
        for states in by_member(self.models):
            # Bad rows would fail the member; so it stays unfinished, as at any end of the time.
            is_bad = self._config.on_bad_row != "uniform" and any(state.bad_rows for state in states)
            unfinished = [state for state in states if not state.finished]
            is_undecided = all(state.plan.is_undecided for state in states)
            may_end_early = unfinished and all(state.may_end_early for state in unfinished)
            if is_bad or is_undecided or not may_end_early:
                continue
            member = states[0].plan.member
            self.selections.keep_computed(member)
            for state in unfinished:
                state.end_early()
                try:
                    self.on_finished(state)
                except MergeError as error:
                    state.fail(Failure(member, str(error)))

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
            max(merged_rows.get(member.name, 0), member.rows_done) > member.reused_rows
            for member in members_of(self.models)
            if member.replicas  # others' predictions were made elsewhere
        )
        if limit is not None and self.status == "time_limit" and not has_new_rows:
            text = time_limit_text(self.models, limit, self._seconds_before_workers, reserve)
            self.explanation = "; ".join(filter(None, [self.results.kept_submission, text]))
            log.warning("%s", self.explanation)


def rules_of(config: RunConfig) -> Rules:
    return Rules(
        retries=config.retries,
        on_bad_row=config.on_bad_row,
        hang_timeout=config.hang_timeout,
        standby=config.standby,
        workers_per_gpu=config.workers_per_gpu,
        release_timeout=config.release_timeout,
        devices=config.devices,
    )


def worker_spec(
    prepared: Prepared,
    rundir: RunDir,
    model: ModelPlan,
    works: Sequence[Work],
    offload_folder: Path | None = None,
) -> WorkerSpec:
    """Return what a worker of a model must know; ``works`` are those of the model's jobs."""
    config, inspected = prepared.plan.config, prepared.of_models[model.name]
    # The worker's share of a GPU that several share, without the memory that CUDA takes.
    memory_limit = None
    if model.gpus and config.workers_per_gpu > 1:
        gpus = [gpu for gpu in prepared.plan.gpus if gpu.uuid in model.placement.devices]
        free = min(gpu.total_bytes - gpu.used_bytes for gpu in gpus)
        memory_limit = free * model.placement.places // config.workers_per_gpu
        footprint = model.placement.footprint
        if footprint is not None:
            memory_limit -= footprint.context_bytes
    common = CommonSpec(
        labels=config.labels,
        activation=inspected.activation,
        gpus=model.gpus,
        memory_limit_bytes=memory_limit,
        seed=config.seed,
        table_path=str(rundir.table.resolve()),
        order_path=str((works[0].shards_dir / ORDER_FILE).resolve()),
        input_columns=model.model.input_columns(config.labels),
        shards_dir=str(rundir.work_dir.resolve()),
        files={path: seen.state for path, seen in works[0].files.items()},
        jobs=tuple(
            JobSpec(work.shards_dir.name, dict(job.swap), job.label_order)
            for work, job in zip(works, model.jobs, strict=True)
        ),
    )
    settings = model.loaded.kind.worker_settings(inspected, model.placement, offload_folder)
    return WorkerSpec(common, model.loaded.kind.child, dict(settings))


class Display(Protocol):
    """Show a run; ``update`` is called with every member's state, a few times a second."""

    def say(self, text: str) -> None: ...
    def update(self, members: Sequence[MemberProgress]) -> None: ...
    def stop(self) -> None: ...
