"""A member's chunks that nobody computes: a dispatch takes no longer where there are many, or many workers."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain
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


@dataclass
class _View:
    """What is pending of a view: what workers were told is next, by its number, and the others in order."""

    told: dict[int, _Placed] = field(default_factory=dict)
    others: deque[_Placed] = field(default_factory=deque)


class PendingChunks:
    """Chunks in order; workers are told, in this order, which of them will probably be theirs."""

    def __init__(self, chunks: Iterable[Chunk] = ()) -> None:
        self._views: defaultdict[int, _View] = defaultdict(_View)
        self._told: Counter[int] = Counter()  # how many workers, by a chunk's number, be it pending or not
        self._before = self._behind = self._count = 0  # all places are between the first two
        self.costs = Costs()
        for chunk in chunks:
            self.append(chunk)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Chunk]:
        told = sorted(chain.from_iterable(one.told.values() for one in self._views.values()))
        return (chunk for _, chunk in merge(told, *(one.others for one in self._views.values())))

    def first(self) -> Chunk:
        """The first that no worker was told of; where there is none, the first."""
        heads = [one.others[0] for one in self._views.values() if one.others]
        return min(heads)[1] if heads else next(iter(self))

    def has(self, view: int) -> bool:
        """Whether there are chunks of a view."""
        one = self._views[view]
        return bool(one.others or one.told)

    def in_first_view(self) -> Iterator[Chunk]:
        """Chunks of the first view that has any, in order, but last those that workers were told of."""
        if found := [view for view in self._views if self.has(view)]:
            one = self._views[min(found)]
            yield from (chunk for _, chunk in one.others)
            yield from (chunk for _, chunk in sorted(one.told.values()))

    def append(self, chunk: Chunk) -> None:
        self._behind += 1
        self._count += 1
        self._views[chunk.view].others.append((self._behind, chunk))
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

    def tell(self, before: Chunk | None, now: Chunk | None) -> None:
        """What a worker was told would probably be its next one, and what it is told instead."""
        if before is not None:
            self._told[before.index] -= 1
            if not self._told[before.index]:
                del self._told[before.index]
                if before.index in self._views[before.view].told:
                    self._insert(self._remove(before), before)
        if now is not None:
            place = self._remove(now)
            self._told[now.index] += 1
            self._insert(place, now)

    def _insert(self, place: int, chunk: Chunk) -> None:
        one = self._views[chunk.view]
        self._count += 1
        if chunk.index in self._told:
            one.told[chunk.index] = (place, chunk)
            return
        # Workers are told of the first ones: what comes back has hardly any before it.
        position = next((at for at, (other, _) in enumerate(one.others) if other > place), len(one.others))
        one.others.insert(position, (place, chunk))

    def _remove(self, chunk: Chunk) -> int:
        """Its place."""
        one = self._views[chunk.view]
        self._count -= 1
        if (placed := one.told.pop(chunk.index, None)) is not None:
            return placed[0]
        position = next(at for at, (_, other) in enumerate(one.others) if other is chunk)
        place = one.others[position][0]
        del one.others[position]
        return place
