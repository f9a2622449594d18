"""PURE: on how many GPUs a replica of a member runs, on which, and what would help where it does not fit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ensemble.config import ModelConfig, RunConfig
from ensemble.devices import Device
from ensemble.errors import DeviceError
from ensemble.planning.footprint import Capability, Fit, Footprint, MemberFacts, fit, footprint
from ensemble.sizes import gib

_FOUR_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


@dataclass(frozen=True)
class Placement:
    """Where a member may run.

    ``devices`` are UUIDs that hold it now, in the inventory's order; ``held`` those that would if others did
    not use them.  ``fits`` says by UUID ("cpu" for the CPU) how, where its footprint is known.
    """

    gpus: int
    devices: tuple[str, ...] = ()
    held: tuple[str, ...] = ()
    footprint: Footprint | None = None
    fits: Mapping[str, Fit] = field(default_factory=dict)
    reason: str = ""
    problems: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def place(
    config: RunConfig, index: int, facts: MemberFacts, devices: Sequence[Device], host_bytes: int | None
) -> Placement:
    """Where a member runs; what speaks against it is in the placement's ``problems``."""
    model = config.models[index]
    asked = min(1, len(devices)) if model.num_gpus is None else model.num_gpus
    if problem := _impossible(index, model, asked, devices):
        return Placement(asked, problems=(problem,))
    capability = _lowest_capability(devices) if asked else None
    needed = footprint(model, facts, asked, capability)
    if needed is not None and (problem := _allowed_too_little(index, model, needed)):
        return Placement(asked, footprint=needed, problems=(problem,))
    if not asked:
        return _on_cpu(index, model, needed, host_bytes)
    everywhere = tuple(device.uuid for device in devices)
    if needed is None or _decides_itself(model):
        reason = "" if needed is None else "its layers go where device_map, max_memory and offload_folder say"
        return Placement(asked, everywhere, footprint=needed, reason=reason)
    can_spread = model.num_gpus is None and not _has_slices(devices)
    most = len(devices) if can_spread else asked
    gpus = _gpus_needed(config, needed, devices, range(asked, most + 1))
    if gpus:
        fits = _fits(config, model, needed, devices, gpus)
        reason = "" if gpus == asked else f"too large for one GPU, so a replica takes {gpus}"
        return _on_gpus(index, model, needed, devices, gpus, fits, reason)
    largest = max(device.total_bytes for device in devices)
    fits = _fits(config, model, needed, devices, asked)
    sentence = (
        f"models[{index}] ({model.name}): its weights take {gib(needed.weights.bytes)} in "
        f"{needed.quantization or needed.dtype}, and {gib(needed.context_bytes)} go to CUDA, but the largest GPU "
        f"has {gib(largest)}; {_remedies(config, index, facts, devices, capability)}"
    )
    return Placement(asked, footprint=needed, fits=fits, problems=(sentence,))


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
            problems.append(f"devices[{place}]: {entry}: named before; name each GPU once")
        else:
            chosen[found.uuid] = found
    if problems:
        raise DeviceError(problems)
    return tuple(chosen.values())


def _impossible(index: int, model: ModelConfig, asked: int, devices: Sequence[Device]) -> str:
    count = len(devices)
    if asked > count:
        there = f"{count} GPU{'s' if count != 1 else ''}"
        return (
            f"models[{index}].num_gpus: {model.name} asks for {asked}, but {there} can be used here; "
            f"lower it, make more visible (CUDA_VISIBLE_DEVICES), or set num_gpus: 0 for the CPU"
        )
    if asked > 1 and _has_slices(devices):
        return (
            f"models[{index}].num_gpus: {model.name} asks for {asked}, but CUDA gives a process one MIG slice "
            f"at most; set num_gpus: 1, or switch MIG off"
        )
    return ""


def _has_slices(devices: Sequence[Device]) -> bool:
    return any(device.uuid.startswith("MIG-") for device in devices)


def _lowest_capability(devices: Sequence[Device]) -> Capability | None:
    # One type of numbers for all replicas, so that a row's probabilities do not depend on where it ran.
    return min((device.compute_capability for device in devices if device.compute_capability), default=None)


def _decides_itself(model: ModelConfig) -> bool:
    """Whether the user has taken placement into their own hands, or lets weights go to the CPU or to disk."""
    return model.device_map is not None or model.max_memory is not None or model.offload_folder is not None


def _allowed_too_little(index: int, model: ModelConfig, needed: Footprint) -> str:
    allowed = sum((model.max_memory or {}).values())
    if model.max_memory is None or model.offload_folder is not None or allowed >= needed.weights.bytes:
        return ""
    return (
        f"models[{index}].max_memory: {gib(allowed)} in all, and the weights of {model.name} take "
        f"{gib(needed.weights.bytes)}; raise it, or set offload_folder for what is left over"
    )


