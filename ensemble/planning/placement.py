"""PURE: on how many GPUs a replica of a member runs, on which, and what would help if it does not fit."""

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

    Attributes:
        lengths: bytes of text per row, int64 [rows].
        memory: None if nothing is known of it.
        expected_share: the share of the rows that it will probably compute; less than 1 with ``when``.
    """

    name: str
    request: ResourceRequest
    lengths: npt.NDArray[np.int64]
    memory: MemoryEstimate | None = None
    needs_worker: bool = True
    expected_share: float = 1.0


@dataclass(frozen=True)
class Fit:
    """How a footprint fits on a device, of which ``room_bytes`` are free to plan with.

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

    Attributes:
        places: of the ``max_workers_per_gpu``, that a worker takes on each of its GPUs.
        devices: UUIDs of the GPUs that it may run on now, in the inventory's order.
        held: UUIDs of the GPUs that would hold it, or hold it better, if other programs did not use them.
        fits: by UUID ("cpu" for the CPU), if its footprint is known.
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
    capability = _lowest_capability(devices)
    named_devices = (*(request.max_memory or {}), *(request.device_map or {}).values())
    numbers = [device for device in named_devices if isinstance(device, int)]
    gpus = request.num_gpus
    if gpus is None:
        gpus = max(numbers) + 1 if numbers else min(1, len(devices))
    footprint: Footprint | None = None
    problem = _request_problem(index, facts, devices, gpus)
    if not problem and memory is not None:
        footprint = memory.footprint(gpus, capability if gpus else None)
    if footprint is not None and request.max_memory is not None and request.offload_folder is None:
        allowed = sum(request.max_memory.values())
        if allowed < footprint.weights.bytes:
            problem = (
                f"models[{index}].max_memory: {gib(allowed)} in all, and the weights of {facts.name} take "
                f"{gib(footprint.weights.bytes)}; raise it, or set offload_folder for the rest"
            )
    if problem:
        placement = Placement(gpus, footprint=footprint, problems=(problem,))
    elif not gpus:
        placement = _on_cpu(index, facts, footprint, host)
    elif footprint is None and isinstance(request.gpu_memory, int):
        placement = _by_request(config, index, facts, devices, gpus, request.gpu_memory)
    elif footprint is None or _decides_itself(request):
        # Anywhere; but it is worth waiting for devices that other programs hold.
        placement = Placement(
            gpus,
            footprint=footprint,
            devices=tuple(device.uuid for device in devices if not device.is_held),
            held=tuple(
                device.uuid for device in devices if device.is_held or device.used_bytes >= MIN_REPORTED_BYTES
            ),
            reason="its layers go where device_map, max_memory and offload_folder say" if footprint else "",
        )
        if request.gpu_memory == "all" and config.max_workers_per_gpu > 1:
            reason = "it has its GPUs to itself, since gpu_memory does not say what it takes of them"
            placement = replace(placement, places=config.max_workers_per_gpu, reason=reason)
    else:
        placement = _on_gpus(config, index, facts, devices, gpus, footprint)
    if placement.gpus and placement.capability is None:
        placement = replace(placement, capability=capability)
    footprint = placement.footprint
    if footprint is not None:
        return replace(placement, dtype=footprint.dtype, attention=footprint.attention)
    if memory is None:
        return placement
    dtype = memory.dtype(placement.gpus, placement.capability)
    attention = memory.attention(dtype, placement.gpus, placement.capability)
    return replace(placement, dtype=dtype, attention=attention)


def _request_problem(index: int, facts: MemberFacts, devices: Sequence[Device], gpus: int) -> str:
    """Return why a member's keys cannot be followed, or an empty text."""
    request = facts.request
    memory_problem = "" if facts.memory is None else facts.memory.problem()
    if memory_problem:
        return f"models[{index}].{memory_problem}"
    key = "max_memory" if request.max_memory else "device_map"
    if request.num_gpus is not None:
        key = "num_gpus"
    start = f"models[{index}].{key}: {facts.name} asks for {plural(gpus, 'GPU')}, but"
    if gpus > together(devices):
        where = "can be used here" if len({device.node for device in devices}) < 2 else "are on any one node"
        return (
            f"{start} {plural(together(devices), 'GPU')} {where}; lower it, make more visible "
            "(CUDA_VISIBLE_DEVICES), or set num_gpus: 0 for the CPU"
        )
    if gpus > 1 and any(device.is_slice for device in devices):
        return f"{start} CUDA gives a process one MIG slice at most; set num_gpus: 1, or switch MIG off"
    return ""


