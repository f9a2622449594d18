"""Which cores of this machine a worker gets to itself, where several workers share its CPUs.

A core belongs to one worker of all runs on the machine: it is held by the name of a socket, which the kernel takes
back however its holder ends.  Neighbours come first, so that a worker's threads share caches, and one NUMA node
where one has enough: memory of another node is slow.  Sources: unix(7) on abstract names, the kernel's
"sysfs-devices-system-cpu" and "sysfs-devices-node".
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from ensemble.common.host import own_groups, threads_of, usable_cpus

_CPUS = Path("/sys/devices/system/cpu")
# How many threads a process computes with, for all libraries that have a say in it.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS")


class Cores:
    """Those of a worker, until they are closed.

    Args:
        share: of what a process may use of this machine.

    Attributes:
        numbers: its own ones; empty: the system chooses, as where others have them all, or where a container may
            use a part of all cores' time.
        may_hold: whether it could have some, if others had none.
        environment: what tells a process how many threads there are to be.
    """

    def __init__(self, share: float) -> None:
        self._held: list[socket.socket] = []
        self.numbers: tuple[int, ...] = ()
        self.may_hold = False
        self.environment: dict[str, str] = {}
        if not 0 < share <= 1:
            return
        allowed, limit = os.sched_getaffinity(0), own_groups("cpu").cpu_limit()
        is_limited = limit is not None and limit < len(allowed)
        # One with everything has as many threads as its libraries take by themselves: one for each core they see,
        # whatever the container's limit is.
        if share == 1 and (not is_limited or _THREADS[0] in os.environ):
            return
        count = threads_of(usable_cpus(), share)
        self.environment = dict.fromkeys(_THREADS, str(count))
        if share == 1 or is_limited:
            return
        self.may_hold = True
        nodes = [list(found) for _, found in groupby(sorted((_place(one), one) for one in allowed), _node)]
        for candidates in (*nodes, [one for found in nodes for one in found]):
            if len(candidates) >= count and self._hold([number for _, number in candidates], count):
                return

    def _hold(self, candidates: list[int], count: int) -> bool:
        for number in candidates:
            own = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
            try:
                own.bind(f"\0ensemble-core-{number}")
            except OSError:
                own.close()
                continue
            self._held.append(own)
            self.numbers = (*self.numbers, number)
            if len(self.numbers) == count:
                return True
        self.close()
        return False

    @contextlib.contextmanager
    def inherited(self) -> Iterator[None]:
        """Processes that this thread starts meanwhile run on these cores alone."""
        before = os.sched_getaffinity(0)
        if self.numbers:
            os.sched_setaffinity(0, self.numbers)
        try:
            yield
        finally:
            if self.numbers:
                os.sched_setaffinity(0, before)

    def close(self) -> None:
        for one in self._held:
            one.close()
        self._held, self.numbers = [], ()


def layout() -> list[int]:
    """How many CPUs this process may use; how many NUMA nodes, packages and cores these are of."""
    places = [_place(cpu) for cpu in os.sched_getaffinity(0)]
    return [len(places), *(len({one[: 1 + part] for one in places}) for part in range(3))]


def _place(cpu: int) -> tuple[int, int, int]:
    """Its NUMA node, and within it its package and core: two threads of a core have the same."""
    folder = _CPUS / f"cpu{cpu}"
    node = next((int(one.name[4:]) for one in folder.glob("node[0-9]*")), 0)
    numbers = []
    for name in ("physical_package_id", "core_id"):
        try:
            numbers.append(int((folder / "topology" / name).read_text(encoding="ascii")))
        except (OSError, ValueError):
            numbers.append(0)
    return node, numbers[0], numbers[1]


def _node(found: tuple[tuple[int, int, int], int]) -> int:
    return found[0][0]
