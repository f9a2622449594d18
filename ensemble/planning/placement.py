"""PURE: on how many GPUs a replica of a member runs, on which, and what would help where it does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DeviceError
from ensemble.common.gpus import MIN_REPORTED_BYTES, Device
from ensemble.common.text import gib, plural
from ensemble.config import RunConfig
from ensemble.members.base import Assigned, ResourceRequest
from ensemble.members.footprint import RESERVE_SHARE, Capability, Footprint, MemoryEstimate

_MAX_ADVISED_GPUS = 8


@dataclass(frozen=True)
class MemberFacts:
    """What the plan must know of a member.

    ``lengths`` has the bytes of text per row, int64 [rows].  ``memory`` is None where nothing is known of it.
    ``expected_share`` is that of the rows which it will probably compute; less than 1 with ``when``.
    """

    name: str
    request: ResourceRequest
    lengths: npt.NDArray[np.int64]
    memory: MemoryEstimate | None = None
    needs_worker: bool = True
    expected_share: float = 1.0


@dataclass(frozen=True)
class Fit:
    """A footprint on a device of ``total_bytes`` of which ``room_bytes`` are free to plan with.

    ``verdict``: ``fits``; ``tight``, where the weights fit but perhaps not the longest row beside them; ``short``,
    where that is so only because others use the device; ``held``, where others leave no room for the weights;
    ``never``.
    """

    verdict: str
    token_budget: int
    room_bytes: int


@dataclass(frozen=True)
class Placement(Assigned):
    """Where a member may run.

    ``devices`` are UUIDs that it may run on now, in the inventory's order; ``held`` those that would hold it, or
    hold it better, if others did not use them.  ``fits`` says by UUID ("cpu" for the CPU) how, where its footprint
    is known.  A worker takes ``places`` of each of its GPUs, of the ``max_workers_per_gpu`` that there are.
    """

    places: int = 1
    devices: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    fits: Mapping[str, Fit] = field(default_factory=dict)
    reason: str = ""
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def place(
    config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device], host: Device | None
) -> Placement:
    """Where a member runs; what speaks against it is in the placement's ``problems``."""
    if not facts.needs_worker:
        return Placement(0)
    request, memory = facts.request, facts.memory
    needed, capability = None, _lowest_capability(devices)
    named = (*(request.max_memory or {}), *(request.device_map or {}).values())
    numbers = [one for one in named if isinstance(one, int)]
    asked = request.num_gpus
    if asked is None:
        asked = max(numbers) + 1 if numbers else min(1, len(devices))
    key = "num_gpus" if request.num_gpus is not None else "max_memory" if request.max_memory else "device_map"
    start = f"models[{index}].{key}: {facts.name} asks for {plural(asked, 'GPU')}, but"
    problem = ""
    if memory is not None and (found := memory.problem()):
        problem = f"models[{index}].{found}"
    elif asked > together(devices):
        where = "can be used here" if len({one.node for one in devices}) < 2 else "are on any one node"
        problem = (
            f"{start} {plural(together(devices), 'GPU')} {where}; lower it, make more visible "
            "(CUDA_VISIBLE_DEVICES), or set num_gpus: 0 for the CPU"
        )
    elif asked > 1 and any(device.is_slice for device in devices):
        problem = f"{start} CUDA gives a process one MIG slice at most; set num_gpus: 1, or switch MIG off"
    elif memory is not None:
        needed = memory.footprint(asked, capability if asked else None)
    if needed is not None and request.max_memory is not None and request.offload_folder is None:
        allowed = sum(request.max_memory.values())
        if allowed < needed.weights.bytes:
            problem = (
                f"models[{index}].max_memory: {gib(allowed)} in all, and the weights of {facts.name} take "
                f"{gib(needed.weights.bytes)}; raise it, or set offload_folder for the rest"
            )
    # The user has taken placement into their own hands, or lets weights go to the CPU or to disk.
    decides_itself = any(
        one is not None for one in (request.device_map, request.max_memory, request.offload_folder)
    )
    if problem:
        placed = Placement(asked, footprint=needed, problems=(problem,))
    elif not asked:
        placed = Placement(0, footprint=needed)
        if needed is not None and host is not None:
            on_cpu = _fit(needed, host, 0, 1, asked_tokens(request, needed), host.used_bytes)
            placed = replace(placed, fits={"cpu": on_cpu})
            size, advice = gib(needed.resident_bytes(0)), "quantize it, or set max_memory and offload_folder"
            text = f"models[{index}] ({facts.name}): on the CPU it takes about {size} of memory, and "
            if on_cpu.verdict == "never" and not decides_itself:
                problem = f"{text}this machine has {gib(host.total_bytes)}; {advice}"
                placed = replace(placed, problems=(problem,))
            elif on_cpu.verdict == "held" and not decides_itself:
                free = gib(host.total_bytes - host.used_bytes)
                placed = replace(placed, warnings=(f"{text}{free} are free: it may be killed; {advice}",))
    elif needed is None and isinstance(request.gpu_memory, int):
        placed = _by_request(config, index, facts, devices, asked, request.gpu_memory)
    elif needed is None or decides_itself:
        # Anywhere; but what others hold can be waited for.
        placed = Placement(
            asked,
            footprint=needed,
            devices=tuple(device.uuid for device in devices if not device.is_held),
            held=tuple(
                device.uuid for device in devices if device.is_held or device.used_bytes >= MIN_REPORTED_BYTES
            ),
            reason="its layers go where device_map, max_memory and offload_folder say" if needed else "",
        )
        if request.gpu_memory == "all" and (sharing := config.max_workers_per_gpu) > 1:
            reason = "it has its GPUs to itself, since gpu_memory does not say what it takes of them"
            placed = replace(placed, places=sharing, reason=reason)
    else:
        placed = _on_gpus(config, index, facts, devices, asked, needed)
    if placed.gpus and placed.capability is None:
        placed = replace(placed, capability=capability)
    if (needed := placed.footprint) is not None:
        return replace(placed, dtype=needed.dtype, attention=needed.attention)
    if memory is None:
        return placed
    on = placed.gpus, placed.capability
    dtype = memory.dtype(*on)
    return replace(placed, dtype=dtype, attention=memory.attention(dtype, *on))


