"""Run trainings through the scheduler: a member's trainings are its chunks, each done by a command in a worker."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ensemble.common.clock import Watch, boot_seconds
from ensemble.common.errors import CheckpointError, DeviceError, MergeError, WriteError
from ensemble.common.files import FileState, changed_files, read_json
from ensemble.common.gpus import Device
from ensemble.common.protocol import ChunkDone, CommonSpec, Start, WorkerSpec
from ensemble.common.python_process import path_of_commands, python_environment
from ensemble.common.redact import secrets_in
from ensemble.common.text import duration, gib, shown_path
from ensemble.config import LoadedConfig, MemberConfig
from ensemble.members.base import OutputColumns
from ensemble.members.registry import member_kind
from ensemble.pipeline.run import Display
from ensemble.pipeline.signals import Signals
from ensemble.pipeline.training_dir import Part, TrainingDir
from ensemble.planning.chunks import Chunk
from ensemble.planning.placement import chosen_devices
from ensemble.planning.plan import MemberPlan
from ensemble.planning.trainings import plan_trainings
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.launchers.base import WorkerStart
from ensemble.scheduling.launchers.local import LocalLauncher
from ensemble.scheduling.records import Failure
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import MAX_TURN_SECONDS, Scheduler
from ensemble.scheduling.state import MemberState
from ensemble.scheduling.training_deadline import TrainingDeadline
from ensemble.training.records import (
    MemberRecord,
    PartRecord,
    Seal,
    Status,
    TrainingReport,
    read_record,
    steps_done,
    write_record,
)
from ensemble.training.seal import seal_training

_CHILD = "ensemble.training.worker"
_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Training:
    """Describe the training of a member on a part.

    Attributes:
        command: a program and its arguments.
        is_built_in: whether the command is our own, which goes on with what an earlier try has left.
        made_of: see ``Seal``.
        is_done: whether it has ended well earlier.
    """

    model: MemberConfig
    part: Part
    command: tuple[str, ...]
    is_built_in: bool
    made_of: Mapping[str, str]
    is_done: bool = False


class TrainingRun:
    """Run trainings on this machine, as the hooks of their scheduler.

    Args:
        trainings: all that are asked for; those that are not done are run.
        watched: the states of the tables, which should not change meanwhile, by absolute path.
        ends_at: when all must have stopped, by ``boot_seconds``; None: no limit.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        trainings: Sequence[Training],
        display: Display,
        signals: Signals,
        watched: Mapping[str, FileState],
        ends_at: float | None = None,
    ) -> None:
        self._loaded = loaded
        self._config = loaded.config
        self._files = TrainingDir(loaded.config.output_dir)
        self._trainings = trainings
        self._lacking: dict[str, list[Training]] = {}
        for training in trainings:
            if not training.is_done:
                self._lacking.setdefault(training.model.name, []).append(training)
        self._display = display
        self.say = display.say
        self._signals = signals
        self._watched = watched
        self._ends_at = ends_at
        self._watch = Watch(MAX_TURN_SECONDS)
        self._launcher = LocalLauncher({})
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="sealing")
        self._sealing: list[tuple[MemberState, Future[None]]] = []
        self._states: list[MemberState] = []
        self._began = boot_seconds()
        self._report_due = -math.inf

    def run(self) -> TrainingReport:
        """Train, and report how it ended.

        Raises:
            DeviceError: a member asks for more GPUs than there are.
            WriteError: a seal could not be written.
            Interrupted: a signal came.
        """
        config, self._gpus = self._config, self._find_gpus()
        for trainings in self._lacking.values():
            model, names = trainings[0].model, [training.part.text for training in trainings]
            assert model.training is not None
            plan = plan_trainings(config, config.models.index(model), model.training, names, self._gpus)
            self._states.append(MemberState(plan, clock=self._watch))
        problems = [problem for state in self._states for problem in state.plan.placement.problems]
        if problems:
            raise DeviceError(problems)
        workers_per_gpu = config.max_workers_per_gpu
        pool = DevicePool(
            self._gpus, workers_per_gpu, config.release_timeout, self._launcher, self.say, self._watch
        )
        rules = Rules(config.retries, "fail", config.hang_timeout, False, workers_per_gpu, config.devices)
        deadline = None
        if self._ends_at is not None:
            workers = max(1, len(self._gpus) * workers_per_gpu)
            deadline = TrainingDeadline(self._ends_at, workers, boot_seconds)
        scheduler = Scheduler(self._states, pool, self._launcher, self, rules, self._watch, deadline)
        status: Status = "interrupted"
        try:
            with self._signals.postponed():
                scheduler.run()
            self._signals.check()
            status = "complete" if all(state.finished for state in self._states) else "time_limit"
            if any(state.failure is not None for state in self._states):
                status = "failed"
        finally:
            self._display.stop()
            self._sealer.shutdown()  # what has begun is completed
            report = self._report(status)
            with contextlib.suppress(WriteError):
                write_record(self._files.records, report)
        return report

    def _find_gpus(self) -> tuple[Device, ...]:
        """Return the GPUs that trainings may use; none are looked for if every member is trained on the CPU."""
        if all(model.training and model.training.num_gpus == 0 for model in self._config.trained_members):
            return ()
        machine = self._launcher.inventory()
        if machine.mask_problem:
            raise DeviceError(machine.mask_problem)
        return tuple(gpu for gpu in chosen_devices(machine.gpus, self._config.devices) if not gpu.is_held)

    def _report(self, status: Status) -> TrainingReport:
        states = {state.plan.name: state for state in self._states}
        members = []
        for name, trainings in itertools.groupby(self._trainings, lambda training: training.model.name):
            state = states.get(name)
            parts = tuple(self._part(training, state) for training in trainings)
            faults = () if state is None else tuple(state.faults)
            failure = None if state is None else state.failure
            members.append(
                MemberRecord(name, parts, faults, "" if failure is None else self._failure_text(failure))
            )
        report = TrainingReport(status, round(boot_seconds() - self._began, 3), tuple(members))
        redacted: TrainingReport = self._loaded.redactor.document(report)
        return redacted

    def _part(self, training: Training, state: MemberState | None) -> PartRecord:
        name, part = training.model.name, training.part
        seal, folder = read_record(self._files.seal(name, part), Seal), self._files.checkpoint(name, part)
        if seal is not None and training.made_of.items() <= seal.made_of.items() and folder.is_dir():
            return PartRecord(
                name=part.name,
                status="done",
                folder=str(folder.absolute()),
                seconds=seal.seconds,
                attempts=seal.attempts,
                devices=seal.devices,
                progress=seal.progress,
            )
        attempts, is_running = 0, False
        if state is not None:
            row = self._lacking[name].index(training)
            attempts = _attempts(state, row)
            is_running = any(chunk.start == row for chunk in state.chunks.in_hand.values())
        return PartRecord(
            name=part.name,
            status="training" if is_running else "waiting",
            attempts=attempts,
            progress=self._progress(training),
        )

    def _progress(self, training: Training) -> dict[str, Any]:
        """Return what a training's command has last said of its progress; empty if it has said nothing."""
        return read_json(self._files.unfinished(training.model.name, training.part) / "progress.json")

    def _failure_text(self, failure: Failure) -> str:
        logs = shown_path(self._files.worker_log(failure.member, 0).parent)
        return failure.message if logs in failure.message else f"{failure.message}; its logs are in {logs}"

    # What the scheduler calls.

    def worker_start(
        self, member: MemberPlan, replica: int, devices: Sequence[Device], checkpoint: int
    ) -> WorkerStart:
        """Return how to start a worker, which can run each of the member's trainings."""
        trainings = self._lacking[member.name]
        model, is_built_in = trainings[0].model, trainings[0].is_built_in
        is_stepwise = is_built_in and model.training is not None and model.training.method != "head"
        jobs = [
            {
                "command": training.command,
                "out": str(self._files.unfinished(member.name, training.part).absolute()),
                "log": shown_path(self._files.log(member.name, training.part)),
                "resumes": training.is_built_in,
                "rungs": str(self._files.rungs.absolute()) if is_stepwise else "",
            }
            for training in trainings
        ]
        environment: dict[str, str | None] = {}
        if not is_built_in:  # its variables are the user's, not those that our own processes need
            changed = {*python_environment()} - {"PYTHONUNBUFFERED"}
            environment = {**{name: os.environ.get(name) for name in changed}, "PATH": path_of_commands()}
        secrets = dict.fromkeys(secrets_in(self._config.model_dump(mode="json")))
        settings: dict[str, Any] = {
            "jobs": jobs,
            "device": ", ".join(f"{device.name} ({gib(device.total_bytes)})" for device in devices),
            "environment": environment,
            "secrets": {f"secret {number}": text for number, text in enumerate(secrets)},
        }
        common = CommonSpec(
            labels=self._config.labels, activation="none", gpus=member.gpus, seed=self._config.seed
        )
        log = self._files.worker_log(member.name, replica)
        log.parent.mkdir(parents=True, exist_ok=True)
        return WorkerStart(
            command=Start(WorkerSpec(common, _CHILD, settings)),
            devices=tuple(devices),
            environment=member_kind(model).environment() if devices and is_built_in else {},
            log=log,
            cpu_share=member.host_share(devices, self._gpus, self._config.max_workers_per_gpu),
        )

    def on_change(self, members: Sequence[MemberState]) -> None:
        """Show and record progress; fail members whose trainings have left what cannot be used."""
        for state, future in self._sealing:
            if future.done() and state.failure is None:
                try:
                    future.result()
                except MergeError as error:
                    state.fail(Failure(state.plan.name, str(error)))
        for state in members:
            state.follow_shares(self._shares(state))
        self._display.update(members)
        now = boot_seconds()
        if now >= self._report_due:
            self._report_due = now + _REPORT_SECONDS
            with contextlib.suppress(WriteError):  # a full disk ends the run when a seal cannot be written
                write_record(self._files.records, self._report("running"))
        self._signals.check()

    def _shares(self, state: MemberState) -> dict[int, float]:
        """Return which share of each training in progress is done, by chunk, where its command tells."""
        shares = {}
        for chunk in state.chunks.in_hand.values():
            training = self._lacking[state.plan.name][chunk.start]
            steps = steps_done(self._progress(training))
            if steps is not None:
                shares[chunk.index] = steps[0] / steps[1]
        return shares

    def on_chunk_done(
        self, state: MemberState, chunk: Chunk, done: ChunkDone, devices: Sequence[str]
    ) -> None:
        """Have what a training has left checked and sealed, in another thread."""
        training, seconds = self._lacking[state.plan.name][chunk.start], done.counters.predict_seconds
        seal = Seal(
            made_of=dict(training.made_of),
            seconds=round(seconds, 3),
            attempts=_attempts(state, chunk.start),
            devices=tuple(devices),
            progress=self._progress(training),
        )
        self._sealing.append((state, self._sealer.submit(self._seal, training, seal)))

    def _seal(self, training: Training, seal: Seal) -> None:
        name, part, config = training.model.name, training.part, self._config
        for path in changed_files(self._watched):
            self.say(
                f"{shown_path(Path(path))} changed while {name} was trained; {part.text} learned the rows as they "
                "were read at the start: the same command again trains anew on the new ones"
            )
        columns = OutputColumns(config.data.id_column, config.labels, config.data.path.parent)
        try:
            seal_training(self._files, training.model, part, columns, seal)
        except CheckpointError as error:
            raise MergeError(f"{part.text}: {'; '.join(error.problems)}") from error
        why = seal.progress.get("why")
        how = f", {seal.progress.get('rung')}: {why}" if why else ""
        self.say(f"{name}: {part.text} trained in {duration(seal.seconds)}{how}")

    def on_finished(self, state: MemberState) -> None:
        """Wait until the last trainings of a member are sealed; raise MergeError if one cannot be."""
        for other, future in self._sealing:
            if other is state:
                future.result()

    def on_bad_rows(self, state: MemberState) -> None: ...
    def on_rooms(self, state: MemberState) -> None: ...
    def on_views_done(self, state: MemberState) -> None: ...
    def on_ended(self, state: MemberState) -> None: ...


def _attempts(state: MemberState, row: int) -> int:
    """Return how often a training was begun, if it was."""
    return 1 + sum(fault.rows == (row, row + 1) for fault in state.faults)
