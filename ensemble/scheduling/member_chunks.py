"""Keep the chunks of a member: pending, in workers' hands, or done.

``planning/chunks.py`` makes their order, and ``dispatch.py`` takes them by it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import count

from ensemble.common.protocol import Progress
from ensemble.planning.chunks import Chunk


class ChunkQueue:
    """Keep the chunks of a member; those of a view come before those of the next.

    Args:
        chunks: what is left to do.
        views: how many views each row has.

    Attributes:
        pending: in the order of dispatch.
        in_hand: chunks that workers have, by number; ``progress`` is how far they are.
        numbers: yields numbers that no chunk of the member has yet.
        done_cost: what this run has done, as a share of all the member's work.
    """

    def __init__(self, chunks: Iterable[Chunk], views: int) -> None:
        self.pending = deque(chunks)
        self.in_hand: dict[int, Chunk] = {}
        self.progress: dict[int, Progress] = {}
        self.numbers = count(1 + max((chunk.index for chunk in self.pending), default=-1))
        self.done_cost = 0.0
        self._views = views
        # By view: the share of the member's work that is done, by this run or before.
        self._done_costs = [1 / views] * views
        for chunk in self.pending:
            self._done_costs[chunk.view] -= chunk.cost

    def take(self, chunk: Chunk, start: int | None = None) -> Chunk:
        """Move a pending chunk, or its rows from ``start`` on, to those in workers' hands."""
        index = self.pending.index(chunk)
        if start is None or start == chunk.start:
            del self.pending[index]
        else:
            self.pending[index], chunk = chunk.split(self.numbers, start)
        self.in_hand[chunk.index] = chunk
        return chunk

    def put_back(self, *chunks: Chunk) -> None:
        """Make these the next chunks of their view."""
        for chunk in reversed(chunks):
            index = sum(other.view < chunk.view for other in self.pending)
            self.pending.insert(index, chunk)

    def drop(self, chunk: Chunk) -> None:
        """Note that no worker has this chunk any more."""
        self.in_hand.pop(chunk.index, None)
        self.progress.pop(chunk.index, None)

    def add_done(self, chunk: Chunk) -> None:
        """Count a chunk as done."""
        self.done_cost += chunk.cost
        self._done_costs[chunk.view] += chunk.cost

    @property
    def has_first_view(self) -> bool:
        """Whether rows in the first view are pending; a member without views has only this view."""
        return bool(self.pending) and self.pending[0].view == 0

    @property
    def computed_cost(self) -> float:
        """The share of the member's work that this run has done, with the progress of chunks in hand."""
        return self.done_cost + sum(
            self.in_hand[number].cost * progress.rows / self.in_hand[number].rows
            for number, progress in self.progress.items()
        )

    def fraction(self, only_first_view: bool = False) -> float:
        """Return the share of the work that is done, by cost and not by rows: long rows come first."""
        whole = 1 / self._views if only_first_view else 1.0
        cost = self._done_costs[0] if only_first_view else sum(self._done_costs)
        for number, progress in self.progress.items():
            chunk = self.in_hand[number]
            if chunk.view == 0 or not only_first_view:
                cost += chunk.cost * progress.rows / chunk.rows
        return min(1.0, max(0.0, round(cost / whole, 9)))
