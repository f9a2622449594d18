"""Run trainings through the scheduler: a member's trainings are jobs, each done by a command in a worker."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ensemble.common.clock import Watch, boot_seconds
from ensemble.common.errors import CheckpointError, ConfigError, DeviceError, WriteError
from ensemble.common.files import FileState, changed_files, read_json
from ensemble.common.gpus import Device
from ensemble.common.protocol import ChunkDone, CommonSpec, Start, WorkerSpec
from ensemble.common.python_process import environment_of_commands
from ensemble.common.text import duration, gib, shown_path
from ensemble.config import LoadedConfig
from ensemble.members.registry import member_kind
from ensemble.pipeline.reporting import members_of
from ensemble.pipeline.run import Display, rules_of
from ensemble.pipeline.signals import Signals
from ensemble.pipeline.training_dir import TrainingDir
from ensemble.planning.chunks import Chunk
from ensemble.planning.placement import chosen_devices
from ensemble.planning.plan import ModelPlan, plan_trainings
from ensemble.scheduling.deadline import TrainingDeadline
from ensemble.scheduling.launchers.base import WorkerStart
from ensemble.scheduling.launchers.local import LocalLauncher
from ensemble.scheduling.records import Failure
from ensemble.scheduling.scheduler import MAX_TURN_SECONDS, Scheduler
from ensemble.scheduling.state import ModelState, RunHooks
from ensemble.training.records import (
    MemberRecord,
    PartRecord,
    Seal,
    Status,
    TrainingReport,
    read_record,
    write_record,
)
from ensemble.training.seal import Training, seal_training

_CHILD = "ensemble.training.worker"
_REPORT_SECONDS = 5.0


@dataclass
class TrainingRun(RunHooks):
    """Run trainings on this machine, as the hooks of their scheduler.

    Attributes:
        trainings: all that are asked for; those that are not done are run.
        earlier: how this command's trainings of other members have ended.
        watched: the states of the tables, which should not change meanwhile, by absolute path.
        ends_at: when all must have stopped, by ``boot_seconds``; None: no limit.
    """

    loaded: LoadedConfig
    files: TrainingDir
    trainings: Sequence[Training]
    earlier: TrainingReport
    display: Display
    signals: Signals
    watched: Mapping[str, FileState]
    ends_at: float | None = None

    def __post_init__(self) -> None:
        self._config = self.loaded.config
        self._lacking: dict[str, list[Training]] = {}  # of each member, in the order of its jobs
        for training in self.trainings:
            if not training.is_done:
                self._lacking.setdefault(training.model.name, []).append(training)
        self._launcher = LocalLauncher({})
        self._gpus: tuple[Device, ...] = ()
        self._states: dict[str, ModelState] = {}
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="sealing")
        self._sealing: list[tuple[ModelState, Training, Future[None]]] = []
        self._began = boot_seconds()
        self._report_due = -math.inf

    def run(self) -> TrainingReport:
        """Train, and report how it ended.

        Raises:
            DeviceError: a member asks for more GPUs than there are.
            WriteError: a seal could not be written.
            Interrupted: a signal came.
        """
        config, watch, self._gpus = self._config, Watch(MAX_TURN_SECONDS), self._find_gpus()
        for name, trainings in self._lacking.items():
            parts = [training.part.text for training in trainings]
            plan = plan_trainings(config, trainings[0].model, parts, self._gpus)
            self._states[name] = ModelState(plan, clock=watch)
        states = [*self._states.values()]
        problems = [problem for state in states for problem in state.plan.placement.problems]
        if problems:
            raise DeviceError([*dict.fromkeys(problems)])
        deadline = None
        if self.ends_at is not None:
            workers = max(1, len(self._gpus) * config.workers_per_gpu)
            deadline = TrainingDeadline(self.ends_at, workers, boot_seconds)
        rules = replace(rules_of(config), standby=False)
        scheduler = Scheduler(states, self._gpus, self._launcher, self, rules, watch, deadline)
        status: Status = "interrupted"
        try:
            with self.signals.postponed(), self._sealer:  # what has ended well is sealed, whatever comes
                scheduler.run()
            self.signals.check()
            self._fail_unusable()
            status = self.earlier.status if all(state.finished for state in states) else "time_limit"
            if any(state.failure is not None for state in states):
                status = "failed"
        finally:
            self.display.stop()
            report = self._report(status)
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
        """Write how far all trainings are to training.json, and return it."""
        members = [*self.earlier.members]
        for name, trainings in itertools.groupby(self.trainings, lambda training: training.model.name):
            state = self._states.get(name)
            folder = str(self.files.trained_rows(name).parent.absolute())
            logs = shown_path(self.files.worker_log(name, 0).parent)
            failure = "" if state is None or state.failure is None else state.failure.message
            if failure and logs not in failure:
                failure += f"; its logs are in {logs}"
            faults = () if state is None else tuple(state.faults)
            parts = tuple(map(self._part, trainings))
            members.append(MemberRecord(name, folder, parts, faults, failure))
        seconds = round(self.earlier.seconds + boot_seconds() - self._began, 3)
        report: TrainingReport = self.loaded.redactor.document(
            TrainingReport(status, seconds, tuple(members))
        )
        with contextlib.suppress(WriteError):  # a full disk ends the run when a seal cannot be written
            write_record(self.files.records, report)
        return report

    def _part(self, training: Training) -> PartRecord:
        name, part = training.model.name, training.part
        seal = read_record(self.files.seal(name, part), Seal)
        if seal is not None and self.files.is_finished(name, part):
            return seal.record
        if training.is_done:  # somebody has removed it
            return PartRecord(part.fold, "waiting")
        return self._part_so_far(self._states[name], self._lacking[name].index(training))

    def _part_so_far(self, state: ModelState, job: int) -> PartRecord:
        """Return how far a training is that has not been sealed."""
        part = self._lacking[state.plan.name][job].part
        is_running = any(chunk.job == job for chunk in state.chunks.in_hand.values())
        return PartRecord(
            fold=part.fold,
            status="training" if is_running else "waiting",
            attempts=is_running + sum(fault.rows == (job, job + 1) for fault in state.faults),
            progress=read_json(self.files.unfinished(state.plan.name, part) / "progress.json"),
        )

    # What the scheduler calls.

    def say(self, text: str) -> None:
        self.display.say(text)

    def worker_start(self, model: ModelPlan, replica: int, devices: Sequence[Device]) -> WorkerStart:
        """Return how to start a worker, which can run each of a member's trainings."""
        trainings = self._lacking[model.name]
        member, is_built_in = trainings[0].model, trainings[0].from_base is not None
        is_stepwise = is_built_in and member.training is not None and member.training.method != "head"
        jobs = [
            {
                "command": training.command,
                "out": str(self.files.unfinished(member.name, training.part).absolute()),
                "log": shown_path(self.files.log(member.name, training.part)),
                "resumes": is_built_in,
                "rungs": str(self.files.rungs.absolute()) if is_stepwise else "",
            }
            for training in trainings
        ]
        settings: dict[str, Any] = {
            "jobs": jobs,
            "device": ", ".join(f"{device.name} ({gib(device.total_bytes)})" for device in devices),
            "environment": {} if is_built_in else environment_of_commands(),
            "config": self._config.model_dump(mode="json"),  # with secrets, which no log may have
        }
        common = CommonSpec(
            labels=self._config.labels, activation="none", gpus=model.gpus, seed=self._config.seed
        )
        log = self.files.worker_log(member.name, replica)
        log.parent.mkdir(parents=True, exist_ok=True)
        return WorkerStart(
            command=Start(WorkerSpec(common, _CHILD, settings)),
            devices=tuple(devices),
            environment=member_kind(member).environment() if devices and is_built_in else {},
            log=log,
            cpu_share=model.host_share(devices, self._gpus, self._config.workers_per_gpu),
        )

    def on_change(self, models: Sequence[ModelState]) -> None:
        """Show and record progress; fail members whose trainings have left what cannot be used."""
        self._fail_unusable()
        for state in models:
            shares = {}
            for chunk in state.chunks.in_hand.values():
                steps = self._part_so_far(state, chunk.job).steps_done
                if steps is not None:
                    shares[chunk.index] = steps[0] / steps[1]
            state.follow_shares(shares)
        self.display.update(members_of(models))
        now = boot_seconds()
        if now >= self._report_due:
            self._report_due = now + _REPORT_SECONDS
            self._report("running")
        self.signals.check()

    def on_chunk_done(self, state: ModelState, chunk: Chunk, done: ChunkDone, devices: Sequence[str]) -> None:
        """Have what a training has left checked and sealed, in another thread."""
        training = self._lacking[state.plan.name][chunk.job]
        record = replace(
            self._part_so_far(state, chunk.job),
            status="done",
            seconds=round(done.counters.predict_seconds, 3),
            devices=tuple(devices),
        )
        self._sealing.append((state, training, self._sealer.submit(self._seal, training, record)))

    def _seal(self, training: Training, record: PartRecord) -> None:
        name, part, config = training.model.name, training.part, self._config
        for path in changed_files(self.watched):
            self.say(
                f"{shown_path(Path(path))} changed while {name} was trained; {part.text} learned the rows as they "
                "were read at the start: the same command again trains anew on the new ones"
            )
        seal = Seal(dict(training.made_of), record)
        note = seal_training(self.files, config, training.model, part, seal)
        if note:
            self.say(f"{name}: {part.text}: {note}")
        why = record.progress.get("why")
        how = f", {record.progress.get('rung')}: {why}" if why else ""
        self.say(f"{name}: {part.text} trained in {duration(record.seconds or 0.0)}{how}")

    def _fail_unusable(self) -> None:
        """Fail members whose trainings have left what cannot be used."""
        for state, training, sealing in self._sealing:
            if sealing.done() and state.failure is None:
                try:
                    sealing.result()
                except (CheckpointError, ConfigError) as error:
                    text = f"{training.part.text}: {'; '.join(error.problems)}"
                    state.fail(Failure(state.plan.name, text))
