"""PURE: how long members take.

Speeds come from an earlier run's run.json if there is one that fits.  Otherwise they are guessed from the size of
the model; that is good enough to compare members, and is never shown.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

from ensemble.members.footprint import Footprint
from ensemble.planning.chunks import BYTES_PER_TOKEN

# Of a new Python process with torch and transformers; on a GPU with a CUDA context.
_GPU_IMPORT_SECONDS = 10.0
_CPU_IMPORT_SECONDS = 4.0
# On shared disks: 84 to 170 s for 9B models on Kaggle, 18 GB of weights.
_LOAD_BYTES_PER_SECOND = 150e6
# One of n workers side by side takes about n ** _THREAD_SCALING times as long as one with all cores: threads wait
# for each other, workers do not.
_THREAD_SCALING = 0.75
# Useful operations a second, about.  The speeds of members that were measured put the guesses right.
_GPU_FLOPS = 1e14
_CPU_FLOPS = 1e11


@dataclass(frozen=True)
class Speed:
    """The speed of a member's replica.

    Attributes:
        startup_seconds: until a worker computes; 0 before it is measured or guessed.
        seconds_per_work: for a byte of text; 0 before it is measured or guessed.
        is_measured: an earlier run has measured ``seconds_per_work``.
        is_startup_measured: an earlier run has measured ``startup_seconds``.
        cpu_share: of the cores that the replica has, on a CPU.
    """

    startup_seconds: float
    seconds_per_work: float
    is_measured: bool
    is_startup_measured: bool = False
    cpu_share: float = 1.0

    def or_guess(self, guess: Speed) -> Speed:
        """Return the speed with a guess of what was not measured."""
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
    """A member in the forecast: seconds to start a replica, and seconds of computing on one replica.

    A replica takes ``gpus`` of ``devices`` (UUIDs), ``places`` on each of them, or ``cpu_share`` of a host's cores.
    ``first_replicas`` start before any later member, up to ``replicas`` if devices are left over.
    """

    startup_seconds: float
    compute_seconds: float
    gpus: int
    replicas: int
    first_replicas: int
    devices: tuple[str, ...]
    places: int = 1
    cpu_share: float = 0.0


def guessed_speed(footprint: Footprint | None, gpus: int) -> Speed:
    """Guess a member's speed from its size, on so many GPUs (0: the CPU).

    It takes two operations per token and parameter that is not an embedding's (Kaplan et al. 2020, section 2.1).
    """
    parameters, size = 0, 0
    if footprint is not None:
        weights = footprint.weights
        parameters = weights.parameters - weights.embedding_parameters
        # To quantize weights while they are loaded, the whole checkpoint is read.
        size = max(weights.bytes, footprint.mapped_bytes)
    flops = gpus * _GPU_FLOPS if gpus else _CPU_FLOPS
    import_seconds = _GPU_IMPORT_SECONDS if gpus else _CPU_IMPORT_SECONDS
    return Speed(
        startup_seconds=import_seconds + size / _LOAD_BYTES_PER_SECOND,
        seconds_per_work=2.0 * parameters / BYTES_PER_TOKEN / flops,
        is_measured=False,
    )


def calibrated(guessed: Mapping[str, float], measured: Mapping[str, float]) -> dict[str, float | None]:
    """Return speeds by member: measured ones, and guesses scaled by how far off the measured members' guesses were.

    The factor is the geometric mean of measured over guessed, because guesses are wrong by factors, not by amounts.

    Args:
        guessed: for every member, in any unit that all share, such as seconds per work; 0 if there is no guess.

    Returns:
        for every name in ``guessed``; None if nothing is known.
    """
    ratios = [measured[name] / guess for name, guess in guessed.items() if guess and measured.get(name)]
    factor = geometric_mean(ratios) if ratios else 1.0
    return {name: measured.get(name) or guess * factor or None for name, guess in guessed.items()}


@dataclass(eq=False)
class _Member:
    """A member in the forecast that has not ended.

    ``seconds_left`` are of one replica's computing; ``ready_at`` has the time from which each replica computes.
    """

    job: Job
    seconds_left: float
    ready_at: list[float] = field(default_factory=list)
    devices: list[str] = field(default_factory=list)


def total_seconds(jobs: Sequence[Job], capacity: Mapping[str, int], hosts: int = 1) -> float:
    """Return when the last of ``jobs`` ends, by the scheduler's own rules.

    Args:
        capacity: how many workers may be on each GPU, by UUID; all GPUs count as equally fast.
        hosts: machines whose CPUs workers share.
    """
    members = [_Member(job, job.compute_seconds) for job in jobs]
    free, free_cpus, now = dict(capacity), float(hosts), 0.0

    def start(member: _Member, reserved: Collection[str] = ()) -> bool:
        """Start a replica, if devices outside of ``reserved`` have room for it."""
        nonlocal free_cpus
        job = member.job
        usable = [uuid for uuid in job.devices if uuid not in reserved and free.get(uuid, 0) >= job.places]
        if len(usable) < job.gpus or not has_room(free_cpus, job.cpu_share):
            return False
        free_cpus -= job.cpu_share
        for uuid in sorted(usable, key=lambda uuid: -free[uuid])[: job.gpus]:
            free[uuid] -= job.places
            member.devices.append(uuid)
        member.ready_at.append(now + job.startup_seconds)
        return True

    while members:
        # Members start in their order; one that waits reserves the devices that it may use.
        reserved: set[str] = set()
        for member in members:
            while len(member.ready_at) < max(1, member.job.first_replicas) and start(member, reserved):
                pass
            if not member.ready_at:
                reserved |= set(member.job.devices)
        running = [member for member in members if member.ready_at]
        if len(running) == len(members):
            for member in sorted(running, key=lambda member: -member.seconds_left):
                while (
                    len(member.ready_at) < member.job.replicas
                    and worth_joining(member.seconds_left / len(member.ready_at), member.job.startup_seconds)
                    and start(member)
                ):
                    pass
        if not running:  # the waiting members fit nowhere, which is among the plan's problems
            break
        ready_times = [ready for member in running for ready in member.ready_at if ready > now]
        rates = [sum(ready <= now for ready in member.ready_at) for member in running]
        ends = [
            now + member.seconds_left / rate if rate else math.inf
            for member, rate in zip(running, rates, strict=True)
        ]
        next_event = min(ends + ready_times)
        for member, rate, end in zip(running, rates, ends, strict=True):
            member.seconds_left -= (next_event - now) * rate
            # By its time and not by ``seconds_left``, which rounding may keep above 0 for ever.
            if end == next_event:
                members.remove(member)
                for uuid in member.devices:
                    free[uuid] += member.job.places
                free_cpus += len(member.ready_at) * member.job.cpu_share
        now = next_event
    return now


def has_room(free_cpus: float, cpu_share: float) -> bool:
    """Return whether the free part of the hosts' CPUs takes one more worker; shares are rounded, such as thirds."""
    return cpu_share <= free_cpus + 1e-6


def worth_joining(seconds_left: float, startup_seconds: float) -> bool:
    """Return whether one more replica, which first has to start, would still take a good part of what is left."""
    return seconds_left > 2 * startup_seconds
