"""PURE: on how many GPUs a replica of a member runs, on which, and what would help where it does not fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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

    ``lengths`` has the bytes of text per row, int64 [rows].  ``memory`` is None if nothing is known of it.
    ``expected_share`` is the share of the rows that it will probably compute; less than 1 with ``when``.
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

    ``verdict``: ``fits``; ``tight`` if the weights fit but perhaps not the longest row beside them; ``short`` if
    that is so only because other programs use the device; ``held`` if they leave no room for the weights;
    ``never``.
    """

    verdict: str
    token_budget: int
    room_bytes: int


@dataclass(frozen=True)
class Placement(Assigned):
    """Where a member may run.

    ``devices`` are UUIDs that it may run on now, in the inventory's order; ``held`` are those that would hold it,
    or hold it better, if other programs did not use them.  ``fits`` says how, by UUID ("cpu" for the CPU), if its
    footprint is known.  A worker takes ``places`` of the ``max_workers_per_gpu`` on each of its GPUs.
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
    """Return where a member runs; if it cannot, the placement's ``problems`` say why."""
    if not facts.needs_worker:
        return Placement(0)
    request, memory = facts.request, facts.memory
    needed, capability = None, _lowest_capability(devices)
    named_devices = (*(request.max_memory or {}), *(request.device_map or {}).values())
    numbers = [device for device in named_devices if isinstance(device, int)]
    asked = request.num_gpus
    if asked is None:
        asked = max(numbers) + 1 if numbers else min(1, len(devices))
    key = "num_gpus" if request.num_gpus is not None else "max_memory" if request.max_memory else "device_map"
    start = f"models[{index}].{key}: {facts.name} asks for {plural(asked, 'GPU')}, but"
    problem = ""
    memory_problem = "" if memory is None else memory.problem()
    if memory_problem:
        problem = f"models[{index}].{memory_problem}"
    elif asked > together(devices):
        where = "can be used here" if len({device.node for device in devices}) < 2 else "are on any one node"
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
    # The user decides on placement, or lets weights go to the CPU or to disk.
    placement_keys = (request.device_map, request.max_memory, request.offload_folder)
    decides_itself = any(value is not None for value in placement_keys)
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
        # Anywhere; but devices that other programs hold can be waited for.
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
    dtype = memory.dtype(placed.gpus, placed.capability)
    attention = memory.attention(dtype, placed.gpus, placed.capability)
    return replace(placed, dtype=dtype, attention=attention)


def chosen_devices(visible: Sequence[Device], wanted: Sequence[int | str] | None) -> tuple[Device, ...]:
    """Return the devices that the config's ``devices`` names, by number or by UUID; all if it is None.

    Raises:
        DeviceError: there is no such device, or it is named twice; every such entry is listed.
    """
    if wanted is None:
        return tuple(visible)
    by_name: dict[int | str, Device] = {device.uuid: device for device in visible}
    by_name.update(enumerate(visible))
    listed = ", ".join(f"{number}: {device.uuid}" for number, device in enumerate(visible)) or "no GPU"
    problems: list[str] = []
    chosen: list[Device] = []
    for position, entry in enumerate(wanted):
        device = by_name.get(entry)
        if device is None:
            what = "GPU has this UUID" if isinstance(entry, str) else "visible GPU has this number"
            problems.append(f"devices[{position}]: {entry}: no {what}; there are {listed}")
        elif device in chosen:
            problems.append(f"devices[{position}]: {entry}: named twice; name each GPU once")
        else:
            chosen.append(device)
    if problems:
        raise DeviceError(problems)
    return tuple(chosen)


def together(devices: Sequence[Device]) -> int:
    """Return how many of these devices a worker can have: the most that are on one node."""
    return max(Counter(device.node for device in devices).values(), default=0)


