"""Members' rows -> blocks -> merged values, block by block: what is in memory does not grow with the table.

Reading is done by the threads of a pool, one block ahead of the merge; pyarrow and NumPy let go of the interpreter
for all that takes time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.config.values import AnyWeight
from ensemble.merging.calibration import Calibrator
from ensemble.merging.methods.base import Block, MergeMethod
from ensemble.merging.row_checks import RowCheck
from ensemble.merging.scoring import CascadeScoring, Scoring

# Changes a block of the table's rows in place: its first row, and float64 [rows, labels].
Rules: TypeAlias = Callable[[int, npt.NDArray[np.float64]], None]
# Of a block: enough that a thread is not busy with Python, few enough for a core's cache.
_MAX_ROWS = 32_768
_MIN_ROWS = 256
_CELLS = 131_072


@dataclass(frozen=True)
class Without:
    """The merge without a member: ``method`` is one of its own, ``scoring`` compares it with the whole merge."""

    method: MergeMethod
    scoring: CascadeScoring


class RowSource(Protocol):
    """Gives a member's rows in the table's order."""

    def read(self, values: npt.NDArray[np.float64]) -> None:
        """Read the next rows into float64 [rows, labels], each column in one piece."""

    def rewind(self) -> None:
        """Begin again with the first row."""

    def close(self) -> None: ...


@dataclass
class MergedMember:
    """A member on its way into the merge.

    ``scoring`` where the truth is known, for members that have all rows: it sees what is merged, after calibration.
    ``ruled``, where there are ``rules``, sees what the member alone would give with them; see ``RowRules.apply``.
    """

    name: str
    weight: AnyWeight
    source: RowSource
    check: RowCheck
    scoring: Scoring | None
    calibrate: Calibrator | None = None
    rules: Rules | None = None
    ruled: Scoring | None = None

    def read(self, start: int, values: npt.NDArray[np.float64], is_present: npt.NDArray[np.bool_]) -> None:
        self.source.read(values)
        is_present[:] = self.check.look(start, values)
        if self.calibrate is not None and not self.check.has_found_any:
            self.calibrate(values)
        has_all = self.check.reached == start + len(values) and not self.check.has_found_any
        if self.scoring is not None and has_all:
            self.scoring.add(start, values)
            if self.rules is not None and self.ruled is not None:
                values = values.copy(order="K")
                self.rules(start, values)
                self.ruled.add(start, values)


def block_spans(rows: int, labels: int) -> list[tuple[int, int]]:
    """Where the blocks of a table start and stop."""
    step = max(_MIN_ROWS, min(_MAX_ROWS, _CELLS // labels))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def merge_blocks(
    method: MergeMethod,
    open_members: Callable[[], Sequence[MergedMember]],
    ids: pa.ChunkedArray,
    text_bytes: npt.NDArray[np.int64],
    pool: ThreadPoolExecutor,
    comparing: Mapping[int, Without] | None = None,
    rules: Rules | None = None,
) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """The merged values from the first row to the last; a row of NaN is one that no member with a weight reached.

    Args:
        open_members: gives the members at their first rows, some with a weight, whatever the row and the label;
            called once for each pass.
        ids: of the table's rows, [rows]; and ``text_bytes``, [rows].
        pool: its threads read.
        comparing: takes what each row that a member has would be without it, by the member's number.
        rules: change what was merged, with all members and without one.

    Yields:
        the block's first row, and float64 [rows of the block, labels].

    Raises:
        MergeError: a member's file does not fit the table, or its rows are no probabilities; in the members' order.
    """
    labels = len(method.members.labels)
    if method.needs_first_pass:
        for block in _read_blocks(open_members(), ids, text_bytes, labels, pool):
            method.look(block)
            for number, one in (comparing or {}).items():
                one.method.look(_without(block, number))
    members = open_members()
    edges = method.settings.length_bins or ()
    weights = weights_by_bin([member.weight for member in members], method.members.labels, len(edges) + 1)
    for block in _read_blocks(members, ids, text_bytes, labels, pool):
        own = weights_of_rows(weights, edges, block.text_bytes)
        merged = method.merge(block, own)
        if rules is not None:
            rules(block.start, merged)
        for number, one in (comparing or {}).items():
            without = one.method.merge(_without(block, number), own)
            if rules is not None:
                rules(block.start, without)
            rows = np.flatnonzero(block.is_present[number] & ~np.isnan(without).any(axis=1))
            one.scoring.add(block.start + rows, merged[rows], without[rows])
        yield block.start, merged


def _without(block: Block, number: int) -> Block:
    """The block as it would be if a member had none of its rows."""
    is_present, probabilities = block.is_present.copy(), block.probabilities.copy(order="K")
    is_present[number], probabilities[number] = False, np.nan
    return replace(block, is_present=is_present, probabilities=probabilities)


def weights_by_bin(given: Sequence[AnyWeight], labels: Sequence[str], bins: int) -> npt.NDArray[np.float64]:
    """The members' weights as numbers.

    Args:
        given: a number, a mapping by label, or a tuple by length bin for each member.
        bins: how many length bins there are.

    Returns:
        float64 [members, bins or 1, labels or 1]; 1 where all have the same.
    """
    # Weights of 0 for every label are no reason to scale rows.
    by_label = any(isinstance(weight, dict) and any(weight.values()) for weight in given)
    by_bin = any(isinstance(weight, tuple) for weight in given)
    found = np.empty((len(given), bins if by_bin else 1, len(labels) if by_label else 1))
    for numbers, weight in zip(found, given, strict=True):
        if isinstance(weight, dict):
            numbers[:] = [weight[label] for label in labels] if by_label else 0.0
        elif isinstance(weight, tuple):
            numbers[:] = np.array(weight)[:, None]
        else:
            numbers[:] = weight
    return found


def weights_of_rows(
    weights: npt.NDArray[np.float64], edges: Sequence[int], text_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """The weights that count in rows, float64 [members, rows or 1, labels or 1]; 1 where all have the same.

    Args:
        weights: see ``weights_by_bin``.
        edges: the bytes of text at which the next bin begins.
        text_bytes: of the rows, [rows].
    """
    if weights.shape[1] == 1:
        return weights
    return np.asarray(weights[:, np.searchsorted(edges, text_bytes, side="right")])


def _read_blocks(
    members: Sequence[MergedMember],
    ids: pa.ChunkedArray,
    text_bytes: npt.NDArray[np.int64],
    labels: int,
    pool: ThreadPoolExecutor,
) -> Iterator[Block]:
    """Once something is wrong with a member's rows there are no more blocks, but all rows are still looked at, so
    that the error can say how many."""

    def empty(start: int, stop: int) -> Block:
        # Each member's columns in one piece.
        probabilities = np.empty((len(members), labels, stop - start)).swapaxes(1, 2)
        is_present = np.empty((len(members), stop - start), dtype=np.bool_)
        rows = ids.slice(start, stop - start)
        return Block(start, rows, probabilities, is_present, text_bytes[start:stop])

    def read(number: int, block: Block) -> Future[None]:
        member = members[number]
        return pool.submit(member.read, block.start, block.probabilities[number], block.is_present[number])

    spans = block_spans(len(ids), labels)
    block = empty(*spans[0])
    pending = [read(number, block) for number in range(len(members))]
    for span in [*spans[1:], None]:
        following = None if span is None else empty(*span)
        for number, reading in enumerate(pending):
            reading.result()
            if following is not None:
                pending[number] = read(number, following)
        if not any(member.check.has_found_any for member in members):
            yield block
        if following is not None:
            block = following
    for member in members:
        member.check.refuse()
