"""PURE: how long members take, and which way of sharing the GPUs ends first.

Speeds come from an earlier run's run.json where there is one that fits; else they are guessed from the size of
the model, which is good enough to weigh a second load against a shared table, and is never shown.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import geometric_mean

from ensemble.members.footprint import Capability, Footprint
from ensemble.planning.chunks import BYTES_PER_TOKEN

# A fresh Python with torch and transformers, then a CUDA context.
_IMPORT_SECONDS = 10.0
# Loading as people see it on shared disks: 84 to 170 s for 9B models on Kaggle, 18 GB of weights.
_LOAD_BYTES_PER_SECOND = 150e6
# Useful products a second, a third of what the data sheets promise for half precision: T4, A100, H100; CPUs.
_FLOPS = {7: 20e12, 8: 100e12, 9: 300e12}
_CPU_FLOPS = 1e11


@dataclass(frozen=True)
class Speed:
    """``startup_seconds`` until a worker computes; ``seconds_per_work`` for a byte of text on one replica.

    ``is_measured`` tells an earlier run's speed from a guess, ``is_startup_measured`` its start-up; what an earlier
    run did not get to measure is 0 before it is guessed.
    """

    startup_seconds: float
    seconds_per_work: float
    is_measured: bool
    is_startup_measured: bool = False

    def or_guess(self, guess: Speed) -> Speed:
        """With a guess where nothing was measured."""
        return replace(
            self,
            startup_seconds=self.startup_seconds if self.is_startup_measured else guess.startup_seconds,
            seconds_per_work=self.seconds_per_work if self.is_measured else guess.seconds_per_work,
        )


@dataclass(frozen=True)
class Job:
    """A member as the forecast sees it: seconds to start a replica, and seconds of computing on one replica.

    A replica takes ``gpus`` of ``devices`` (UUIDs), or the CPU.  ``first_replicas`` start before any later member,
    up to ``replicas`` where devices are left over.
    """

    startup_seconds: float
    compute_seconds: float
    gpus: int
    replicas: int
    first_replicas: int
    devices: tuple[str, ...]


def guessed_speed(needed: Footprint | None, capability: Capability | None) -> Speed:
    """From the size: two operations per parameter and token, as Kaplan et al. (2020, section 2.1) count them."""
    flops = _FLOPS.get(min(max(capability[0], 7), 9), _CPU_FLOPS) if capability else _CPU_FLOPS
    parameters, size = (needed.weights.parameters, needed.weights.bytes) if needed else (0, 0)
    return Speed(
        startup_seconds=_IMPORT_SECONDS + size / _LOAD_BYTES_PER_SECOND,
        seconds_per_work=2.0 * parameters / BYTES_PER_TOKEN / flops,
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


def total_seconds(jobs: Sequence[Job], capacity: Mapping[str, int]) -> float:
    """When the last of ``jobs`` ends, by the scheduler's own rules.

    Args:
        capacity: how many workers may be on each GPU, by UUID; all GPUs count as equally fast.
    """
    waiting, running = list(jobs), list[_Running]()
    free, now = dict(capacity), 0.0

    def start(member: _Running, reserved: Collection[str] = ()) -> bool:
        """One more replica, if the devices outside of ``reserved`` have room for it."""
        able = [uuid for uuid in member.job.devices if free.get(uuid, 0) and uuid not in reserved]
        if len(able) < member.job.gpus:
            return False
        for uuid in sorted(able, key=lambda uuid: -free[uuid])[: member.job.gpus]:
            free[uuid] -= 1
            member.devices.append(uuid)
        member.ready_at.append(now + member.job.startup_seconds)
        return True

    while waiting or running:
        # Members in their order; one that waits keeps the devices it may use from later ones.
        reserved: set[str] = set()
        for job in list(waiting):
            member, count = _Running(job, job.compute_seconds), max(1, job.first_replicas)
            # The CPU is one device: it takes the replicas of one member at a time.
            if job.gpus or all(one.job.gpus for one in running):
                while len(member.ready_at) < count and start(member, reserved):
                    pass
            if member.ready_at:
                waiting.remove(job)
                running.append(member)
            else:
                reserved |= set(job.devices)
        for one in sorted(running, key=lambda one: -one.left) if not waiting else ():
            while (
                one.job.gpus
                and len(one.ready_at) < one.job.replicas
                and worth_joining(one.left / len(one.ready_at), one.job.startup_seconds)
                and start(one)
            ):
                pass
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
                    free[uuid] += 1
        now = later
    return now


def worth_joining(seconds_left: float, startup_seconds: float) -> bool:
    """Whether one more replica, which first has to start, still takes a good part of what is left."""
    return seconds_left > 2 * startup_seconds