def _on_cpu(index: int, model: ModelConfig, needed: Footprint | None, host_bytes: int | None) -> Placement:
    if needed is None or host_bytes is None:
        return Placement(0, footprint=needed)
    found = fit(needed, Device("cpu", "CPU", None, host_bytes, 0), 0, 1, model.max_num_batched_tokens)
    warnings: tuple[str, ...] = ()
    if found.verdict == "never" and model.offload_folder is None:
        warnings = (
            f"models[{index}] ({model.name}): about {gib(needed.resident_bytes(0))} of memory are needed, "
            f"{gib(host_bytes)} are free; it may be killed: quantize it, or set max_memory and offload_folder",
        )
    return Placement(0, footprint=needed, fits={"cpu": found}, warnings=warnings)


def _fits(
    config: RunConfig, model: ModelConfig, needed: Footprint, devices: Sequence[Device], gpus: int
) -> dict[str, Fit]:
    share = config.max_workers_per_gpu
    return {
        device.uuid: fit(needed, device, gpus, share, model.max_num_batched_tokens, device.used_bytes)
        for device in devices
    }


def _gpus_needed(
    config: RunConfig, needed: Footprint, devices: Sequence[Device], counts: Iterable[int]
) -> int:
    """The fewest GPUs on which a replica fits with its longest row, or else with its weights; 0: not even that."""
    for wanted in (("fits",), ("fits", "tight")):
        for gpus in counts:
            empty = (fit(needed, device, gpus, config.max_workers_per_gpu, None) for device in devices)
            if sum(one.verdict in wanted for one in empty) >= gpus:
                return gpus
    return 0


def _on_gpus(
    index: int,
    model: ModelConfig,
    needed: Footprint,
    devices: Sequence[Device],
    gpus: int,
    fits: dict[str, Fit],
    reason: str,
) -> Placement:
    roomy = [uuid for uuid, one in fits.items() if one.verdict == "fits"]
    tight = [uuid for uuid, one in fits.items() if one.verdict == "tight"]
    chosen = set(roomy if len(roomy) >= gpus else [*roomy, *tight])
    usable = tuple(device.uuid for device in devices if device.uuid in chosen)
    held = tuple(uuid for uuid, one in fits.items() if one.verdict == "held")
    small = [device for device in devices if device.uuid not in (*usable, *held)]
    warnings = []
    if small:
        names = ", ".join(f"{device.name} ({device.uuid})" for device in small)
        warnings.append(f"{model.name} does not fit well on {names} and runs elsewhere")
    if any(fits[uuid].verdict == "tight" for uuid in usable):
        warnings.append(_tight(index, model, needed, gpus, fits))
    return Placement(gpus, usable, held, needed, fits, reason, (), tuple(warnings))


def _tight(index: int, model: ModelConfig, needed: Footprint, gpus: int, fits: Mapping[str, Fit]) -> str:
    tight = min((one for one in fits.values() if one.verdict == "tight"), key=lambda one: one.room_bytes)
    if model.max_num_batched_tokens is not None:
        # Even so the run is not lost: batches that do not fit run again in halves.
        return (
            f"models[{index}].max_num_batched_tokens: {model.max_num_batched_tokens:,} tokens in rows of "
            f"{needed.width:,} take about {gib(tight.peak_bytes)}, and {gib(tight.room_bytes)} are free; "
            "lower or drop it"
        )
    room = tight.room_bytes - needed.resident_bytes(gpus) - needed.activation.fixed_bytes
    shorter = next(
        (
            length
            for length in range(needed.width - 64, 64, -64)
            if needed.activation.bytes(length, length) <= room
        ),
        0,
    )
    advice = f"max_length: {shorter} fits" if shorter else "quantize it, or give it more GPUs (num_gpus)"
    return (
        f"models[{index}] ({model.name}): a row of {needed.width:,} tokens takes about "
        f"{gib(needed.peak_bytes(gpus, needed.width))}, and {gib(tight.room_bytes)} are free; {advice}"
    )


def _remedies(
    config: RunConfig,
    index: int,
    facts: MemberFacts,
    devices: Sequence[Device],
    capability: Capability | None,
) -> str:
    return "; ".join(_what_helps(config, index, facts, devices, capability)) or "use a smaller model"


def _what_helps(
    config: RunConfig,
    index: int,
    facts: MemberFacts,
    devices: Sequence[Device],
    capability: Capability | None,
) -> Iterator[str]:
    model = config.models[index]
    plain = footprint(model, facts, 1, capability)
    assert plain is not None
    largest = max(device.total_bytes for device in devices) // config.max_workers_per_gpu
    if not plain.quantization:
        four = footprint(model, facts, 1, capability, quantization=_FOUR_BITS)
        if four is not None and four.resident_bytes(1) < largest:
            yield f"quantization_config: {{load_in_4bit: true}} makes it {gib(four.weights.bytes)}"
    counts = range((model.num_gpus or 1) + 1, 9)
    enough = next((count for count in counts if plain.resident_bytes(count) < largest), None)
    if enough is not None:
        there = "" if enough <= len(devices) else f" (this run has {len(devices)})"
        yield f"num_gpus: {enough} of this size hold it{there}"
    yield "max_memory with a cpu entry and offload_folder keep a part of it outside the GPU, slowly"
