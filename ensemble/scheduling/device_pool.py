"""Lease GPUs to workers, and lease a GPU again only once its memory is free.

A driver frees memory some time after a process has ended.  So a released device is leased again only when its used
memory is back where it was before its worker, or before the run's first one.  On a desktop's device other programs'
memory may have grown meanwhile: then most of what the worker held must be gone, and the rest be flat for some
seconds.  A device that stays full past the time-out is set aside, and used again only if no other device is left.
Memory is compared instead of process ids, because in a container NVML shows the host's ids.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from ensemble.common.gpus import Device, Telemetry, gpu_users
from ensemble.common.text import gib
from ensemble.scheduling.launchers.base import Launcher

# Drivers keep a little memory on a GPU that was used, and other programs may need a little.
TOLERANCE_BYTES = 256 << 20
SAMPLE_SECONDS = 0.25
# A browser's or compositor's memory grows by some hundred MiB while a worker computes. What a worker holds while
# its process ends is more, or changes.
_MAX_DRIFT_BYTES = 1 << 30
_FLAT_SECONDS = 3.0
_FLAT_BYTES = 64 << 20
# The curve in run.json gets a point when the memory changes by this much, and at least a point per minute.
_CURVE_STEP_BYTES = 16 << 20
_CURVE_STEP_SECONDS = 60.0
# Telemetry is read less often than memory, and its curve gets a point less often.
_TELEMETRY_SECONDS = 1.0
_TELEMETRY_STEP_SECONDS = 30.0
# Reasons for throttling, by the names of ``Telemetry.clock_events``.  Clocks that a user has set do not count, nor
# do idle GPUs.
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
    """Describe how a device was released.

    Attributes:
        seconds: until its memory was free of the worker's (``is_free``), or until the time-out.
        after_seconds: from the run's start to the end of the last worker; None in reports of earlier versions.
    """

    device: str
    seconds: float
    used_bytes: int | None
    is_free: bool
    after_seconds: float | None = None


@dataclass
class _Lease:
    """Remember a leased device's memory, to tell what its workers held from what other programs hold.

    Attributes:
        bytes_before: used when the first of its workers got it.
        most_bytes: the most that was used since.
        flat_since, flat_bytes: since when, and at how many bytes, the used memory is flat.
    """

    bytes_before: int
    most_bytes: int
    flat_since: float = 0.0
    flat_bytes: int = 0

    def look(self, used: int, now: float) -> None:
        """Note a reading of the used memory."""
        self.most_bytes = max(self.most_bytes, used)
        if abs(used - self.flat_bytes) > _FLAT_BYTES:
            self.flat_since, self.flat_bytes = now, used

    def is_gone(self, used: int, now: float, released: float) -> bool:
        """Return whether the memory of the ended workers is free, although other programs may hold more by now.

        Args:
            released: when the last worker ended.
        """
        rest = used - self.bytes_before
        if rest <= TOLERANCE_BYTES:
            return True
        flat_seconds = now - max(self.flat_since, released)
        is_drift = rest <= min(_MAX_DRIFT_BYTES, (self.most_bytes - self.bytes_before) // 2)
        return is_drift and flat_seconds >= _FLAT_SECONDS


@dataclass
class MemoryCurve:
    """Collect a device's used memory over the run, as pairs: seconds since the run's start, and bytes."""

    baseline_bytes: int | None
    points: list[tuple[float, int]] = field(default_factory=list)

    def add(self, seconds: float, used: int) -> None:
        last_seconds, last_used = self.points[-1] if self.points else (-math.inf, 0)
        if abs(used - last_used) >= _CURVE_STEP_BYTES or seconds - last_seconds >= _CURVE_STEP_SECONDS:
            self.points.append((round(seconds, 2), used))


@dataclass(frozen=True)
class TelemetryPoint:
    """Hold a device's telemetry at a time, in seconds since the run's start."""

    seconds: float
    sm_clock_mhz: int | None
    temperature_celsius: int | None
    power_watts: float | None
    clock_events: tuple[str, ...]


@dataclass
class TelemetryCurve:
    """Collect a device's telemetry over the run.

    Attributes:
        seconds: how long the device was watched.
        throttled_seconds: how long it was throttled, for any reason.
        throttled_by: the same by reason; if two reasons overlap, each reason counts in full.
    """

    max_sm_clock_mhz: int | None = None
    max_temperature_celsius: int | None = None
    seconds: float = 0.0
    throttled_seconds: float = 0.0
    throttled_by: dict[str, float] = field(default_factory=dict)
    points: list[TelemetryPoint] = field(default_factory=list)

    def add(self, now: float, passed: float, telemetry: Telemetry) -> None:
        """Add a reading, which counts for the ``passed`` seconds since the last reading."""
        passed = round(passed, 3)
        self.seconds += passed
        self.max_sm_clock_mhz = telemetry.max_sm_clock_mhz
        celsius = telemetry.temperature_celsius
        if celsius is not None:
            self.max_temperature_celsius = max(celsius, self.max_temperature_celsius or celsius)
        reasons = {_THROTTLES[event] for event in telemetry.clock_events if event in _THROTTLES}
        if len(reasons) > 1:
            reasons.discard("hardware slowdown")  # the other reasons are more exact
        if reasons:
            self.throttled_seconds += passed
        for reason in sorted(reasons):
            self.throttled_by[reason] = self.throttled_by.get(reason, 0.0) + passed
        if not self.points or now - self.points[-1].seconds >= _TELEMETRY_STEP_SECONDS:
            point = TelemetryPoint(
                seconds=round(now, 2),
                sm_clock_mhz=telemetry.sm_clock_mhz,
                temperature_celsius=celsius,
                power_watts=telemetry.power_watts,
                clock_events=telemetry.clock_events,
            )
            self.points.append(point)


class DevicePool:
    """Lease the GPUs of a run.

    Args:
        gpus: the GPUs that may be leased, in the inventory's order.
        workers_per_gpu: how many workers may be on a device at the same time.
        release_timeout_seconds: how long the memory of a device's worker may take to be free.

    Attributes:
        hosts: how many machines have CPUs that workers share.
        expects_nodes: whether lost nodes may soon be back.
        max_cpu_workers: how many workers may run on CPUs at the same time; None: as many as their shares allow.
        seen: all devices of the run, also devices that have joined or left during the run.
    """

    hosts = 1
    expects_nodes = False
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
        self._taken = dict.fromkeys(self._gpus, 0)  # places of each device that are taken
        self._releasing: dict[str, float] = {}  # when devices that are not free yet were released
        self._leases: dict[str, _Lease] = {}  # the last of each device whose memory is known
        self._full: set[str] = set()  # devices whose memory was never freed
        self._suspect: set[str] = set()  # devices on which a worker could not start
        self._timeout_seconds = release_timeout_seconds
        self.seen = tuple(gpus)
        self._launcher = launcher
        self._say = say
        self._clock = clock
        self._began = self._sampled_at = self._telemetry_at = clock()
        self._used = launcher.used_memory([*self._gpus]) if gpus else {}
        self.curves = {uuid: MemoryCurve(used) for uuid, used in self._used.items()}
        self.telemetry = {uuid: TelemetryCurve() for uuid in self._gpus}
        self.releases: list[Release] = []

    @property
    def gpus(self) -> tuple[Device, ...]:
        return tuple(self._gpus.values())

    def change(self, joined: Sequence[Device], lost: Collection[str]) -> None:
        """Add devices of new nodes, and remove devices of lost nodes."""
        for uuid in lost:
            self._releasing.pop(uuid, None)
            self._gpus.pop(uuid, None)
        self.seen = tuple({gpu.uuid: gpu for gpu in (*self.seen, *joined)}.values())
        for gpu in joined:
            self._gpus[gpu.uuid] = gpu
            self._taken.setdefault(gpu.uuid, 0)
            self.telemetry.setdefault(gpu.uuid, TelemetryCurve())
            self.curves.setdefault(gpu.uuid, MemoryCurve(gpu.used_bytes))

    def is_releasing(self) -> bool:
        return bool(self._releasing)

    def acquire(
        self,
        count: int,
        allowed: Collection[str],
        preferred: Iterable[Sequence[Device]] = (),
        places: int = 1,
    ) -> tuple[Device, ...]:
        """Lease ``count`` devices of a single node: devices with the fewest workers, in the inventory's order.

        Devices whose memory was never freed, or on which a worker could not start, are leased last, and only if
        none of the allowed devices is in use or being released.

        Args:
            allowed: UUIDs.
            places: how many of the ``workers_per_gpu`` places of each device are leased.
            preferred: groups of devices; the first group that can be leased is leased.

        Returns:
            The devices, in the inventory's order; none if too few are free.
        """
        candidates = [
            uuid
            for uuid in self._gpus
            if uuid in allowed
            and uuid not in self._releasing
            and self._taken[uuid] + places <= self._workers_per_gpu
        ]
        doubtful = self._full | self._suspect
        if doubtful and any(self._taken.get(uuid) or uuid in self._releasing for uuid in allowed):
            candidates = [uuid for uuid in candidates if uuid not in doubtful]
        # Sorting is stable: devices with equally many workers stay in the inventory's order.
        candidates.sort(key=self._taken.__getitem__)
        candidates.sort(key=doubtful.__contains__)
        of_node: dict[str, list[str]] = {}
        for uuid in candidates:
            of_node.setdefault(self._gpus[uuid].node, []).append(uuid)
        choices = [[gpu.uuid for gpu in devices] for devices in preferred]
        choices = [uuids for uuids in choices if {*uuids} <= {*candidates} - doubtful]
        choices += [uuids[:count] for uuids in of_node.values() if len(uuids) >= count]
        if not choices:
            return ()
        leased = tuple(gpu for uuid, gpu in self._gpus.items() if uuid in choices[0])
        for gpu in leased:
            used = self._used.get(gpu.uuid)
            if not self._taken[gpu.uuid] and used is not None:
                self._leases[gpu.uuid] = _Lease(used, used)
            self._taken[gpu.uuid] += places
            self._full.discard(gpu.uuid)
        return leased

    def release(self, devices: Sequence[Device], places: int = 1, is_suspect: bool = False) -> None:
        """Take back the devices of a worker that has ended; a device is free when its memory is free.

        If other workers still use a device, its memory is not watched: nobody can tell whose memory is left.

        Args:
            places: as many as the worker's lease took.
            is_suspect: whether the worker ended before it could compute.  Then its devices are leased last, since
                a device can answer NVML and still fail at every start.
        """
        for gpu in devices:
            self._taken[gpu.uuid] -= places
            if gpu.uuid in self._gpus and not self._taken[gpu.uuid]:
                self._releasing[gpu.uuid] = self._clock()
            if is_suspect:
                self._suspect.add(gpu.uuid)
            else:
                self._suspect.discard(gpu.uuid)
        self._sampled_at = -math.inf  # the next poll reads the memory in any case

    def poll(self) -> None:
        """Read the memory if it is time, and free the devices that are back at their baseline."""
        now = self._clock()
        if not self._gpus or now - self._sampled_at < SAMPLE_SECONDS:
            return
        is_after_release = self._sampled_at == -math.inf
        self._sampled_at = now
        self._used = self._launcher.used_memory([*self._gpus])
        for uuid, used in self._used.items():
            if used is not None:
                self.curves[uuid].add(now - self._began, used)
                if uuid in self._leases:
                    self._leases[uuid].look(used, now)
        if is_after_release or now - self._telemetry_at >= _TELEMETRY_SECONDS:
            for uuid, telemetry in self._launcher.telemetry(list(self.telemetry)).items():
                if telemetry is not None:
                    self.telemetry[uuid].add(now - self._began, now - self._telemetry_at, telemetry)
            self._telemetry_at = now
        for uuid, since in list(self._releasing.items()):
            used, lease, seconds = self._used.get(uuid), self._leases.get(uuid), round(now - since, 3)
            is_gone = lease is not None and used is not None and lease.is_gone(used, now, since)
            is_free = is_gone or self._is_free(uuid)
            if is_free or used is None or seconds >= self._timeout_seconds:
                del self._releasing[uuid]
                after_seconds = round(since - self._began, 3)
                self.releases.append(Release(uuid, seconds, used, is_free, after_seconds))
                log.info("%s released: %s", uuid, self.releases[-1])
                if not is_free:
                    self._leave_out(self._gpus[uuid], used)
        # Memory may still be freed after the time-out.
        self._full -= {uuid for uuid in self._full if self._is_free(uuid)}

    def _leave_out(self, gpu: Device, used: int | None) -> None:
        self._full.add(gpu.uuid)
        problem = " no longer answers; it"
        if used is not None:
            problem = (
                f": {gib(used)} still in use {self._timeout_seconds:g} s after its worker ended, "
                f"{gib(self.curves[gpu.uuid].baseline_bytes or 0)} before the first worker started; "
                f"{gpu_users(gpu)}. The device"
            )
        self._say(f"{gpu.title}{problem} is left out as long as other devices can be used")

    def _is_free(self, uuid: str) -> bool:
        used = self._used.get(uuid)
        baseline = self.curves[uuid].baseline_bytes
        if baseline is None:
            return True  # the device does not report its memory, so there is nothing to wait for
        return used is not None and used <= baseline + TOLERANCE_BYTES
