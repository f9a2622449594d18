"""For how long a device computes nothing between two members: the price of a process for each."""

from __future__ import annotations

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
    """Measures them; a device on which somebody else computes meanwhile has none."""

    def __init__(self) -> None:
        self.found: list[Gap] = []
        self._workers: dict[int, tuple[str, Sequence[str]]] = {}
        self._idle_since: dict[str, tuple[str, float]] = {}

    def begin(self, worker: int, member: str, devices: Sequence[str], now: float) -> None:
        """A worker, known by its number, begins a chunk on its devices; only its first one counts."""
        if worker in self._workers:
            return
        self._workers[worker] = (member, devices)
        for device in devices:
            after, since = self._idle_since.pop(device, (member, now))
            if after != member:
                self.found.append(Gap(device, after, member, round(now - since, 3)))

    def end(self, worker: int, now: float) -> None:
        """A worker has computed its last chunk, if it ever had one."""
        member, devices = self._workers.pop(worker, ("", ()))
        busy = {device for _, others in self._workers.values() for device in others}
        self._idle_since.update({device: (member, now) for device in devices if device not in busy})
