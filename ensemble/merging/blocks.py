"""Check members' values and merge them block by block, so that a method's arrays stay in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from ensemble.common.errors import EnsembleError, MergeError
from ensemble.common.protocol import SUM_TOLERANCE, Activation
from ensemble.common.text import listed, plural, quoted
from ensemble.config.values import AnyWeight
from ensemble.merging.calibration import Calibrator
from ensemble.merging.methods.base import Block, MergeMethod, block_spans
from ensemble.merging.post_process import PostProcess
from ensemble.merging.scoring import CascadeScoring, Scoring


def mean_of_jobs(
    values: Sequence[npt.NDArray[np.float64]], weights: Sequence[float]
) -> npt.NDArray[np.float64]:
    """Return each row's weighted mean over the jobs that have the row, [rows, labels]; NaN if no job has it."""
    if len(values) == 1:
        return values[0]
    sums, shares = np.zeros(values[0].shape, order="F"), np.zeros(len(values[0]))
    for job_values, weight in zip(values, weights, strict=True):
        is_present = ~np.isnan(job_values[:, 0])
        sums[is_present] += weight * job_values[is_present]
        shares[is_present] += weight
    with np.errstate(invalid="ignore"):
        return np.asarray(sums / shares[:, None])


# What may be wrong with rows, the worst first.
_NOT_FINITE = "no finite number"
_OUTSIDE = "values below 0 or above 1"
_OTHER_SUMS = "values that do not sum to 1"
_SHOWN = 4


class RowCheck:
    """Check a member's rows block by block; ``refuse`` raises an error if some are wrong.

    Args:
        source: what the message says has the rows.
        may_lack_rows: whether a row may be NaN, because the member did not reach it.
        advice: what to do about wrong rows.
        columns: names of the values of a row, for messages; none: they are not shown.

    Attributes:
        reached: how many of the rows so far hold numbers.
    """

    def __init__(
        self,
        source: str,
        activation: Activation,
        ids: pa.ChunkedArray,
        may_lack_rows: bool,
        advice: str = "remove the file and run the same command again, which computes it again",
        columns: Sequence[str] = (),
    ) -> None:
        self._advice = advice
        self._source = source
        self.activation = activation
        self._ids = ids
        self._may_lack_rows = may_lack_rows
        self._columns = columns
        # Count, first row and its values, by what is wrong.
        self._bad: dict[str, tuple[int, int, npt.NDArray[np.float64]]] = {}
        self.reached = 0

    @property
    def has_found_any(self) -> bool:
        return bool(self._bad)

    def look(self, start: int, values: npt.NDArray[np.float64]) -> npt.NDArray[np.bool_]:
        """Check the rows from ``start`` on, float64 [rows, labels]; return which are present, [rows]."""
        columns = values.T
        with np.errstate(invalid="ignore", over="ignore"):  # infinite values
            sums = np.add.reduce(columns)
        is_odd = ~np.isfinite(sums)
        is_present: npt.NDArray[np.bool_] = np.ones(len(values), dtype=np.bool_)
        if is_odd.any():
            is_odd = ~np.isfinite(values).all(axis=1)  # not of a sum that is too large
            is_present = np.asarray(~np.isnan(values).all(axis=1))
        self.reached += int(is_present.sum())
        wrong = {_NOT_FINITE: is_odd & is_present if self._may_lack_rows else is_odd}
        if self.activation != "none":  # comparing NaN is False
            wrong[_OUTSIDE] = (np.minimum.reduce(columns) < 0) | (np.maximum.reduce(columns) > 1)
        if self.activation == "softmax":
            wrong[_OTHER_SUMS] = np.abs(sums - 1) > SUM_TOLERANCE
        for problem, is_wrong in wrong.items():
            rows = np.flatnonzero(is_wrong)
            if len(rows):
                first = int(rows[0])
                count, row, cells = self._bad.get(problem, (0, start + first, values[first].copy()))
                self._bad[problem] = count + len(rows), row, cells
        return is_present

    def refuse(self, error: type[EnsembleError] = MergeError) -> None:
        """Raise the error if values are not finite, below 0 or above 1, or do not sum to 1; name the first row."""
        for problem in (_NOT_FINITE, _OUTSIDE, _OTHER_SUMS):
            if problem not in self._bad:
                continue
            count, first, row = self._bad[problem]
            is_wrong = {_NOT_FINITE: ~np.isfinite(row), _OUTSIDE: (row < 0) | (row > 1)}.get(
                problem, row == row
            )
            cells = [
                f"{quoted(column)} is {row[place]:g}"
                for place, column in enumerate(self._columns)
                if is_wrong[place]
            ]
            shown = f" ({listed(cells, _SHOWN, str)})" if cells else ""
            where = f"{plural(count, 'row')} with {problem}, the first is id {self._ids[first]}{shown}"
            raise error(f"{self._source}: {where}; {self._advice}")


@dataclass(frozen=True)
class Without:
    """Merge without a member: ``method`` computes it, ``scoring`` compares it with the merge of all."""

    method: MergeMethod
    scoring: CascadeScoring


