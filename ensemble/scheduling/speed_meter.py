"""Measures a member's speed during a run."""

from __future__ import annotations

from ensemble.common.protocol import Progress, Ready
from ensemble.planning.chunks import Chunk
from ensemble.planning.forecast import Speed
from ensemble.planning.plan import MemberPlan
from ensemble.scheduling.records import WorkerRecord


class SpeedMeter:
    """Measures how long a member's workers take to start, and how long one takes for the member's work.

    Attributes:
        startup_seconds: of the slowest worker, until it could compute; 0 before the first.
        slowest_seconds_per_cost: of the slowest chunk about as large as the largest so far.
        lost_rows: rows that were computed in chunks which the deadline cut short.
    """

    def __init__(self) -> None:
        self.startup_seconds = 0.0
        self.slowest_seconds_per_cost = 0.0
        self.lost_rows = 0
        self._seconds = self._cost = self._largest_cost = 0.0
        self._cut_short_seconds = self._cut_short_cost = 0.0
        self._min_seconds_per_cost = 0.0
        self._is_on_cpu_instead = False  # a worker that was leased a GPU computes on the CPU

    def note_start(self, record: WorkerRecord, ready: Ready) -> None:
        """Note that a worker has loaded."""
        self.startup_seconds = max(self.startup_seconds, (record.start_seconds or 0.0) + ready.load_seconds)
        if ready.device == "cpu" and not record.devices[0].startswith("cpu"):
            self._is_on_cpu_instead = True

    def note_chunk(self, cost: float, seconds: float) -> None:
        """Note how long a chunk took."""
        self._seconds += seconds
        self._cost += cost
        # Small first chunks say little about larger ones: the warm-up of the first batch is a large part of them.
        if cost > 1.5 * self._largest_cost:
            self.slowest_seconds_per_cost = 0.0
        self._largest_cost = max(self._largest_cost, cost)
        if cost:
            self.slowest_seconds_per_cost = max(self.slowest_seconds_per_cost, seconds / cost)

    def note_cut_short(self, chunk: Chunk, progress: Progress | None, seconds: float) -> None:
        """Note a chunk that the deadline cut short ``seconds`` after its dispatch.

        The next run learns from it how fast the member is; the rows that were computed are lost.
        """
        if progress is not None and progress.rows:
            self.lost_rows += progress.rows
            self._cut_short_seconds += seconds
            self._cut_short_cost += chunk.cost * progress.rows / chunk.rows
        elif chunk.cost:
            # As if half of it had been done: the next run tries fewer rows, until some fit.
            self._min_seconds_per_cost = max(self._min_seconds_per_cost, 2 * seconds / chunk.cost)

    @property
    def seconds_per_cost(self) -> float | None:
        """How long one worker would take for all work, by the chunks that are done; None before the first."""
        if not self._seconds or not self._cost:
            return None
        return self._seconds / self._cost

    def speed(self, plan: MemberPlan) -> Speed:
        """Return the speed measured by this run, or else by an earlier one; 0 for what is not measured."""
        startup = plan.speed.startup_seconds if plan.speed.is_startup_measured else 0.0
        per_work = plan.speed.seconds_per_work if plan.speed.is_measured else 0.0
        share = plan.speed.cpu_share
        # A worker that was leased a GPU and fell back to the CPU says nothing about the GPU's speed.
        if not self._is_on_cpu_instead:
            startup = self.startup_seconds or startup
            seconds = self._seconds + self._cut_short_seconds
            work = (self._cost + self._cut_short_cost) * plan.work
            minimum = self._min_seconds_per_cost / plan.work if plan.work else 0.0
            if (seconds and work) or minimum > per_work * plan.slowdown:
                per_work = max(minimum, seconds / work if work else 0.0)
                share = plan.cpu_share
        return Speed(startup, per_work, per_work > 0, startup > 0, share)