def _decides_itself(request: ResourceRequest) -> bool:
    """Return whether the user decides on placement, or lets weights go to the CPU or to disk."""
    placement_keys = (request.device_map, request.max_memory, request.offload_folder)
    return any(value is not None for value in placement_keys)


def _on_cpu(index: int, facts: MemberFacts, footprint: Footprint | None, host: Device | None) -> Placement:
    """Place a member on the CPU, with a problem or a warning if memory is too small."""
    placement = Placement(0, footprint=footprint)
    if footprint is None or host is None:
        return placement
    fit = _fit(footprint, host, 0, 1, asked_tokens(facts.request, footprint), host.used_bytes)
    placement = replace(placement, fits={"cpu": fit})
    if _decides_itself(facts.request):
        return placement
    size, advice = gib(footprint.resident_bytes(0)), "quantize it, or set max_memory and offload_folder"
    text = f"models[{index}] ({facts.name}): on the CPU it takes about {size} of memory, and "
    if fit.verdict == "never":
        return replace(placement, problems=(f"{text}this machine has {gib(host.total_bytes)}; {advice}",))
    if fit.verdict == "held":
        free = gib(host.total_bytes - host.used_bytes)
        return replace(placement, warnings=(f"{text}{free} are free: it may be killed; {advice}",))
    return placement


