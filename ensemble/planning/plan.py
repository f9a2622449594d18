"""Plan what runs where: RunConfig + facts about table, models and devices -> Plan.

PURE except ``plan_run``: no disk, no clock, no environment; the same arguments give the same plan.  ``placement``
decides where a model may run, ``forecast`` how long it takes, ``chunks`` how its rows are cut.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.device_trials import DeviceTrial
from ensemble.common.gpus import Device
from ensemble.common.host import available_memory_bytes, threads_of, total_memory_bytes, usable_cpus
from ensemble.common.text import gib, plural
from ensemble.config import MemberConfig, RunConfig
from ensemble.jobs.job import Job, Model, model_of_trainings
from ensemble.members.base import ResourceRequest
from ensemble.planning.chunks import (
    BYTES_PER_TOKEN,
    ROW_OVERHEAD_BYTES,
    Chunk,
    cut_chunks,
    cut_closest_first,
    join_jobs,
    what_is_left,
)
from ensemble.planning.forecast import Demand, Speed, guessed_speed, slower_by, total_seconds
from ensemble.planning.placement import ModelFacts, Placement, asked_tokens, place, rooms

# What a worker on a GPU takes of its host: torch's CUDA libraries, a CUDA context, bitsandbytes and token ids.
# Reckoned, 1.5 to 2.5 GiB; not measured on a GPU yet.
WORKER_HOST_BYTES = 2 << 30
# The same of a worker that stands by, without a context.
STANDBY_HOST_BYTES = 1 << 30
# Rows of jobs in their order, their chunks and their work.
_Cut: TypeAlias = tuple[npt.NDArray[np.int64], tuple[Chunk, ...], float]
_UNMEASURED = Speed(0.0, 0.0, is_measured=False)
_NO_TIME = Speed(0.0, 0.0, is_measured=True, is_startup_measured=True)


@dataclass(frozen=True)
class CpuChoice:
    """Hold what a run chose for a model on the CPU: the threads of each worker, and workers at a time."""

    threads: int
    workers: int


@dataclass(frozen=True)
class ModelPlan:
    """Say how a model runs: on ``gpus`` devices per replica (0: the CPU).

    A model that needs no worker has neither replicas nor chunks.  Until the rows of a job are selected
    (``with_job``), its chunks are those of the whole table.

    Attributes:
        loaded: what a worker loads, with the jobs that it computes.
        replicas: the most at a time.
        first_replicas: those that start before any later member; the others join if a GPU or a part of the CPU is
            left over.
        cpu_share: the share of the cores that each replica has on a CPU.
        work: the bytes of text that max_length leaves of all rows in all jobs, and what each row costs besides;
            where jobs may not compute some rows, of the others. Rows that are not selected count, too.
        order: rows of the table, longest text first, those of each job after those of the job before it, int64
            [rows].
        undecided: jobs whose rows are not selected yet, by number, with the share of the rows that the forecast
            counts.
        left_out: the share of the work in rows that were not selected.
        cpu_threads: threads of a worker on a CPU; None: by its share of the cores.
    """

    loaded: Model
    request: ResourceRequest
    placement: Placement
    replicas: int
    first_replicas: int
    cpu_share: float
    speed: Speed
    work: float
    chunks: tuple[Chunk, ...]
    order: npt.NDArray[np.int64] = field(compare=False, repr=False)
    undecided: Mapping[int, float] = field(default_factory=dict)
    left_out: float = 0.0
    cpu_threads: int | None = None

    @property
    def name(self) -> str:
        return self.loaded.name

    @property
    def member(self) -> str:
        return self.loaded.member

    @property
    def model(self) -> MemberConfig:
        """Return the member's settings, of which only what this model computes counts."""
        return self.loaded.settings

    @property
    def jobs(self) -> tuple[Job, ...]:
        return self.loaded.jobs

    @property
    def has_rows(self) -> bool:
        """Return whether its jobs compute rows of the table."""
        return all(job.has_rows for job in self.jobs)

    @property
    def gpus(self) -> int:
        return self.placement.gpus

    @property
    def is_undecided(self) -> bool:
        """Return whether the rows of all of its jobs are still to be selected."""
        return len(self.undecided) == len(self.jobs)

    @property
    def undecided_work(self) -> float:
        """Return the share of the model's work in jobs whose rows are not selected yet, if they had all rows."""
        return len(self.undecided) / len(self.jobs)

    @property
    def unexpected_work(self) -> float:
        """Return the share of the model's work that jobs are expected not to select."""
        return sum(1.0 - share for share in self.undecided.values()) / len(self.jobs)

    @property
    def needs_worker(self) -> bool:
        return self.replicas > 0

    def host_share(
        self, devices: Sequence[Device], gpus: Sequence[Device], max_workers_per_gpu: int
    ) -> float:
        """Return a worker's share of its host's cores: on GPUs that of its GPUs among the host's; 0: no limit."""
        if not devices:
            return self.cpu_share
        of_host = [gpu for gpu in gpus if gpu.node == devices[0].node]
        share = len(devices) * self.placement.places / max(1, len(of_host) * max_workers_per_gpu)
        return share if share < 1 else 0.0

    @property
    def slowdown(self) -> float:
        """Return the factor by which a replica is slower than ``speed`` says, by its share of the cores."""
        return slower_by(self.cpu_share) / slower_by(self.speed.cpu_share)

    @property
    def whole_seconds(self) -> float:
        """Return how long one replica computes all rows of the table, in all jobs."""
        return self.speed.seconds_per_work * self.work * self.slowdown

    @property
    def demand(self) -> Demand:
        return Demand(
            startup_seconds=self.speed.startup_seconds,
            compute_seconds=self.whole_seconds * (1.0 - self.unexpected_work),
            gpus=self.gpus,
            replicas=self.replicas,
            devices=self.placement.devices,
            places=self.placement.places,
            cpu_share=self.cpu_share,
        )


