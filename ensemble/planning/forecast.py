"""Forecast how long members take. PURE.

Speeds come from an earlier run's run.json if there is one that fits.  Otherwise they are guessed from the size of
the model; that is good enough to compare members, and is never shown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    """Hold the speed of a member's replica.

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
class Demand:
    """Say what a model takes in the forecast: seconds to start a replica, and seconds of computing on one replica.

    A replica takes ``gpus`` of ``devices`` (UUIDs), ``places`` on each of them, or ``cpu_share`` of a host's cores.
    """

    startup_seconds: float
    compute_seconds: float
    gpus: int
    replicas: int
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
        # To quantize weights while they are loaded, all of the stored weights are read.
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
    Guesses are in any unit that all share, 0 without a guess; a member of which nothing is known gets None.
    """
    ratios = [measured[name] / guess for name, guess in guessed.items() if guess and measured.get(name)]
    factor = geometric_mean(ratios) if ratios else 1.0
    return {name: measured.get(name) or guess * factor or None for name, guess in guessed.items()}


def total_seconds(demands: Sequence[Demand], capacity: Mapping[str, int], hosts: int = 1) -> float:
    """Return about when the last of ``demands`` is met.

    That is the longest of what each member takes by itself, and of what the members that share devices take
    together: devices that are left over join other members, so that none is idle for long.

    Args:
        capacity: how many workers may be on each GPU, by UUID; all GPUs count as equally fast.
        hosts: machines whose CPUs workers share.
    """
    seconds = 0.0
    for demand in demands:
        sharing = [other for other in demands if bool(other.gpus) == bool(demand.gpus)]
        places = float(hosts)
        if demand.gpus:
            places = sum(capacity.get(uuid, 0) for uuid in demand.devices)
            sharing = [other for other in sharing if set(other.devices) <= set(demand.devices)]
        needed = 0.0
        for other in sharing:
            taken = other.gpus * other.places if other.gpus else other.cpu_share
            needed += taken * (other.startup_seconds + other.compute_seconds)
        alone = demand.startup_seconds + demand.compute_seconds / max(1, demand.replicas)
        seconds = max(seconds, alone, needed / max(places, 1e-9))
    return seconds
