"""PURE: what to run where.  RunConfig + facts about table, checkpoints and devices -> Plan.

No disk, no clock, no environment: the same arguments give the same plan, so that it can be tested as arithmetic.
What a member takes of a device is in ``footprint``, where it may run in ``placement``, how long it takes in
``forecast``, its chunks in ``chunks``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np
import numpy.typing as npt

from ensemble.common.gpus import Device
from ensemble.common.text import plural
from ensemble.config import MemberConfig, RunConfig
from ensemble.members.base import ResourceRequest
from ensemble.planning.chunks import Chunk, common_lengths, counted_lengths, cut_chunks, what_is_left, work_of
from ensemble.planning.forecast import Job, Speed, guessed_speed, total_seconds
from ensemble.planning.placement import MemberFacts, Placement, place
from ensemble.planning.time_limit import handout_order

# Side by side is chosen where it promises to be this much faster: a replica on each GPU stays balanced where the
# promise was wrong.
_WORTH_CHANGING = 0.98
_UNMEASURED = Speed(0.0, 0.0, is_measured=False)


@dataclass(frozen=True)
class MemberPlan:
    """How one member runs: on ``gpus`` devices per replica (0: the CPU), ``replicas`` at most at a time.

    ``order`` holds row numbers, longest text first, int64 [rows]; chunks are slices of it.  ``work`` is the
    text of all rows in bytes, as far as max_length lets it through, with what each row costs beyond it.
    ``first_replicas`` start before any later member; the others join where a GPU is left over.  A member that needs
    no worker has neither replicas nor chunks.
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
    def job(self) -> Job:
        return Job(
            startup_seconds=self.speed.startup_seconds,
            compute_seconds=self.speed.seconds_per_work * self.work,
            gpus=self.gpus,
            replicas=self.replicas,
            first_replicas=self.first_replicas,
            devices=self.placement.devices,
        )


@dataclass(frozen=True)
class Plan:
    """``problems`` name the members that cannot run; then nothing else is decided.

    ``why`` says how members share the GPUs, where there was a choice.  ``seconds`` is the forecast of the whole
    run, None where no earlier run has measured every member.
    """

    members: tuple[MemberPlan, ...]
    warnings: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    why: str = ""
    seconds: float | None = None


def make_plan(
    config: RunConfig,
    facts: Mapping[str, MemberFacts],
    devices: Sequence[Device],
    host: Device | None = None,
    speeds: Mapping[str, Speed] | None = None,
) -> Plan:
    """Decide devices, replicas and chunks for every member.

    Args:
        config: the run.
        facts: per member name.
        devices: the GPUs this run may use, with what others hold of them.
        host: the CPU with its memory; None: not known.
        speeds: per member name, from an earlier run.
    """
    # Under a time limit members cover the same rows first; each by itself pads least in the order of its own texts.
    lengths = {name: one.lengths for name, one in facts.items() if one.needs_worker}
    is_timed = config.time_limit is not None
    common = common_lengths(lengths) if is_timed and lengths and _is_same_table(lengths) else None
    members: list[MemberPlan] = []
    warnings: list[str] = []
    problems: list[str] = []
    for index, model in enumerate(config.models):
        known = facts[model.name]
        placement = place(config, index, known, devices, host)
        problems += placement.problems
        warnings += placement.warnings
        if not known.needs_worker:
            members.append(_without_worker(index, model, known, placement))
            continue
        # Rows that max_length cuts cost no more than others of that length.  Order and cut still go by the whole
        # text: another cut would mean other batches, and so other last digits, for what little padding it saves.
        counted = known.lengths
        if known.memory is not None:
            counted = counted_lengths(known.lengths, known.memory.max_length)
        order, chunks = cut_chunks(counted, known.lengths if common is None else common)
        replicas, warning = _replicas(index, known, placement, config.max_workers_per_gpu)
        warnings += warning
        members.append(
            MemberPlan(
                index=index,
                model=model,
                request=known.request,
                placement=placement,
                replicas=min(replicas, len(chunks)),
                first_replicas=min(replicas, len(chunks)),
                speed=(speeds or {}).get(model.name, _UNMEASURED).or_guess(_guess(placement, devices)),
                work=work_of(counted),
                chunks=chunks,
                order=order,
            )
        )
    plan = Plan(tuple(members), tuple(warnings), tuple(problems))
    places = dict.fromkeys((device.uuid for device in devices), config.max_workers_per_gpu)
    return plan if problems else _shared(plan, places)


def _without_worker(index: int, model: MemberConfig, known: MemberFacts, placement: Placement) -> MemberPlan:
    rows = len(known.lengths)
    return MemberPlan(
        index=index,
        model=model,
        request=known.request,
        placement=placement,
        replicas=0,
        first_replicas=0,
        speed=Speed(0.0, 0.0, is_measured=True, is_startup_measured=True),
        work=work_of(known.lengths),
        chunks=(),
        order=np.arange(rows),
    )


def without_done(member: MemberPlan, is_done: npt.NDArray[np.bool_], is_timed: bool) -> MemberPlan:
    """The member with the chunks that are left to do; chunks of which nothing is done stay as they were cut.

    Args:
        is_done: by row of the table, bool [rows].
        is_timed: hand the chunks out in the order for a time limit.
    """
    order, left = what_is_left(member.chunks, member.order, is_done, count(len(member.chunks)))
    if is_timed:
        left = tuple(left[place] for place in handout_order(left))
    return replace(member, chunks=left, order=order)


def _is_same_table(lengths: Mapping[str, npt.NDArray[np.int64]]) -> bool:
    return (
        len({len(one) for one in lengths.values()}) == 1
    )  # a table that cannot be read has one row for some


def _shared(plan: Plan, places: Mapping[str, int]) -> Plan:
    """The plan with the better way of sharing the GPUs: a replica on each, or members at the same time."""
    working = [member for member in plan.members if member.replicas]
    is_measured = all(member.speed.is_measured for member in working)
    is_known = all(member.speed.seconds_per_work > 0 for member in working)
    seconds = total_seconds([member.job for member in working], places)
    open_choice = [
        member
        for member in working
        if member.gpus and member.replicas > 1 and member.request.replicas == "auto"
    ]
    why = ""
    if open_choice and len(working) > 1 and is_known:
        apart = tuple(
            replace(member, first_replicas=1) if member in open_choice else member for member in plan.members
        )
        at_once = total_seconds([member.job for member in apart if member.replicas], places)
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


def _guess(placement: Placement, devices: Sequence[Device]) -> Speed:
    needed = placement.footprint
    parameters = needed.weights.parameters if needed else 0
    weight_bytes = needed.weights.bytes if needed else 0
    capability = devices[0].compute_capability if placement.gpus and devices else None
    return guessed_speed(parameters, weight_bytes, capability)


def _replicas(
    index: int, facts: MemberFacts, placement: Placement, workers_per_gpu: int
) -> tuple[int, Sequence[str]]:
    gpus, asked = placement.gpus, facts.request.replicas
    places = len(placement.devices) * workers_per_gpu
    if asked == "auto":
        return (max(1, places // gpus) if gpus else 1), ()
    room = max(1, places // gpus) if gpus else asked
    if asked > room:
        return room, (
            f"models[{index}].replicas: {facts.name} asks for {plural(asked, 'replica')} of "
            f"{plural(gpus, 'GPU')} each, but there is room for {room} at a time; running {room}",
        )
    return asked, ()
