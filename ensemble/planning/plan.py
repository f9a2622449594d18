"""What to run where.  RunConfig + facts about table, checkpoints and devices -> Plan.

PURE but for ``plan_run``: no disk, no clock, no environment; the same arguments give the same plan.  Where a member
may run is in ``placement``, how long it takes in ``forecast``, its chunks in ``chunks``.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, repeat

import numpy as np
import numpy.typing as npt

from ensemble.common.device_trials import Trial
from ensemble.common.gpus import Device
from ensemble.common.host import available_memory_bytes, threads_of, total_memory_bytes, usable_cpus
from ensemble.common.text import duration, gib, plural
from ensemble.config import MemberConfig, RunConfig
from ensemble.members.base import ResourceRequest
from ensemble.planning.chunks import (
    BYTES_PER_TOKEN,
    CHUNK_MAX_ROWS,
    FIRST_CHUNK_ROWS,
    ROW_OVERHEAD_BYTES,
    Chunk,
    common_lengths,
    cut_chunks,
    cut_closest_first,
    cut_to_rows,
    in_views,
    what_is_left,
)
from ensemble.planning.forecast import (
    Job,
    Speed,
    guessed_speed,
    pipelined,
    slower_by,
    total_seconds,
)
from ensemble.planning.placement import MemberFacts, Placement, asked_tokens, fitting, place, rooms

# Side by side is chosen where it promises to be this much faster: a replica on each GPU stays balanced where the
# promise was wrong.
_WORTH_CHANGING = 0.98
# What a worker on a GPU takes of its host: torch and transformers imported, and a chunk's token ids; about.
WORKER_HOST_BYTES = 1 << 30
_UNMEASURED = Speed(0.0, 0.0, is_measured=False)
_NO_TIME = Speed(0.0, 0.0, is_measured=True, is_startup_measured=True)


@dataclass(frozen=True)
class CpuChoice:
    """What a run chose for a member on the CPU: the threads of each worker, and workers at a time."""

    threads: int
    workers: int


@dataclass(frozen=True)
class MemberPlan:
    """How one member runs: on ``gpus`` devices per replica (0: the CPU), ``replicas`` at most at a time.

    ``order`` holds row numbers, longest text first, int64 [rows]; chunks are slices of it.  A member with several
    ``views`` of each row has all rows of the first view before those of the next, numbered through them
    (``chunks.in_views``); the table has ``table_rows``.  ``work`` is the text of all of these rows in bytes, as far
    as max_length lets it through, with what each row costs beyond it.
    ``first_replicas`` start before any later member; the others join where a GPU or a part of the CPU is left over.
    On a CPU each has ``cpu_share`` of the cores, which makes it slower, and ``cpu_threads``; None: as many as its
    share.  A member that needs no worker has neither replicas nor chunks.  A member with ``when`` ``waits_for`` the
    members with a weight before it: until its rows are selected (``with_rows``) its chunks are those of the whole
    table, and the forecast takes ``expected_share`` of them.  ``advice`` is what else could be set, and what it
    would take.
    """

    index: int
    model: MemberConfig
    request: ResourceRequest
    placement: Placement
    replicas: int
    first_replicas: int
    cpu_share: float
    speed: Speed
    work: float
    chunks: tuple[Chunk, ...]
    order: npt.NDArray[np.int64] = field(compare=False, repr=False)
    table_rows: int = 0
    waits_for: tuple[str, ...] = ()
    expected_share: float = 1.0
    advice: str = ""
    cpu_threads: int | None = None

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def gpus(self) -> int:
        return self.placement.gpus

    @property
    def views(self) -> int:
        """In how many views it gets each row."""
        return max(1, len(self.model.counted_views))

    @property
    def needs_worker(self) -> bool:
        return self.replicas > 0

    @property
    def slowdown(self) -> float:
        """How many times as long one of its replicas computes as ``speed`` says, which may be of another share."""
        return slower_by(self.cpu_share) / slower_by(self.speed.cpu_share)

    @property
    def whole_seconds(self) -> float:
        """Of computing all rows of the table, in all views, on one replica."""
        return self.speed.seconds_per_work * self.work * self.slowdown

    def rows_at_a_time(self) -> Iterator[int]:
        """Yield how many rows each of its next chunks may have under a time limit.

        While its speed is not measured, each replica begins with few: at least a batch, if its size is known.
        """
        if self.speed.is_measured:
            return repeat(CHUNK_MAX_ROWS)
        batch_rows = self.request.batch_size or 0
        if (tokens := self.request.max_num_batched_tokens) is not None:
            batch_rows = int(tokens * BYTES_PER_TOKEN * len(self.order) / max(self.work, 1.0))
        first_rows = max(FIRST_CHUNK_ROWS, batch_rows)
        return (first_rows * 2**step for step in count() for _ in range(max(1, self.replicas)))

    @property
    def job(self) -> Job:
        return Job(
            startup_seconds=self.speed.startup_seconds,
            compute_seconds=self.whole_seconds * self.expected_share,
            gpus=self.gpus,
            replicas=self.replicas,
            first_replicas=self.first_replicas,
            devices=self.placement.devices,
            places=self.placement.places,
            cpu_share=self.cpu_share,
        )


@dataclass(frozen=True)
class Plan:
    """``problems`` name the members that cannot run; then nothing else is decided.

    ``hosts`` is how many machines there are whose CPUs take workers, ``cpus`` what :func:`usable_cpus` says of one.
    ``why`` says how members share the devices, where there was a choice.  ``seconds`` is the forecast of the whole
    run, None where no earlier run has measured every member.  The others are what the plan was made from, as
    :func:`make_plan` takes it.
    """

    config: RunConfig = field(repr=False)
    facts: Mapping[str, MemberFacts] = field(repr=False, compare=False)
    gpus: tuple[Device, ...]
    host: Device | None
    speeds: Mapping[str, Speed]
    hosts: int
    cpus: int
    members: tuple[MemberPlan, ...]
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    why: str = ""
    seconds: float | None = None
    cpu_choices: Mapping[str, CpuChoice] = field(default_factory=dict)

    def seconds_of(self, jobs: Sequence[Job]) -> float:
        """From now until the last of ``jobs`` ends on its devices."""
        places = dict.fromkeys((gpu.uuid for gpu in self.gpus), self.config.max_workers_per_gpu)
        return total_seconds(jobs, places, self.hosts)

    @property
    def jobs(self) -> list[Job]:
        return [member.job for member in self.members if member.needs_worker]

    @property
    def host_bytes(self) -> int:
        """What its workers take of the host's memory at a time, about: a process each, and on the CPU weights and
        a row, or the batch that is asked, besides, of the largest that run together.  Weights on their way to a GPU
        are mapped."""
        places = len(self.gpus) * self.config.max_workers_per_gpu
        on_gpus = min(places, sum(one.replicas for one in self.members if one.gpus))
        on_cpu = [(_cpu_bytes(one), one) for one in self.members if one.needs_worker and not one.gpus]
        size, free = on_gpus * WORKER_HOST_BYTES, 1.0
        for each, one in sorted(on_cpu, key=lambda pair: -pair[0] / pair[1].cpu_share):
            count = min(one.replicas, int(free / one.cpu_share + 1e-6))
            size, free = size + count * each, free - count * one.cpu_share
        return size

    def again(self, gpus: Sequence[Device], cpu_choices: Mapping[str, CpuChoice] | None = None) -> Plan:
        """Return the plan of the same run on devices that have changed, or with other ``cpu_choices``."""
        return make_plan(
            self.config,
            self.facts,
            gpus,
            host=self.host,
            speeds=self.speeds,
            hosts=self.hosts,
            cpus=self.cpus,
            cpu_choices=self.cpu_choices if cpu_choices is None else cpu_choices,
        )


def make_plan(
    config: RunConfig,
    facts: Mapping[str, MemberFacts],
    gpus: Sequence[Device],
    host: Device | None = None,
    speeds: Mapping[str, Speed] | None = None,
    hosts: int = 1,
    cpus: int = 1,
    cpu_choices: Mapping[str, CpuChoice] | None = None,
) -> Plan:
    """Decide devices, replicas and chunks for every member.

    Args:
        config: the run.
        facts: per member name.
        gpus: those that this run may use, with what others hold of them.
        host: the CPU with its memory, of several the one with the least free; None: not known.
        speeds: per member name, as far as an earlier run has measured them.
        hosts: machines whose CPUs take workers.
        cpus: threads of computing that one of these runs at a time.
        cpu_choices: per member name, what the run that goes on chose when it began.
    """
    speeds = speeds or {}
    sharing = config.max_workers_per_gpu
    # Under a time limit members cover the same rows first; each by itself pads least in the order of its own texts.
    lengths = [one.lengths for one in facts.values() if one.needs_worker]
    # A table that cannot be read has one row for some.
    is_same_table = len({len(one) for one in lengths}) == 1
    common = common_lengths(lengths) if config.time_limit is not None and is_same_table else None
    members: list[MemberPlan] = []
    warnings: list[str] = []
    problems: list[str] = []
    # By lengths and max_length: members that read the same have one order in memory.
    cuts: dict[tuple[int, int], tuple[npt.NDArray[np.int64], tuple[Chunk, ...]]] = {}
    for index, model in enumerate(config.models):
        known, views = facts[model.name], max(1, len(model.counted_views))
        counted = known.lengths
        placement, speed = place(config, index, known, gpus, host), _NO_TIME
        problems += placement.problems
        warnings += placement.warnings
        room = hosts
        if placement.gpus:
            own = [gpu for gpu in gpus if gpu.uuid in placement.devices]
            room = rooms(own, placement.gpus, sharing // placement.places)
        replicas = max(1, room)
        if (asked := known.request.replicas) != "auto":
            replicas = min(asked, replicas) if placement.gpus else asked
            if replicas < asked:
                warnings.append(
                    f"models[{index}].replicas: {known.name} asks for {plural(asked, 'replica')} of "
                    f"{plural(placement.gpus, 'GPU')} each, but there is room for {replicas} at a time; "
                    f"running {replicas}"
                )
        if known.needs_worker:
            # Order and cut go by the whole text: another cut would mean other batches, and so other last digits,
            # for little less padding.
            counted = _computed_lengths(known)
            key = id(known.lengths), int(counted.max(initial=0))
            if key not in cuts:
                cuts[key] = cut_chunks(counted, known.lengths if common is None else common)
            order, chunks = in_views(*cuts[key], views, len(counted))
            capability = gpus[0].compute_capability if placement.gpus and gpus else None
            guess = guessed_speed(placement.footprint, capability, placement.gpus, cpus)
            speed = speeds.get(model.name, _UNMEASURED).or_guess(guess)
        else:
            order, chunks = np.arange(len(counted)), ()
        members.append(
            MemberPlan(
                index=index,
                model=model,
                request=known.request,
                placement=placement,
                replicas=min(replicas, len(chunks)),
                first_replicas=min(replicas, len(chunks)),
                cpu_share=0.0
                if placement.gpus
                else 1 / (1 if asked == "auto" else max(1, min(asked, len(chunks)))),
                speed=speed,
                work=_work_of(counted, views),
                chunks=chunks,
                order=order,
                table_rows=len(known.lengths),
                waits_for=() if model.when is None else config.deciders(index),
                expected_share=known.expected_share,
            )
        )
    plan = Plan(
        config=config,
        facts=facts,
        gpus=tuple(gpus),
        host=host,
        speeds=speeds,
        hosts=hosts,
        cpus=cpus,
        members=tuple(members),
        warnings=tuple(warnings),
        problems=tuple(problems),
        cpu_choices=cpu_choices or {},
    )
    if problems:
        return plan
    plan = _beside(_shared(plan))
    return replace(plan, members=tuple(replace(one, advice=_advice(plan, one)) for one in plan.members))


def plan_run(
    config: RunConfig,
    facts: Mapping[str, MemberFacts],
    gpus: Sequence[Device],
    speeds: Mapping[str, Speed],
    hosts: Sequence[Device],
    trials: Callable[..., Sequence[Trial]],
) -> Plan:
    """Plan a run; the arguments are those of ``make_plan``, ``hosts`` the CPUs of nodes, none: this machine's.

    ``trials`` tries devices where they are, as :func:`ensemble.common.device_trials.run_trials` does.
    """
    total, available = total_memory_bytes(), available_memory_bytes()
    host = None
    if total is not None and available is not None:
        host = Device("cpu", "CPU", None, total, max(0, total - available))
    host = min(hosts, key=lambda one: one.total_bytes - one.used_bytes, default=host)
    if gpus and importlib.util.find_spec("flash_attn") is not None:
        # Whether flash-attention 2 works only a process with torch can tell, which takes seconds: asked where a
        # member would take it.
        able = {
            name: replace(one, memory=memory)
            for name, one in facts.items()
            if one.memory is not None and (memory := one.memory.with_flash_attention()) is not None
        }
        would_take_it = any(
            model.name in able
            and place(config, index, able[model.name], gpus, None).attention == "flash_attention_2"
            for index, model in enumerate(config.models)
        )
        report = trials(gpus[:1], flash_attention=True)[0].report if would_take_it else None
        if report is not None and report.has_flash_attention:
            facts = {**facts, **able}
    return make_plan(
        config,
        facts,
        gpus,
        host=host,
        speeds=speeds,
        hosts=len(hosts) or 1,
        cpus=1 if hosts else usable_cpus(),
    )


def without_done(member: MemberPlan, is_done: npt.NDArray[np.bool_], is_timed: bool) -> MemberPlan:
    """Return the member with the chunks that are left to do; chunks of which nothing is done keep their rows.

    Under a time limit they are in the order of dispatch: first the longest rows, which show in the first minute
    whether memory suffices and how fast the member is; then from the shortest up, because that covers the most
    rows.  All rows come in one view before any comes in the next.  If its speed is unknown, the first chunks are
    small.

    Args:
        member: as it was planned, with all of its chunks.
        is_done: by row number, bool [rows].
    """
    numbers = count(len(member.chunks))
    order, left = what_is_left(member.chunks, member.order, is_done, numbers)
    if is_timed:
        left = left[:1] + tuple(sorted(left[1:], key=lambda chunk: (chunk.view, -chunk.start)))
        left = cut_to_rows(left, member.rows_at_a_time(), numbers)
    return replace(member, chunks=left, order=order)


def with_rows(
    plan: Plan, member: MemberPlan, is_selected: npt.NDArray[np.bool_], doubt: npt.NDArray[np.float64]
) -> MemberPlan:
    """Return a member with ``when`` once its rows are selected: with the chunks of these rows.

    Under a time limit the closest calls come first, in the order of dispatch.

    Args:
        is_selected: bool [rows of the table].
        doubt: how unsure each row is, [rows of the table].
    """
    rows = np.flatnonzero(is_selected)
    facts = plan.facts[member.name]
    lengths, computed = facts.lengths[rows], _computed_lengths(facts)[rows]
    if plan.config.time_limit is None:
        order, chunks = cut_chunks(computed, lengths)
    else:
        order, chunks = cut_closest_first(computed, lengths, doubt[rows], member.rows_at_a_time())
    order, chunks = in_views(rows[order], chunks, member.views, member.table_rows)
    work = _work_of(computed, member.views)
    return replace(member, order=order, chunks=chunks, work=work, expected_share=1.0, waits_for=())


def _computed_lengths(facts: MemberFacts) -> npt.NDArray[np.int64]:
    """Return the bytes of each row's text that the member computes: max_length cuts the rest, [rows]."""
    if facts.memory is None:
        return facts.lengths
    return np.minimum(facts.lengths, int(facts.memory.max_length * BYTES_PER_TOKEN))


