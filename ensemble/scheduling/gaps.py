"""Measures how long devices compute nothing between two members."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Gap:
    """``seconds`` from the end of one member's computing on a device ("cpu" for the CPU) to another's beginning."""

    device: str
    after: str
    before: str
    seconds: float


class Gaps:
    """Measures gaps; a device on which another worker computes meanwhile has none."""

    def __init__(self) -> None:
        self.measured: list[Gap] = []
        self._workers: dict[str, tuple[str, Sequence[str]]] = {}  # member and devices, by the worker's name
        self._busy: Counter[str] = Counter()  # how many workers compute on a device
        self._idle_since: dict[str, tuple[str, float]] = {}

    def begin(self, worker: str, member: str, devices: Sequence[str], now: float) -> None:
        """Note that a worker begins a chunk on its devices; only its first chunk counts."""
        if worker in self._workers:
            return
        self._workers[worker] = (member, devices)
        self._busy.update(devices)
        for device in devices:
            after, since = self._idle_since.pop(device, (member, now))
            if after != member:
                self.measured.append(Gap(device, after, member, round(now - since, 3)))

    def end(self, worker: str, now: float) -> None:
        """Note that a worker has computed its last chunk, if it ever had one."""
        member, devices = self._workers.pop(worker, ("", ()))
        self._busy.subtract(devices)
        self._idle_since.update({device: (member, now) for device in devices if not self._busy[device]})
