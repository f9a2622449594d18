"""Run trainings through the scheduler: a member's trainings are its chunks, each done by a command in a worker."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ensemble.common.clock import Watch, boot_seconds
from ensemble.common.errors import CheckpointError, DeviceError, MergeError, WriteError
from ensemble.common.files import FileState, changed_files, read_json
from ensemble.common.gpus import Device
from ensemble.common.protocol import ChunkDone, CommonSpec, Start, WorkerSpec
from ensemble.common.python_process import python_environment
from ensemble.common.redact import secrets_in
from ensemble.common.text import duration, shown_path
from ensemble.config import LoadedConfig, MemberConfig, RunConfig
from ensemble.members.base import OutputColumns, ResourceRequest
from ensemble.pipeline.run import Display
from ensemble.pipeline.signals import Signals
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import Speed
from ensemble.planning.placement import MemberFacts, chosen_devices, place, rooms
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.deadline import Deadline
from ensemble.scheduling.device_pool import DevicePool
from ensemble.scheduling.launchers.base import WorkerStart
from ensemble.scheduling.launchers.local import LocalLauncher
from ensemble.scheduling.records import Failure
from ensemble.scheduling.retry import Rules
from ensemble.scheduling.scheduler import MAX_TURN_SECONDS, Scheduler
from ensemble.scheduling.state import MemberState
from ensemble.training.layout import Part, TrainingDir
from ensemble.training.records import MemberTrainings, PartTraining, Status, TrainingReport
from ensemble.training.seal import Seal, seal_training

_CHILD = "ensemble.training.child.runner"
# Users' commands get the environment of this process in these variables, not that of our own Python processes.
_KEPT_VARIABLES = ("PYTHONUNBUFFERED",)  # so that the log shows at once what a script prints
_REPORT_SECONDS = 5.0


@dataclass(frozen=True)
class Training:
    """Describe the training of a member on a part.

    Attributes:
        command: a program and its arguments.
        is_built_in: whether the command is our own, which goes on with what an earlier try has left.
        made_of: see ``Seal``.
    """

    model: MemberConfig
    part: Part
    command: tuple[str, ...]
    is_built_in: bool
    made_of: Mapping[str, str]


class TrainingState(MemberState):
    """Hold the state of a member's trainings; ``on_done`` is called when one has ended well.

    Attributes:
        trainings: in the order of the plan's rows.
        steps: of the trainings in progress that tell: the step and the number of steps, by the row.
        sealing: of the trainings that have ended well, by the row.
        done: the seconds of these, by the row.
    """

    def __init__(
        self,
        plan: MemberPlan,
        trainings: Sequence[Training],
        clock: Callable[[], float],
        on_done: Callable[[TrainingState, int, float], Future[None]],
    ) -> None:
        self.trainings = trainings
        self.steps: dict[int, tuple[int, int]] = {}
        self.sealing: dict[int, Future[None]] = {}
        self.done: dict[int, float] = {}
        self._on_done = on_done
        super().__init__(plan, clock=clock)

    def complete(self, chunk: Chunk, done: ChunkDone) -> None:
        super().complete(chunk, done)
        self.done[chunk.start] = done.counters.predict_seconds
        self.sealing[chunk.start] = self._on_done(self, chunk.start, done.counters.predict_seconds)

    def look(self, files: TrainingDir) -> None:
        """Read how far the trainings in progress are."""
        self.steps = {}
        for chunk in self.chunks.in_hand.values():
            training = self.trainings[chunk.start]
            progress = read_json(files.unfinished(training.model.name, training.part) / "progress.json")
            step, steps = progress.get("step"), progress.get("steps")
            if isinstance(step, int) and isinstance(steps, int) and 0 <= step <= steps and steps:
                self.steps[chunk.start] = step, steps

    @property
    def computed_cost(self) -> float:
        """Return the share of the work that is done, with the steps of the trainings in progress."""
        shares = (step / steps for step, steps in self.steps.values())
        return super().computed_cost + sum(shares) / len(self.plan.row_names)

    def attempts(self, row: int) -> int:
        return 1 + sum(fault.rows == (row, row + 1) for fault in self.faults)

    @property
    def in_hand_texts(self) -> list[str]:
        texts = []
        for chunk in self.chunks.in_hand.values():
            text = self.plan.row_names[chunk.start]
            if chunk.start in self.steps:
                text += " at step {:,} of {:,}".format(*self.steps[chunk.start])
            texts.append(text)
        return texts


class TrainingRun:
    """Run trainings on this machine; these are the hooks of their scheduler.

    Args:
        watched: the states of the tables, which should not change meanwhile, by absolute path.
        deadline: when all must have stopped; None: no limit.
    """

    def __init__(
        self,
        loaded: LoadedConfig,
        display: Display,
        signals: Signals,
        watched: Mapping[str, FileState],
        deadline: Deadline | None = None,
    ) -> None:
        self._config: RunConfig = loaded.config
        self._loaded = loaded
        self._files = TrainingDir(loaded.config.output_dir)
        self._display = display
        self._signals = signals
        self._watched = watched
        self._deadline = deadline
        self._watch = Watch(MAX_TURN_SECONDS)
        self._launcher = LocalLauncher({})
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="sealing")
        self._began = boot_seconds()
        self._report_due = -math.inf
        self.gpus = self._find_gpus()
        self.members: list[TrainingState] = []
        self._kept: Sequence[Training] = ()
        self.say = display.say

    def run(self, trainings: Sequence[Training], kept: Sequence[Training]) -> TrainingReport:
        """Run the trainings, and report them and those that are ``kept`` from before.

        Raises:
            DeviceError: a member asks for more GPUs than there are.
            WriteError: a seal could not be written.
            Interrupted: a signal came.
        """
        self._kept = kept
        by_member: dict[str, list[Training]] = {}
        for training in trainings:
            by_member.setdefault(training.model.name, []).append(training)
        plans = [self._plan(of_member) for of_member in by_member.values()]
        problems = [problem for plan in plans for problem in plan.placement.problems]
        if problems:
            raise DeviceError(problems)
        self.members = [
            TrainingState(plan, of_member, self._watch, self._on_done)
            for plan, of_member in zip(plans, by_member.values(), strict=True)
        ]
        config = self._config
        pool = DevicePool(
            self.gpus,
            config.max_workers_per_gpu,
            config.release_timeout,
            self._launcher,
            self.say,
            self._watch,
        )
        rules = Rules(
            retries=config.retries,
            on_bad_row="fail",
            hang_timeout=config.hang_timeout,
            standby=False,
            workers_per_gpu=config.max_workers_per_gpu,
            devices=config.devices,
        )
        states: list[MemberState] = [*self.members]
        scheduler = Scheduler(states, pool, self._launcher, self, rules, self._watch, self._deadline)
        status: Status = "interrupted"
        try:
            with self._signals.postponed():
                scheduler.run()
            self._signals.check()
            status = self._outcome()
        finally:
            self._display.stop()
            self._sealer.shutdown()  # what has begun is completed
            with contextlib.suppress(WriteError):
                self.report(status).write(self._files.records)
        return self.report(status)

    def _outcome(self) -> Status:
        if any(state.failure is not None for state in self.members):
            return "failed"
        return "complete" if all(state.finished for state in self.members) else "time_limit"

    def report(self, status: Status) -> TrainingReport:
        """Return how far all trainings are."""
        states = {state.plan.name: state for state in self.members}
        kept: dict[str, list[PartTraining]] = {}
        for training in self._kept:
            kept.setdefault(training.model.name, []).append(self._part(training, None, 0))
        members = []
        for model in self._config.trained_members:
            state, parts = states.get(model.name), kept.get(model.name, [])
            if state is None:
                members.append(MemberTrainings(model.name, tuple(parts)))
                continue
            parts += [self._part(training, state, row) for row, training in enumerate(state.trainings)]
            members.append(
                MemberTrainings(
                    name=model.name,
                    parts=tuple(parts),
                    faults=tuple(state.faults),
                    workers=tuple(state.workers),
                    failure="" if state.failure is None else self._failure_text(state.failure),
                )
            )
        report = TrainingReport.now(status, boot_seconds() - self._began, members)
        redacted: TrainingReport = self._loaded.redactor.document(report)
        return redacted

    def _part(self, training: Training, state: TrainingState | None, row: int) -> PartTraining:
        name, part = training.model.name, training.part
        how: Literal["kept", "done", "training", "waiting"] = "kept"
        seal = Seal.read(self._files.seal(name, part)) if state is None else None
        seconds, step = None if seal is None else seal.seconds, None
        if state is not None:
            sealing, step = state.sealing.get(row), state.steps.get(row)
            is_done = sealing is not None and sealing.done() and sealing.exception() is None
            how = (
                "training"
                if any(chunk.start == row for chunk in state.chunks.in_hand.values())
                else "waiting"
            )
            if is_done:
                how, seconds = "done", round(state.done[row], 3)
        is_there = how in ("kept", "done")
        return PartTraining(
            name=part.name,
            status=how,
            seconds=seconds,
            attempts=0 if state is None else state.attempts(row),
            step=None if step is None else step[0],
            steps=None if step is None else step[1],
            folder=str(self._files.checkpoint(name, part).absolute()) if is_there else "",
            log=str(self._files.log(name, part).absolute()),
        )

    def _failure_text(self, failure: Failure) -> str:
        logs = shown_path(self._files.worker_log(failure.member, 0).parent)
        return failure.message if logs in failure.message else f"{failure.message}; its logs are in {logs}"

    def _find_gpus(self) -> tuple[Device, ...]:
        """Return the GPUs that trainings may use; none are looked for if every member is trained on the CPU."""
        if all(model.training and model.training.num_gpus == 0 for model in self._config.trained_members):
            return ()
        machine = self._launcher.inventory()
        if machine.mask_problem:
            raise DeviceError(machine.mask_problem)
        return tuple(gpu for gpu in chosen_devices(machine.gpus, self._config.devices) if not gpu.is_held)

    def _plan(self, trainings: Sequence[Training]) -> MemberPlan:
        """Plan the trainings of a member: as many side by side as GPUs or ``cpu_workers`` allow."""
        config, model = self._config, trainings[0].model
        assert model.training is not None
        index, count = config.models.index(model), len(trainings)
        # A training takes all memory of its GPUs.
        request = ResourceRequest(num_gpus=model.training.num_gpus, gpu_memory="all")
        facts = MemberFacts(model.name, request, np.ones(count, dtype=np.int64))
        placement = place(config, index, facts, self.gpus, None)
        problems = tuple(text.replace("num_gpus", "train.num_gpus") for text in placement.problems)
        replicas = 1 if config.cpu_workers == "auto" else config.cpu_workers
        if placement.gpus:
            usable = [gpu for gpu in self.gpus if gpu.uuid in placement.devices]
            replicas = rooms(usable, placement.gpus, config.max_workers_per_gpu // placement.places)
        replicas = max(1, min(replicas, count))
        return MemberPlan(
            index=index,
            model=model.model_copy(update={"when": None, "views": None}),
            request=request,
            placement=replace(placement, problems=problems),
            replicas=replicas,
            first_replicas=replicas,
            cpu_share=0.0 if placement.gpus else 1 / replicas,
            speed=Speed(0.0, 0.0, is_measured=False),
            work=float(count),
            chunks=tuple(Chunk(row, row, row + 1, 1 / count) for row in range(count)),
            order=np.arange(count),
            table_rows=count,
            row_names=tuple(training.part.text for training in trainings),
        )

    # What the scheduler calls.

    def worker_start(self, member: MemberPlan, replica: int, devices: Sequence[Device]) -> WorkerStart:
        (state,) = [state for state in self.members if state.plan.name == member.name]
        environment = {
            name: os.environ.get(name) for name in python_environment() if name not in _KEPT_VARIABLES
        }
        jobs = [
            {
                "command": training.command,
                "out": str(self._files.unfinished(member.name, training.part).absolute()),
                "log": shown_path(self._files.log(member.name, training.part)),
                "resumes": training.is_built_in,
            }
            for training in state.trainings
        ]
        common = CommonSpec(
            labels=self._config.labels,
            activation="none",
            gpus=member.gpus,
            memory_limit_bytes=None,
            seed=self._config.seed,
            table_path="",
            order_path="",
            shards_dir="",
        )
        secrets = dict.fromkeys(secrets_in(self._config.model_dump(mode="json")))
        settings: dict[str, Any] = {
            "jobs": jobs,
            "environment": {} if state.trainings[0].is_built_in else environment,
            "secrets": {f"secret {number}": text for number, text in enumerate(secrets)},
        }
        log = self._files.worker_log(member.name, replica)
        log.parent.mkdir(parents=True, exist_ok=True)
        share = member.cpu_share
        if devices:
            places = len(self.gpus) * self._config.max_workers_per_gpu
            share = len(devices) * member.placement.places / places
            share = share if share < 1 else 0.0
        return WorkerStart(
            command=Start(WorkerSpec(common, _CHILD, settings)),
            devices=tuple(devices),
            environment={},
            log=log,
            cpu_share=share,
        )

    def on_change(self, members: Sequence[MemberState]) -> None:
        for state in self.members:
            state.look(self._files)
            for future in state.sealing.values():
                error = future.exception() if future.done() else None
                if isinstance(error, CheckpointError) and state.failure is None:
                    state.fail(Failure(state.plan.name, str(error)))
                elif error is not None and not isinstance(error, CheckpointError):
                    raise error
        self._display.update(members)
        now = boot_seconds()
        if now >= self._report_due:
            self._report_due = now + _REPORT_SECONDS
            with contextlib.suppress(WriteError):  # a full disk ends the run when a seal cannot be written
                self.report("running").write(self._files.records)
        self._signals.check()

    def on_finished(self, state: MemberState) -> None:
        """Wait until the last trainings of a member are sealed."""
        assert isinstance(state, TrainingState)
        for future in state.sealing.values():
            try:
                future.result()
            except CheckpointError as error:
                raise MergeError(error.problems) from error

    def on_bad_rows(self, state: MemberState) -> None: ...
    def on_rooms(self, state: MemberState) -> None: ...
    def on_views_done(self, state: MemberState) -> None: ...
    def on_ended(self, state: MemberState) -> None: ...

    def _on_done(self, state: TrainingState, row: int, seconds: float) -> Future[None]:
        return self._sealer.submit(self._seal, state, row, seconds)

    def _seal(self, state: TrainingState, row: int, seconds: float) -> None:
        """Check and seal what a training has left."""
        training, config = state.trainings[row], self._config
        name, part = training.model.name, training.part
        for path in changed_files(self._watched):
            self.say(
                f"{shown_path(Path(path))} changed while {name} was trained; {part.text} learned the rows as they "
                "were read at the start: the same command again trains anew on the new ones"
            )
        devices = {gpu.name for gpu in self.gpus if gpu.uuid in state.plan.placement.devices}
        seal = Seal(
            made_of=dict(training.made_of),
            files={},
            seconds=round(seconds, 3),
            attempts=state.attempts(row),
            devices=tuple(sorted(devices)) or ("cpu",),
            progress=read_json(self._files.unfinished(name, part) / "progress.json"),
        )
        columns = OutputColumns(config.data.id_column, config.labels, config.data.path.parent)
        try:
            seal_training(self._files, training.model, part, columns, seal)
        except CheckpointError as error:
            raise CheckpointError(f"{part.text}: {'; '.join(error.problems)}") from error
        except OSError as error:
            raise WriteError(
                f"cannot write to {error.filename} ({error.strerror}); make room there"
            ) from error
        self.say(f"{name}: {part.text} trained in {duration(seconds)}")
