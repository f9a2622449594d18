"""Lease GPUs to workers, and lease a GPU again only once its memory is free.

A driver frees memory some time after a process has ended.  So a released device is leased again only when its used
memory is back where it was before its worker.  On a desktop's device other programs' memory may have grown
meanwhile: after some seconds a little more counts as theirs.  A device that stays full past the time-out is set
aside, and used again only if no other device is left.  Memory is compared instead of process ids, because in a
container NVML shows the host's ids.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Sequence

from ensemble.common.gpus import Device, gpu_users
from ensemble.common.text import gib
from ensemble.scheduling.launchers.base import Launcher

# Drivers keep a little memory on a GPU that was used, and other programs may need a little.
TOLERANCE_BYTES = 256 << 20
SAMPLE_SECONDS = 0.25
# A browser's or compositor's memory grows by some hundred MiB while a worker computes. What is left after so many
# seconds, and is no more than this, counts as theirs.
_GROWTH_BYTES = 1 << 30
_GROWTH_SECONDS = 5.0
log = logging.getLogger(__name__)


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
        self._bytes_before: dict[str, int] = {}  # used when a device was last leased, where it tells
        self._full: set[str] = set()  # devices whose memory was never freed
        self._suspect: set[str] = set()  # devices on which a worker could not start
        self._timeout_seconds = release_timeout_seconds
        self.seen = tuple(gpus)
        self._launcher = launcher
        self._say = say
        self._clock = clock
        self._sampled_at = clock()
        self._used = launcher.used_memory([*self._gpus]) if gpus else {}

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
            self._used[gpu.uuid] = gpu.used_bytes

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
                self._bytes_before[gpu.uuid] = used
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
        """Read the memory if it is time, and free the devices whose workers' memory is gone."""
        now = self._clock()
        if not self._gpus or now - self._sampled_at < SAMPLE_SECONDS:
            return
        self._sampled_at = now
        self._used = self._launcher.used_memory([*self._gpus])
        for gpu in self.gpus:
            if self._used.get(gpu.uuid) is not None:  # its node may not have told yet when it was leased
                self._bytes_before.setdefault(gpu.uuid, gpu.used_bytes)
        for uuid, since in list(self._releasing.items()):
            used, seconds = self._used.get(uuid), round(now - since, 3)
            is_free = self._is_free(uuid, seconds)
            if is_free or used is None or seconds >= self._timeout_seconds:
                del self._releasing[uuid]
                state = "released" if is_free else "not free"
                log.info("%s %s after %.2f s, with %s bytes in use", uuid, state, seconds, used)
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
                f"{gib(self._bytes_before[gpu.uuid])} before it started; "
                f"{gpu_users(gpu)}. The device"
            )
        self._say(f"{gpu.title}{problem} is left out as long as other devices can be used")

    def _is_free(self, uuid: str, seconds: float = 0.0) -> bool:
        """Return whether the device is free ``seconds`` after its last worker ended."""
        used, before = self._used.get(uuid), self._bytes_before.get(uuid)
        if before is None:
            return True  # the device does not report its memory, so there is nothing to wait for
        growth = TOLERANCE_BYTES if seconds < _GROWTH_SECONDS else _GROWTH_BYTES
        return used is not None and used <= before + growth
