"""PURE: how long members take, and which way of sharing the GPUs ends first.

Speeds come from an earlier run's run.json where there is one that fits; else they are guessed from the size of
the model, which is good enough to weigh a second load against a shared table, and is never shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from statistics import geometric_mean

from ensemble.members.footprint import BATCHES_PER_STAGE, Capability, Footprint
from ensemble.planning.chunks import BYTES_PER_TOKEN

# A fresh Python with torch and transformers, then a CUDA context.
_IMPORT_SECONDS = 10.0
# Loading as people see it on shared disks: 84 to 170 s for 9B models on Kaggle, 18 GB of weights.
_LOAD_BYTES_PER_SECOND = 150e6
# On a CPU there is less to import, and no context.
_CPU_IMPORT_SECONDS = 4.0
# One of n workers side by side takes about n ** _THREAD_SCALING times as long as one with all cores: threads wait
# for each other, workers do not.
_THREAD_SCALING = 0.75
# Useful operations a second, a third of what the data sheets promise for half precision: T4, A100, H100.
_FLOPS = {7: 20e12, 8: 100e12, 9: 300e12}
# Of two cores, in float32, about: 180e9 measured on Zen 5, and many have half as much or less.
_CPU_FLOPS = 1e11


@dataclass(frozen=True)
class Speed:
    """``startup_seconds`` until a worker computes; ``seconds_per_work`` for a byte of text on one replica.

    On a CPU that replica has ``cpu_share`` of the cores.  ``is_measured`` tells an earlier run's speed from a
    guess, ``is_startup_measured`` its start-up; what an earlier run did not get to measure is 0 before it is
    guessed.
    """

    startup_seconds: float
    seconds_per_work: float
    is_measured: bool
    is_startup_measured: bool = False
    cpu_share: float = 1.0

    def or_guess(self, guess: Speed) -> Speed:
        """With a guess where nothing was measured."""
        return replace(
            self,
            startup_seconds=self.startup_seconds if self.is_startup_measured else guess.startup_seconds,
            seconds_per_work=self.seconds_per_work if self.is_measured else guess.seconds_per_work,
            cpu_share=self.cpu_share if self.is_measured else guess.cpu_share,
        )


def slower_by(cpu_share: float) -> float:
    """Return how many times as long a worker computes with this share of the cores as with all.

    It is 1 on a GPU, where the share is 0.
    """
    return cpu_share**-_THREAD_SCALING if 0 < cpu_share < 1 else 1.0


@dataclass(frozen=True)
class Job:
    """A member as the forecast sees it: seconds to start a replica, and seconds of computing on one replica.

    A replica takes ``gpus`` of ``devices`` (UUIDs), ``places`` on each of them, or ``cpu_share`` of a host's cores.
    ``first_replicas`` start before any later member, up to ``replicas`` where devices are left over.
    """

    startup_seconds: float
    compute_seconds: float
    gpus: int
    replicas: int
    first_replicas: int
    devices: tuple[str, ...]
    places: int = 1
    cpu_share: float = 0.0


def pipelined(gpus: int) -> float:
    """What a member over so many GPUs takes, of what it would take on one of them.

    n batches of a chunk pass through p stages in n + p - 1 steps of a p-th of a batch's work each (Huang et al.
    2019, GPipe, section 2.3).
    """
    if gpus < 2:
        return 1.0
    batches = BATCHES_PER_STAGE * gpus
    return (batches + gpus - 1) / (batches * gpus)


def guessed_speed(
    needed: Footprint | None, capability: Capability | None, gpus: int = 1, cpus: int = 1
) -> Speed:
    """From the size: two operations per token and parameter that is not an embedding's, as Kaplan et al. (2020,
    section 2.1) count them.

    Args:
        gpus: over which a replica is spread.
        cpus: cores of a replica that is on none; 1 also where nobody knows.
    """
    on_cpu = _CPU_FLOPS * (max(2, cpus) / 2) ** _THREAD_SCALING
    flops = _FLOPS[min(max(capability[0], 7), 9)] if capability else on_cpu
    parameters, size = 0, 0
    if needed is not None:
        weights = needed.weights
        parameters = weights.parameters - weights.embedding_parameters
        # Where weights are quantized while they are loaded, the whole checkpoint is read each time.
        size = max(weights.bytes, needed.mapped_bytes)
    return Speed(
        startup_seconds=(_IMPORT_SECONDS if capability else _CPU_IMPORT_SECONDS)
        + size / _LOAD_BYTES_PER_SECOND,
        seconds_per_work=pipelined(gpus) * 2.0 * parameters / BYTES_PER_TOKEN / flops,
        is_measured=False,
    )


def calibrated(guessed: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float | None]:
    """Speeds by member: measured ones as they are, guesses scaled by what the guesses of the measured were off.

    The factor is the geometric mean of measured over guessed: guesses are wrong by factors, not by amounts.

    Args:
        guessed: for every member, in any unit that all share, such as seconds per work; 0 where there is no guess.
        measured: in the same unit, for members that have computed something.

    Returns:
        for every name in ``guessed``; None where nothing is known.
    """
    off = [measured[name] / guess for name, guess in guessed.items() if guess and measured.get(name)]
    factor = geometric_mean(off) if off else 1.0
    return {name: measured.get(name) or guess * factor or None for name, guess in guessed.items()}


@dataclass
class _Running:
    """A member in the forecast: ``left`` seconds of one replica's computing, replicas by when they are ready."""

    job: Job
    left: float
    ready_at: list[float] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)


