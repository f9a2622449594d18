"""What is known of members and workers while a run goes on, and what is left of it for the reports."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from ensemble.planning.chunks import Chunk
from ensemble.planning.plan import MemberPlan
from ensemble.protocol import Closed, Progress, Ready


@dataclass(frozen=True)
class Failure:
    """Why a member failed: one sentence, the whole traceback where there is one, and where to read on."""

    member: str
    message: str
    traceback: str
    log_path: str


@dataclass
class WorkerRecord:
    """What one worker did, for run.json; times in seconds, memory in bytes."""

    member: str
    replica: int
    devices: tuple[str, ...]
    pid: int
    log_path: str
    started_after_seconds: float
    start_seconds: float | None = None
    load_seconds: float | None = None
    predict_seconds: float = 0.0
    life_seconds: float | None = None
    rows: int = 0
    tokens: int = 0
    padded_tokens: int = 0
    batches: int = 0
    truncated_rows: int = 0
    oom_events: int = 0
    recomputed_rows: int = 0
    chunks: int = 0
    exit_code: int | None = None
    ready: Ready | None = None
    closed: Closed | None = None
    versions: dict[str, str] = field(default_factory=dict)


@dataclass
class MemberState:
    """A member while the run goes on; ``current`` holds the progress of chunks in hand, by worker pid."""

    plan: MemberPlan
    waiting: deque[Chunk]
    current: dict[int, Progress] = field(default_factory=dict)
    workers: list[WorkerRecord] = field(default_factory=list)
    done_cost: float = 0.0
    chunks_done: int = 0
    running: int = 0
    failure: Failure | None = None
    predicting_since: float | None = None  # monotonic clock, seconds
    finished_at: float | None = None

    @property
    def finished(self) -> bool:
        return self.failure is None and self.chunks_done == len(self.plan.chunks)

    @property
    def rows_done(self) -> int:
        return sum(record.rows for record in self.workers) + sum(p.rows for p in self.current.values())

    @property
    def tokens_done(self) -> int:
        return sum(record.tokens for record in self.workers) + sum(p.tokens for p in self.current.values())

    @property
    def fraction(self) -> float:
        """Share of the member's work that is done, by cost and not by rows: long rows come first."""
        done = self.done_cost
        for progress in self.current.values():
            chunk = self.plan.chunks[progress.chunk]
            done += chunk.cost * progress.rows / (chunk.stop - chunk.start)
        return min(done, 1.0)

    @property
    def seconds_left(self) -> float:
        """Until the member's end at the speed so far; 0 while there is none."""
        if self.predicting_since is None or not self.fraction:
            return 0.0
        return (time.monotonic() - self.predicting_since) * (1 - self.fraction) / self.fraction

    @property
    def startup_seconds(self) -> float:
        """What a worker of this member takes until it computes; 0 while none has got there."""
        return max(
            (
                one.start_seconds + one.load_seconds
                for one in self.workers
                if one.start_seconds is not None and one.load_seconds is not None
            ),
            default=0.0,
        )