def chosen_devices(visible: Sequence[Device], wanted: Sequence[int | str] | None) -> tuple[Device, ...]:
    """The devices that the config's ``devices`` names, by number among the visible ones or by UUID; None: all.

    Raises:
        DeviceError: there is no such device, or it is named twice; every such entry is listed.
    """
    if wanted is None:
        return tuple(visible)
    known: dict[int | str, Device] = {device.uuid: device for device in visible}
    known.update(enumerate(visible))
    there = ", ".join(f"{number}: {device.uuid}" for number, device in enumerate(visible)) or "no GPU"
    problems: list[str] = []
    chosen: list[Device] = []
    for position, entry in enumerate(wanted):
        found = known.get(entry)
        if found is None:
            what = "GPU has this UUID" if isinstance(entry, str) else "visible GPU has this number"
            problems.append(f"devices[{position}]: {entry}: no {what}; there are {there}")
        elif found in chosen:
            problems.append(f"devices[{position}]: {entry}: named twice; name each GPU once")
        else:
            chosen.append(found)
    if problems:
        raise DeviceError(problems)
    return tuple(chosen)


def together(devices: Sequence[Device]) -> int:
    """How many of these a worker can have: the most that are on one node."""
    return max(Counter(device.node for device in devices).values(), default=0)


def rooms(devices: Sequence[Device], gpus: int, workers_per_gpu: int) -> int:
    """How many workers of so many GPUs each these have room for at a time, each on one node."""
    return sum(
        count * workers_per_gpu // gpus for count in Counter(device.node for device in devices).values()
    )


def fitting(
    config: RunConfig, request: ResourceRequest, needed: Footprint, devices: Sequence[Device]
) -> list[Device]:
    """Those of the devices of which one alone holds a replica, with its longest row or the batch that is asked."""
    sharing, tokens = config.max_workers_per_gpu, asked_tokens(request, needed)
    return [one for one in devices if _fit(needed, one, 1, sharing, tokens, one.used_bytes).verdict == "fits"]


def _lowest_capability(devices: Sequence[Device]) -> Capability | None:
    # One type of numbers for all replicas, so that a row's probabilities do not depend on where it ran.
    return min((device.compute_capability for device in devices if device.compute_capability), default=None)


