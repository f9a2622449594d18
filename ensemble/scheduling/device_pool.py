"""Which worker has which GPU, and proof that a GPU is free again before another worker gets it.

A driver gives memory back some time after a process has gone.  So a device that comes back is watched until its
used memory is at the baseline again, which was taken before the first worker; only then is it leased anew.  A
device that stays full past the time-out is set aside and taken again only if nothing else is left.  What counts is
the device's memory and not process ids: in a container NVML shows the host's.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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

    Attributes:
        hosts: the machines whose CPUs workers share.
        max_cpu_workers: how many may be there at a time; None: as many as their shares leave room for.
    """

    hosts = 1
    max_cpu_workers: int | None = None

    def __init__(
        self,
        gpus: Sequence[Device],
        workers_per_gpu: int,
        release_timeout_seconds: float,
        launcher: Launcher,
        say: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self._gpus = {gpu.uuid: gpu for gpu in gpus}
        self._workers_per_gpu = workers_per_gpu
        self._places = dict.fromkeys(self._gpus, 0)  # that are taken
        self._releasing: dict[str, float] = {}  # since when devices come back
        self._doubtful: set[str] = set()  # devices that never came free
        self._suspect: set[str] = set()  # devices on which a worker could not start
        self._timeout_seconds = release_timeout_seconds
        self.seen = tuple(gpus)  # with those that have come since, and those that have gone
        self._launcher = launcher
        self._say = say
        self._clock = clock
        self._began = self._sampled_at = clock()
        self._used = self._sample()
        self.curves = {uuid: MemoryCurve(used) for uuid, used in self._used.items()}
        self._telemetry_at, self._telemetry_due = self._began, self._began + _TELEMETRY_SECONDS
        self.telemetry = {uuid: TelemetryCurve() for uuid in self._gpus}
        self.releases: list[Release] = []

    @property
    def gpus(self) -> tuple[Device, ...]:
        """The devices that have not gone."""
        return tuple(self._gpus.values())

    def change(self, joined: Sequence[Device], lost: Collection[str]) -> None:
        """Add devices that have come, and remove those that have gone for good with their nodes."""
        for uuid in lost:
            self._releasing.pop(uuid, None)
            self._gpus.pop(uuid, None)
        self.seen = tuple({gpu.uuid: gpu for gpu in (*self.seen, *joined)}.values())
        for gpu in joined:
            self._gpus[gpu.uuid] = gpu
            self._places.setdefault(gpu.uuid, 0)
            self.telemetry[gpu.uuid] = TelemetryCurve()
            self.curves[gpu.uuid] = MemoryCurve(gpu.used_bytes)

    def is_releasing(self, among: Collection[str] | None = None) -> bool:
        """Return whether a device is on its way back; of these UUIDs, or of all."""
        return any(among is None or uuid in among for uuid in self._releasing)

    def is_in_use(self, among: Collection[str]) -> bool:
        """Return whether a worker is on any device of these UUIDs."""
        return any(self._places[uuid] for uuid in among)

    def acquire(
        self,
        count: int,
        allowed: Collection[str],
        is_last_resort: bool = False,
        preferred: Iterable[Sequence[Device]] = (),
        places: int = 1,
    ) -> tuple[Device, ...]:
        """Lease so many devices of one node: those with fewer workers first, then in the inventory's order.

        Args:
            allowed: UUIDs.
            places: on each of them, of the ``workers_per_gpu``.
            is_last_resort: take, after all others, also those whose memory never came free, and those on which a
                worker could not start.
            preferred: choices; the first that can be made is made.

        Returns:
            The devices, in the inventory's order; none if there are not so many.
        """
        sound: list[tuple[int, int, Device]] = []
        doubtful: list[tuple[int, int, Device]] = []
        for number, (uuid, gpu) in enumerate(self._gpus.items()):
            taken = self._places[uuid]
            if uuid in allowed and uuid not in self._releasing and taken + places <= self._workers_per_gpu:
                is_doubtful = uuid in self._doubtful or uuid in self._suspect
                (doubtful if is_doubtful else sound).append((taken, number, gpu))
        of_node: dict[str, list[tuple[int, Device]]] = {}
        for _, number, gpu in [*sorted(sound), *(sorted(doubtful) if is_last_resort else [])]:
            of_node.setdefault(gpu.node, []).append((number, gpu))
        choice = next((gpus[:count] for gpus in of_node.values() if len(gpus) >= count), [])
        if not choice:
            return ()
        numbers = {gpu.uuid: number for _, number, gpu in sound}
        for wanted in preferred:
            if len(wanted) == count and all(gpu.uuid in numbers for gpu in wanted):
                choice = [(numbers[gpu.uuid], gpu) for gpu in wanted]
                break
        leased = tuple(gpu for _, gpu in sorted(choice))
        for gpu in leased:
            self._places[gpu.uuid] += places
            self._doubtful.discard(gpu.uuid)
        return leased

    def could_acquire(
        self, count: int, allowed: Collection[str], places: int, returned: Mapping[Device, int]
    ) -> bool:
        """Return whether so many devices could be leased once ``returned`` places on each are free."""
        able = [
            gpu
            for uuid, gpu in self._gpus.items()
            if uuid in allowed and self._places[uuid] - returned.get(gpu, 0) + places <= self._workers_per_gpu
        ]
        return len(able) >= count

    def release(self, devices: Sequence[Device], places: int = 1, is_suspect: bool = False) -> None:
        """Take the devices of a worker back that has ended; a device is free once its memory says so.

        What a worker leaves on a device that others still use cannot be told from theirs: it counts as gone.

        Args:
            places: as they were acquired.
            is_suspect: it ended before it could compute: the devices are then taken last, since one can answer
                NVML and fail at every start.
        """
        uuids = {gpu.uuid for gpu in devices}
        if is_suspect:
            self._suspect |= uuids
        else:
            self._suspect -= uuids
        for uuid in uuids:
            self._places[uuid] -= places
            if uuid in self._gpus and not self._places[uuid]:
                self._releasing[uuid] = self._clock()
        self._sampled_at = self._telemetry_due = -math.inf  # the next poll looks, whenever it is

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
        for uuid, since in list(self._releasing.items()):
            used, is_free, seconds = self._used.get(uuid), self._is_back(uuid), now - since
            if not is_free and used is not None and seconds < self._timeout_seconds:
                continue
            del self._releasing[uuid]
            after = round(since - self._began, 3)
            self.releases.append(Release(uuid, round(seconds, 3), used, is_free, after))
            log.info("%s released: %s", uuid, self.releases[-1])
            if is_free:
                continue
            self._doubtful.add(uuid)
            gpu = self._gpus[uuid]
            what = " no longer answers; it"
            if used is not None:
                what = (
                    f": {gib(used)} still in use {self._timeout_seconds:g} s after its worker ended, "
                    f"{gib(self.curves[uuid].baseline_bytes or 0)} before the first one started; "
                    f"{gpu_users(gpu)}. The device"
                )
            self._say(f"{gpu.title}{what} is left out as long as there is another")
        # A late release is still one.
        self._doubtful -= {uuid for uuid in self._doubtful if self._is_back(uuid)}

    def _is_back(self, uuid: str) -> bool:
        used, baseline = self._used.get(uuid), self.curves[uuid].baseline_bytes
        if baseline is None:
            return True  # what the driver never told cannot be waited for
        return used is not None and used <= baseline + TOLERANCE_BYTES

    def _sample(self) -> dict[str, int | None]:
        return self._launcher.used_memory([*self._gpus]) if self._gpus else {}
