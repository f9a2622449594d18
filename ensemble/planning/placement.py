"""Place members: on how many GPUs a replica runs, on which, and what would help if it does not fit. PURE."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from ensemble.common.errors import DeviceError
from ensemble.common.gpus import MIN_REPORTED_BYTES, Device
from ensemble.common.text import gib, plural
from ensemble.members.base import Assigned, ResourceRequest
from ensemble.members.footprint import RESERVE_SHARE, Capability, Footprint, MemoryEstimate

_MAX_ADVISED_GPUS = 8


@dataclass(frozen=True)
class ModelFacts:
    """Hold what the plan must know of a model.

    Attributes:
        lengths: bytes of text per row, int64 [rows].
        memory: None if nothing is known of it.
        job_shares: the share of the rows that a job will probably compute, by the job's name; others: all.
        job_rows: the rows that a job may compute at all, bool [rows], by the job's name; others: all.
    """

    name: str
    request: ResourceRequest
    lengths: npt.NDArray[np.int64]
    memory: MemoryEstimate | None = None
    needs_worker: bool = True
    job_shares: Mapping[str, float] = field(default_factory=dict)
    job_rows: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)


@dataclass(frozen=True)
class Fit:
    """Say how a footprint fits on a device, of which ``room_bytes`` are free to plan with.

    ``verdict``: ``fits``; ``tight`` if the weights fit but perhaps not the longest row beside them; ``short`` if
    that is so only because other programs use the device; ``held`` if they leave no room for the weights;
    ``never``.
    """

    verdict: str
    token_budget: int
    room_bytes: int


@dataclass(frozen=True)
class Placement(Assigned):
    """Say where a member may run.

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
    workers_per_gpu: int, index: int, facts: ModelFacts, devices: Sequence[Device], host: Device | None
) -> Placement:
    """Return where a member runs; if it cannot, the placement's ``problems`` say why."""
    if not facts.needs_worker:
        return Placement(0)
    asks_torch = facts.request.uses_torch and facts.request.num_gpus != 0
    usable = [device for device in devices if not (asks_torch and device.torch_problem)]
    others = [f"{device.title}: {device.torch_problem}" for device in devices if device not in usable]
    if others and not usable:
        return Placement(1, problems=tuple(others))
    placement = _Placing(workers_per_gpu, index, facts, usable, host).place()
    if placement.problems:
        return replace(placement, problems=(*placement.problems, *others))
    notes = (f"{facts.name} does not run on {sentence}" for sentence in others)
    return replace(placement, warnings=(*placement.warnings, *notes))