def _by_request(
    config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device], asked: int, size: int
) -> Placement:
    """A member that has said how many bytes it takes of each of its GPUs."""
    sharing = config.max_workers_per_gpu
    fits = {}
    for one in devices:
        free = max(0, one.total_bytes - _held_bytes(one))
        verdict = "fits" if size <= free else "held" if size <= one.total_bytes else "never"
        fits[one.uuid] = Fit(verdict, 0, free)
    usable = [one for one in devices if fits[one.uuid].verdict == "fits"]
    held = [one for one in devices if fits[one.uuid].verdict == "held"]
    if len(usable) + len(held) < asked:
        largest = max(one.total_bytes for one in devices)
        problem = (
            f"models[{index}].gpu_memory: {facts.name} asks for {gib(size)} of {plural(asked, 'GPU')}, but the "
            f"largest GPU has {gib(largest)}"
        )
        if len(usable) + len(held):
            problem = f"{problem}, and only {plural(len(usable) + len(held), 'GPU')} so much"
        return Placement(asked, fits=fits, problems=(f"{problem}; lower it, or num_gpus",))
    # Of what is free, as others' shares are; the same on all, or a worker's place would depend on its GPU.
    shares = [max(1, fits[one.uuid].room_bytes // sharing) for one in usable]
    places = max((min(sharing, -(-size // share)) for share in shares), default=1)
    reason = ""
    if sharing > 1:
        reason = f"it takes {gib(size)} of each of its GPUs: {places} of {sharing} places there"
    return Placement(
        asked,
        places=places,
        devices=tuple(one.uuid for one in usable),
        held=tuple(one.uuid for one in held),
        fits=fits,
        reason=reason,
    )


def _on_gpus(
    config: RunConfig,
    index: int,
    facts: MemberFacts,
    devices: Sequence[Device],
    asked: int,
    needed: Footprint,
) -> Placement:
    assert facts.memory is not None
    sharing = config.max_workers_per_gpu
    can_spread = facts.request.num_gpus is None and not any(device.is_slice for device in devices)
    # The fewest on which a replica fits with its longest row, or else with its weights.
    for wanted, gpus in product(
        (("fits",), ("fits", "tight")), range(asked, (together(devices) if can_spread else asked) + 1)
    ):
        if (
            together([one for one in devices if _fit(needed, one, gpus, sharing, None).verdict in wanted])
            >= gpus
        ):
            break
    else:
        fits = {one.uuid: _fit(needed, one, asked, sharing, None, _held_bytes(one)) for one in devices}
        problem = _too_large_text(config, index, facts, devices, needed)
        return Placement(asked, footprint=needed, fits=fits, problems=(problem,))
    able = [one for one in devices if _fit(needed, one, gpus, sharing, None).verdict != "never"]
    # A GPU that cannot hold the member has no say in its type.
    capability = _lowest_capability(able)
    needed = facts.memory.footprint(gpus, capability) or needed
    tokens = asked_tokens(facts.request, needed)
    fits = {one.uuid: _fit(needed, one, gpus, sharing, tokens, _held_bytes(one)) for one in able}

    def are(*verdicts: str) -> set[str]:
        return {uuid for uuid, one in fits.items() if one.verdict in verdicts}

    usable, held = are("fits"), are("short", "held")
    if together([one for one in able if one.uuid in usable]) < gpus:
        usable = are("fits", "short", "tight")
    warnings = []
    if small := [one for one in devices if one.uuid not in usable | held]:
        names = ", ".join(one.title for one in small)
        warnings.append(f"{facts.name} does not fit well on {names} and runs elsewhere")
    tight = [fits[uuid].room_bytes for uuid in fits if uuid in usable & are("tight")]
    if tight and tokens is not None:
        # Even so the run is not lost: batches that do not fit run again in halves.
        key = "max_num_batched_tokens" if facts.request.batch_size is None else "batch_size"
        warnings.append(
            f"models[{index}].{key}: {tokens:,} tokens in rows of {needed.width:,} take about "
            f"{gib(needed.peak_bytes(gpus, max(tokens, needed.width)))}, but only {gib(min(tight))} may be used; "
            "lower or drop it"
        )
    elif tight:
        room, lengths = min(tight) - needed.resident_bytes(gpus), range(needed.width - 64, 64, -64)
        shorter = next((length for length in lengths if needed.activation.bytes(length, length) <= room), 0)
        advice = f"max_length: {shorter} fits" if shorter else "quantize it, or give it more GPUs (num_gpus)"
        warnings.append(
            f"models[{index}] ({facts.name}): a row of {needed.width:,} tokens takes about "
            f"{gib(needed.peak_bytes(gpus, needed.width))}, but only {gib(min(tight))} may be used; {advice}"
        )
    reason = ""
    if gpus != asked:
        holds = any(needed.resident_bytes(asked) <= one.total_bytes for one in able)
        what = "its longest row is too large beside its weights" if holds else "too large"
        reason = f"{what} for one GPU, so a replica takes {gpus}"
    return Placement(
        gpus,
        capability=capability,
        footprint=needed,
        devices=tuple(uuid for uuid in fits if uuid in usable),
        held=tuple(uuid for uuid in fits if uuid in held),
        fits=fits,
        reason=reason,
        warnings=tuple(warnings),
    )


def _held_bytes(device: Device) -> int:
    """What nobody else can have of it now."""
    return device.total_bytes if device.is_held else device.used_bytes


def asked_tokens(request: ResourceRequest, needed: Footprint) -> int | None:
    """Padded tokens in the largest batch that the user asks for; None where it is left to the plan."""
    if request.batch_size is not None:
        return request.batch_size * needed.width
    return request.max_num_batched_tokens


def _too_large_text(
    config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device], needed: Footprint
) -> str:
    """With each key that would help, and what it would change; only what the rules allow for this member."""
    assert facts.memory is not None
    capability, sharing = devices[0].compute_capability, config.max_workers_per_gpu
    largest = max(device.total_bytes for device in devices)
    share = largest // sharing
    plain = facts.memory.footprint(1, capability) or needed
    helps, of_that = [], ""
    if sharing > 1:
        of_that = f", which max_workers_per_gpu: {sharing} makes {gib(share)} each"
        if plain.resident_bytes(1) < share * sharing:
            helps.append("max_workers_per_gpu: 1 gives it a whole GPU")
    for keys, less in facts.memory.smaller(capability):
        if less.resident_bytes(1) < share:
            helps.append(f"{keys} makes its weights {gib(less.weights.bytes)}")
    counts = range((facts.request.num_gpus or 1) + 1, _MAX_ADVISED_GPUS + 1)
    enough = next((count for count in counts if plain.resident_bytes(count) < share), None)
    if enough is not None and not any(device.is_slice for device in devices):
        there = "" if enough <= len(devices) else f" (this run has {len(devices)})"
        helps.append(f"num_gpus: {enough} of this size hold it{there}")
    if facts.request.may_offload:
        helps.append(
            "max_memory with a cpu entry, or offload_folder, keeps a part of it outside the GPU, slowly"
        )
    return (
        f"models[{index}] ({facts.name}): its weights take {gib(needed.weights.bytes)} in "
        f"{needed.quantization or needed.dtype}, and {gib(needed.context_bytes)} go to CUDA, but the largest GPU "
        f"has {gib(largest)}{of_that}; {'; '.join(helps) or 'use a smaller model'}"
    )


def _fit(
    needed: Footprint,
    device: Device,
    gpus: int,
    workers_per_gpu: int,
    asked_tokens: int | None,
    held_bytes: int = 0,
) -> Fit:
    """How ``needed`` fits on ``device``.

    Args:
        workers_per_gpu: how many workers share the device.
        asked_tokens: the user's own budget for a batch, padded tokens of the longest rows.
        held_bytes: what others use of it.
    """
    total = device.total_bytes // workers_per_gpu
    free = max(0, device.total_bytes - held_bytes) // workers_per_gpu
    resident = needed.resident_bytes(gpus)

    def has_room(size: int) -> bool:
        """Whether the longest row, or the batch that was asked for, fits beside the weights."""
        if asked_tokens is not None:
            return needed.peak_bytes(gpus, asked_tokens) <= size
        return needed.token_budget(gpus, int(size - RESERVE_SHARE * total)) > 0

    if resident > free:
        verdict = "never" if resident > total else "held"
    elif has_room(free):
        verdict = "fits"
    else:
        verdict = "short" if has_room(total) else "tight"
    room = max(0, int(free - RESERVE_SHARE * total))
    return Fit(verdict, asked_tokens or needed.token_budget(gpus, room), room)
