"""What to run where.  RunConfig + facts about table, checkpoints and devices -> Plan.

PURE but for ``plan_run``: no disk, no clock, no environment; the same arguments give the same plan.  Where a member
may run is in ``placement``, how long it takes in ``forecast``, its chunks in ``chunks``.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import numpy.typing as npt

from ensemble.common.device_trials import run_trials
from ensemble.common.files import free_bytes, may_keep
from ensemble.common.gpus import Device
from ensemble.common.host import available_memory_bytes, total_memory_bytes
from ensemble.common.text import gib, plural
from ensemble.config import MemberConfig, RunConfig
from ensemble.members.base import ResourceRequest
from ensemble.planning.chunks import (
    BYTES_PER_TOKEN,
    ROW_OVERHEAD_BYTES,
    Chunk,
    common_lengths,
    cut_chunks,
    what_is_left,
)
from ensemble.planning.forecast import Job, Speed, guessed_speed, total_seconds
from ensemble.planning.placement import MemberFacts, Placement, place

# Side by side is chosen where it promises to be this much faster: a replica on each GPU stays balanced where the
# promise was wrong.
_WORTH_CHANGING = 0.98
# What a worker on a GPU takes of its host: torch and transformers imported, and a chunk's token ids; about.
WORKER_HOST_BYTES = 1 << 30
_UNMEASURED = Speed(0.0, 0.0, is_measured=False)
_NO_TIME = Speed(0.0, 0.0, is_measured=True, is_startup_measured=True)


@dataclass(frozen=True)
class LoadCache:
    """Whether what a load makes of a member's weights is kept in the run directory for later loads.

    ``bytes`` is what it takes of the disk; None: not known.  ``reason`` says why it is not kept although it could
    be of use.
    """

    is_kept: bool
    bytes: int | None = None
    reason: str = ""


@dataclass(frozen=True)
class MemberPlan:
    """How one member runs: on ``gpus`` devices per replica (0: the CPU), ``replicas`` at most at a time.

    ``order`` holds row numbers, longest text first, int64 [rows]; chunks are slices of it.  ``work`` is the
    text of all rows in bytes, as far as max_length lets it through, with what each row costs beyond it.
    ``first_replicas`` start before any later member; the others join where a GPU is left over.  A member that needs
    no worker has neither replicas nor chunks.  One with ``when`` ``waits_for`` the members with a weight
    before it: then ``chunks`` are those of the whole table, and which of their rows it computes comes out in the
    run; the forecast takes ``expected_share`` of them.
    """

    index: int
    model: MemberConfig
    request: ResourceRequest
    placement: Placement
    replicas: int
    first_replicas: int
    speed: Speed
    work: float
    chunks: tuple[Chunk, ...]
    order: npt.NDArray[np.int64] = field(compare=False, repr=False)
    load_cache: LoadCache = LoadCache(is_kept=False)
    waits_for: tuple[str, ...] = ()
    expected_share: float = 1.0

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def gpus(self) -> int:
        return self.placement.gpus

    @property
    def needs_worker(self) -> bool:
        return self.replicas > 0

    @property
    def whole_seconds(self) -> float:
        """Of computing all rows of the table on one replica."""
        return self.speed.seconds_per_work * self.work

    @property
    def job(self) -> Job:
        return Job(
            startup_seconds=self.speed.startup_seconds,
            compute_seconds=self.whole_seconds * self.expected_share,
            gpus=self.gpus,
            replicas=self.replicas,
            first_replicas=self.first_replicas,
            devices=self.placement.devices,
        )


@dataclass(frozen=True)
class Plan:
    """``problems`` name the members that cannot run; then nothing else is decided.

    ``why`` says how members share the GPUs, where there was a choice.  ``seconds`` is the forecast of the whole
    run, None where no earlier run has measured every member.  The others are what the plan was made from, as
    :func:`make_plan` takes it.
    """

    config: RunConfig = field(repr=False)
    facts: Mapping[str, MemberFacts] = field(repr=False, compare=False)
    gpus: tuple[Device, ...]
    host: Device | None
    speeds: Mapping[str, Speed]
    disk_free_bytes: int | None
    members: tuple[MemberPlan, ...]
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    why: str = ""
    seconds: float | None = None

    @property
    def host_bytes(self) -> int:
        """What its workers take of the host's memory at the same time, about: a process each, and on the CPU, which
        takes one member at a time, weights and a row besides.  Weights on their way to a GPU are mapped."""
        places = len(self.gpus) * self.config.max_workers_per_gpu
        on_gpus = min(places, sum(one.replicas for one in self.members if one.gpus))
        on_cpu = [0]
        for one in self.members:
            if one.needs_worker and not one.gpus:
                needed = one.placement.footprint
                each = WORKER_HOST_BYTES if needed is None else needed.peak_bytes(0, needed.width)
                on_cpu.append(one.replicas * each)
        return on_gpus * WORKER_HOST_BYTES + max(on_cpu)

    def again(self, gpus: Sequence[Device]) -> Plan:
        """The plan of the same run on devices that have changed."""
        return make_plan(self.config, self.facts, gpus, self.host, self.speeds, self.disk_free_bytes)


def make_plan(
    config: RunConfig,
    facts: Mapping[str, MemberFacts],
    gpus: Sequence[Device],
    host: Device | None = None,
    speeds: Mapping[str, Speed] | None = None,
    disk_free_bytes: int | None = None,
) -> Plan:
    """Decide devices, replicas and chunks for every member.

    Args:
        config: the run.
        facts: per member name.
        gpus: those that this run may use, with what others hold of them.
        host: the CPU with its memory; None: not known.
        speeds: per member name, as far as an earlier run has measured them.
        disk_free_bytes: where the run directory is; None: not known.
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
    for index, model in enumerate(config.models):
        known = facts[model.name]
        counted, order, chunks = known.lengths, np.arange(len(known.lengths)), tuple[Chunk, ...]()
        placement, speed = place(config, index, known, gpus, host), _NO_TIME
        problems += placement.problems
        warnings += placement.warnings
        room = len(placement.devices) * sharing // placement.gpus if placement.gpus else 1
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
            # Rows that max_length cuts cost no more than others of that length.  Order and cut still go by the
            # whole text: another cut would mean other batches, and so other last digits, for little less padding.
            if known.memory is not None:
                counted = np.minimum(counted, int(known.memory.max_length * BYTES_PER_TOKEN))
            order, chunks = cut_chunks(counted, known.lengths if common is None else common)
            capability = gpus[0].compute_capability if placement.gpus and gpus else None
            guess = guessed_speed(placement.footprint, capability)
            speed = speeds.get(model.name, _UNMEASURED).or_guess(guess)
        members.append(
            MemberPlan(
                index=index,
                model=model,
                request=known.request,
                placement=placement,
                replicas=min(replicas, len(chunks)),
                first_replicas=min(replicas, len(chunks)),
                speed=speed,
                work=float((counted + ROW_OVERHEAD_BYTES).sum()),
                chunks=chunks,
                order=order,
                waits_for=() if model.when is None else config.deciders(index),
                expected_share=known.expected_share,
            )
        )
    made_from = (config, facts, tuple(gpus), host, speeds, disk_free_bytes)
    plan = Plan(*made_from, tuple(members), tuple(warnings), tuple(problems))
    if problems:
        return plan
    plan = _shared(plan, dict.fromkeys((gpu.uuid for gpu in gpus), sharing))
    return replace(plan, members=_with_caches(plan))