def rooms(devices: Sequence[Device], gpus: int, workers_per_gpu: int) -> int:
    """Return how many workers of so many GPUs each these devices have room for at a time, each on one node."""
    by_node = Counter(device.node for device in devices)
    return sum(count * workers_per_gpu // gpus for count in by_node.values())


def fitting(
    config: RunConfig, request: ResourceRequest, needed: Footprint, devices: Sequence[Device]
) -> list[Device]:
    """Return the devices that alone hold a replica, with its longest row or the batch that is asked."""
    sharing, tokens = config.max_workers_per_gpu, asked_tokens(request, needed)
    able = []
    for device in devices:
        if _fit(needed, device, 1, sharing, tokens, device.used_bytes).verdict == "fits":
            able.append(device)
    return able


def _lowest_capability(devices: Sequence[Device]) -> Capability | None:
    # One type of numbers for all replicas, so that a row's probabilities do not depend on where it ran.
    return min((device.compute_capability for device in devices if device.compute_capability), default=None)


def _by_request(
    config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device], asked: int, size: int
) -> Placement:
    """Place a member whose ``gpu_memory`` says how many bytes it takes of each of its GPUs."""
    sharing = config.max_workers_per_gpu
    fits = {}
    for device in devices:
        free = max(0, device.total_bytes - _held_bytes(device))
        verdict = "never"
        if size <= free:
            verdict = "fits"
        elif size <= device.total_bytes:
            verdict = "held"
        fits[device.uuid] = Fit(verdict, 0, free)
    usable = [device for device in devices if fits[device.uuid].verdict == "fits"]
    held = [device for device in devices if fits[device.uuid].verdict == "held"]
    if len(usable) + len(held) < asked:
        largest = max(device.total_bytes for device in devices)
        problem = (
            f"models[{index}].gpu_memory: {facts.name} asks for {gib(size)} of {plural(asked, 'GPU')}, but the "
            f"largest GPU has {gib(largest)}"
        )
        if len(usable) + len(held):
            problem = f"{problem}, and only {plural(len(usable) + len(held), 'GPU')} so much"
        return Placement(asked, fits=fits, problems=(f"{problem}; lower it, or num_gpus",))
    # Of what is free, as others' shares are; the same on all, or a worker's place would depend on its GPU.
    shares = [max(1, fits[device.uuid].room_bytes // sharing) for device in usable]
    places = max((min(sharing, -(-size // share)) for share in shares), default=1)
    reason = ""
    if sharing > 1:
        reason = f"it takes {gib(size)} of each of its GPUs: {places} of {sharing} places there"
    return Placement(
        asked,
        places=places,
        devices=tuple(device.uuid for device in usable),
        held=tuple(device.uuid for device in held),
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
    """Place a member of known footprint on as few GPUs as hold a replica."""
    assert facts.memory is not None
    sharing = config.max_workers_per_gpu
    gpus = _fewest_gpus(facts, devices, asked, needed, sharing)
    if gpus is None:
        fits = {
            device.uuid: _fit(needed, device, asked, sharing, None, _held_bytes(device)) for device in devices
        }
        problem = _too_large_text(config, index, facts, devices, needed)
        return Placement(asked, footprint=needed, fits=fits, problems=(problem,))
    able = [device for device in devices if _fit(needed, device, gpus, sharing, None).verdict != "never"]
    # A GPU that cannot hold the member has no say in its type.
    capability = _lowest_capability(able)
    needed = facts.memory.footprint(gpus, capability) or needed
    tokens = asked_tokens(facts.request, needed)
    fits = {device.uuid: _fit(needed, device, gpus, sharing, tokens, _held_bytes(device)) for device in able}

    def with_verdict(*verdicts: str) -> set[str]:
        return {uuid for uuid, fit in fits.items() if fit.verdict in verdicts}

    usable, held = with_verdict("fits"), with_verdict("short", "held")
    if together([device for device in able if device.uuid in usable]) < gpus:
        usable = with_verdict("fits", "short", "tight")
    warnings = []
    small = [device for device in devices if device.uuid not in usable | held]
    if small:
        names = ", ".join(device.title for device in small)
        warnings.append(f"{facts.name} does not fit well on {names} and runs elsewhere")
    tight = [fits[uuid].room_bytes for uuid in fits if uuid in usable & with_verdict("tight")]
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
        holds = any(needed.resident_bytes(asked) <= device.total_bytes for device in able)
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


def _fewest_gpus(
    facts: MemberFacts, devices: Sequence[Device], asked: int, needed: Footprint, sharing: int
) -> int | None:
    """Return the fewest GPUs on which a replica fits with its longest row, or else with its weights; None: none."""
    can_spread = facts.request.num_gpus is None and not any(device.is_slice for device in devices)
    most = together(devices) if can_spread else asked
    for verdicts in (("fits",), ("fits", "tight")):
        for gpus in range(asked, most + 1):
            able = [
                device for device in devices if _fit(needed, device, gpus, sharing, None).verdict in verdicts
            ]
            if together(able) >= gpus:
                return gpus
    return None


def _held_bytes(device: Device) -> int:
    """Return how many bytes of a device this run cannot have now."""
    return device.total_bytes if device.is_held else device.used_bytes


def asked_tokens(request: ResourceRequest, needed: Footprint) -> int | None:
    """Return the padded tokens in the largest batch that the user asks for; None if it is left to the plan."""
    if request.batch_size is not None:
        return request.batch_size * needed.width
    return request.max_num_batched_tokens


def _too_large_text(
    config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device], needed: Footprint
) -> str:
    """Return why no GPU holds a member, with each key that would help and is allowed for this member."""
    assert facts.memory is not None
    capability, sharing = devices[0].compute_capability, config.max_workers_per_gpu
    largest = max(device.total_bytes for device in devices)
    share = largest // sharing
    plain = facts.memory.footprint(1, capability) or needed
    helps, of_each_worker = [], ""
    if sharing > 1:
        of_each_worker = f", which max_workers_per_gpu: {sharing} makes {gib(share)} each"
        if plain.resident_bytes(1) < share * sharing:
            helps.append("max_workers_per_gpu: 1 gives it a whole GPU")
    for keys, less in facts.memory.smaller(capability):
        if less.resident_bytes(1) < share:
            helps.append(f"{keys} makes its weights {gib(less.weights.bytes)}")
    counts = range((facts.request.num_gpus or 1) + 1, _MAX_ADVISED_GPUS + 1)
    enough = next((count for count in counts if plain.resident_bytes(count) < share), None)
    if enough is not None and not any(device.is_slice for device in devices):
        available = "" if enough <= len(devices) else f" (this run has {len(devices)})"
        helps.append(f"num_gpus: {enough} of this size hold it{available}")
    if facts.request.may_offload:
        helps.append(
            "max_memory with a cpu entry, or offload_folder, keeps a part of it outside the GPU, slowly"
        )
    return (
        f"models[{index}] ({facts.name}): its weights take {gib(needed.weights.bytes)} in "
        f"{needed.quantization or needed.dtype}, and {gib(needed.context_bytes)} go to CUDA, but the largest GPU "
        f"has {gib(largest)}{of_each_worker}; {'; '.join(helps) or 'use a smaller model'}"
    )


def _fit(
    needed: Footprint,
    device: Device,
    gpus: int,
    workers_per_gpu: int,
    asked_tokens: int | None,
    held_bytes: int = 0,
) -> Fit:
    """Return how ``needed`` fits on ``device``.

    Args:
        workers_per_gpu: how many workers share the device.
        asked_tokens: the user's own budget for a batch, padded tokens of the longest rows.
        held_bytes: what other programs use of it.
    """
    total = device.total_bytes // workers_per_gpu
    free = max(0, device.total_bytes - held_bytes) // workers_per_gpu
    resident = needed.resident_bytes(gpus)

    def has_room(size: int) -> bool:
        """Return whether the longest row, or the batch that was asked for, fits beside the weights."""
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