def total_seconds(jobs: Sequence[Job], capacity: Mapping[str, int], hosts: int = 1) -> float:
    """When the last of ``jobs`` ends, by the scheduler's own rules.

    Args:
        capacity: how many workers may be on each GPU, by UUID; all GPUs count as equally fast.
        hosts: machines whose CPUs workers share.
    """
    waiting, running = list(jobs), list[_Running]()
    free, free_cpus, now = dict(capacity), float(hosts), 0.0

    def is_first(member: _Running) -> bool:
        return len(member.ready_at) < max(1, member.job.first_replicas)

    def is_worth_it(member: _Running) -> bool:
        seconds = member.left / len(member.ready_at)
        return len(member.ready_at) < member.job.replicas and worth_joining(
            seconds, member.job.startup_seconds
        )

    def start(
        member: _Running, is_wanted: Callable[[_Running], bool], reserved: Collection[str] = ()
    ) -> None:
        """More replicas as long as they are wanted, if the devices outside of ``reserved`` have room for them."""
        nonlocal free_cpus
        job = member.job
        # Those with the most room first, else in their order.
        devices = ((uuid, free.get(uuid, 0)) for uuid in job.devices if uuid not in reserved)
        able = [(-room, place, uuid) for place, (uuid, room) in enumerate(devices) if room >= job.places]
        heapify(able)
        while is_wanted(member) and (
            len(able) >= job.gpus if job.gpus else has_room(free_cpus, job.cpu_share)
        ):
            free_cpus -= 0.0 if job.gpus else job.cpu_share
            for room, place, uuid in [heappop(able) for _ in range(job.gpus)]:
                free[uuid] -= job.places
                member.devices.append(uuid)
                if free[uuid] >= job.places:
                    heappush(able, (room + job.places, place, uuid))
            member.ready_at.append(now + job.startup_seconds)

    while waiting or running:
        # Members in their order; one that waits keeps the devices it may use from later ones.
        reserved: set[str] = set()
        for job in list(waiting):
            member = _Running(job, job.compute_seconds)
            start(member, is_first, reserved)
            if member.ready_at:
                waiting.remove(job)
                running.append(member)
            else:
                reserved |= set(job.devices)
        for one in sorted(running, key=lambda one: -one.left) if not waiting else ():
            start(one, is_worth_it)
        if not running:  # what is left fits nowhere; the plan has said so
            return now
        rates = [sum(ready <= now for ready in one.ready_at) for one in running]
        ends = [now + one.left / rate if rate else math.inf for one, rate in zip(running, rates, strict=True)]
        later = min([*ends, *(ready for one in running for ready in one.ready_at if ready > now)])
        for one, rate, end in zip(list(running), rates, ends, strict=True):
            one.left -= (later - now) * rate
            # By its time and not by what is left of it, which rounding may keep above 0 for ever.
            if end == later:
                running.remove(one)
                for uuid in one.devices:
                    free[uuid] += one.job.places
                free_cpus += len(one.ready_at) * one.job.cpu_share
        now = later
    return now


def has_room(free_cpus: float, cpu_share: float) -> bool:
    """Whether hosts' CPUs, less what workers there have, take one more; thirds do not add up to 1."""
    return cpu_share <= free_cpus + 1e-6


def worth_joining(seconds_left: float, startup_seconds: float) -> bool:
    """Whether one more replica, which first has to start, still takes a good part of what is left."""
    return seconds_left > 2 * startup_seconds
