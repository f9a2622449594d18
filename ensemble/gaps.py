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
        self._computing: dict[str, int] = {}
        self._idle_since: dict[str, tuple[str, float]] = {}

    def begin(self, member: str, devices: Sequence[str], now: float) -> None:
        """A worker begins its first chunk there."""
        for device in devices:
            self._computing[device] = self._computing.get(device, 0) + 1
            after, since = self._idle_since.pop(device, (member, now))
            if after != member:
                self.found.append(Gap(device, after, member, round(now - since, 3)))

    def end(self, member: str, devices: Sequence[str], now: float) -> None:
        """A worker has computed its last chunk there."""
        for device in devices:
            self._computing[device] -= 1
            if not self._computing[device]:
                self._idle_since[device] = (member, now)