def _work_of(lengths: npt.NDArray[np.int64], views: int) -> float:
    return views * float(lengths.sum() + ROW_OVERHEAD_BYTES * len(lengths))


def _shared(plan: Plan) -> Plan:
    """The plan with the better way of sharing the GPUs: a replica on each, or members at the same time."""
    working = [member for member in plan.members if member.needs_worker]
    is_measured = all(member.speed.is_measured for member in working)
    seconds = plan.seconds_of(plan.jobs)
    apart = replace(
        plan,
        members=tuple(
            replace(member, first_replicas=1)
            if member.gpus and member.replicas > 1 and member.request.replicas == "auto"
            else member
            for member in plan.members
        ),
    )
    why = ""
    is_known = all(member.speed.seconds_per_work > 0 for member in working)
    if apart.members != plan.members and len(working) > 1 and is_known:
        at_once = plan.seconds_of(apart.jobs)
        by = "by the speeds of an earlier run" if is_measured else "by the sizes of the models"
        if at_once < _WORTH_CHANGING * seconds:
            gain = 1 - at_once / seconds
            plan, seconds = apart, at_once
            why = f"members run at the same time, one replica each at first: {by}, {gain:.0%} sooner than in turn"
        else:
            why = (
                f"members run in turn, with replicas on all their GPUs: {by}, no later than at the same time"
            )
    return replace(plan, why=why, seconds=seconds if working and is_measured else None)


