"""Who holds which GPU, and proof that a GPU is free again before somebody else gets it.

A driver gives memory back some time after a process has gone.  So a device that comes back is watched until its
used memory is at the baseline again, which was taken before the first worker; only then is it leased anew.  A
device that stays full past the time-out is set aside and taken again only where nothing else is left.

Judges by the device's memory and not by process ids: in a container NVML shows the host's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ensemble.devices import Device, processes_on, used_memory

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
        release_timeout_seconds: how long a device may take to come back to its baseline.
        say: takes a sentence for the user.
        clock: the monotonic clock, in seconds.
    """

    def __init__(
        self,
        gpus: Sequence[Device],
        release_timeout_seconds: float,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._gpus = tuple(gpus)
        self._free = list(gpus)
        self._releasing: dict[Device, float] = {}
        self._doubtful: list[Device] = []
        self._timeout_seconds = release_timeout_seconds
        self._say = say
        self._clock = clock
        self._began = clock()
        self._sampled_at = self._began
        self._used = self._ask()
        self.curves = {uuid: MemoryCurve(used) for uuid, used in self._used.items()}
        self.releases: list[Release] = []

    @property
    def is_releasing(self) -> bool:
        """Whether a device is on its way back."""
        return bool(self._releasing)

    def can_take(self, count: int, is_last_resort: bool = False) -> bool:
        """Whether ``count`` devices could be leased now; as a last resort also those that never came free."""
        return len(self._free) + (len(self._doubtful) if is_last_resort else 0) >= count

    def take(self, count: int) -> tuple[Device, ...]:
        """Lease devices, in the inventory's order, those that are known to be free first."""
        chosen = [*self._free, *self._doubtful][:count]
        assert len(chosen) == count
        self._free = [gpu for gpu in self._free if gpu not in chosen]
        self._doubtful = [gpu for gpu in self._doubtful if gpu not in chosen]
        return tuple(gpu for gpu in self._gpus if gpu in chosen)

    def give_back(self, lease: Sequence[Device]) -> None:
        """The worker on these devices has ended; they are free once their memory says so."""
        now = self._clock()
        self._releasing |= dict.fromkeys(lease, now)
        self._sampled_at = float("-inf")  # look at once
        self.poll()

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
            used, baseline = self._used.get(gpu.uuid), self.curves[gpu.uuid].baseline_bytes
            # What the driver does not tell cannot be waited for.
            if used is None or baseline is None or used <= baseline + TOLERANCE_BYTES:
                self._released(gpu, now - since, used, True)
            elif now - since >= self._timeout_seconds:
                self._released(gpu, now - since, used, False)
                self._say(self._stuck(gpu, used, baseline))

    def _released(self, gpu: Device, seconds: float, used: int | None, is_free: bool) -> None:
        del self._releasing[gpu]
        self.releases.append(Release(gpu.uuid, round(seconds, 3), used, is_free))
        log.info("%s released: %s", gpu.uuid, self.releases[-1])
        back = {*self._free, gpu} if is_free else set(self._free)
        self._free = [known for known in self._gpus if known in back]
        if not is_free:
            self._doubtful.append(gpu)

    def _stuck(self, gpu: Device, used: int, baseline: int) -> str:
        holders = [
            f"process {pid}{f' ({name})' if name else ''}{f' with {_gib(size)}' if size else ''}"
            for pid, name, size in processes_on(gpu.uuid)
        ]
        return (
            f"{gpu.name} ({gpu.uuid}): {_gib(used)} are still used {self._timeout_seconds:g} s after its worker "
            f"ended, {_gib(baseline)} were before the first one; NVML shows "
            f"{', '.join(holders) if holders else 'no process'} there. "
            "The device is left out as long as there is another"
        )

    def _ask(self) -> dict[str, int | None]:
        return used_memory([gpu.uuid for gpu in self._gpus]) if self._gpus else {}


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
