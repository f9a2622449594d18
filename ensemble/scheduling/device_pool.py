"""Who holds which GPU, and proof that a GPU is free again before somebody else gets it.

A driver gives memory back some time after a process has gone.  So a device that comes back is watched until its
used memory is at the baseline again, which was taken before the first worker; only then is it leased anew.  A
device that stays full past the time-out is set aside and taken again only where nothing else is left.

Judges by the device's memory and not by process ids: in a container NVML shows the host's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from ensemble.common.gpus import Device, gpu_users, used_memory
from ensemble.common.text import gib

# Drivers keep a little for themselves once a GPU has been used, and other programs come and go.
TOLERANCE_BYTES = 256 << 20
SAMPLE_SECONDS = 0.25
# The curve in run.json gets a point when the memory moves by this much, and now and then in between.
_CURVE_STEP_BYTES = 16 << 20
_CURVE_STEP_SECONDS = 60.0
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Release:
    """How a device came back: ``seconds`` until its memory was at the baseline, or until nobody waited longer.

    ``used_bytes`` is what was used then; ``is_free`` whether that was the baseline.
    """

    device: str
    seconds: float
    used_bytes: int | None
    is_free: bool


@dataclass
class MemoryCurve:
    """A device's used memory over the run: pairs of seconds since its start and bytes."""

    baseline_bytes: int | None
    points: list[tuple[float, int]] = field(default_factory=list)

    def add(self, seconds: float, used: int) -> None:
        if self.points:
            last_seconds, last_used = self.points[-1]
            near = abs(used - last_used) < _CURVE_STEP_BYTES
            if near and seconds - last_seconds < _CURVE_STEP_SECONDS:
                return
        self.points.append((round(seconds, 2), used))


class Leases:
    """The GPUs of a run.

    Args:
        gpus: those that may be leased, in the inventory's order.
        workers_per_gpu: how many workers may be on a device at the same time.
        release_timeout_seconds: how long a device may take to come back to its baseline.
        say: takes a sentence for the user.
        clock: the monotonic clock, in seconds.
    """

    def __init__(
        self,
        gpus: Sequence[Device],
        workers_per_gpu: int,
        release_timeout_seconds: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = tuple(gpus)
        self._workers_per_gpu = workers_per_gpu
        self._workers = dict.fromkeys(gpus, 0)
        self._releasing: dict[Device, float] = {}
        self._doubtful: set[Device] = set()
        self._suspect: set[Device] = set()
        self._timeout_seconds = release_timeout_seconds
        self._say = say
        self._clock = clock
        self._began = clock()
        self._sampled_at = self._began
        self._used = self._ask()
        self.curves = {uuid: MemoryCurve(used) for uuid, used in self._used.items()}
        self.releases: list[Release] = []

    def is_releasing(self, among: Collection[str] | None = None) -> bool:
        """Whether a device is on its way back; of these UUIDs, or of all."""
        return any(among is None or gpu.uuid in among for gpu in self._releasing)

    def can_take(self, count: int, allowed: Collection[str], is_last_resort: bool = False) -> bool:
        """Whether ``count`` of the ``allowed`` UUIDs could be leased now.

        As a last resort also those whose memory never came free, and those on which a worker could not start.
        """
        return len(self._choose(count, allowed, is_last_resort)) == count

    def take(
        self,
        count: int,
        allowed: Collection[str],
        is_last_resort: bool = False,
        preferred: Sequence[Sequence[Device]] = (),
    ) -> tuple[Device, ...]:
        """Lease devices: those that are known to be free first, then those with fewer workers, then in order.

        Args:
            preferred: choices to be made if they can, the first of them that can.
        """
        chosen = self._choose(count, allowed, is_last_resort)
        for wanted in preferred:
            uuids = {gpu.uuid for gpu in wanted} & set(allowed)
            if len(uuids) == count and len(found := self._choose(count, uuids, False)) == count:
                chosen = found
                break
        assert len(chosen) == count
        for gpu in chosen:
            self._workers[gpu] += 1
        self._doubtful -= set(chosen)
        return tuple(gpu for gpu in self._gpus if gpu in chosen)

    def give_back(self, lease: Sequence[Device], is_suspect: bool = False) -> None:
        """The worker on these devices has ended; a device is free once its memory says so.

        Args:
            is_suspect: it ended before it could compute.  The devices are then taken last: one can answer NVML
                and fail at every start.

        What a worker leaves on a device that others still use cannot be told from theirs: its place there is
        free at once.
        """
        now = self._clock()
        (self._suspect.update if is_suspect else self._suspect.difference_update)(lease)
        for gpu in lease:
            self._workers[gpu] -= 1
            if not self._workers[gpu]:
                self._releasing[gpu] = now
        self._sampled_at = float("-inf")  # look at once
        self.poll()

    def _choose(self, count: int, allowed: Collection[str], is_last_resort: bool) -> list[Device]:
        usable = [
            gpu
            for gpu in self._gpus
            if gpu.uuid in allowed
            and gpu not in self._releasing
            and self._workers[gpu] < self._workers_per_gpu
            and (is_last_resort or gpu not in self._doubtful | self._suspect)
        ]
        doubts = self._doubtful | self._suspect
        return sorted(usable, key=lambda gpu: (gpu in doubts, self._workers[gpu]))[:count]

    def poll(self) -> None:
        """Look at the memory if it is time, and free the devices that are back at their baseline."""
        now = self._clock()
        if not self._gpus or now - self._sampled_at < SAMPLE_SECONDS:
            return
        self._sampled_at = now
        self._used = self._ask()
        for uuid, used in self._used.items():
            if used is not None:
                self.curves[uuid].add(now - self._began, used)
        for gpu, since in list(self._releasing.items()):
            used = self._used.get(gpu.uuid)
            if self._is_back(gpu):
                self._released(gpu, now - since, used, True)
            elif used is None:
                self._released(gpu, now - since, None, False)
                self._say(
                    f"{gpu.name} ({gpu.uuid}) no longer answers; it is left out as long as there is another"
                )
            elif now - since >= self._timeout_seconds:
                self._released(gpu, now - since, used, False)
                self._say(self._stuck(gpu, used or 0, self.curves[gpu.uuid].baseline_bytes or 0))

        # A late release is still one.
        self._doubtful -= {gpu for gpu in self._doubtful if self._is_back(gpu)}

    def _is_back(self, gpu: Device) -> bool:
        used, baseline = self._used.get(gpu.uuid), self.curves[gpu.uuid].baseline_bytes
        if baseline is None:
            return True  # what the driver never told cannot be waited for
        return used is not None and used <= baseline + TOLERANCE_BYTES

    def _released(self, gpu: Device, seconds: float, used: int | None, is_free: bool) -> None:
        del self._releasing[gpu]
        self.releases.append(Release(gpu.uuid, round(seconds, 3), used, is_free))
        log.info("%s released: %s", gpu.uuid, self.releases[-1])
        if not is_free:
            self._doubtful.add(gpu)

    def _stuck(self, gpu: Device, used: int, baseline: int) -> str:
        return (
            f"{gpu.name} ({gpu.uuid}): {gib(used)} still in use {self._timeout_seconds:g} s after its worker "
            f"ended, {gib(baseline)} before the first one started; NVML shows {gpu_users(gpu.uuid)} there. "
            "The device is left out as long as there is another"
        )

    def _ask(self) -> dict[str, int | None]:
        return used_memory([gpu.uuid for gpu in self._gpus]) if self._gpus else {}