@dataclass(frozen=True)
class _Placing:
    """Place one member."""

    workers_per_gpu: int
    index: int
    facts: ModelFacts
    devices: Sequence[Device]
    host: Device | None

    def place(self) -> Placement:
        request, memory = self.facts.request, self.facts.memory
        capability = _lowest_capability(self.devices)
        named_devices = (*(request.max_memory or {}), *(request.device_map or {}).values())
        numbers = [device for device in named_devices if isinstance(device, int)]
        gpus = request.num_gpus
        if gpus is None:
            gpus = max(numbers) + 1 if numbers else min(1, len(self.devices))
        footprint: Footprint | None = None
        problem = self._request_problem(gpus)
        if not problem and memory is not None:
            footprint = memory.footprint(gpus, capability if gpus else None)
        if footprint is not None and request.max_memory is not None and request.offload_folder is None:
            allowed = sum(request.max_memory.values())
            if allowed < footprint.weights.bytes:
                problem = (
                    f"models[{self.index}].max_memory: {gib(allowed)} in all, and the weights of "
                    f"{self.facts.name} take {gib(footprint.weights.bytes)}; raise it, or set offload_folder for "
                    "the rest"
                )
        if problem:
            placement = Placement(gpus, footprint=footprint, problems=(problem,))
        elif not gpus:
            placement = self._on_cpu(footprint)
        elif footprint is None and isinstance(request.gpu_memory, int):
            placement = self._by_request(gpus, request.gpu_memory)
        elif footprint is None or self._decides_itself:
            placement = self._anywhere(gpus, footprint)
        else:
            placement = self._on_gpus(gpus, footprint)
        if placement.gpus and placement.capability is None:
            placement = replace(placement, capability=capability)
        return _with_types(placement, memory)

    def _request_problem(self, gpus: int) -> str:
        """Return why the member's keys cannot be followed, or an empty text."""
        request = self.facts.request
        capability = _lowest_capability(self.devices) if gpus else None
        memory_problem = "" if self.facts.memory is None else self.facts.memory.problem(capability)
        if memory_problem:
            return f"models[{self.index}].{memory_problem}"
        key = "max_memory" if request.max_memory else "device_map"
        if request.num_gpus is not None:
            key = "num_gpus"
        start = f"models[{self.index}].{key}: {self.facts.name} asks for {plural(gpus, 'GPU')}, but"
        usable = together(self.devices)
        if gpus > usable:
            several = len({device.node for device in self.devices}) > 1
            where = "are on any one node" if several else "can be used here"
            return (
                f"{start} {plural(usable, 'GPU')} {where}; lower it, make more visible (CUDA_VISIBLE_DEVICES), or "
                "set num_gpus: 0 for the CPU"
            )
        if gpus > 1 and any(device.is_slice for device in self.devices):
            return f"{start} CUDA gives a process one MIG slice at most; set num_gpus: 1, or switch MIG off"
        return ""

    @property
    def _decides_itself(self) -> bool:
        """Return whether the user decides on placement, or lets weights go to the CPU or to disk."""
        request = self.facts.request
        return (request.device_map, request.max_memory, request.offload_folder) != (None, None, None)

    def _on_cpu(self, footprint: Footprint | None) -> Placement:
        """Place the member on the CPU, with a problem or a warning if memory is too small."""
        placement, host = Placement(0, footprint=footprint), self.host
        if footprint is None or host is None:
            return placement
        fit = _fit(footprint, host, 0, 1, asked_tokens(self.facts.request, footprint), host.used_bytes)
        placement = replace(placement, fits={"cpu": fit})
        size, advice = gib(footprint.resident_bytes(0)), "quantize it, or set max_memory and offload_folder"
        text = f"models[{self.index}] ({self.facts.name}): on the CPU it takes about {size} of memory, and "
        if fit.verdict == "never" and not self._decides_itself:
            return replace(placement, problems=(f"{text}this machine has {gib(host.total_bytes)}; {advice}",))
        if fit.verdict == "held" and not self._decides_itself:
            free = gib(host.total_bytes - host.used_bytes)
            return replace(placement, warnings=(f"{text}{free} are free: it may be killed; {advice}",))
        return placement

    def _anywhere(self, gpus: int, footprint: Footprint | None) -> Placement:
        """Place the member on any GPUs; but it is worth waiting for those that other programs hold."""
        places, reason = 1, ""
        if footprint is not None:
            reason = "its layers go where device_map, max_memory and offload_folder say"
        if self.facts.request.gpu_memory == "all" and self.workers_per_gpu > 1:
            places = self.workers_per_gpu
            reason = "it has its GPUs to itself, since gpu_memory does not say what it takes of them"
        in_use = [gpu for gpu in self.devices if gpu.is_held or gpu.used_bytes >= MIN_REPORTED_BYTES]
        return Placement(
            gpus,
            footprint=footprint,
            places=places,
            devices=tuple(device.uuid for device in self.devices if not device.is_held),
            held=tuple(device.uuid for device in in_use),
            reason=reason,
        )

    def _by_request(self, gpus: int, size: int) -> Placement:
        """Place a member whose ``gpu_memory`` says how many bytes it takes of each of its GPUs."""
        fits = {}
        for device in self.devices:
            free = max(0, device.total_bytes - _held_bytes(device))
            verdict = "never"
            if size <= free:
                verdict = "fits"
            elif size <= device.total_bytes:
                verdict = "held"
            fits[device.uuid] = Fit(verdict, 0, free)
        usable = [uuid for uuid, fit in fits.items() if fit.verdict == "fits"]
        in_use = [uuid for uuid, fit in fits.items() if fit.verdict == "held"]
        large_enough = len(usable) + len(in_use)
        if large_enough < gpus:
            largest = max(device.total_bytes for device in self.devices)
            problem = (
                f"models[{self.index}].gpu_memory: {self.facts.name} asks for {gib(size)} of "
                f"{plural(gpus, 'GPU')}, but the largest GPU has {gib(largest)}"
            )
            if large_enough:
                problem += f", and only {plural(large_enough, 'GPU')} so much"
            return Placement(gpus, fits=fits, problems=(f"{problem}; lower it, or num_gpus",))
        places, reason = 1, ""
        if self.workers_per_gpu > 1:
            # Shares of the free memory, as for other members; the largest count of places counts on all GPUs.
            shares = [max(1, fits[uuid].room_bytes // self.workers_per_gpu) for uuid in usable]
            places = max((min(self.workers_per_gpu, -(-size // share)) for share in shares), default=1)
            reason = (
                f"it takes {gib(size)} of each of its GPUs: {places} of {self.workers_per_gpu} places there"
            )
        return Placement(
            gpus, places=places, devices=tuple(usable), held=tuple(in_use), fits=fits, reason=reason
        )

    def _on_gpus(self, min_gpus: int, footprint: Footprint) -> Placement:
        """Place a member of known footprint on as few GPUs as hold a replica."""
        assert self.facts.memory is not None
        gpus = self._fewest_gpus(min_gpus, footprint)
        if gpus is None:
            fits = self._fits(self.devices, footprint, min_gpus, None)
            problems = (self._too_large_text(footprint),)
            return Placement(min_gpus, footprint=footprint, fits=fits, problems=problems)
        large_enough = self._holding(footprint, gpus, ("fits", "tight"))
        # The number type does not depend on GPUs that cannot hold the member.
        capability = _lowest_capability(large_enough)
        footprint = self.facts.memory.footprint(gpus, capability) or footprint
        fits = self._fits(large_enough, footprint, gpus, asked_tokens(self.facts.request, footprint))

        def with_verdict(*verdicts: str) -> tuple[str, ...]:
            return tuple(uuid for uuid, fit in fits.items() if fit.verdict in verdicts)

        usable, in_use = with_verdict("fits"), with_verdict("short", "held")
        if together([device for device in large_enough if device.uuid in usable]) < gpus:
            usable = with_verdict("fits", "short", "tight")
        warnings = []
        small = [device for device in self.devices if device.uuid not in {*usable, *in_use}]
        if small:
            names = ", ".join(device.title for device in small)
            warnings.append(f"{self.facts.name} does not fit well on {names} and runs elsewhere")
        tight = [fits[uuid].room_bytes for uuid in usable if fits[uuid].verdict == "tight"]
        if tight:
            warnings.append(self._tight_text(footprint, gpus, min(tight)))
        reason = ""
        if gpus != min_gpus:
            reason = f"its weights and its longest row are too large for one GPU, so a replica takes {gpus}"
            for text in self._smaller(capability)[:1]:
                reason += f"; {text}, to fit one, and gives other numbers"
        return Placement(
            gpus,
            capability=capability,
            footprint=footprint,
            devices=usable,
            held=in_use,
            fits=fits,
            reason=reason,
            warnings=tuple(warnings),
        )

    def _fits(
        self, devices: Sequence[Device], footprint: Footprint, gpus: int, tokens: int | None
    ) -> dict[str, Fit]:
        """Return how a footprint fits on each of these devices as they are now."""
        return {
            device.uuid: _fit(footprint, device, gpus, self.workers_per_gpu, tokens, _held_bytes(device))
            for device in devices
        }

    def _holding(self, footprint: Footprint, gpus: int, verdicts: Sequence[str]) -> list[Device]:
        """Return the devices on which a footprint would have one of these verdicts if nobody else used them."""
        return [
            device
            for device in self.devices
            if _fit(footprint, device, gpus, self.workers_per_gpu).verdict in verdicts
        ]

    def _fewest_gpus(self, min_gpus: int, footprint: Footprint) -> int | None:
        """Return the fewest GPUs on which a replica fits with its longest row, else with its weights."""
        can_spread = self.facts.request.num_gpus is None and not any(gpu.is_slice for gpu in self.devices)
        max_gpus = together(self.devices) if can_spread else min_gpus
        for verdicts in (("fits",), ("fits", "tight")):
            for gpus in range(min_gpus, max_gpus + 1):
                if together(self._holding(footprint, gpus, verdicts)) >= gpus:
                    return gpus
        return None

    def _tight_text(self, footprint: Footprint, gpus: int, usable_bytes: int) -> str:
        """Return a warning that weights fit on each GPU, but not the longest row or the asked batch."""
        width = footprint.width
        tokens = asked_tokens(self.facts.request, footprint)
        batch = f"a row of {width:,} tokens takes"
        advice = "quantize it, or give it more GPUs (num_gpus)"
        if tokens is not None:
            batch = f"a batch of {tokens:,} tokens in rows of {width:,} takes"
            advice = "lower batch_size or max_num_batched_tokens"
        else:
            for length in range(width - 64, 64, -64):
                if footprint.peak_bytes(gpus, length, length) <= usable_bytes:
                    advice = f"max_length: {length} fits"
                    break
        size = gib(footprint.peak_bytes(gpus, max(tokens or 0, width)))
        return (
            f"models[{self.index}] ({self.facts.name}): {batch} about {size}, but only {gib(usable_bytes)} may be "
            f"used; {advice}"
        )

    def _too_large_text(self, footprint: Footprint) -> str:
        """Return why no GPU holds the member, with each key that would help and is allowed for it."""
        assert self.facts.memory is not None
        request, workers = self.facts.request, self.workers_per_gpu
        capability = self.devices[0].compute_capability
        largest = max(device.total_bytes for device in self.devices)
        share = largest // workers
        on_one_gpu = self.facts.memory.footprint(1, capability) or footprint
        remedies, of_each_worker = [], ""
        if workers > 1:
            of_each_worker = f", which max_workers_per_gpu: {workers} makes {gib(share)} each"
            if on_one_gpu.resident_bytes(1) < largest:
                remedies.append("max_workers_per_gpu: 1 gives it a whole GPU")
        remedies += self._smaller(capability)
        counts = range((request.num_gpus or 1) + 1, _MAX_ADVISED_GPUS + 1)
        enough = next((count for count in counts if on_one_gpu.resident_bytes(count) < share), None)
        if enough is not None and not any(device.is_slice for device in self.devices):
            available = "" if enough <= len(self.devices) else f" (this run has {len(self.devices)})"
            remedies.append(f"num_gpus: {enough} of this size hold it{available}")
        if request.may_offload:
            remedies.append(
                "max_memory with a cpu entry, or offload_folder, keeps a part of it outside the GPU, slowly"
            )
        return (
            f"models[{self.index}] ({self.facts.name}): its weights take {gib(footprint.weights.bytes)} in "
            f"{footprint.quantization or footprint.dtype}, and {gib(footprint.context_bytes)} go to CUDA, but the "
            f"largest GPU has {gib(largest)}{of_each_worker}; {'; '.join(remedies) or 'use a smaller model'}"
        )

    def _smaller(self, capability: Capability | None) -> list[str]:
        """Return what would make the member fit one GPU, each with the size of its weights then."""
        assert self.facts.memory is not None
        return [
            f"{keys} makes its weights {gib(smaller.weights.bytes)}"
            for keys, smaller in self.facts.memory.smaller(capability)
            if self._holding(smaller, 1, ("fits",))
        ]


def chosen_devices(visible: Sequence[Device], names: Sequence[int | str] | None) -> tuple[Device, ...]:
    """Return the devices that the config's ``devices`` names, by number or by UUID; all if it is None.

    Raises:
        DeviceError: there is no such device, or it is named twice; every such entry is listed.
    """
    if names is None:
        return tuple(visible)
    by_name = {device.uuid: device for device in visible} | dict(enumerate(visible))
    listed = ", ".join(f"{number}: {device.uuid}" for number, device in enumerate(visible)) or "no GPU"
    problems: list[str] = []
    chosen = []
    for position, entry in enumerate(names):
        device = by_name.get(entry)
        if device is None:
            problems.append(
                f"devices[{position}]: {entry}: no visible GPU has this number or UUID; there are {listed}"
            )
        elif device in chosen:
            problems.append(f"devices[{position}]: {entry}: named twice; name each GPU once")
        chosen.append(device)
    if problems:
        raise DeviceError(problems)
    return tuple(by_name[entry] for entry in names)


def together(devices: Sequence[Device]) -> int:
    """Return how many of these devices a worker can have: the most that are on one node."""
    return max(Counter(device.node for device in devices).values(), default=0)


def rooms(devices: Sequence[Device], gpus: int, workers_per_gpu: int) -> int:
    """Return how many workers with so many GPUs each fit on these devices at a time, each worker on one node."""
    by_node = Counter(device.node for device in devices)
    return sum(count * workers_per_gpu // gpus for count in by_node.values())


def asked_tokens(request: ResourceRequest, footprint: Footprint) -> int | None:
    """Return the padded tokens in the largest batch that the user asks for; None if the plan decides."""
    if request.batch_size is not None:
        return request.batch_size * footprint.width
    return request.max_num_batched_tokens


def _with_types(placement: Placement, memory: MemoryEstimate | None) -> Placement:
    """Return a placement with the type of the weights and the attention, as far as files tell."""
    footprint = placement.footprint
    if footprint is not None:
        return replace(placement, dtype=footprint.dtype, attention=footprint.attention)
    if memory is None:
        return placement
    dtype = memory.dtype(placement.gpus, placement.capability)
    attention = memory.attention(dtype, placement.gpus, placement.capability)
    return replace(placement, dtype=dtype, attention=attention)


def _lowest_capability(devices: Sequence[Device]) -> Capability | None:
    # All replicas take one number type, so that a row's probabilities do not depend on the device.
    return min((device.compute_capability for device in devices if device.compute_capability), default=None)


def _held_bytes(device: Device) -> int:
    """Return how many bytes of a device this run cannot have now."""
    return device.total_bytes if device.is_held else device.used_bytes


def _fit(
    footprint: Footprint,
    device: Device,
    gpus: int,
    workers_per_gpu: int,
    tokens: int | None = None,
    held_bytes: int = 0,
) -> Fit:
    """Return how a footprint fits on a device, of which other programs use ``held_bytes``.

    ``tokens`` are those of the batch that the user asks for; None: one of the longest row has to fit.
    """
    total = device.total_bytes // workers_per_gpu
    free = max(0, device.total_bytes - held_bytes) // workers_per_gpu
    reserve = RESERVE_SHARE * total

    def has_room(size: int) -> bool:
        if tokens is not None:
            return footprint.peak_bytes(gpus, tokens) <= size
        return footprint.token_budget(gpus, int(size - reserve)) > 0

    resident = footprint.resident_bytes(gpus)
    if resident > free:
        verdict = "never" if resident > total else "held"
    elif has_room(free):
        verdict = "fits"
    else:
        verdict = "short" if has_room(total) else "tight"
    room = max(0, int(free - reserve))
    return Fit(verdict, tokens or footprint.token_budget(gpus, room), room)