def chosen_devices(visible: Sequence[Device], names: Sequence[int | str] | None) -> tuple[Device, ...]:
    """Return the devices that the config's ``devices`` names, by number or by UUID; all if it is None.

    Raises:
        DeviceError: there is no such device, or it is named twice; every such entry is listed.
    """
    if names is None:
        return tuple(visible)
    by_name: dict[int | str, Device] = {device.uuid: device for device in visible}
    by_name.update(enumerate(visible))
    listed = ", ".join(f"{number}: {device.uuid}" for number, device in enumerate(visible)) or "no GPU"
    problems: list[str] = []
    chosen: list[Device] = []
    for position, entry in enumerate(names):
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
    """Return how many workers with so many GPUs each fit on these devices at a time, each worker on one node."""
    by_node = Counter(device.node for device in devices)
    return sum(count * workers_per_gpu // gpus for count in by_node.values())


def fitting(
    config: RunConfig, request: ResourceRequest, footprint: Footprint, devices: Sequence[Device]
) -> list[Device]:
    """Return the devices that alone hold a replica, with its longest row or the batch that the user asks for."""
    workers_per_gpu, tokens = config.max_workers_per_gpu, asked_tokens(request, footprint)
    holding = []
    for device in devices:
        if _fit(footprint, device, 1, workers_per_gpu, tokens, device.used_bytes).verdict == "fits":
            holding.append(device)
    return holding


def _lowest_capability(devices: Sequence[Device]) -> Capability | None:
    # All replicas take one number type, so that a row's probabilities do not depend on the device.
    return min((device.compute_capability for device in devices if device.compute_capability), default=None)


def _by_request(
    config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device], gpus: int, size: int
) -> Placement:
    """Place a member whose ``gpu_memory`` says how many bytes it takes of each of its GPUs."""
    workers_per_gpu = config.max_workers_per_gpu
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
    large_enough = len(usable) + len(held)
    if large_enough < gpus:
        problem = (
            f"models[{index}].gpu_memory: {facts.name} asks for {gib(size)} of {plural(gpus, 'GPU')}, but the "
            f"largest GPU has {gib(max(device.total_bytes for device in devices))}"
        )
        if large_enough:
            problem += f", and only {plural(large_enough, 'GPU')} so much"
        return Placement(gpus, fits=fits, problems=(f"{problem}; lower it, or num_gpus",))
    # Shares of the free memory, as for other members; the largest count of places counts on all GPUs.
    shares = [max(1, fits[device.uuid].room_bytes // workers_per_gpu) for device in usable]
    places = max((min(workers_per_gpu, -(-size // share)) for share in shares), default=1)
    reason = ""
    if workers_per_gpu > 1:
        reason = f"it takes {gib(size)} of each of its GPUs: {places} of {workers_per_gpu} places there"
    return Placement(
        gpus,
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
    min_gpus: int,
    footprint: Footprint,
) -> Placement:
    """Place a member of known footprint on as few GPUs as hold a replica."""
    assert facts.memory is not None
    workers_per_gpu = config.max_workers_per_gpu
    gpus = _fewest_gpus(facts, devices, min_gpus, footprint, workers_per_gpu)
    if gpus is None:
        fits = {
            device.uuid: _fit(footprint, device, min_gpus, workers_per_gpu, None, _held_bytes(device))
            for device in devices
        }
        problem = _too_large_text(config, index, facts, devices, footprint)
        return Placement(min_gpus, footprint=footprint, fits=fits, problems=(problem,))
    large_enough = []
    for device in devices:
        if _fit(footprint, device, gpus, workers_per_gpu, None).verdict != "never":
            large_enough.append(device)
    # The number type does not depend on GPUs that cannot hold the member.
    capability = _lowest_capability(large_enough)
    footprint = facts.memory.footprint(gpus, capability) or footprint
    tokens = asked_tokens(facts.request, footprint)
    fits = {
        device.uuid: _fit(footprint, device, gpus, workers_per_gpu, tokens, _held_bytes(device))
        for device in large_enough
    }

    def with_verdict(*verdicts: str) -> set[str]:
        return {uuid for uuid, fit in fits.items() if fit.verdict in verdicts}

    usable, held = with_verdict("fits"), with_verdict("short", "held")
    if together([device for device in large_enough if device.uuid in usable]) < gpus:
        usable = with_verdict("fits", "short", "tight")
    warnings = []
    small = [device for device in devices if device.uuid not in usable | held]
    if small:
        names = ", ".join(device.title for device in small)
        warnings.append(f"{facts.name} does not fit well on {names} and runs elsewhere")
    tight = [fits[uuid].room_bytes for uuid in usable & with_verdict("tight")]
    if tight:
        warnings.append(_tight_text(index, facts, footprint, gpus, min(tight)))
    reason = ""
    if gpus != min_gpus:
        holds_weights = any(
            footprint.resident_bytes(min_gpus) <= device.total_bytes for device in large_enough
        )
        what = "its longest row is too large beside its weights" if holds_weights else "too large"
        reason = f"{what} for one GPU, so a replica takes {gpus}"
    return Placement(
        gpus,
        capability=capability,
        footprint=footprint,
        devices=tuple(uuid for uuid in fits if uuid in usable),
        held=tuple(uuid for uuid in fits if uuid in held),
        fits=fits,
        reason=reason,
        warnings=tuple(warnings),
    )


def _tight_text(index: int, facts: MemberFacts, footprint: Footprint, gpus: int, usable_bytes: int) -> str:
    """Return a warning that weights fit on each GPU, but not the longest row or the asked batch."""
    tokens = asked_tokens(facts.request, footprint)
    if tokens is not None:
        key = "max_num_batched_tokens" if facts.request.batch_size is None else "batch_size"
        needed_bytes = footprint.peak_bytes(gpus, max(tokens, footprint.width))
        return (
            f"models[{index}].{key}: {tokens:,} tokens in rows of {footprint.width:,} take about "
            f"{gib(needed_bytes)}, but only {gib(usable_bytes)} may be used; lower or drop it"
        )
    room = usable_bytes - footprint.resident_bytes(gpus)
    advice = "quantize it, or give it more GPUs (num_gpus)"
    for length in range(footprint.width - 64, 64, -64):
        if footprint.activation.bytes(length, length) <= room:
            advice = f"max_length: {length} fits"
            break
    return (
        f"models[{index}] ({facts.name}): a row of {footprint.width:,} tokens takes about "
        f"{gib(footprint.peak_bytes(gpus, footprint.width))}, but only {gib(usable_bytes)} may be used; {advice}"
    )


def _fewest_gpus(
    facts: MemberFacts,
    devices: Sequence[Device],
    min_gpus: int,
    footprint: Footprint,
    workers_per_gpu: int,
) -> int | None:
    """Return the fewest GPUs on which a replica fits with its longest row, else with its weights; None: none."""
    can_spread = facts.request.num_gpus is None and not any(device.is_slice for device in devices)
    max_gpus = together(devices) if can_spread else min_gpus
    for verdicts in (("fits",), ("fits", "tight")):
        for gpus in range(min_gpus, max_gpus + 1):
            holding = []
            for device in devices:
                if _fit(footprint, device, gpus, workers_per_gpu, None).verdict in verdicts:
                    holding.append(device)
            if together(holding) >= gpus:
                return gpus
    return None


def _held_bytes(device: Device) -> int:
    """Return how many bytes of a device this run cannot have now."""
    return device.total_bytes if device.is_held else device.used_bytes


def asked_tokens(request: ResourceRequest, footprint: Footprint) -> int | None:
    """Return the padded tokens in the largest batch that the user asks for; None if the plan decides."""
    if request.batch_size is not None:
        return request.batch_size * footprint.width
    return request.max_num_batched_tokens


def _too_large_text(
    config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device], footprint: Footprint
) -> str:
    """Return why no GPU holds a member, with each key that would help and is allowed for this member."""
    assert facts.memory is not None
    capability, workers_per_gpu = devices[0].compute_capability, config.max_workers_per_gpu
    largest = max(device.total_bytes for device in devices)
    share = largest // workers_per_gpu
    on_one_gpu = facts.memory.footprint(1, capability) or footprint
    remedies, of_each_worker = [], ""
    if workers_per_gpu > 1:
        of_each_worker = f", which max_workers_per_gpu: {workers_per_gpu} makes {gib(share)} each"
        if on_one_gpu.resident_bytes(1) < share * workers_per_gpu:
            remedies.append("max_workers_per_gpu: 1 gives it a whole GPU")
    for keys, smaller in facts.memory.smaller(capability):
        if smaller.resident_bytes(1) < share:
            remedies.append(f"{keys} makes its weights {gib(smaller.weights.bytes)}")
    counts = range((facts.request.num_gpus or 1) + 1, _MAX_ADVISED_GPUS + 1)
    enough = next((count for count in counts if on_one_gpu.resident_bytes(count) < share), None)
    if enough is not None and not any(device.is_slice for device in devices):
        available = "" if enough <= len(devices) else f" (this run has {len(devices)})"
        remedies.append(f"num_gpus: {enough} of this size hold it{available}")
    if facts.request.may_offload:
        remedies.append(
            "max_memory with a cpu entry, or offload_folder, keeps a part of it outside the GPU, slowly"
        )
    return (
        f"models[{index}] ({facts.name}): its weights take {gib(footprint.weights.bytes)} in "
        f"{footprint.quantization or footprint.dtype}, and {gib(footprint.context_bytes)} go to CUDA, but the "
        f"largest GPU has {gib(largest)}{of_each_worker}; {'; '.join(remedies) or 'use a smaller model'}"
    )


def _fit(
    footprint: Footprint,
    device: Device,
    gpus: int,
    workers_per_gpu: int,
    asked_tokens: int | None,
    held_bytes: int = 0,
) -> Fit:
    """Return how a footprint fits on a device, of which other programs use ``held_bytes``."""
    total = device.total_bytes // workers_per_gpu
    free = max(0, device.total_bytes - held_bytes) // workers_per_gpu
    resident = footprint.resident_bytes(gpus)

    def has_room(size: int) -> bool:
        """Return whether the longest row, or the batch that the user asks for, fits beside the weights."""
        if asked_tokens is not None:
            return footprint.peak_bytes(gpus, asked_tokens) <= size
        return footprint.token_budget(gpus, int(size - RESERVE_SHARE * total)) > 0

    if resident > free:
        verdict = "never" if resident > total else "held"
    elif has_room(free):
        verdict = "fits"
    else:
        verdict = "short" if has_room(total) else "tight"
    room = max(0, int(free - RESERVE_SHARE * total))
    return Fit(
        verdict=verdict,
        token_budget=asked_tokens or footprint.token_budget(gpus, room),
        room_bytes=room,
    )
