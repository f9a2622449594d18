"""Who has which GPU, and proof that a GPU is free again before somebody else gets it.

A driver gives memory back some time after a process has gone.  So a device that comes back is watched until its
used memory is at the baseline again, which was taken before the first worker; only then is it leased anew.  A
device that stays full past the time-out is set aside and taken again only where nothing else is left.  What counts
is the device's memory and not process ids: in a container NVML shows the host's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ensemble.common.gpus import Device, Telemetry, gpu_users
from ensemble.common.text import gib
from ensemble.scheduling.launchers.base import Launcher

# Drivers keep a little for themselves once a GPU has been used, and other programs come and go.
TOLERANCE_BYTES = 256 << 20
SAMPLE_SECONDS = 0.25
# The curve in run.json gets a point when the memory moves by this much, and now and then in between.
_CURVE_STEP_BYTES = 16 << 20
_CURVE_STEP_SECONDS = 60.0
# How GPUs are doing is asked more seldom than for their memory; and the curve of it gets a point when the reasons
# change for which a clock is lowered, unless there has just been one: they can change all the time.
_TELEMETRY_SECONDS = 1.0
_TELEMETRY_STEP_SECONDS = 10.0
# Why a GPU computes slower than it could, by the names of ``Telemetry.clock_events``.  Clocks that somebody has set
# are not throttled, nor is a GPU that idles.
_THROTTLES = {
    "sw_thermal_slowdown": "thermal",
    "hw_thermal_slowdown": "thermal",
    "sw_power_cap": "power cap",
    "hw_power_brake_slowdown": "power brake",
    "hw_slowdown": "hardware slowdown",
}
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Release:
    """How a device came back: ``seconds`` until its memory was at the baseline, or until nobody waited longer.

    ``used_bytes`` is what was used then; ``is_free`` whether that was the baseline.  ``after_seconds``: when its
    last worker had ended, since the run's start; None in reports of earlier versions.
    """

    device: str
    seconds: float
    used_bytes: int | None
    is_free: bool
    after_seconds: float | None = None


@dataclass
class MemoryCurve:
    """A device's used memory over the run: pairs of seconds since its start and bytes."""

    baseline_bytes: int | None
    points: list[tuple[float, int]] = field(default_factory=list)

    def add(self, seconds: float, used: int) -> None:
        last_seconds, last_used = self.points[-1] if self.points else (-math.inf, 0)
        if abs(used - last_used) >= _CURVE_STEP_BYTES or seconds - last_seconds >= _CURVE_STEP_SECONDS:
            self.points.append((round(seconds, 2), used))


@dataclass(frozen=True)
class TelemetryPoint:
    """How a device was doing so many seconds after the run's start."""

    seconds: float
    sm_clock_mhz: int | None
    temperature_celsius: int | None
    power_watts: float | None
    clock_events: tuple[str, ...]


@dataclass
class TelemetryCurve:
    """How a device was doing over the run.

    Attributes:
        seconds: for how long it was watched.
        throttled_seconds: for how long of these it was throttled, for any reason.
        throttled_by: the same by reason; of two at the same time each has all of it.
        throttled_clock_mhz: the mean of its SMs' clock meanwhile; None where it was not, or does not tell.
    """

    max_sm_clock_mhz: int | None = None
    max_temperature_celsius: int | None = None
    seconds: float = 0.0
    throttled_seconds: float = 0.0
    throttled_by: dict[str, float] = field(default_factory=dict)
    throttled_clock_mhz: float | None = None
    points: list[TelemetryPoint] = field(default_factory=list)

    def add(self, now: float, passed: float, seen: Telemetry) -> None:
        """What was seen ``now``, and has been so for the seconds that have ``passed`` since the last look."""
        self.max_sm_clock_mhz = seen.max_sm_clock_mhz
        known = [one for one in (self.max_temperature_celsius, seen.temperature_celsius) if one is not None]
        self.max_temperature_celsius = max(known, default=None)
        self.seconds = round(self.seconds + passed, 3)
        if reasons := {_THROTTLES[event] for event in seen.clock_events if event in _THROTTLES}:
            if len(reasons) > 1:
                reasons.discard("hardware slowdown")  # of which the others are the kinds
            for reason in sorted(reasons):
                self.throttled_by[reason] = round(self.throttled_by.get(reason, 0.0) + passed, 3)
            before, self.throttled_seconds = self.throttled_seconds, round(self.throttled_seconds + passed, 3)
            if seen.sm_clock_mhz is not None and self.throttled_seconds:
                # By the rounded seconds, so that the shares add up to 1.
                cycles = before * (self.throttled_clock_mhz or 0.0)
                cycles += (self.throttled_seconds - before) * seen.sm_clock_mhz
                self.throttled_clock_mhz = round(cycles / self.throttled_seconds, 1)
        last = self.points[-1] if self.points else None
        is_news = last is None or last.clock_events != seen.clock_events
        since = math.inf if last is None else now - last.seconds
        if since >= (_TELEMETRY_STEP_SECONDS if is_news else _CURVE_STEP_SECONDS):
            facts = seen.sm_clock_mhz, seen.temperature_celsius, seen.power_watts, seen.clock_events
            self.points.append(TelemetryPoint(round(now, 2), *facts))


