"""PURE: on how many GPUs a replica of a member runs, on which, and what would help where it does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DeviceError
from ensemble.common.gpus import MIN_REPORTED_BYTES, Device
from ensemble.common.text import gib, plural
from ensemble.config import RunConfig
from ensemble.members.base import Assigned, ResourceRequest
from ensemble.members.footprint import RESERVE_SHARE, Capability, Footprint, MemoryEstimate


@dataclass(frozen=True)
class MemberFacts:
    """What the plan must know of a member.

    ``lengths`` has the bytes of text per row, int64 [rows].  ``memory`` is None where nothing is known of it.
    """

    name: str
    request: ResourceRequest
    lengths: npt.NDArray[np.int64]
    memory: MemoryEstimate | None = None
    needs_worker: bool = True


@dataclass(frozen=True)
class Fit:
    """A footprint on a device of ``total_bytes`` of which ``room_bytes`` are free to plan with.

    ``verdict``: ``fits``; ``tight``, where the weights fit but perhaps not the longest row beside them; ``short``,
    where that is so only because others use the device; ``held``, where others leave no room for the weights;
    ``never``.
    """

    verdict: str
    token_budget: int
    peak_bytes: int
    room_bytes: int


@dataclass(frozen=True)
class Placement(Assigned):
    """Where a member may run.

    ``devices`` are UUIDs that it may run on now, in the inventory's order; ``held`` those that would hold it, or
    hold it better, if others did not use them.  ``fits`` says by UUID ("cpu" for the CPU) how, where its footprint
    is known.
    """

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
    memory = facts.memory
    if memory is not None and (problem := memory.problem()):
        asked = _asked_gpus(facts.request, devices)
        return Placement(asked, problems=(f"models[{index}].{problem}",))
    placed = _placed(config, index, facts, devices, host)
    if (needed := placed.footprint) is not None:
        return replace(placed, dtype=needed.dtype, attention=needed.attention)
    if memory is None:
        return placed
    on = placed.gpus, _lowest_capability(devices) if placed.gpus else None
    dtype = memory.dtype(*on)
    return replace(placed, dtype=dtype, attention=memory.attention(dtype, *on))


def _placed(
    config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device], host: Device | None
) -> Placement:
    request, memory = facts.request, facts.memory
    asked = _asked_gpus(request, devices)
    if problem := _impossible(index, facts, asked, devices):
        return Placement(asked, problems=(problem,))
    needed = None
    if memory is not None:
        needed = memory.footprint(asked, _lowest_capability(devices) if asked else None)
    if needed is not None and (problem := _allowed_too_little(index, facts, needed)):
        return Placement(asked, footprint=needed, problems=(problem,))
    if not asked:
        return _on_cpu(index, facts, needed, host)
    if memory is None or needed is None or _decides_itself(request):
        return _trusted(facts, asked, devices, needed)
    can_spread = request.num_gpus is None and not any(device.is_slice for device in devices)
    counts = range(asked, (len(devices) if can_spread else asked) + 1)
    gpus = _gpus_needed(config, needed, devices, counts)
    if not gpus:
        return _nowhere(config, index, facts, devices, asked, needed)
    able = [device for device in devices if _empty_fit(config, needed, device, gpus).verdict != "never"]
    # A GPU that cannot hold the member has no say in its type.
    needed = memory.footprint(gpus, _lowest_capability(able)) or needed
    return _on_gpus(config, index, facts, needed, devices, able, gpus, asked)


def chosen_devices(visible: Sequence[Device], wanted: Sequence[int | str] | None) -> tuple[Device, ...]:
    """The devices that the config's ``devices`` names, by number among the visible ones or by UUID; None: all.

    Raises:
        DeviceError: there is no such device, or it is named twice; every such entry is listed.
    """
    if wanted is None:
        return tuple(visible)
    by_uuid = {device.uuid: device for device in visible}
    there = ", ".join(f"{number}: {device.uuid}" for number, device in enumerate(visible)) or "no GPU"
    problems: list[str] = []
    chosen: dict[str, Device] = {}
    for place, entry in enumerate(wanted):
        found = by_uuid.get(entry) if isinstance(entry, str) else None
        if isinstance(entry, int) and entry < len(visible):
            found = visible[entry]
        if found is None:
            what = "GPU has this UUID" if isinstance(entry, str) else "visible GPU has this number"
            problems.append(f"devices[{place}]: {entry}: no {what}; there are {there}")
        elif found.uuid in chosen:
            problems.append(f"devices[{place}]: {entry}: named twice; name each GPU once")
        else:
            chosen[found.uuid] = found
    if problems:
        raise DeviceError(problems)
    return tuple(chosen.values())


def _asked_gpus(request: ResourceRequest, devices: Sequence[Device]) -> int:
    if request.num_gpus is not None:
        return request.num_gpus
    places = (*(request.max_memory or {}), *(request.device_map or {}).values())
    numbers = [place for place in places if isinstance(place, int)]
    return max(numbers) + 1 if numbers else min(1, len(devices))


def _impossible(index: int, facts: MemberFacts, asked: int, devices: Sequence[Device]) -> str:
    count, name, request = len(devices), facts.name, facts.request
    key = "num_gpus" if request.num_gpus is not None else "max_memory" if request.max_memory else "device_map"
    if asked > count:
        if not count:
            return (
                f"models[{index}].{key}: {name} asks for {plural(asked, 'GPU')}, but there is no GPU that "
                "this run can use; set num_gpus: 0 for the CPU"
            )
        return (
            f"models[{index}].{key}: {name} asks for {asked} GPUs, but {plural(count, 'GPU')} can be used "
            "here; lower it, make more visible (CUDA_VISIBLE_DEVICES), or set num_gpus: 0 for the CPU"
        )
    if asked > 1 and any(device.is_slice for device in devices):
        return (
            f"models[{index}].{key}: {name} asks for {asked}, but CUDA gives a process one MIG slice "
            f"at most; set num_gpus: 1, or switch MIG off"
        )
    return ""


def _lowest_capability(devices: Sequence[Device]) -> Capability | None:
    # One type of numbers for all replicas, so that a row's probabilities do not depend on where it ran.
    return min((device.compute_capability for device in devices if device.compute_capability), default=None)


def _decides_itself(request: ResourceRequest) -> bool:
    """Whether the user has taken placement into their own hands, or lets weights go to the CPU or to disk."""
    return any(one is not None for one in (request.device_map, request.max_memory, request.offload_folder))


def _allowed_too_little(index: int, facts: MemberFacts, needed: Footprint) -> str:
    sizes = facts.request.max_memory
    allowed = sum((sizes or {}).values())
    if sizes is None or facts.request.offload_folder is not None or allowed >= needed.weights.bytes:
        return ""
    return (
        f"models[{index}].max_memory: {gib(allowed)} in all, and the weights of {facts.name} take "
        f"{gib(needed.weights.bytes)}; raise it, or set offload_folder for the rest"
    )


def _on_cpu(index: int, facts: MemberFacts, needed: Footprint | None, host: Device | None) -> Placement:
    if needed is None or host is None:
        return Placement(0, footprint=needed)
    found = fit(needed, host, 0, 1, _asked_tokens(facts.request, needed), host.used_bytes)
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    if found.verdict in ("never", "held") and not _decides_itself(facts.request):
        size = gib(needed.resident_bytes(0))
        start = f"models[{index}] ({facts.name}): on the CPU it takes about {size} of memory"
        advice = "quantize it, or set max_memory and offload_folder"
        if found.verdict == "never":
            problems = (f"{start}, and this machine has {gib(host.total_bytes)}; {advice}",)
        else:
            free = gib(host.total_bytes - host.used_bytes)
            warnings = (f"{start}, and {free} are free: it may be killed; {advice}",)
    return Placement(0, footprint=needed, fits={"cpu": found}, problems=problems, warnings=warnings)


def _trusted(facts: MemberFacts, gpus: int, devices: Sequence[Device], needed: Footprint | None) -> Placement:
    """Anywhere: where nothing is known, or the user has decided; what others hold can still be waited for."""
    everywhere = tuple(device.uuid for device in devices)
    held = tuple(device.uuid for device in devices if device.used_bytes >= MIN_REPORTED_BYTES)
    reason = "" if needed is None else "its layers go where device_map, max_memory and offload_folder say"
    return Placement(gpus, footprint=needed, devices=everywhere, held=held, reason=reason)


def _empty_fit(config: RunConfig, needed: Footprint, device: Device, gpus: int) -> Fit:
    return fit(needed, device, gpus, config.max_workers_per_gpu, None)


def _gpus_needed(
    config: RunConfig,
    needed: Footprint,
    devices: Sequence[Device],
    counts: Iterable[int],
) -> int:
    """The fewest GPUs on which a replica fits with its longest row, or else with its weights; 0: not even that."""
    for wanted in (("fits",), ("fits", "tight")):
        for gpus in counts:
            empty = (_empty_fit(config, needed, device, gpus) for device in devices)
            if sum(one.verdict in wanted for one in empty) >= gpus:
                return gpus
    return 0


def _on_gpus(
    config: RunConfig,
    index: int,
    facts: MemberFacts,
    needed: Footprint,
    devices: Sequence[Device],
    able: Sequence[Device],
    gpus: int,
    asked: int,
) -> Placement:
    tokens = _asked_tokens(facts.request, needed)
    fits = {
        device.uuid: fit(needed, device, gpus, config.max_workers_per_gpu, tokens, device.used_bytes)
        for device in able
    }
    by_verdict = {
        verdict: [uuid for uuid, one in fits.items() if one.verdict == verdict]
        for verdict in ("fits", "short", "tight", "held")
    }
    roomy = by_verdict["fits"]
    usable = roomy if len(roomy) >= gpus else [*roomy, *by_verdict["short"], *by_verdict["tight"]]
    held = [*by_verdict["short"], *by_verdict["held"]]
    warnings = []
    if small := [device for device in devices if device.uuid not in (*usable, *held)]:
        names = ", ".join(f"{device.name} ({device.uuid})" for device in small)
        warnings.append(f"{facts.name} does not fit well on {names} and runs elsewhere")
    if any(uuid in usable for uuid in by_verdict["tight"]):
        warnings.append(_tight(index, facts, needed, gpus, fits))
    return Placement(
        gpus,
        footprint=needed,
        devices=tuple(device.uuid for device in able if device.uuid in usable),
        held=tuple(device.uuid for device in able if device.uuid in held),
        fits=fits,
        reason=_why_spread(needed, able, gpus, asked),
        warnings=tuple(warnings),
    )


def _why_spread(needed: Footprint, devices: Sequence[Device], gpus: int, asked: int) -> str:
    if gpus == asked:
        return ""
    holds = any(needed.resident_bytes(asked) <= device.total_bytes for device in devices)
    what = "its longest row is too large beside its weights" if holds else "too large"
    return f"{what} for one GPU, so a replica takes {gpus}"


def _asked_tokens(request: ResourceRequest, needed: Footprint) -> int | None:
    """Padded tokens in the largest batch that the user asks for; None where it is left to the plan."""
    if request.batch_size is not None:
        return request.batch_size * needed.width
    return request.max_num_batched_tokens


def _tight(index: int, facts: MemberFacts, needed: Footprint, gpus: int, fits: Mapping[str, Fit]) -> str:
    tight = min((one for one in fits.values() if one.verdict == "tight"), key=lambda one: one.room_bytes)
    if (tokens := _asked_tokens(facts.request, needed)) is not None:
        # Even so the run is not lost: batches that do not fit run again in halves.
        key = "max_num_batched_tokens" if facts.request.batch_size is None else "batch_size"
        return (
            f"models[{index}].{key}: {tokens:,} tokens in rows of {needed.width:,} take about "
            f"{gib(tight.peak_bytes)}, but only {gib(tight.room_bytes)} may be used; lower or drop it"
        )
    room = tight.room_bytes - needed.resident_bytes(gpus)
    lengths = range(needed.width - 64, 64, -64)
    shorter = next((length for length in lengths if needed.activation.bytes(length, length) <= room), 0)
    advice = f"max_length: {shorter} fits" if shorter else "quantize it, or give it more GPUs (num_gpus)"
    return (
        f"models[{index}] ({facts.name}): a row of {needed.width:,} tokens takes about "
        f"{gib(needed.peak_bytes(gpus, needed.width))}, but only {gib(tight.room_bytes)} may be used; {advice}"
    )


def _nowhere(
    config: RunConfig,
    index: int,
    facts: MemberFacts,
    devices: Sequence[Device],
    gpus: int,
    needed: Footprint,
) -> Placement:
    sharing = config.max_workers_per_gpu
    largest = max(device.total_bytes for device in devices)
    share = (
        f", which max_workers_per_gpu: {sharing} makes {gib(largest // sharing)} each" if sharing > 1 else ""
    )
    fits = {device.uuid: fit(needed, device, gpus, sharing, None, device.used_bytes) for device in devices}
    sentence = (
        f"models[{index}] ({facts.name}): its weights take {gib(needed.weights.bytes)} in "
        f"{needed.quantization or needed.dtype}, and {gib(needed.context_bytes)} go to CUDA, but the largest GPU "
        f"has {gib(largest)}{share}; "
        f"{'; '.join(what_helps(config, facts, devices)) or 'use a smaller model'}"
    )
    return Placement(gpus, footprint=needed, fits=fits, problems=(sentence,))


_MOST_GPUS = 8


def what_helps(config: RunConfig, facts: MemberFacts, devices: Sequence[Device]) -> Iterator[str]:
    """Phrases, each a key and what it would change; only what the rules of the config allow for this member."""
    capability = devices[0].compute_capability
    plain = facts.memory.footprint(1, capability) if facts.memory is not None else None
    if facts.memory is None or plain is None:
        return
    sharing = config.max_workers_per_gpu
    largest = max(device.total_bytes for device in devices) // sharing
    if sharing > 1 and plain.resident_bytes(1) < largest * sharing:
        yield "max_workers_per_gpu: 1 gives it a whole GPU"
    for keys, less in facts.memory.smaller(capability):
        if less.resident_bytes(1) < largest:
            yield f"{keys} makes its weights {gib(less.weights.bytes)}"
    counts = range((facts.request.num_gpus or 1) + 1, _MOST_GPUS + 1)
    enough = next((count for count in counts if plain.resident_bytes(count) < largest), None)
    if enough is not None and not any(device.is_slice for device in devices):
        there = "" if enough <= len(devices) else f" (this run has {len(devices)})"
        yield f"num_gpus: {enough} of this size hold it{there}"
    if facts.request.may_offload:
        yield "max_memory with a cpu entry, or offload_folder, keeps a part of it outside the GPU, slowly"


def fit(
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
    room = max(0, int(free - RESERVE_SHARE * total))
    budget = needed.token_budget(gpus, room)
    verdict = _verdict(needed, gpus, total, free, asked_tokens)
    if verdict == "tight" and _verdict(needed, gpus, total, total, asked_tokens) == "fits":
        verdict = "short"
    tokens = asked_tokens or budget
    return Fit(verdict, tokens, needed.peak_bytes(gpus, max(tokens, needed.width)), room)


def _verdict(needed: Footprint, gpus: int, total: int, free: int, asked_tokens: int | None) -> str:
    resident = needed.resident_bytes(gpus)
    if resident > free:
        return "never" if resident > total else "held"
    if asked_tokens is not None:
        return "tight" if needed.peak_bytes(gpus, asked_tokens) > free else "fits"
    return "fits" if needed.token_budget(gpus, int(free - RESERVE_SHARE * total)) else "tight"