@dataclass(frozen=True)
class Plan:
    """Say what to run where; the other attributes are the arguments of :func:`make_plan`.

    Attributes:
        problems: of the members that cannot run; if there are any, nothing else is decided.
        why: how members share the devices, if there was a choice.
        seconds: the forecast of the whole run; None if an earlier run has not measured every member.
    """

    config: RunConfig = field(repr=False)
    facts: Mapping[str, ModelFacts] = field(repr=False, compare=False)
    gpus: tuple[Device, ...]
    host: Device | None
    speeds: Mapping[str, Speed]
    hosts: int
    cpus: int
    models: tuple[ModelPlan, ...]
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    why: str = ""
    seconds: float | None = None
    cpu_choices: Mapping[str, CpuChoice] = field(default_factory=dict)

    def seconds_of(self, demands: Sequence[Demand]) -> float:
        places = dict.fromkeys((gpu.uuid for gpu in self.gpus), self.config.workers_per_gpu)
        return total_seconds(demands, places, self.hosts)

    @property
    def demands(self) -> list[Demand]:
        return [model.demand for model in self.models if model.needs_worker]

    @property
    def host_bytes(self) -> int:
        """Return about how much of the host's memory the workers take at a time.

        A worker on a GPU takes only its process, as weights are mapped on their way to the GPU. A worker on the CPU
        also takes the weights and a row or batch; members whose shares of the cores fit run side by side.
        """
        places = len(self.gpus) * self.config.workers_per_gpu
        gpu_workers = min(places, sum(model.replicas for model in self.models if model.gpus))
        on_cpu = [model for model in self.models if model.needs_worker and not model.gpus]
        on_cpu.sort(key=_cpu_bytes, reverse=True)
        together = [0]
        for first in on_cpu:
            size, room = 0, 1.0
            for model in (first, *(other for other in on_cpu if other is not first)):
                workers = min(model.replicas, int(room / model.cpu_share + 1e-6))  # shares are rounded
                size += workers * _cpu_bytes(model)
                room -= workers * model.cpu_share
            together.append(size)
        return gpu_workers * WORKER_HOST_BYTES + max(together)

    def again(self, gpus: Sequence[Device], cpu_choices: Mapping[str, CpuChoice] | None = None) -> Plan:
        """Return the plan of the same run on devices that have changed, or with other ``cpu_choices``."""
        choices = self.cpu_choices if cpu_choices is None else cpu_choices
        compiled = [model.loaded for model in self.models]
        return make_plan(
            self.config, compiled, self.facts, gpus, self.host, self.speeds, self.hosts, self.cpus, choices
        )