def auto_workers(cpus: int) -> int:
    """Return how many workers share so many cores: two cores for each, and two workers on two or three cores."""
    return max(cpus // 2, min(cpus, 2))


def _beside(plan: Plan) -> Plan:
    """Return the plan with workers side by side on a CPU, each with its share of the cores as threads.

    ``cpu_workers: auto`` takes as many as ``auto_workers`` says, as far as chunks and memory go.  A member of which
    nobody knows what memory it takes then has the CPU to itself.  A member for which the run chose before has the
    same threads again, unless a key says otherwise or there are too few cores.
    """
    asked = plan.config.cpu_workers
    on_cpu = [member for member in plan.members if member.needs_worker and not member.gpus]
    can_share = [member for member in on_cpu if member.placement.footprint is not None or asked != "auto"]
    if not on_cpu:
        return plan
    chunks = sum(
        len(member.chunks) if member.request.replicas == "auto" else member.replicas for member in can_share
    )
    free = 0 if plan.host is None else plan.host.total_bytes - plan.host.used_bytes
    room = free // max(_cpu_bytes(member) for member in on_cpu)
    most = min(auto_workers(plan.cpus), room) if asked == "auto" else asked
    workers = max(1, min(most, chunks))
    members = list(plan.members)
    for member in can_share:
        replicas, first_replicas = member.replicas, member.first_replicas
        if member.request.replicas == "auto":
            replicas = min(workers * plan.hosts, len(member.chunks))
            first_replicas = math.ceil(replicas / len(on_cpu))
        members[member.index] = replace(
            member,
            replicas=replicas,
            first_replicas=first_replicas,
            cpu_share=min(member.cpu_share, 1 / workers),
        )
    if asked == "auto":
        for member in on_cpu:
            members[member.index] = _as_chosen(plan, members[member.index], len(on_cpu), max(1, room))
    made = replace(plan, members=tuple(members))
    smallest = min((members[member.index] for member in on_cpu), key=lambda member: member.cpu_share)
    if (at_a_time := round(1 / smallest.cpu_share)) > 1:
        each = plural(smallest.cpu_threads or threads_of(plan.cpus, smallest.cpu_share), "core")
        takes = f"{at_a_time} workers at a time on the CPU, {each} each"
        takes += f", take about {gib(made.host_bytes)} of memory"
        made = replace(made, why="; ".join(filter(None, (plan.why, takes))))
    return replace(made, seconds=made.seconds_of(made.jobs) if plan.seconds else None)


def _as_chosen(plan: Plan, member: MemberPlan, members: int, room: int) -> MemberPlan:
    """Return the member with the threads and workers that the run chose for it when it began, if there are any.

    Args:
        members: how many of them share the CPU.
        room: how many workers memory holds.
    """
    choice = plan.cpu_choices.get(member.name)
    if choice is None or member.request.replicas != "auto" or choice.threads > plan.cpus:
        return member
    at_a_time = min(choice.workers, plan.cpus // choice.threads, room)
    replicas = min(at_a_time, len(member.chunks))
    return replace(
        member,
        replicas=replicas,
        first_replicas=math.ceil(replicas / members),
        cpu_share=1 / at_a_time,
        cpu_threads=choice.threads,
    )


def _cpu_bytes(member: MemberPlan) -> int:
    """What a worker of it takes of the host's memory on the CPU, about, with a row or the batch that is asked."""
    needed = member.placement.footprint
    if needed is None:
        return WORKER_HOST_BYTES
    return needed.peak_bytes(0, max(needed.width, asked_tokens(member.request, needed) or 0))


def _advice(plan: Plan, member: MemberPlan) -> str:
    """For a member that is spread because one GPU cannot hold it: what replicas with smaller weights would take.

    Nothing is decided by this, since smaller weights give other numbers.  Both are computed by the same products;
    to unpack weights of 4 bits moves 4.5 bytes a parameter for each batch, which by the data sheets of T4, A100 and
    H100 is 1 % of the products of 16,384 tokens, and is left out.
    """
    known, config = plan.facts[member.name], plan.config
    memory, request, capability = known.memory, known.request, member.placement.capability
    if member.gpus < 2 or memory is None or member.speed.seconds_per_work <= 0:
        return ""
    whole = memory.footprint(1, capability)
    if whole is None or fitting(config, request, whole, plan.gpus):
        return ""  # as the user wants it
    seconds = plan.seconds_of([member.job])
    for keys, smaller in memory.smaller(capability):
        own = fitting(config, request, smaller, plan.gpus)
        room = rooms(own, 1, config.max_workers_per_gpu)
        replicas = min(room, len(member.chunks), room if request.replicas == "auto" else request.replicas)
        if replicas < 1:
            continue
        job = replace(
            member.job,
            # A load reads the checkpoint, whatever it makes of it.
            compute_seconds=member.job.compute_seconds / pipelined(member.gpus),
            gpus=1,
            replicas=replicas,
            first_replicas=replicas,
            devices=tuple(gpu.uuid for gpu in own),
        )
        instead = plan.seconds_of([job])
        what = f"{smaller.quantization} weights ({gib(smaller.weights.bytes)}) would fit one GPU: "
        what += f"{plural(replicas, 'replica')} would take "
        if member.speed.is_measured:
            what += (
                f"about {duration(instead)} in place of {duration(seconds)}, by the speed of an earlier run"
            )
        else:
            what += f"{instead / seconds:.2f} of the time that it takes over {member.gpus} GPUs, by its size"
        if instead >= _WORTH_CHANGING * seconds:
            return f"{what}; as it is it keeps its numbers at no cost"
        own_keys = keys if request.num_gpus is None else f"{keys} and num_gpus: 1"
        return f"{what}, and give other numbers; {own_keys} for that"
    return ""