@dataclass
class MergedMember:
    """Hold a member to merge.

    Attributes:
        values: float64 [rows, labels], in the table's order, each column contiguous.
        scoring: scores the calibrated values, if the truth is known, of a member that has all rows.
        ruled: scores what the member alone gives with the rules; None: there are none.
    """

    name: str
    weight: AnyWeight
    values: npt.NDArray[np.float64]
    check: RowCheck
    scoring: Scoring | None
    calibrate: Calibrator | None = None
    ruled: Scoring | None = None

    def score(self, start: int, values: npt.NDArray[np.float64], post: PostProcess, exclusive: bool) -> None:
        """Score a block of the member's values, as ``PostProcess.member`` returns them, if it has all rows."""
        if self.scoring is None or self.check.reached != start + len(values):
            return
        self.scoring.add(start, values)
        if self.ruled is not None:
            values = values.copy(order="K")
            post.merged(start, values, exclusive)
            self.ruled.add(start, values)


def merge_blocks(
    method: MergeMethod,
    members: Sequence[MergedMember],
    ids: pa.ChunkedArray,
    text_bytes: npt.NDArray[np.int64],
    post: PostProcess,
    exclusive: bool = False,
    comparing: Mapping[int, Without] | None = None,
) -> Iterator[tuple[int, npt.NDArray[np.float64]]]:
    """Yield the first row of each block of the table and its merged values, float64 [rows of the block, labels].

    Rows that no member with a weight reached are NaN.

    Args:
        members: some of them with a weight.
        exclusive: of the merged values, see ``RowRules.are_exclusive``.
        comparing: the merges without a member, by the member's number.

    Raises:
        MergeError: a member's rows do not hold what its activation promises; the first such member is named.
    """
    merges_without = comparing or {}
    if method.needs_first_pass:
        for block, _ in _read_blocks(method, members, ids, text_bytes, post):
            method.look(block)
            for number, comparison in merges_without.items():
                comparison.method.look(_without(block, number))
    edges = method.settings.length_bins or ()
    weights = weights_by_bin([member.weight for member in members], method.members.labels, len(edges) + 1)
    for block, values_of_members in _read_blocks(method, members, ids, text_bytes, post):
        for member, values in zip(members, values_of_members, strict=True):
            member.score(block.start, values, post, exclusive)
        block_weights = weights_of_rows(weights, edges, block.text_bytes)
        merged = method.merge(block, block_weights)
        post.merged(block.start, merged, exclusive)
        for number, comparison in merges_without.items():
            without = comparison.method.merge(_without(block, number), block_weights)
            post.merged(block.start, without, exclusive)
            rows = np.flatnonzero(block.is_present[number] & ~np.isnan(without).any(axis=1))
            comparison.scoring.add(block.start + rows, merged[rows], without[rows])
        yield block.start, merged


def _without(block: Block, number: int) -> Block:
    """Return the block as if a member had none of its rows."""
    is_present, probabilities = block.is_present.copy(), block.probabilities.copy(order="K")
    is_present[number], probabilities[number] = False, np.nan
    return replace(block, is_present=is_present, probabilities=probabilities)


def weights_by_bin(weights: Sequence[AnyWeight], labels: Sequence[str], bins: int) -> npt.NDArray[np.float64]:
    """Return the members' weights as float64 [members, bins or 1, labels or 1]; 1 if all have the same."""
    # Weights of 0 for every label are no reason to scale rows.
    by_label = any(isinstance(weight, dict) and any(weight.values()) for weight in weights)
    by_bin = any(isinstance(weight, tuple) for weight in weights)
    numbers = np.empty((len(weights), bins if by_bin else 1, len(labels) if by_label else 1))
    for of_member, weight in zip(numbers, weights, strict=True):
        if isinstance(weight, dict):
            of_member[:] = [weight[label] for label in labels] if by_label else 0.0
        elif isinstance(weight, tuple):
            of_member[:] = np.array(weight)[:, None]
        else:
            of_member[:] = weight
    return numbers


def weights_of_rows(
    weights: npt.NDArray[np.float64], edges: Sequence[int], text_bytes: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """Return the weights that count in rows, float64 [members, rows or 1, labels or 1]; 1 if all have the same."""
    if weights.shape[1] == 1:
        return weights
    return np.asarray(weights[:, np.searchsorted(edges, text_bytes, side="right")])


def _read_blocks(
    method: MergeMethod,
    members: Sequence[MergedMember],
    ids: pa.ChunkedArray,
    text_bytes: npt.NDArray[np.int64],
    post: PostProcess,
) -> Iterator[tuple[Block, list[npt.NDArray[np.float64]]]]:
    """Yield the blocks, each with the values of each member that are scored.

    After the first wrong row there are no more blocks, but all rows are checked, so that the error can count them.
    """
    for member in members:
        member.check.reached = 0
    for start, stop in block_spans(len(ids), len(method.members.labels)):
        # The rows of each member and label are contiguous.
        probabilities = np.empty((len(members), len(method.members.labels), stop - start)).swapaxes(1, 2)
        is_present = np.empty((len(members), stop - start), dtype=np.bool_)
        scored = []
        for values, present, member in zip(probabilities, is_present, members, strict=True):
            values[:] = member.values[start:stop]
            present[:] = member.check.look(start, values)
            if not member.check.has_found_any:
                activation = member.check.activation
                scored.append(
                    post.member(start, values, activation, member.calibrate, method.takes_impossible)
                )
        if len(scored) == len(members):
            rows = ids.slice(start, stop - start)
            yield Block(start, rows, probabilities, is_present, text_bytes[start:stop]), scored
    for member in members:
        member.check.refuse()