def plan_run(
    config: RunConfig,
    facts: Mapping[str, MemberFacts],
    gpus: Sequence[Device],
    speeds: Mapping[str, Speed],
) -> Plan:
    """Plan a run on this machine; the arguments are those of ``make_plan``."""
    total, available = total_memory_bytes(), available_memory_bytes()
    host = None
    if total is not None and available is not None:
        host = Device("cpu", "CPU", None, total, max(0, total - available))
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
        report = run_trials(gpus[:1], flash_attention=True)[0].report if would_take_it else None
        if report is not None and report.has_flash_attention:
            facts = {**facts, **able}
    free = free_bytes(config.output_dir)
    if free is not None:  # what an earlier run keeps needs no more room
        with contextlib.suppress(OSError):
            free += sum(one.stat().st_size for one in config.output_dir.glob("work/*/cache/*/*"))
    return make_plan(config, facts, gpus, host, speeds, free)


def without_done(member: MemberPlan, is_done: npt.NDArray[np.bool_], is_timed: bool) -> MemberPlan:
    """The member with the chunks that are left to do; chunks of which nothing is done stay as they were cut.

    Under a time limit they are in the order of dispatch: first the longest rows, which show in the first minute
    whether memory suffices and how fast it goes; then from the shortest up, because that covers the most rows.

    Args:
        member: as it was planned, with all of its chunks.
        is_done: by row of the table, bool [rows].
    """
    order, left = what_is_left(member.chunks, member.order, is_done, count(len(member.chunks)))
    if is_timed:
        left = left[:1] + left[:0:-1]
    return replace(member, chunks=left, order=order)


