"""PURE: how long members take, and which way of sharing the GPUs ends first.

Speeds come from an earlier run's run.json where there is one that fits; else they are guessed from the size of
the model, which is good enough to weigh a second load against a shared table, and is never shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A fresh Python with torch and transformers, then a CUDA context.
_IMPORT_SECONDS = 10.0
# Loading as people see it on shared disks: 84 to 170 s for 9B models on Kaggle, 18 GB of weights.
_LOAD_BYTES_PER_SECOND = 150e6
# Useful products a second, a third of what the data sheets promise for half precision: T4, A100, H100; CPUs.
_FLOPS = {7: 20e12, 8: 100e12, 9: 300e12}
_CPU_FLOPS = 1e11
_BYTES_PER_TOKEN = 4.0


@dataclass(frozen=True)
class Speed:
    """``startup_seconds`` until a worker computes; ``seconds_per_work`` for a byte of text on one replica.

    ``is_measured`` tells an earlier run's speed from a guess.
    """

    startup_seconds: float
    seconds_per_work: float
    is_measured: bool


@dataclass(frozen=True)
class Job:
    """A member as the forecast sees it: seconds to start a replica, and seconds of computing on one replica.

    ``first_replicas`` start before any later member, up to ``replicas`` where devices are left over.
    """

    startup_seconds: float
    compute_seconds: float
    gpus: int
    replicas: int
    first_replicas: int


def measured_speeds(document: Mapping[str, Any], gpu_names: Sequence[str]) -> dict[str, Speed]:
    """Speeds by member name from a run.json; only of complete members, and of runs on GPUs of these names."""
    try:
        if {gpu["name"] for gpu in document["devices"] if gpu["uuid"] != "cpu"} != set(gpu_names):
            return {}
        return {
            member["name"]: Speed(
                startup_seconds=max(one["start_seconds"] + one["load_seconds"] for one in member["workers"]),
                seconds_per_work=sum(one["predict_seconds"] for one in member["workers"]) / member["work"],
                is_measured=True,
            )
            for member in document["members"]
            if member["status"] == "complete" and member["work"] > 0
        }
    except (KeyError, TypeError, ValueError):  # of another version, or by another hand
        return {}


def guessed_speed(parameters: int, weight_bytes: int, capability: tuple[int, int] | None) -> Speed:
    """From the size: two operations per parameter and token, as Kaplan et al. (2020, section 2.1) count them."""
    flops = _FLOPS.get(min(max(capability[0], 7), 9), _CPU_FLOPS) if capability else _CPU_FLOPS
    return Speed(
        startup_seconds=_IMPORT_SECONDS + weight_bytes / _LOAD_BYTES_PER_SECOND,
        seconds_per_work=2.0 * parameters / _BYTES_PER_TOKEN / flops,
        is_measured=False,
    )


@dataclass
class _Running:
    """A member in the forecast: ``left`` seconds of one replica's computing, replicas by when they are ready."""

    job: Job
    left: float
    ready_at: list[float]

    def rate(self, now: float) -> int:
        return sum(ready <= now for ready in self.ready_at)


def total_seconds(jobs: Sequence[Job], gpus: int) -> float:
    """When the last of ``jobs`` ends on ``gpus`` equal devices, by the scheduler's own rules."""
    waiting, running = list(jobs), list[_Running]()
    now, free = 0.0, gpus
    while waiting or running:
        blocked: set[bool] = set()
        for job in list(waiting):
            if (job.gpus > 0) in blocked or not _can_start(job, free, running):
                blocked.add(job.gpus > 0)  # later members of the kind do not overtake
                continue
            most = free // job.gpus if job.gpus else job.replicas
            count = max(1, min(job.first_replicas, most))
            free -= count * job.gpus
            waiting.remove(job)
            running.append(_Running(job, job.compute_seconds, [now + job.startup_seconds] * count))
        for one in sorted(running, key=lambda one: -one.left) if not waiting else ():
            free -= _join(one, free, now)
        if not running:  # what is left fits nowhere; the plan has said so
            return now
        events = [ready for one in running for ready in one.ready_at if ready > now]
        events += [now + one.left / one.rate(now) for one in running if one.rate(now)]
        later = min(events)
        for one in running:
            one.left -= (later - now) * one.rate(now)
        now = later
        for one in [one for one in running if one.left <= 1e-9 and one.rate(now)]:
            running.remove(one)
            free += len(one.ready_at) * one.job.gpus
    return now


def _join(member: _Running, free: int, now: float) -> int:
    """Replicas that start beside those that run; the GPUs they take."""
    job, before = member.job, len(member.ready_at)
    while (
        job.gpus
        and (len(member.ready_at) - before + 1) * job.gpus <= free
        and len(member.ready_at) < job.replicas
        and worth_joining(member.left / len(member.ready_at), job.startup_seconds)
    ):
        member.ready_at.append(now + job.startup_seconds)
    return (len(member.ready_at) - before) * job.gpus


def _can_start(job: Job, free: int, running: Sequence[_Running]) -> bool:
    """Whether there is room: the CPU is one device, which takes one member at a time."""
    return job.gpus <= free if job.gpus else all(one.job.gpus for one in running)


def worth_joining(seconds_left: float, startup_seconds: float) -> bool:
    """Whether one more replica, which first has to start, still takes a good part of what is left."""
    return seconds_left > 2 * startup_seconds