def make_plan(
    config: RunConfig,
    compiled: Sequence[Model],
    facts: Mapping[str, ModelFacts],
    gpus: Sequence[Device],
    host: Device | None = None,
    speeds: Mapping[str, Speed] | None = None,
    hosts: int = 1,
    cpus: int = 1,
    cpu_choices: Mapping[str, CpuChoice] | None = None,
) -> Plan:
    """Decide devices, replicas and chunks for every member.

    Args:
        compiled: what workers load, with the jobs that they compute.
        facts: of each of these, by name.
        gpus: those that this run may use, with the memory that others use of them.
        host: the CPU with its memory, of several hosts the one with the least free memory; None: not known.
        speeds: as far as an earlier run has measured them.
        hosts: the number of machines whose CPUs take workers.
        cpus: the threads that compute on such a machine at a time.
        cpu_choices: what a resumed run chose when it began.
    """
    common = _common_lengths(config, facts)
    speeds = speeds or {}
    models: list[ModelPlan] = []
    warnings: list[str] = []
    for model in compiled:
        of_model = facts[model.name]
        request, needs_worker = of_model.request, of_model.needs_worker
        placement = place(config.workers_per_gpu, model.index, of_model, gpus, host)
        warnings += placement.warnings
        room = hosts
        if placement.gpus:
            usable = [gpu for gpu in gpus if gpu.uuid in placement.devices]
            room = rooms(usable, placement.gpus, config.workers_per_gpu // placement.places)
        replicas = max(1, room)
        if request.replicas != "auto":
            if placement.gpus and request.replicas > replicas:
                warnings.append(
                    f"models[{model.index}].replicas: {model.name} asks for "
                    f"{plural(request.replicas, 'replica')} of {plural(placement.gpus, 'GPU')} each, but there is "
                    f"room for {replicas} at a time; running {replicas}"
                )
            else:
                replicas = request.replicas
        computed = _computed_lengths(of_model)
        order, speed, work = np.arange(len(computed)), _NO_TIME, len(model.jobs) * _work_of(computed)
        chunks: tuple[Chunk, ...] = ()
        if needs_worker:
            # Order and cut go by the whole text: another cut would mean other batches, and so other last digits,
            # for little less padding.
            ranked = of_model.lengths if common is None else common
            order, chunks, work = _cut_jobs(of_model, model.jobs, computed, ranked)
            guess = guessed_speed(placement.footprint, placement.gpus)
            speed = speeds.get(model.member, _UNMEASURED).or_guess(guess)
        # All rows may be those of other models of its member.
        replicas = max(1, min(replicas, len(chunks))) if needs_worker else 0
        cpu_share = 0.0
        if not placement.gpus:
            cpu_share = 1.0 if request.replicas == "auto" else 1 / max(1, replicas)
        planned = ModelPlan(
            loaded=model,
            request=request,
            placement=placement,
            replicas=replicas,
            first_replicas=replicas,
            cpu_share=cpu_share,
            speed=speed,
            work=work,
            chunks=chunks,
            order=order,
            undecided={
                number: of_model.job_shares.get(job.name, 1.0)
                for number, job in enumerate(model.jobs)
                if job.selection is not None
            },
        )
        models.append(planned)
    plan = Plan(
        config=config,
        facts=facts,
        gpus=tuple(gpus),
        host=host,
        speeds=speeds,
        hosts=hosts,
        cpus=cpus,
        models=tuple(models),
        warnings=tuple(warnings),
        problems=tuple(dict.fromkeys(problem for model in models for problem in model.placement.problems)),
        cpu_choices=cpu_choices or {},
    )
    if plan.problems:
        return plan
    plan = _share_cpu(_share_gpus(plan))
    measured = [model.speed.is_measured for model in plan.models if model.needs_worker]
    is_measured = bool(measured) and all(measured)
    return replace(plan, seconds=plan.seconds_of(plan.demands) if is_measured else None)


def _common_lengths(config: RunConfig, facts: Mapping[str, ModelFacts]) -> npt.NDArray[np.int64] | None:
    """Return the lengths by which all members are cut under a time limit: so they cover the same rows first.

    Without a limit each takes the order of its own texts, which pads least.
    """
    lengths = [of_member.lengths for of_member in facts.values() if of_member.needs_worker]
    # If the table cannot be read, some members have one row.
    if config.time_limit is None or len(set(map(len, lengths))) != 1:
        return None
    return np.asarray(np.mean(lengths, axis=0), dtype=np.int64)


def plan_run(
    config: RunConfig,
    compiled: Sequence[Model],
    facts: Mapping[str, ModelFacts],
    gpus: Sequence[Device],
    speeds: Mapping[str, Speed],
    hosts: Sequence[Device],
    trials: Callable[..., Sequence[DeviceTrial]],
) -> Plan:
    """Plan a run, with what this machine or the nodes say of memory, cores and flash-attention 2.

    ``hosts`` are the CPUs of a cluster's nodes, none: this machine. ``trials`` is ``run_trials`` on these machines.
    """
    total, available = total_memory_bytes(), available_memory_bytes()
    host = None
    if total is not None and available is not None:
        host = Device("cpu", "CPU", None, total, max(0, total - available))
    host = min(hosts, key=lambda node: node.total_bytes - node.used_bytes, default=host)
    if gpus and importlib.util.find_spec("flash_attn") is not None:
        facts = _with_flash_attention(config, compiled, facts, gpus, trials)
    return make_plan(
        _with_workers(config, compiled, facts, gpus),
        compiled,
        facts,
        gpus,
        host=host,
        speeds=speeds,
        hosts=len(hosts) or 1,
        cpus=1 if hosts else usable_cpus(),
    )


def _with_workers(
    config: RunConfig, compiled: Sequence[Model], facts: Mapping[str, ModelFacts], gpus: Sequence[Device]
) -> RunConfig:
    """Return a config with a number for ``max_workers_per_gpu: auto``.

    As many share a GPU as let all models run at the same time, as long as each has room for the batches that it
    would have on a GPU of its own: now, and once other programs have ended. A model of unknown memory shares none.
    """
    if config.max_workers_per_gpu != "auto" or not gpus:
        return config
    empty = [replace(gpu, used_bytes=0) for gpu in gpus]

    def batches(workers: int) -> list[tuple[str, int]]:
        placements = [
            place(workers, model.index, facts[model.name], devices, None)
            for devices in (gpus, empty)
            for model in compiled
        ]
        alone = [("alone", int(item.places == workers)) for item in placements if item.gpus and not item.fits]
        return alone + [(fit.verdict, fit.token_budget) for item in placements for fit in item.fits.values()]

    wanted = [of_model.request.num_gpus for of_model in facts.values() if of_model.needs_worker]
    most = math.ceil(sum(1 if number is None else number for number in wanted) / len(gpus))
    of_one = batches(1)
    workers = next((number for number in range(most, 1, -1) if batches(number) == of_one), 1)
    return config.model_copy(update={"max_workers_per_gpu": workers})


def _with_flash_attention(
    config: RunConfig,
    compiled: Sequence[Model],
    facts: Mapping[str, ModelFacts],
    gpus: Sequence[Device],
    trials: Callable[..., Sequence[DeviceTrial]],
) -> Mapping[str, ModelFacts]:
    """Return the facts with flash-attention 2 for members that can take it, if it works.

    Only a process with torch can tell, which takes seconds; it is started only if a member would use it.
    """
    with_flash: dict[str, ModelFacts] = {}
    would_take_it = False
    for model in compiled:
        of_model = facts[model.name]
        memory = None if of_model.memory is None else of_model.memory.with_flash_attention()
        if memory is not None:
            with_flash[model.name] = replace(of_model, memory=memory)
            placement = place(config.workers_per_gpu, model.index, with_flash[model.name], gpus, None)
            would_take_it = would_take_it or placement.attention == "flash_attention_2"
    if would_take_it:
        report = trials(gpus[:1], flash_attention=True)[0].report
        if report is not None and report.has_flash_attention:
            return {**facts, **with_flash}
    return facts


def without_done(model: ModelPlan, is_done: npt.NDArray[np.bool_], is_timed: bool) -> ModelPlan:
    """Return the model with the chunks of the rows that are not done; ``is_done`` is bool [jobs, rows].

    Jobs whose rows are not selected have no chunks yet; ``with_job`` adds them. Under a time limit the chunks are
    in the order of dispatch. The longest rows come first: they show in the first minute whether memory suffices and
    how fast the model is. The others follow from the shortest up, because that covers the most rows. A job begins
    when all rows of the job before it are dispatched.
    """
    chunks = tuple(chunk for chunk in model.chunks if chunk.job not in model.undecided)
    order, chunks = what_is_left(chunks, model.order, is_done)
    if is_timed:
        chunks = chunks[:1] + tuple(sorted(chunks[1:], key=lambda chunk: (chunk.job, -chunk.start)))
    return replace(model, chunks=chunks, order=order)


def with_job(
    plan: Plan,
    model: ModelPlan,
    number: int,
    is_selected: npt.NDArray[np.bool_],
    doubt: npt.NDArray[np.float64],
    is_done: npt.NDArray[np.bool_],
) -> ModelPlan:
    """Return a model with the chunks that are left to do of a job, once its rows are selected.

    Under a time limit the closest calls come first.  ``is_selected``, ``doubt`` and ``is_done`` are of the table's
    rows, [rows].
    """
    facts = plan.facts[model.name]
    rows_of_job = facts.job_rows.get(model.jobs[number].name)
    if rows_of_job is not None:
        is_selected = is_selected & rows_of_job
    is_timed = plan.config.time_limit is not None
    rows, chunks, work = _cut(
        np.flatnonzero(is_selected),
        facts.request,
        _computed_lengths(facts),
        facts.lengths,
        doubt if is_timed else None,
    )
    order, chunks = what_is_left(chunks, rows, is_done[None])
    index = 1 + max((chunk.index for chunk in model.chunks), default=-1)
    share = work / model.work if model.work else 0.0
    added = [chunk.behind(index, len(model.order), share, number) for chunk in chunks]
    undecided = {other: expected for other, expected in model.undecided.items() if other != number}
    planned = replace(
        model,
        order=np.concatenate([model.order, order]),
        chunks=tuple(sorted((*model.chunks, *added), key=lambda chunk: chunk.job)),
        undecided=undecided,
    )
    left_out = model.left_out + model.undecided_work - planned.undecided_work - share
    return replace(planned, left_out=max(0.0, left_out))


def _cut_jobs(
    facts: ModelFacts, jobs: Sequence[Job], computed: npt.NDArray[np.int64], ranked: npt.NDArray[np.int64]
) -> _Cut:
    """Return all rows in all jobs that may compute them."""
    parts: list[_Cut] = []
    for job in jobs:
        rows = facts.job_rows.get(job.name)
        if rows is None and parts and not facts.job_rows:
            parts.append(parts[0])
        else:
            numbers = np.arange(len(computed)) if rows is None else np.flatnonzero(rows)
            parts.append(_cut(numbers, facts.request, computed, ranked))
    return join_jobs(parts)


def _cut(
    rows: npt.NDArray[np.int64],
    request: ResourceRequest,
    computed: npt.NDArray[np.int64],
    ranked: npt.NDArray[np.int64],
    doubt: npt.NDArray[np.float64] | None = None,
) -> _Cut:
    """Return rows of the table in their order, their chunks, and their work in one job."""
    chunk_rows = max(1, len(rows)) if request.chunk_rows == "all" else request.chunk_rows
    if doubt is None:
        order, chunks = cut_chunks(computed[rows], ranked[rows], chunk_rows)
    else:
        order, chunks = cut_closest_first(computed[rows], ranked[rows], doubt[rows], chunk_rows)
    return rows[order], chunks, _work_of(computed[rows])


def _computed_lengths(facts: ModelFacts) -> npt.NDArray[np.int64]:
    """Return the bytes of each row's text that the member computes: max_length cuts the rest, [rows]."""
    if facts.memory is None:
        return facts.lengths
    return np.minimum(facts.lengths, int(facts.memory.max_length * BYTES_PER_TOKEN))


def _work_of(lengths: npt.NDArray[np.int64]) -> float:
    return float(lengths.sum() + ROW_OVERHEAD_BYTES * len(lengths))


def _share_gpus(plan: Plan) -> Plan:
    """Return the plan with members at the same time, one replica each at first, where several share the GPUs."""
    working = [model for model in plan.models if model.needs_worker]
    several = [model for model in working if model.gpus and model.replicas > 1]
    sharing = {model.name for model in several if model.request.replicas == "auto"}
    if len(working) == 1 or not sharing:
        return plan
    models = (replace(model, first_replicas=1) if model.name in sharing else model for model in plan.models)
    return replace(plan, models=tuple(models), why="members run at the same time, one replica each at first")


def _share_cpu(plan: Plan) -> Plan:
    """Return the plan with workers side by side on a CPU, each with its share of the cores as threads.

    ``cpu_workers: auto`` takes two cores for each worker, and two workers on two or three cores, as far as chunks
    and memory go. A member with unknown memory then has the CPU to itself. A resumed run gives a member the threads
    that it chose before, unless a key says otherwise or there are too few cores.
    """
    on_cpu = [model for model in plan.models if model.needs_worker and not model.gpus]
    if not on_cpu:
        return plan
    asked = plan.config.cpu_workers
    sharing = [model for model in on_cpu if model.placement.footprint is not None or asked != "auto"]
    chunks = sum(
        len(model.chunks) if model.request.replicas == "auto" else model.replicas for model in sharing
    )
    free = 0 if plan.host is None else plan.host.total_bytes - plan.host.used_bytes
    memory_holds = max(1, free // max(_cpu_bytes(model) for model in on_cpu))
    max_workers = min(max(plan.cpus // 2, min(plan.cpus, 2)), memory_holds) if asked == "auto" else asked
    workers = max(1, min(max_workers, chunks))
    models = {model.name: model for model in plan.models}
    for model in on_cpu:
        is_auto = model.request.replicas == "auto"
        at_a_time, threads = workers if model in sharing else 1, None
        choice = plan.cpu_choices.get(model.name)
        if asked == "auto" and is_auto and choice is not None and choice.threads <= plan.cpus:
            threads = choice.threads
            at_a_time = min(choice.workers, plan.cpus // threads, memory_holds)
        replicas, first_replicas = model.replicas, model.first_replicas
        if is_auto:
            replicas = max(1, min(at_a_time * plan.hosts, len(model.chunks)))
            first_replicas = math.ceil(replicas / len(on_cpu))
        models[model.name] = replace(
            model,
            replicas=replicas,
            first_replicas=first_replicas,
            cpu_share=min(model.cpu_share, 1 / at_a_time),
            cpu_threads=threads,
        )
    plan = replace(plan, models=tuple(models.values()))
    smallest = min((models[model.name] for model in on_cpu), key=lambda model: model.cpu_share)
    at_a_time = round(1 / smallest.cpu_share)
    if at_a_time > 1:
        each = plural(smallest.cpu_threads or threads_of(plan.cpus, smallest.cpu_share), "core")
        size = gib(plan.host_bytes)
        why = f"{at_a_time} workers at a time on the CPU, {each} each, take about {size} of memory"
        plan = replace(plan, why=f"{plan.why}; {why}" if plan.why else why)
    return plan


def _cpu_bytes(model: ModelPlan) -> int:
    """Return what a worker of the model takes of the host's memory on the CPU, about, with a row or batch."""
    footprint = model.placement.footprint
    if footprint is None:
        return WORKER_HOST_BYTES
    return footprint.peak_bytes(0, max(footprint.width, asked_tokens(model.request, footprint) or 0))


def plan_trainings(
    config: RunConfig, member: MemberConfig, names: Sequence[str], gpus: Sequence[Device]
) -> ModelPlan:
    """Return the plan of a member's trainings, each a job of one chunk; the placement has the problems.

    As many run side by side as the GPUs or ``cpu_workers`` allow; a training takes all memory of its GPUs.
    """
    training = member.training
    assert training is not None
    model, count = model_of_trainings(config.models, member, names), len(names)
    request = ResourceRequest(training.num_gpus, gpu_memory="all", uses_torch=training.base_model is not None)
    facts = ModelFacts(model.name, request, np.ones(count, dtype=np.int64))
    placement = place(config.workers_per_gpu, model.index, facts, gpus, None)
    problems = tuple(text.replace("num_gpus", "train.num_gpus") for text in placement.problems)
    replicas = 1 if config.cpu_workers == "auto" else config.cpu_workers
    if placement.gpus:
        usable = [gpu for gpu in gpus if gpu.uuid in placement.devices]
        replicas = rooms(usable, placement.gpus, config.workers_per_gpu // placement.places)
    # Whichever trainings are left: other threads would give one that goes on other last digits.
    cpu_share = 0.0 if placement.gpus else 1 / replicas
    replicas = max(1, min(replicas, count))
    return ModelPlan(
        loaded=model,
        request=request,
        placement=replace(placement, problems=problems),
        replicas=replicas,
        first_replicas=replicas,
        cpu_share=cpu_share,
        speed=Speed(0.0, 0.0, is_measured=False),
        work=float(count),
        chunks=tuple(Chunk(job, job, job + 1, 1 / count, job) for job in range(count)),
        order=np.arange(count),
    )