def _shared(plan: Plan, capacity: Mapping[str, int]) -> Plan:
    """The plan with the better way of sharing the GPUs: a replica on each, or members at the same time."""
    working = [member for member in plan.members if member.needs_worker]
    is_measured = all(member.speed.is_measured for member in working)
    seconds = total_seconds([member.job for member in working], capacity)
    apart = tuple(
        replace(member, first_replicas=1)
        if member.gpus and member.replicas > 1 and member.request.replicas == "auto"
        else member
        for member in plan.members
    )
    why = ""
    is_known = all(member.speed.seconds_per_work > 0 for member in working)
    if apart != plan.members and len(working) > 1 and is_known:
        at_once = total_seconds([member.job for member in apart if member.needs_worker], capacity)
        by = "by the speeds of an earlier run" if is_measured else "by the sizes of the models"
        if at_once < _WORTH_CHANGING * seconds:
            gain = 1 - at_once / seconds
            plan, seconds = replace(plan, members=apart), at_once
            why = f"members run at the same time, one replica each at first: {by}, {gain:.0%} sooner than in turn"
        else:
            why = (
                f"members run in turn, with replicas on all their GPUs: {by}, no later than at the same time"
            )
    return replace(plan, why=why, seconds=seconds if working and is_measured else None)


def _with_caches(plan: Plan) -> tuple[MemberPlan, ...]:
    """The members, each with whether its loads keep what they make of the weights.

    It is expected to be loaded again where members take turns under a time limit, which also leaves work to resume,
    and where replicas join later.  Replicas that start together quantize side by side: one that waited for the
    other's files would be later.
    """
    members, left = [], plan.disk_free_bytes
    for member in plan.members:
        asked, needed = member.request.load_cache, member.placement.footprint
        memory = plan.facts[member.name].memory
        if memory is not None and memory.is_kept_as_stored():
            asked = False
        is_expected = plan.config.time_limit is not None or member.first_replicas < member.replicas
        if member.needs_worker and (asked is True or (asked == "auto" and is_expected)):
            size = needed.weights.bytes if needed is not None else None
            if left is not None and not may_keep(size, left):
                takes = "" if size is None else f", and its quantized weights would take {gib(size)} of it"
                cache = LoadCache(False, size, f"the disk of output_dir has {gib(left)} free{takes}")
            else:
                cache = LoadCache(True, size)
                left = None if left is None else left - (size or 0)
            member = replace(member, load_cache=cache)
        members.append(member)
    return tuple(members)