class DevicePool:
    """The GPUs of a run.

    Args:
        gpus: those that may be leased, in the inventory's order.
        workers_per_gpu: how many workers may be on a device at the same time.
        release_timeout_seconds: how long a device may take to come back to its baseline.
        say: takes a sentence for the user.
        clock: the run's, in seconds.
    """

    def __init__(
        self,
        gpus: Sequence[Device],
        workers_per_gpu: int,
        release_timeout_seconds: float,
        launcher: Launcher,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._gpus = tuple(gpus)
        self._workers_per_gpu = workers_per_gpu
        self._workers = dict.fromkeys(gpus, 0)
        self._releasing: dict[Device, float] = {}
        self._doubtful: set[Device] = set()  # never came free
        self._suspect: set[Device] = set()  # a worker could not start there
        self._timeout_seconds = release_timeout_seconds
        self._launcher = launcher
        self._say = say
        self._clock = clock
        self._began = self._sampled_at = clock()
        self._used = self._sample()
        self.curves = {uuid: MemoryCurve(used) for uuid, used in self._used.items()}
        self._telemetry_at, self._telemetry_due = self._began, self._began + _TELEMETRY_SECONDS
        self.telemetry = {gpu.uuid: TelemetryCurve() for gpu in self._gpus}
        self.releases: list[Release] = []

    def is_releasing(self, among: Collection[str] | None = None) -> bool:
        """Whether a device is on its way back; of these UUIDs, or of all."""
        return any(among is None or gpu.uuid in among for gpu in self._releasing)

    def acquire(
        self,
        count: int,
        allowed: Collection[str],
        is_last_resort: bool = False,
        preferred: Sequence[Sequence[Device]] = (),
    ) -> tuple[Device, ...]:
        """Lease so many devices: those known to be free first, then those with fewer workers, then in order.

        Args:
            allowed: UUIDs.
            is_last_resort: also those whose memory never came free, and those on which a worker could not start.
            preferred: choices to be made if they can, the first of them that can.

        Returns:
            The devices, in the inventory's order; none where there are not so many.
        """
        doubts = self._doubtful | self._suspect
        usable = [
            gpu
            for gpu in self._gpus
            if gpu.uuid in allowed
            and gpu not in self._releasing
            and self._workers[gpu] < self._workers_per_gpu
            and (is_last_resort or gpu not in doubts)
        ]
        if len(usable) < count:
            return ()
        by_use = sorted(usable, key=lambda gpu: (gpu in doubts, self._workers[gpu]))
        sound = set(usable) - doubts
        choices = (wanted for wanted in preferred if len(wanted) == count and set(wanted) <= sound)
        chosen = next(choices, by_use[:count])
        for gpu in chosen:
            self._workers[gpu] += 1
        self._doubtful -= set(chosen)
        return tuple(gpu for gpu in self._gpus if gpu in chosen)

    def release(self, devices: Sequence[Device], is_suspect: bool = False) -> None:
        """The worker on these devices has ended; a device is free once its memory says so.

        What a worker leaves on a device that others still use cannot be told from theirs: it counts as gone.

        Args:
            is_suspect: it ended before it could compute: the devices are then taken last, since one can answer
                NVML and fail at every start.
        """
        (self._suspect.update if is_suspect else self._suspect.difference_update)(devices)
        for gpu in devices:
            self._workers[gpu] -= 1
            if not self._workers[gpu]:
                self._releasing[gpu] = self._clock()
        self._sampled_at = self._telemetry_due = -math.inf  # look at once
        self.poll()

    def poll(self) -> None:
        """Look at the memory if it is time, and free the devices that are back at their baseline."""
        now = self._clock()
        if not self._gpus or now - self._sampled_at < SAMPLE_SECONDS:
            return
        self._sampled_at = now
        self._used = self._sample()
        for uuid, used in self._used.items():
            if used is not None:
                self.curves[uuid].add(now - self._began, used)
        if now >= self._telemetry_due:
            passed, self._telemetry_at = now - self._telemetry_at, now
            self._telemetry_due = now + _TELEMETRY_SECONDS
            for uuid, seen in self._launcher.telemetry(list(self.telemetry)).items():
                if seen is not None:
                    self.telemetry[uuid].add(now - self._began, passed, seen)
        for gpu, since in list(self._releasing.items()):
            used, is_free, seconds = self._used.get(gpu.uuid), self._is_back(gpu), now - since
            if not is_free and used is not None and seconds < self._timeout_seconds:
                continue
            del self._releasing[gpu]
            after = round(since - self._began, 3)
            self.releases.append(Release(gpu.uuid, round(seconds, 3), used, is_free, after))
            log.info("%s released: %s", gpu.uuid, self.releases[-1])
            if is_free:
                continue
            self._doubtful.add(gpu)
            what = " no longer answers; it"
            if used is not None:
                what = (
                    f": {gib(used)} still in use {self._timeout_seconds:g} s after its worker ended, "
                    f"{gib(self.curves[gpu.uuid].baseline_bytes or 0)} before the first one started; NVML shows "
                    f"{gpu_users(gpu.uuid)} there. The device"
                )
            self._say(f"{gpu.name} ({gpu.uuid}){what} is left out as long as there is another")
        # A late release is still one.
        self._doubtful -= {gpu for gpu in self._doubtful if self._is_back(gpu)}

    def _is_back(self, gpu: Device) -> bool:
        used, baseline = self._used.get(gpu.uuid), self.curves[gpu.uuid].baseline_bytes
        if baseline is None:
            return True  # what the driver never told cannot be waited for
        return used is not None and used <= baseline + TOLERANCE_BYTES

    def _sample(self) -> dict[str, int | None]:
        return self._launcher.used_memory([gpu.uuid for gpu in self._gpus]) if self._gpus else {}
