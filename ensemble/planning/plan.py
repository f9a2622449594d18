"""Plan what runs where: RunConfig + facts about table, checkpoints and devices -> Plan.

PURE except ``plan_run``: no disk, no clock, no environment; the same arguments give the same plan.  ``placement``
decides where a member may run, ``forecast`` how long it takes, ``chunks`` how its rows are cut.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ensemble.common.device_trials import DeviceTrial
from ensemble.common.gpus import Device
from ensemble.common.host import available_memory_bytes, threads_of, total_memory_bytes, usable_cpus
from ensemble.common.text import gib, plural
from ensemble.config import MemberConfig, RunConfig
from ensemble.config.values import takes_time_left
from ensemble.members.base import ResourceRequest
from ensemble.planning.chunks import (
    BYTES_PER_TOKEN,
    ROW_OVERHEAD_BYTES,
    Chunk,
    cut_chunks,
    cut_closest_first,
    join_views,
    what_is_left,
)
from ensemble.planning.forecast import Job, Speed, guessed_speed, slower_by, total_seconds
from ensemble.planning.placement import MemberFacts, Placement, asked_tokens, place, rooms

# What a worker on a GPU takes of its host: torch's CUDA libraries, a CUDA context, bitsandbytes and token ids.
# Reckoned, 1.5 to 2.5 GiB; not measured on a GPU yet.
WORKER_HOST_BYTES = 2 << 30
# The same of a worker that stands by, without a context.
STANDBY_HOST_BYTES = 1 << 30
# Rows of views in their order, their chunks and their work.
_Cut: TypeAlias = tuple[npt.NDArray[np.int64], tuple[Chunk, ...], float]
_UNMEASURED = Speed(0.0, 0.0, is_measured=False)
_NO_TIME = Speed(0.0, 0.0, is_measured=True, is_startup_measured=True)


@dataclass(frozen=True)
class CpuChoice:
    """Hold what a run chose for a member on the CPU: the threads of each worker, and workers at a time."""

    threads: int
    workers: int


@dataclass(frozen=True)
class MemberPlan:
    """Say how a member runs: on ``gpus`` devices per replica (0: the CPU).

    A member that needs no worker has neither replicas nor chunks.  Until the rows of a member with ``when`` are
    selected (``with_rows``), its chunks are those of the whole table.

    Attributes:
        replicas: the most at a time.
        first_replicas: those that start before any later member; the others join if a GPU or a part of the CPU is
            left over.
        cpu_share: the share of the cores that each replica has on a CPU.
        work: the bytes of text that max_length leaves of all rows in all views, and what each row costs besides;
            where views may not compute some rows, of the others.
        order: row numbers, longest text first, int64 [rows], numbered through the views (``chunks.join_views``).
        waits_for: the members with a weight before it, if it has ``when``.
        expected_share: the share of the rows that the forecast counts.
        undecided_views: views with ``when`` whose rows are not selected yet, by number, with the share of the
            member's rows that the forecast counts.
        cpu_threads: threads of a worker on a CPU; None: by its share of the cores.
        checkpoints: the number of each view's checkpoint, of which a worker has one; empty: all views share one.
        row_names: what its rows are called if they are no rows of a table, such as "fold 0" of trainings.  Each is
            a chunk of its own, and the member fails with the first that cannot be done.
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
    undecided_views: Mapping[int, float] = field(default_factory=dict)
    cpu_threads: int | None = None
    checkpoints: tuple[int, ...] = ()
    row_names: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def gpus(self) -> int:
        return self.placement.gpus

    @property
    def views(self) -> int:
        return max(1, len(self.model.counted_views))

    @property
    def undecided_work(self) -> float:
        """Return the share of the member's work in views whose rows are not selected yet, if they had all rows."""
        return len(self.undecided_views) / self.views

    @property
    def unexpected_work(self) -> float:
        """Return the share of the member's work that views are expected not to select."""
        return sum(1.0 - share for share in self.undecided_views.values()) / self.views

    @property
    def needs_worker(self) -> bool:
        return self.replicas > 0

    def checkpoint_of(self, view: int) -> int:
        """Return the number of the checkpoint that computes a view."""
        return self.checkpoints[view] if self.checkpoints else 0

    def takes_time_left(self, view: int) -> bool:
        """Return whether a view has as many rows as there is time for."""
        return takes_time_left(self.model.when) or takes_time_left(self.model.views_with_when.get(view))

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
        """Return how long one replica computes all rows of the table, in all views."""
        return self.speed.seconds_per_work * self.work * self.slowdown

    @property
    def job(self) -> Job:
        starts = math.ceil(len(set(self.checkpoints)) / max(1, self.replicas)) or 1  # one behind the other
        return Job(
            startup_seconds=starts * self.speed.startup_seconds,
            compute_seconds=self.whole_seconds * self.expected_share * (1.0 - self.unexpected_work),
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
        places = dict.fromkeys((gpu.uuid for gpu in self.gpus), self.config.max_workers_per_gpu)
        return total_seconds(jobs, places, self.hosts)

    @property
    def jobs(self) -> list[Job]:
        return [member.job for member in self.members if member.needs_worker]

    @property
    def host_bytes(self) -> int:
        """Return about how much of the host's memory the workers take at a time.

        A worker on a GPU takes only its process, as weights are mapped on their way to the GPU. A worker on the CPU
        also takes the weights and a row or batch; members whose shares of the cores fit run side by side.
        """
        places = len(self.gpus) * self.config.max_workers_per_gpu
        gpu_workers = min(places, sum(member.replicas for member in self.members if member.gpus))
        on_cpu = [member for member in self.members if member.needs_worker and not member.gpus]
        on_cpu.sort(key=_cpu_bytes, reverse=True)
        together = [0]
        for first in on_cpu:
            size, room = 0, 1.0
            for member in (first, *(other for other in on_cpu if other is not first)):
                workers = min(member.replicas, int(room / member.cpu_share + 1e-6))  # shares are rounded
                size += workers * _cpu_bytes(member)
                room -= workers * member.cpu_share
            together.append(size)
        return gpu_workers * WORKER_HOST_BYTES + max(together)

    def again(self, gpus: Sequence[Device], cpu_choices: Mapping[str, CpuChoice] | None = None) -> Plan:
        """Return the plan of the same run on devices that have changed, or with other ``cpu_choices``."""
        choices = self.cpu_choices if cpu_choices is None else cpu_choices
        return make_plan(
            self.config, self.facts, gpus, self.host, self.speeds, self.hosts, self.cpus, choices
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
        gpus: those that this run may use, with the memory that others use of them.
        host: the CPU with its memory, of several hosts the one with the least free memory; None: not known.
        speeds: as far as an earlier run has measured them.
        hosts: the number of machines whose CPUs take workers.
        cpus: the threads that compute on such a machine at a time.
        cpu_choices: what a resumed run chose when it began.
    """
    common = _common_lengths(config, facts)
    speeds = speeds or {}
    members: list[MemberPlan] = []
    warnings: list[str] = []
    for index, model in enumerate(config.models):
        of_member = facts[model.name]
        request, needs_worker = of_member.request, of_member.needs_worker
        placement = place(config, index, of_member, gpus, host)
        warnings += placement.warnings
        room = hosts
        if placement.gpus:
            usable = [gpu for gpu in gpus if gpu.uuid in placement.devices]
            room = rooms(usable, placement.gpus, config.max_workers_per_gpu // placement.places)
        replicas = max(1, room)
        if request.replicas != "auto":
            if placement.gpus and request.replicas > replicas:
                warnings.append(
                    f"models[{index}].replicas: {model.name} asks for {plural(request.replicas, 'replica')} of "
                    f"{plural(placement.gpus, 'GPU')} each, but there is room for {replicas} at a time; "
                    f"running {replicas}"
                )
            else:
                replicas = request.replicas
        computed = _computed_lengths(of_member)
        table_rows, views = len(computed), max(1, len(model.counted_views))
        order, speed, work = np.arange(table_rows), _NO_TIME, views * _work_of(computed)
        chunks: tuple[Chunk, ...] = ()
        if needs_worker:
            # Order and cut go by the whole text: another cut would mean other batches, and so other last digits,
            # for little less padding.
            ranked = of_member.lengths if common is None else common
            cut = partial(_cut, computed=computed, ranked=ranked)
            order, chunks, work = _cut_views(of_member, views, np.ones(table_rows, dtype=np.bool_), cut)
            guess = guessed_speed(placement.footprint, placement.gpus)
            speed = speeds.get(model.name, _UNMEASURED).or_guess(guess)
        replicas = min(replicas, len(chunks))
        cpu_share = 0.0
        if not placement.gpus:
            cpu_share = 1.0 if request.replicas == "auto" else 1 / max(1, replicas)
        member = MemberPlan(
            index=index,
            model=model,
            request=request,
            placement=placement,
            replicas=replicas,
            first_replicas=replicas,
            cpu_share=cpu_share,
            speed=speed,
            work=work,
            chunks=chunks,
            order=order,
            table_rows=table_rows,
            waits_for=() if model.when is None else config.deciders(index),
            expected_share=of_member.expected_share,
            undecided_views={view: of_member.view_shares.get(view, 1.0) for view in model.views_with_when},
            checkpoints=model.view_checkpoints,
        )
        members.append(member)
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
        problems=tuple(problem for member in members for problem in member.placement.problems),
        cpu_choices=cpu_choices or {},
    )
    if plan.problems:
        return plan
    plan = _share_cpu(_share_gpus(plan))
    is_measured = bool(plan.jobs) and all(
        member.speed.is_measured for member in plan.members if member.needs_worker
    )
    return replace(plan, seconds=plan.seconds_of(plan.jobs) if is_measured else None)


def _common_lengths(config: RunConfig, facts: Mapping[str, MemberFacts]) -> npt.NDArray[np.int64] | None:
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
    facts: Mapping[str, MemberFacts],
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
        facts = _with_flash_attention(config, facts, gpus, trials)
    return make_plan(
        config,
        facts,
        gpus,
        host=host,
        speeds=speeds,
        hosts=len(hosts) or 1,
        cpus=1 if hosts else usable_cpus(),
    )


def _with_flash_attention(
    config: RunConfig,
    facts: Mapping[str, MemberFacts],
    gpus: Sequence[Device],
    trials: Callable[..., Sequence[DeviceTrial]],
) -> Mapping[str, MemberFacts]:
    """Return the facts with flash-attention 2 for members that can take it, if it works.

    Only a process with torch can tell, which takes seconds; it is started only if a member would use it.
    """
    with_flash: dict[str, MemberFacts] = {}
    would_take_it = False
    for index, model in enumerate(config.models):
        of_member = facts[model.name]
        memory = None if of_member.memory is None else of_member.memory.with_flash_attention()
        if memory is not None:
            checkpoints = (estimate.with_flash_attention() or estimate for estimate in of_member.checkpoints)
            with_flash[model.name] = replace(of_member, memory=memory, checkpoints=tuple(checkpoints))
            placement = place(config, index, with_flash[model.name], gpus, None)
            would_take_it = would_take_it or placement.attention == "flash_attention_2"
    if would_take_it:
        report = trials(gpus[:1], flash_attention=True)[0].report
        if report is not None and report.has_flash_attention:
            return {**facts, **with_flash}
    return facts


def without_done(member: MemberPlan, is_done: npt.NDArray[np.bool_], is_timed: bool) -> MemberPlan:
    """Return the member with the chunks of the rows that are not done; ``is_done`` is bool [rows].

    Views whose rows are not selected have no chunks yet; ``with_view`` adds them. Under a time limit the chunks are
    in the order of dispatch. The longest rows come first: they show in the first minute whether memory suffices and
    how fast the member is. The others follow from the shortest up, because that covers the most rows. A view begins
    when all rows of the view before it are dispatched.
    """
    chunks = tuple(chunk for chunk in member.chunks if chunk.view not in member.undecided_views)
    order, chunks = what_is_left(chunks, member.order, is_done)
    if is_timed:
        chunks = chunks[:1] + tuple(sorted(chunks[1:], key=lambda chunk: (chunk.view, -chunk.start)))
    return replace(member, chunks=chunks, order=order)


def with_rows(
    plan: Plan, member: MemberPlan, is_selected: npt.NDArray[np.bool_], doubt: npt.NDArray[np.float64]
) -> MemberPlan:
    """Return a member with ``when`` once its rows are selected: with the chunks of these rows.

    Under a time limit the closest calls come first.  ``is_selected`` and ``doubt`` are of the table's rows, [rows].
    """
    facts, cut = plan.facts[member.name], partial(_cut_selected, plan, member, doubt=doubt)
    order, chunks, work = _cut_views(facts, member.views, is_selected, cut)
    return replace(member, order=order, chunks=chunks, work=work, expected_share=1.0, waits_for=())


def with_view(
    plan: Plan,
    member: MemberPlan,
    view: int,
    is_selected: npt.NDArray[np.bool_],
    doubt: npt.NDArray[np.float64],
    is_done: npt.NDArray[np.bool_],
) -> MemberPlan:
    """Return a member with the chunks that are left to do of a view with ``when``, once its rows are selected.

    Under a time limit the closest calls come first.  ``is_selected`` and ``doubt`` are of the table's rows, [rows];
    ``is_done`` is of the rows numbered through the views.
    """
    view_rows = plan.facts[member.name].view_rows
    if view_rows is not None:
        is_selected = is_selected & view_rows[view]
    rows, chunks, work = _cut_selected(plan, member, np.flatnonzero(is_selected), doubt)
    order, chunks = what_is_left(chunks, rows + view * member.table_rows, is_done)
    index = 1 + max((chunk.index for chunk in member.chunks), default=-1)
    added = [
        replace(
            chunk,
            index=index + chunk.index,
            start=len(member.order) + chunk.start,
            stop=len(member.order) + chunk.stop,
            cost=chunk.cost * work / member.work,
            view=view,
        )
        for chunk in chunks
    ]
    return replace(
        member,
        order=np.concatenate([member.order, order]),
        chunks=tuple(sorted((*member.chunks, *added), key=lambda chunk: chunk.view)),
        undecided_views={other: share for other, share in member.undecided_views.items() if other != view},
    )


def _cut_views(
    facts: MemberFacts, views: int, is_selected: npt.NDArray[np.bool_], cut: Callable[..., _Cut]
) -> _Cut:
    """Return the selected rows, bool [rows], in all views that may compute them; ``cut`` is for a single view."""
    if facts.view_rows is None:
        parts = [cut(np.flatnonzero(is_selected))] * views
    else:
        parts = [cut(np.flatnonzero(is_selected & rows)) for rows in facts.view_rows]
    return join_views(parts, len(is_selected))


def _cut_selected(
    plan: Plan, member: MemberPlan, rows: npt.NDArray[np.int64], doubt: npt.NDArray[np.float64]
) -> _Cut:
    """Return selected rows of the table in their order, their chunks, and their work in one view."""
    facts, is_timed = plan.facts[member.name], plan.config.time_limit is not None
    return _cut(rows, _computed_lengths(facts), facts.lengths, doubt if is_timed else None)


def _cut(
    rows: npt.NDArray[np.int64],
    computed: npt.NDArray[np.int64],
    ranked: npt.NDArray[np.int64],
    doubt: npt.NDArray[np.float64] | None = None,
) -> _Cut:
    """Return rows of the table in their order, their chunks, and their work in one view."""
    if doubt is None:
        order, chunks = cut_chunks(computed[rows], ranked[rows])
    else:
        order, chunks = cut_closest_first(computed[rows], ranked[rows], doubt[rows])
    return rows[order], chunks, _work_of(computed[rows])


def _computed_lengths(facts: MemberFacts) -> npt.NDArray[np.int64]:
    """Return the bytes of each row's text that the member computes: max_length cuts the rest, [rows]."""
    if facts.memory is None:
        return facts.lengths
    return np.minimum(facts.lengths, int(facts.memory.max_length * BYTES_PER_TOKEN))


def _work_of(lengths: npt.NDArray[np.int64]) -> float:
    return float(lengths.sum() + ROW_OVERHEAD_BYTES * len(lengths))


def _share_gpus(plan: Plan) -> Plan:
    """Return the plan with members at the same time, one replica each at first, where several share the GPUs."""
    working = [member for member in plan.members if member.needs_worker]
    members = list(plan.members)
    for member in working:
        if len(working) > 1 and member.gpus and member.replicas > 1 and member.request.replicas == "auto":
            members[member.index] = replace(member, first_replicas=1)
    why = "members run at the same time, one replica each at first" if members != [*plan.members] else ""
    return replace(plan, members=tuple(members), why=why)


def _share_cpu(plan: Plan) -> Plan:
    """Return the plan with workers side by side on a CPU, each with its share of the cores as threads.

    ``cpu_workers: auto`` takes two cores for each worker, and two workers on two or three cores, as far as chunks
    and memory go. A member with unknown memory then has the CPU to itself. A resumed run gives a member the threads
    that it chose before, unless a key says otherwise or there are too few cores.
    """
    on_cpu = [member for member in plan.members if member.needs_worker and not member.gpus]
    if not on_cpu:
        return plan
    asked = plan.config.cpu_workers
    sharing = [member for member in on_cpu if member.placement.footprint is not None or asked != "auto"]
    chunks = sum(
        len(member.chunks) if member.request.replicas == "auto" else member.replicas for member in sharing
    )
    free = 0 if plan.host is None else plan.host.total_bytes - plan.host.used_bytes
    memory_holds = max(1, free // max(_cpu_bytes(member) for member in on_cpu))
    max_workers = min(max(plan.cpus // 2, min(plan.cpus, 2)), memory_holds) if asked == "auto" else asked
    workers = max(1, min(max_workers, chunks))
    members = list(plan.members)
    for member in on_cpu:
        is_auto = member.request.replicas == "auto"
        at_a_time, threads = workers if member in sharing else 1, None
        choice = plan.cpu_choices.get(member.name)
        if asked == "auto" and is_auto and choice is not None and choice.threads <= plan.cpus:
            threads = choice.threads
            at_a_time = min(choice.workers, plan.cpus // threads, memory_holds)
        replicas, first_replicas = member.replicas, member.first_replicas
        if is_auto:
            replicas = min(at_a_time * plan.hosts, len(member.chunks))
            first_replicas = math.ceil(replicas / len(on_cpu))
        members[member.index] = replace(
            member,
            replicas=replicas,
            first_replicas=first_replicas,
            cpu_share=min(member.cpu_share, 1 / at_a_time),
            cpu_threads=threads,
        )
    plan = replace(plan, members=tuple(members))
    smallest = min((members[member.index] for member in on_cpu), key=lambda member: member.cpu_share)
    at_a_time = round(1 / smallest.cpu_share)
    if at_a_time > 1:
        each = plural(smallest.cpu_threads or threads_of(plan.cpus, smallest.cpu_share), "core")
        size = gib(plan.host_bytes)
        why = f"{at_a_time} workers at a time on the CPU, {each} each, take about {size} of memory"
        plan = replace(plan, why=f"{plan.why}; {why}" if plan.why else why)
    return plan


def _cpu_bytes(member: MemberPlan) -> int:
    """Return what a worker of the member takes of the host's memory on the CPU, about, with a row or batch."""
    footprint = member.placement.footprint
    if footprint is None:
        return WORKER_HOST_BYTES
    return footprint.peak_bytes(0, max(footprint.width, asked_tokens(member.request, footprint) or 0))


def plan_trainings(
    config: RunConfig, model: MemberConfig, names: Sequence[str], gpus: Sequence[Device]
) -> MemberPlan:
    """Return the plan of a member whose chunks are its trainings; the placement has the problems.

    As many run side by side as the GPUs or ``cpu_workers`` allow; a training takes all memory of its GPUs.
    """
    assert model.training is not None
    index, count = config.models.index(model), len(names)
    request = ResourceRequest(num_gpus=model.training.num_gpus, gpu_memory="all")
    placement = place(
        config, index, MemberFacts(model.name, request, np.ones(count, dtype=np.int64)), gpus, None
    )
    problems = tuple(text.replace("num_gpus", "train.num_gpus") for text in placement.problems)
    replicas = 1 if config.cpu_workers == "auto" else config.cpu_workers
    if placement.gpus:
        usable = [gpu for gpu in gpus if gpu.uuid in placement.devices]
        replicas = rooms(usable, placement.gpus, config.max_workers_per_gpu // placement.places)
    # Whichever trainings are left: other threads would give one that goes on other last digits.
    cpu_share = 0.0 if placement.gpus else 1 / replicas
    replicas = max(1, min(replicas, count))
    return MemberPlan(
        index=index,
        model=model.model_copy(update={"when": None, "views": None}),
        request=request,
        placement=replace(placement, problems=problems),
        replicas=replicas,
        first_replicas=replicas,
        cpu_share=cpu_share,
        speed=Speed(0.0, 0.0, is_measured=False),
        work=float(count),
        chunks=tuple(Chunk(row, row, row + 1, 1 / count) for row in range(count)),
        order=np.arange(count),
        table_rows=count,
        row_names=tuple(names),
    )
