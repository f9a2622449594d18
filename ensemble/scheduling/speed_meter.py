"""Measures a member's speed during a run."""

from __future__ import annotations

from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import MemberPlan


class SpeedMeter:
    """Measures how long a member's workers take to start, and how long one takes for the member's work.

    Attributes:
        startup_seconds: of the slowest worker, until it could compute; 0 before the first.
        last_seconds_per_cost: of the latest chunk.
        lost_rows: rows that were computed in chunks which the deadline cut short.
    """

    def __init__(self) -> None:
        self.startup_seconds = 0.0
        self.last_seconds_per_cost = 0.0
        self.lost_rows = 0
        self._seconds = self._cost = 0.0

    def add_chunk(self, cost: float, seconds: float) -> None:
        """Add a chunk that took so long."""
        self._seconds += seconds
        self._cost += cost
        if cost:
            self.last_seconds_per_cost = seconds / cost

    def add_cut_short(self, chunk: Chunk, rows: int, seconds: float) -> None:
        """Add a chunk that the deadline cut short after so many rows and seconds.

        The next run learns from it how fast the member is.  If no row was done, half of the chunk counts: the next
        run tries fewer rows.
        """
        self.lost_rows += rows
        self.add_chunk(chunk.cost * (rows or chunk.rows / 2) / chunk.rows, seconds)

    @property
    def seconds_per_cost(self) -> float | None:
        """How long one worker would take for all work; None before the first chunk."""
        return self._seconds / self._cost if self._seconds and self._cost else None

    def speed(self, plan: MemberPlan) -> Speed:
        """Return the speed measured by this run, or else by an earlier one; 0 for what is not measured."""
        startup = plan.speed.startup_seconds if plan.speed.is_startup_measured else 0.0
        startup = self.startup_seconds or startup
        if self.seconds_per_cost is not None and plan.work:
            return Speed(startup, self.seconds_per_cost / plan.work, True, startup > 0, plan.cpu_share)
        per_work = plan.speed.seconds_per_work if plan.speed.is_measured else 0.0
        return Speed(startup, per_work, per_work > 0, startup > 0, plan.speed.cpu_share)
