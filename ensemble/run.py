"""The road of a run, in order, and nothing else."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType

import numpy as np

from ensemble.config import LoadedConfig
from ensemble.devices import Device, worker_environment
from ensemble.errors import Interrupted, WriteError
from ensemble.launch.allocator import allocator_environment
from ensemble.launch.local import LocalWorker
from ensemble.leases import Leases
from ensemble.planning.plan import MemberPlan
from ensemble.planning.preflight import held_texts, wait_for_room
from ensemble.prepare import Prepared, prepare
from ensemble.protocol import Start
from ensemble.report.progress import Display
from ensemble.report.runjson import run_document, write_run_json
from ensemble.report.terminal import shown_path
from ensemble.results import Results, merge, write_predictions
from ensemble.rundir import RunDir, atomic_path, hold, write_text
from ensemble.scheduler import Scheduler, Worker
from ensemble.spec import worker_spec
from ensemble.state import Failure, MemberState

log = logging.getLogger("ensemble")


@dataclass
class RunResult:
    """A run's members as they ended, and what it handed over."""

    members: list[MemberState] = field(default_factory=list)
    results: Results = field(default_factory=Results)

    @property
    def failures(self) -> list[Failure]:
        return [state.failure for state in self.members if state.failure is not None]


def run(loaded: LoadedConfig, display: Display) -> RunResult:
    """Run a config from its checks to its merged files.

    Members that failed are in the result's ``failures``; then nothing was merged, and the others' CSVs stand.

    Raises:
        EnsembleError: of exit code 2 before anything is written, 3 when the directory is in use, 1 when
            the disk was full or the members' CSVs do not fit together.
        Interrupted: a signal came.
    """
    began = time.monotonic()
    prepared = prepare(loaded)
    for text in _opening(prepared):
        display.say(text)
    with _signals_raise():
        prepared = replace(prepared, outlook=wait_for_room(prepared.outlook, display.say))
    for text in filter(None, (*prepared.plan.warnings, prepared.plan.why)):
        display.say(text)
    rundir = RunDir(prepared.config.output_dir)
    rundir.create()
    result = RunResult()
    with _other_disk_errors(rundir), hold(rundir), _signals_raise():
        rundir.clear()
        leases = _leases(prepared, display)
        with _logging_to(rundir.run_log):
            status = "interrupted"
            try:
                write_text(rundir.config, loaded.text)
                _publish(prepared, rundir)
                _run_members(prepared, rundir, leases, display, result)
                status = "failed"
                if not result.failures:
                    merge(prepared, rundir, result.results)
                    status = "complete"
            finally:
                seconds = time.monotonic() - began
                with contextlib.suppress(WriteError):  # what ended the run says more than this
                    _write_run_json(prepared, rundir, leases, result, status, seconds)
            rundir.remove_work()
    return result


def _opening(prepared: Prepared) -> Iterator[str]:
    table, config = prepared.table, prepared.config
    yield f"{shown_path(config.data.path)}: {table.rows:,} rows"
    for column, count in table.null_texts.items():
        if count:
            yield f"{count:,} empty texts in {column!r}, read as empty strings"
    if config.limit is not None and config.submission is not None and config.submission.path is not None:
        yield f"a trial on the first rows: {shown_path(config.submission.path)} will not be written"
    yield from filter(None, (prepared.inventory.note, *prepared.warnings))
    yield from held_texts(prepared.outlook.gpus)


def _leases(prepared: Prepared, display: Display) -> Leases:
    config = prepared.config
    return Leases(prepared.outlook.gpus, config.max_workers_per_gpu, config.release_timeout, display.say)


def _publish(prepared: Prepared, rundir: RunDir) -> None:
    with atomic_path(rundir.table) as temporary:
        prepared.table.publish(temporary)
    prepared.table.forget_columns()  # the workers have them now
    for member in prepared.plan.members:
        rundir.parts_dir(member.name).mkdir()
        with atomic_path(rundir.order(member.name)) as temporary, temporary.open("wb") as file:
            np.save(file, member.order)


def _run_members(
    prepared: Prepared, rundir: RunDir, leases: Leases, display: Display, result: RunResult
) -> None:
    offloaded: list[Path] = []

    def launch(member: MemberPlan, replica: int, lease: Sequence[Device]) -> tuple[Worker, str]:
        log_path = rundir.log(member.name, replica)
        model = member.model
        folder: Path | None = None
        if model.offload_folder is not None:
            # transformers names its files there after parameters, which are alike in every model.
            folder = model.offload_folder / f"{member.name}-{replica}-{os.getpid()}"
            folder.mkdir(parents=True)
            offloaded.append(folder)
        environment = worker_environment(lease)
        if lease:
            environment |= allocator_environment(model.expandable_segments, model.max_split_size_mb)
        worker = LocalWorker(environment, log_path)
        worker.send(Start.of(worker_spec(prepared, rundir, member, folder)))
        return worker, shown_path(log_path)

    def finished(state: MemberState) -> None:
        write_predictions(prepared, rundir, state, result.results)

    scheduler = Scheduler(prepared.plan, leases, launch, display.update, finished)
    result.members = scheduler.members
    display.start()
    try:
        scheduler.run()
    finally:
        display.stop()
        for folder in offloaded:
            shutil.rmtree(folder, ignore_errors=True)


def _write_run_json(
    prepared: Prepared, rundir: RunDir, leases: Leases, result: RunResult, status: str, seconds: float
) -> None:
    document = run_document(
        status=status,
        loaded=prepared.loaded,
        inventory=prepared.inventory,
        gpus=prepared.outlook.gpus,
        rows=prepared.table.rows,
        null_texts=prepared.table.null_texts,
        members=result.members,
        leases=leases,
        scores=result.results.scores,
        warnings=prepared.warnings,
        files=result.results.files,
        timing={"total_seconds": round(seconds, 3)},
    )
    write_run_json(rundir.run_json, document)
    result.results.files["report"] = rundir.run_json


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """While a run goes on, SIGINT, SIGTERM and SIGHUP end it through its own clean-up; a second one at once.

    A signal that was ignored stays so: under nohup the end of the terminal is none of the run's business.
    """
    came: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        if came:
            os._exit(128 + number)  # workers go with this process: the kernel kills them
        came.append(number)
        raise Interrupted(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}
    heeded = [number for number in numbers if before[number] is not signal.SIG_IGN]
    for number in heeded:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number in heeded:
            signal.signal(number, before[number])


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


@contextlib.contextmanager
def _logging_to(path: Path) -> Iterator[None]:
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    level = log.level
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.setLevel(level)
        log.removeHandler(handler)
        handler.close()
