"""PURE: the rows that a member with ``when`` computes, and its chunks.

A row is computed where the mean of the members before is unsure.  That is a function of these members' values
alone: neither chunks nor time nor what an earlier run did have a part in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ensemble.planning.chunks import CHUNK_MAX_ROWS, Chunk

Doubts = npt.NDArray[np.float64]
# What ``decide`` says of a row.
UNKNOWN: Final = -1
SKIP: Final = 0
COMPUTE: Final = 1
# A share of rows, such as 0.07 of 100, is a little more or less than a whole number.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class ExpectedShare:
    """The share of the rows that a member with ``when`` is expected to compute, and why, in words."""

    share: float
    why: str


def when_text(when: Mapping[str, float]) -> str:
    """The rule in words: only where the members before it have ..."""
    ((rule, number),) = when.items()
    if rule == "share":
        return f"only on the {100 * number:g} % of the rows of which the members before it are least certain"
    what = f"a margin below {number:g}" if rule == "margin_below" else f"an entropy above {number:g} nats"
    return f"only on rows where the mean of the members before it has {what}"


def margins(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """From the second likeliest of two labels or more to the likeliest, [rows]."""
    second, first = np.partition(values, -2, axis=1)[:, -2:].T
    return np.asarray(first - second)


def entropy_terms(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """-p ln p of each cell, in nats; 0 of 0."""
    return np.asarray(-(values * np.log(np.where(values > 0, values, 1.0))))


def doubts(rule: str, mean: npt.NDArray[np.float64], is_exclusive: bool) -> Doubts:
    """How unsure each row is, [rows]: more where it is less certain, infinite where there is no mean.

    For ``entropy_above`` it is the entropy in nats, else the margin below 0.  Of labels that exclude each other the
    margin is from the likeliest to the next, and the entropy is that of the row scaled to a sum of 1.  Of
    independent labels each is a choice of its own between p and 1 - p: the margin is that of the closest one, and
    the entropies add up.

    Args:
        rule: the key of ``when``.
        mean: float64 [rows, labels], probabilities; NaN in rows that nobody has.
    """
    if rule == "entropy_above":
        if is_exclusive:
            with np.errstate(invalid="ignore"):
                shares = [mean / mean.sum(axis=1)[:, None]]
        else:
            shares = [mean, 1.0 - mean]
        found = sum((entropy_terms(part).sum(axis=1) for part in shares), np.zeros(len(mean)))
    elif is_exclusive and mean.shape[1] > 1:
        found = -margins(mean)
    else:
        found = -np.abs(2.0 * mean - 1.0).min(axis=1)
    return np.where(np.isnan(found), np.inf, found)


def decide(when: Mapping[str, float], doubt: Doubts) -> npt.NDArray[np.int8]:
    """Which rows are computed, int8 [rows]: ``COMPUTE``, ``SKIP``, or ``UNKNOWN`` for now.

    Rows that nobody has are always computed.  Of rows that are equally certain, ``share`` takes those that come
    first in the table.

    Args:
        when: one rule with its number.
        doubt: of all rows of the table; NaN where it is not known yet.
    """
    ((rule, number),) = when.items()
    is_known = ~np.isnan(doubt)
    if rule == "share":
        found = np.full(len(doubt), UNKNOWN if not is_known.all() else SKIP, dtype=np.int8)
        if is_known.all():
            count = math.ceil(number * len(doubt) - _ROUNDING)
            found[np.argsort(-doubt, kind="stable")[:count]] = COMPUTE
            found[np.isinf(doubt)] = COMPUTE
        return found
    threshold = -number if rule == "margin_below" else number
    with np.errstate(invalid="ignore"):
        return np.where(is_known, np.where(doubt > threshold, COMPUTE, SKIP), UNKNOWN).astype(np.int8)


@dataclass(frozen=True)
class Group:
    """Rows that become a chunk, int64 [n], and their share of the work of the whole table."""

    rows: npt.NDArray[np.int64]
    cost: float

    def without(self, is_done: npt.NDArray[np.bool_]) -> Group:
        """Those that are left to compute; costs go by rows, which are about equally long."""
        left = self.rows[~is_done[self.rows]]
        return Group(left, self.cost * len(left) / max(1, len(self.rows)))


def row_costs(chunks: Sequence[Chunk], order: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Each row's share of the work of the whole table, by row of the table, [rows]."""
    costs = np.zeros(len(order))
    for chunk in chunks:
        costs[order[chunk.start : chunk.stop]] = chunk.cost / chunk.rows
    return costs


class Grouping:
    """Makes chunks of the rows to compute, slice by slice of the member's order, as soon as the slices are known.

    The chunks of the whole table are the slices.  What is left of each joins what is left of those before it, until
    that is half a chunk: which rows are computed in one batch depends on the decision alone.

    Args:
        chunks: of the whole table, slices of ``order``.
    """

    def __init__(self, chunks: Sequence[Chunk], order: npt.NDArray[np.int64]) -> None:
        self._chunks = chunks
        self._order = order
        self._next = 0
        self._rows: list[npt.NDArray[np.int64]] = []
        self._cost = 0.0
        self._enough = max((chunk.cost for chunk in chunks), default=0.0) / 2

    def take(self, decided: npt.NDArray[np.int8]) -> list[Group]:
        """The groups that are complete by now and that no earlier call has given; all, once all rows are known."""
        found: list[Group] = []
        while self._next < len(self._chunks):
            chunk = self._chunks[self._next]
            rows = self._order[chunk.start : chunk.stop]
            if (decided[rows] == UNKNOWN).any():
                return found
            wanted = rows[decided[rows] == COMPUTE]
            self._rows.append(wanted)
            self._cost += chunk.cost * len(wanted) / chunk.rows
            self._next += 1
            is_last = self._next == len(self._chunks)
            if is_last or self._cost >= self._enough or sum(map(len, self._rows)) >= CHUNK_MAX_ROWS // 4:
                if len(joined := np.concatenate(self._rows)):
                    found.append(Group(joined, self._cost))
                self._rows, self._cost = [], 0.0
        return found


def closest_first(
    doubt: Doubts,
    decided: npt.NDArray[np.int8],
    chunks: Sequence[Chunk],
    order: npt.NDArray[np.int64],
    max_rows: Iterator[int],
) -> list[Group]:
    """The rows to compute in groups, the closest calls in the first one; within a group the longest rows first.

    Args:
        doubt: of all rows, and what was decided of them.
        chunks: of the whole table, slices of ``order``: a group costs no more than the largest of them.
        max_rows: how many rows each group may have.
    """
    if not chunks:
        return []
    costs, place = row_costs(chunks, order), np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    wanted = np.flatnonzero(decided == COMPUTE)
    wanted = wanted[np.argsort(-doubt[wanted], kind="stable")]
    cumulative = np.concatenate([[0.0], np.cumsum(costs[wanted])])
    target, found, start = max(chunk.cost for chunk in chunks) * (1 + _ROUNDING), list[Group](), 0
    while start < len(wanted):
        within = int(np.searchsorted(cumulative, cumulative[start] + target, side="right")) - 1
        stop = min(max(within, start + 1), start + next(max_rows), len(wanted))
        rows = wanted[start:stop]
        found.append(Group(rows[np.argsort(place[rows])], float(cumulative[stop] - cumulative[start])))
        start = stop
    return found
