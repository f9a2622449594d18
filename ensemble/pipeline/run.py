"""The road of a run, in order, and nothing else."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ensemble.common.clock import boot_seconds
from ensemble.common.errors import DataError, Interrupted, MergeError, WriteError
from ensemble.common.files import atomic_path, file_state, remove_halves, sync_directory, write_text
from ensemble.common.shards import order_path
from ensemble.common.text import duration, plural, shown_path
from ensemble.config import LoadedConfig
from ensemble.pipeline.launch import Launcher
from ensemble.pipeline.results import Handover, Results
from ensemble.pipeline.resume import MemberWork, find_works, refuse_trial, write_bad_rows
from ensemble.pipeline.run_dir import RunDir, hold
from ensemble.pipeline.run_log import log, logging_to
from ensemble.pipeline.run_report import run_document, worker_documents, write_run_json
from ensemble.pipeline.signals import Signals, heed_signals
from ensemble.pipeline.validate import Prepared, prepare
from ensemble.pipeline.wait_for_gpus import held_texts, wait_for_room
from ensemble.planning.plan import without_done
from ensemble.planning.time_limit import reserve_seconds
from ensemble.scheduling.deadline import TimeKeeper, reckoning
from ensemble.scheduling.device_pool import Leases
from ensemble.scheduling.retry import Judge
from ensemble.scheduling.scheduler import Scheduler
from ensemble.scheduling.state import Failure, Gap, MemberState, phase_of

if TYPE_CHECKING:
    pass

# How old what ``status`` shows of a running run may be; short enough for people, long enough for slow disks.
_REPORT_SECONDS = 5.0


@dataclass
class RunResult:
    """A run's members as they ended, and what it handed over.

    ``status`` is ``complete``, ``time_limit`` (merged, but not of all rows), ``failed`` or ``interrupted``.
    ``left_out`` are failed members that the config allows to merge without; in ``gaps`` a device computed nothing.
    ``reckoning`` says where the time went under a limit that was too short to compute anything.
    """

    status: str = "failed"
    members: list[MemberState] = field(default_factory=list)
    results: Results = field(default_factory=Results)
    left_out: list[Failure] = field(default_factory=list)
    reckoning: str = ""
    gaps: Sequence[Gap] = ()

    @property
    def failures(self) -> list[Failure]:
        """Why nothing was merged; empty where something was."""
        if self.status in ("complete", "time_limit"):
            return []
        return [state.failure for state in self.members if state.failure is not None]


def run(
    loaded: LoadedConfig,
    display: Display,
    fresh: bool = False,
    elapsed_seconds: float = 0.0,
    clock: Callable[[], float] = boot_seconds,
) -> RunResult:
    """Run a config from its checks to its merged files; what an earlier run did of the same work is kept.

    Members that failed are in the result's ``failures``; then nothing was merged, and the others' CSVs stand.

    Args:
        fresh: start over, whatever an earlier run did.
        elapsed_seconds: how much of ``time_limit`` is over already.
        clock: what the limit goes by, in seconds; it goes on while nobody runs.

    Raises:
        EnsembleError: of exit code 2 before anything is written, 3 when the directory is in use, 1 when
            the disk was full or the members' CSVs do not fit together.
        Interrupted: a signal came.
    """
    began = clock() - elapsed_seconds
    prepared = prepare(loaded)
    for text in _opening(prepared):
        display.say(text)
    rundir = RunDir(prepared.config.output_dir)
    if not prepared.config.wait_for_gpu and not rundir.run_json.exists():
        # Before anything is written; a run that goes on may have nothing left that needs a GPU.
        wait_for_room(prepared.outlook, lambda text: None)
    rundir.create()
    with _other_disk_errors(rundir), hold(rundir), heed_signals() as signals:
        refuse_trial(prepared, rundir)
        if fresh:
            rundir.clear()
        rundir.tidy()
        if prepared.config.submission is not None and prepared.config.submission.path is not None:
            remove_halves(prepared.config.submission.path)
        with logging_to(rundir.run_log, loaded.redactor):
            for ignored in signals.ignored:
                log.info("%s is ignored: this process was started so", ignored.name)
            return _Run(prepared, rundir, display, signals, began, clock).go()


class _Run:
    """One run, with what its steps share."""

    def __init__(
        self,
        prepared: Prepared,
        rundir: RunDir,
        display: Display,
        signals: Signals,
        began: float,
        clock: Callable[[], float],
    ) -> None:
        self._prepared = prepared
        self._config = prepared.config
        self._rundir = rundir
        self._display = display
        self._signals = signals
        self._began = began
        self._clock = clock
        self._result = RunResult()
        self._works: dict[str, MemberWork] = {}
        self._not_given: dict[str, Failure] = {}
        self._leases: Leases | None = None
        self._phases: list[str] = []
        self._before_seconds = 0.0  # until workers could start
        self._reported_at = -math.inf

    def go(self) -> RunResult:
        result, rundir, config = self._result, self._rundir, self._config
        try:
            handover = Handover(self._prepared, rundir, self._works)
            result.results = handover.results
            if config.time_limit is not None and config.hash_weights and not rundir.ensemble.exists():
                handover.merge([])  # to read all weights can take minutes
            self._works.update(find_works(self._prepared, rundir, self._display.say))
            self._take_given(handover)
            self._plan_what_is_left()
            self._write_run_json("running")
            if self._is_work_left:
                rundir.forget_results()
            loaded = self._prepared.loaded
            write_text(rundir.config, loaded.redactor(loaded.text))
            reserve = self._first_submission(handover)
            if self._is_work_left:
                self._wait_for_room(reserve)
                self._publish()
            self._run_members(handover, reserve)
            self._hand_over(handover)
            self._look_at_table()
            self._reckon(reserve)
        except Interrupted as stopped:
            result.status = "interrupted"
            log.warning("interrupted: %s", stopped)
            raise
        finally:
            if result.members:  # else the report of an earlier run says more
                # What ended the run says more than this; what nothing ended is not done without its report.
                has_ended_well = result.status in ("complete", "time_limit")
                with contextlib.nullcontext() if has_ended_well else contextlib.suppress(WriteError):
                    self._write_run_json(result.status)
                    result.results.files["report"] = rundir.run_json
        if result.status == "complete" and not result.left_out:  # who was left out can go on from its parts
            rundir.remove_work(self._done_folders())
        return result

    def _done_folders(self) -> Iterator[Path]:
        """The folders of parts that nobody needs any more.

        Not those of members that this config leaves out, which another run may resume; of a trial only its own.
        """
        for name, work in self._works.items():
            yield work.parts_dir
            if self._config.limit is None:
                yield from self._rundir.parts_dirs(name)
                yield from (self._rundir.root / place for place in work.taken if place.startswith("work/"))

    @property
    def _is_work_left(self) -> bool:
        return any(state.waiting for state in self._result.members)

    def _plan_what_is_left(self) -> None:
        outlook = self._prepared.outlook
        is_timed = self._config.time_limit is not None
        members = tuple(
            without_done(member, self._works[member.name].is_done, is_timed)
            for member in outlook.plan.members
        )
        plan = replace(outlook.plan, members=members)
        self._prepared = replace(self._prepared, outlook=replace(outlook, plan=plan))
        self._result.members = [MemberState.of(member) for member in members]
        for state in self._result.members:
            state.failure = self._not_given.get(state.plan.name)
            state.bad_rows.update(self._works[state.plan.name].bad_rows)

    def _take_given(self, handover: Handover) -> None:
        """Seal the predictions of members that need no worker: first, so that the first submission has them."""
        for member in self._prepared.plan.members:
            if member.needs_worker or self._works[member.name].is_sealed:
                continue
            self._signals.check()
            self._rundir.forget_results()
            try:
                handover.write_given(member)
            except (DataError, MergeError) as error:
                log.error("%s failed: %s", member.name, error)
                self._not_given[member.name] = Failure(member.name, "; ".join(error.problems))

    def _first_submission(self, handover: Handover) -> float:
        """Under a time limit: a submission of what there is; returns the seconds to keep for the last one."""
        limit = self._config.time_limit
        if limit is None or not self._is_work_left:
            return 0.0
        began = self._clock()
        handover.merge([one for one in self._result.members if self._works[one.plan.name].is_done.any()])
        self._display.say(
            f"time limit {duration(limit)}: a first submission is written; rows that no member reaches are filled "
            f"in (fill: {self._config.fill})"
        )
        return reserve_seconds(self._clock() - began, len(self._config.models), limit)

    def _wait_for_room(self, reserve: float) -> None:
        limit = self._config.time_limit
        left = math.inf if limit is None else self._began + limit - reserve - self._clock()
        outlook = wait_for_room(self._prepared.outlook, self._display.say, left)
        if outlook is not self._prepared.outlook:
            self._prepared = replace(self._prepared, outlook=outlook)
            self._plan_what_is_left()
        for text in filter(None, (*outlook.plan.warnings, outlook.plan.why)):
            self._display.say(text)

    def _publish(self) -> None:
        rundir, prepared = self._rundir, self._prepared
        with atomic_path(rundir.table) as temporary:
            prepared.table.publish(temporary)
        for member in prepared.plan.members:
            work = self._works[member.name]
            if member.chunks:
                work.make_parts_dir()
                with atomic_path(order_path(work.parts_dir)) as temporary, temporary.open("wb") as file:
                    np.save(file, member.order)
        sync_directory(rundir.work_dir)  # so that the new folders are there after a power cut

    def _run_members(self, handover: Handover, reserve: float) -> None:
        config, display, members = self._config, self._display, self._result.members
        self._prepared.table.forget_columns()  # the workers have them now
        gpus = self._prepared.outlook.gpus
        self._leases = Leases(gpus, config.max_workers_per_gpu, config.release_timeout, display.say)
        launcher = Launcher(self._prepared, self._rundir, self._works)
        scheduler = Scheduler(
            members,
            self._leases,
            launcher.launch,
            Judge(config.retries, config.on_bad_row, display.say, self._keep_bad_rows),
            self._on_change,
            lambda state: handover.write_predictions(state, worker_documents(state)),
            config.hang_timeout,
            self._time_keeper(reserve),
            config.standby,
        )
        self._result.gaps = scheduler.gaps.found
        self._before_seconds = self._clock() - self._began
        display.start()
        try:
            with self._signals.postponed():
                scheduler.run()
            self._signals.check()
        finally:
            display.stop()
            launcher.remove_offloaded()

    def _time_keeper(self, reserve: float) -> TimeKeeper | None:
        config = self._config
        if config.time_limit is None:
            return None
        on_cpu = [member.replicas for member in self._prepared.plan.members if not member.gpus]
        places = len(self._prepared.outlook.gpus) * config.max_workers_per_gpu + max(on_cpu, default=0)
        return TimeKeeper(self._began + config.time_limit - reserve, places, self._clock)

    def _on_change(self, members: list[MemberState]) -> None:
        self._display.update(members)
        phases = [phase_of(state) for state in members]
        if phases != self._phases or self._clock() - self._reported_at >= _REPORT_SECONDS:
            self._phases = phases
            with contextlib.suppress(WriteError):  # a full disk ends the run when a result cannot be written
                self._write_run_json("running")
        self._signals.check()

    def _keep_bad_rows(self, state: MemberState) -> None:
        write_bad_rows(self._works[state.plan.name], state.bad_rows)

    def _hand_over(self, handover: Handover) -> None:
        """Merge what may be merged."""
        result = self._result
        good = [state for state in result.members if state.failure is None]
        failures = [state.failure for state in result.members if state.failure is not None]
        may_go_on = self._config.on_member_failure == "continue"
        is_timed = self._config.time_limit is not None
        counts = any(state.plan.model.weight for state in good)
        if not counts or not all(failure.is_dropped or may_go_on for failure in failures):
            if is_timed and self._is_any_done(good):
                handover.merge(good)  # better than the first submission, which is there in any case
                names = ", ".join(failure.member for failure in failures)
                self._display.say(f"the submission holds what there is, without {names}")
            return
        handover.merge(good)
        result.left_out = failures
        # One whose CSV was not written in time has its parts, which must stay.
        unfinished = is_timed and not all(self._works[state.plan.name].is_sealed for state in good)
        result.status = "time_limit" if unfinished else "complete"

    def _reckon(self, reserve: float) -> None:
        """Say where the time went of a limit that left none to compute anything."""
        limit, result = self._config.time_limit, self._result
        # What a worker wrote in its last moment counts, though nobody heard of it.
        reached = result.results.merged_rows
        has_got_further = any(reached.get(one.plan.name, 0) > one.reused_rows for one in result.members)
        if limit is not None and result.status == "time_limit" and not has_got_further:
            result.reckoning = reckoning(result.members, limit, self._before_seconds, reserve)
            log.warning("%s", result.reckoning)

    def _is_any_done(self, members: Sequence[MemberState]) -> bool:
        return any(state.rows_done and state.plan.model.weight for state in members)

    def _look_at_table(self) -> None:
        """Say that the table changed: what was made is of the rows that were read, once, at the beginning."""
        path = self._config.data.path
        if file_state(path) != self._prepared.table_state:
            self._display.say(
                f"{shown_path(path)} changed during the run; the results are of the rows as they were read at its "
                "start: run the same command again for the rows that are new"
            )

    def _write_run_json(self, status: str) -> None:
        self._reported_at = self._clock()
        prepared, result = self._prepared, self._result
        document = run_document(
            status=status,
            prepared=prepared,
            members=result.members,
            works=self._works,
            leases=self._leases,
            gaps=result.gaps,
            results=result.results,
            left_out=result.left_out,
            timing={"total_seconds": round(self._clock() - self._began, 3)},
        )
        write_run_json(self._rundir.run_json, document)


def _opening(prepared: Prepared) -> Iterator[str]:
    table, config = prepared.table, prepared.config
    yield f"{shown_path(config.data.path)}: {plural(table.rows, 'row')}"
    for column, count in table.null_texts.items():
        if count:
            yield f"{plural(count, 'empty text')} in {column!r}, read as an empty string"
    if config.limit is not None and config.submission is not None and config.submission.path is not None:
        yield f"a trial on the first rows: {shown_path(config.submission.path)} will not be written"
    yield from filter(None, (prepared.inventory.note, *prepared.warnings))
    yield from held_texts(prepared.outlook.gpus)


@contextlib.contextmanager
def _other_disk_errors(rundir: RunDir) -> Iterator[None]:
    """Names the place of disk errors outside of the writing of a file, such as the making of a folder."""
    try:
        yield
    except OSError as error:
        place = error.filename or rundir.root
        raise WriteError(
            f"cannot write to {place} ({error.strerror or error}); free it or change output_dir"
        ) from error


class Display(Protocol):
    """Shows a run; ``update`` is called a few times a second with every member's state."""

    def start(self) -> None: ...
    def say(self, text: str) -> None: ...
    def update(self, members: Sequence[MemberState]) -> None: ...
    def stop(self) -> None: ...
