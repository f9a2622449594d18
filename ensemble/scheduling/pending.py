"""A member's chunks that nobody computes: a dispatch takes no longer where there are many, or many workers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from heapq import merge
from typing import TypeAlias

from ensemble.planning.chunks import Chunk

# Costs are added up as whole numbers: so many to one are exact, and nothing is left of a cost that came and went.
_UNITS = 2.0**80
# With its place in the order, which no other has at the time.
_Placed: TypeAlias = tuple[int, Chunk]


class Costs:
    """Sums of costs that come and go, by view."""

    def __init__(self) -> None:
        self._units: Counter[int] = Counter()

    def add(self, view: int, cost: float) -> None:
        self._units[view] += int(cost * _UNITS)

    def remove(self, view: int, cost: float) -> None:
        self._units[view] -= int(cost * _UNITS)

    def clear(self) -> None:
        self._units.clear()

    def of(self, view: int) -> float:
        return self._units[view] / _UNITS

    @property
    def total(self) -> float:
        return sum(self._units.values()) / _UNITS


class PendingChunks:
    """Chunks in order."""

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self._views: defaultdict[int, deque[_Placed]] = defaultdict(deque)
        self._before = self._behind = self._count = 0  # all places are between the first two
        self.costs = Costs()
        for chunk in chunks:
            self.append(chunk)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Chunk]:
        return (chunk for _, chunk in merge(*self._views.values()))

    def first(self) -> Chunk:
        return next(iter(self))

    def has(self, view: int) -> bool:
        """Whether there are chunks of a view."""
        return bool(self._views[view])

    def in_first_view(self) -> Iterator[Chunk]:
        """Chunks of the first view that has any, in order."""
        if found := [view for view in self._views if self.has(view)]:
            yield from (chunk for _, chunk in self._views[min(found)])

    def append(self, chunk: Chunk) -> None:
        self._behind += 1
        self._count += 1
        self._views[chunk.view].append((self._behind, chunk))
        self.costs.add(chunk.view, chunk.cost)

    def put_back(self, chunks: Sequence[Chunk]) -> None:
        """These come first now."""
        for chunk in reversed(chunks):
            self._before -= 1
            self._insert(self._before, chunk)
            self.costs.add(chunk.view, chunk.cost)

    def take(self, chunk: Chunk, rest: Chunk | None = None) -> None:
        """Somebody computes this one; ``rest`` gets its place."""
        place = self._remove(chunk)
        self.costs.remove(chunk.view, chunk.cost)
        if rest is not None:
            self._insert(place, rest)
            self.costs.add(rest.view, rest.cost)

    def clear(self) -> None:
        self._views.clear()
        self._count = 0
        self.costs.clear()

    def _insert(self, place: int, chunk: Chunk) -> None:
        placed = self._views[chunk.view]
        self._count += 1
        # What comes back has hardly any before it.
        position = next((at for at, (other, _) in enumerate(placed) if other > place), len(placed))
        placed.insert(position, (place, chunk))

    def _remove(self, chunk: Chunk) -> int:
        """Its place."""
        placed = self._views[chunk.view]
        self._count -= 1
        position = next(at for at, (_, other) in enumerate(placed) if other is chunk)
        place = placed[position][0]
        del placed[position]
        return place
